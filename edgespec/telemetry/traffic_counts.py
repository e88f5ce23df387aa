"""Messages and their payload bytes, by kind: the least that a ``ByteMeter`` can do."""

from __future__ import annotations

from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    Draft,
    Fault,
    Message,
    Open,
    Opened,
    Received,
)

UPLINK: tuple[type[Message], ...] = (Open, Draft, Received, Cancel)
DOWNLINK: tuple[type[Message], ...] = (Opened, Commit, Fault)


class TrafficCounts:
    """Implements ``ports.ByteMeter``."""

    def __init__(self) -> None:
        self._counts: dict[type, list[int]] = {kind: [0, 0] for kind in UPLINK + DOWNLINK}

    def count(self, message: Message, payload_bytes: int) -> None:
        counts = self._counts[type(message)]
        counts[0] += 1
        counts[1] += payload_bytes

    def of(self, kind: type[Message]) -> tuple[int, int]:
        """Messages of a kind so far, and their payload bytes."""
        messages, payload_bytes = self._counts[kind]
        return messages, payload_bytes
