"""For how long, and why, messages of devices were left unread."""

from __future__ import annotations

from edgespec.core.verifier.traffic_budget import Wait


class ReadWaits:
    """Seconds by reason. Waits of several streams at the same time all count."""

    def __init__(self) -> None:
        self._total_s = dict.fromkeys(Wait, 0.0)

    def add(self, reason: Wait, wait_s: float) -> None:
        """One stream is not read for so long."""
        self._total_s[reason] += wait_s

    def by_reason(self) -> dict[str, float]:
        """All of it so far, by the reason's word."""
        return {reason.value: total_s for reason, total_s in self._total_s.items()}
