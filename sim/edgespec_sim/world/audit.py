"""The books an auditor keeps of one queue or machine, and the error for a law that was broken.

Every slot that was given out is written down and judged at once: it may not overlap another, and it
may not be shorter than what it holds needs. ``conservation.py`` judges messages in the same way.
"""

from __future__ import annotations

import bisect

from edgespec.core.link_model import SharedQueue
from edgespec_sim.links.cross_traffic import LoadedQueue

SLACK_S = 1e-9
"""What rounding may do to a sum of times."""
_REMEMBERED_SLOTS = 4096


class ConservationError(AssertionError):
    """The simulated world broke one of its laws: a bug in the simulator or in the product."""


def broken(now_s: float, what: str) -> ConservationError:
    """Asked for only where a law is broken: millions of messages break none."""
    return ConservationError(f"at {now_s:.6f} s: {what}")


def require(law: bool, now_s: float, what: str) -> None:
    if not law:
        raise broken(now_s, what)


class Slots:
    """The slots of one queue or machine, as an auditor keeps them."""

    def __init__(self, what: str = "messages leave through one queue") -> None:
        self._what = what
        self._slots: list[tuple[float, float]] = []

    def add(self, start_s: float, end_s: float, least_s: float) -> None:
        if end_s - start_s < least_s - SLACK_S:
            why = f"a slot of {end_s - start_s:.9f} s holds what needs {least_s:.9f}"
            raise broken(start_s, f"{why}: {self._what}")
        slots = self._slots
        if len(slots) == _REMEMBERED_SLOTS:
            del slots[: _REMEMBERED_SLOTS // 2]
        if not slots or slots[-1][1] <= start_s:  # behind all others, as usual
            slots.append((start_s, end_s))
            return
        index = bisect.bisect(slots, (start_s, end_s))
        before = slots[index - 1][1] if index else start_s
        after = slots[index][0] if index < len(slots) else end_s
        if before > start_s + SLACK_S or end_s > after + SLACK_S:
            raise broken(start_s, f"two {self._what} at the same time")
        slots.insert(index, (start_s, end_s))


class AuditedQueue(SharedQueue):
    """A ``SharedQueue`` whose every slot is judged."""

    def __init__(self, bits_per_s: float) -> None:
        super().__init__(bits_per_s)
        self._audit, self._rate = Slots(), bits_per_s

    def take(self, start_s: float, end_s: float, size_bytes: int) -> None:
        self._audit.add(start_s, end_s, size_bytes * 8 / self._rate)
        super().take(start_s, end_s, size_bytes)


class AuditedLoadedQueue(LoadedQueue):
    """The same for one with cross traffic, whose packets are judged as well."""

    def __init__(self, bits_per_s: float, share: float, seed: int) -> None:
        super().__init__(bits_per_s, share, seed=seed)
        self._audit, self._rate = Slots(), bits_per_s

    def take(self, start_s: float, end_s: float, size_bytes: int) -> None:
        self._audit.add(start_s, end_s, size_bytes * 8 / self._rate)
        super().take(start_s, end_s, size_bytes)
