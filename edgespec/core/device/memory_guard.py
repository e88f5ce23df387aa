"""The guard keeps a running draft below its memory budget: the first rung of the device's governor.

Theory of operation. The driver measures what the process holds and tells the guard before draft
steps, together with what the next step may add. While that leaves the margin free, nothing happens.
Else the guard restricts the draft, in this order and no further than needed:

    whole window -> a shorter one, down to 64 tokens -> one guess a step -> rest: nothing held

Rows given back count at once. When the process has stayed well below for a while, the guard goes
back one rung. Whatever it does, the stream goes on: a draft that rests only has no guesses.

A governor that also knows heat, battery and other programs' needs takes the guard's place: it has
the same two verbs, ``observe`` and ``Restriction``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

SMALLEST_WINDOW = 64
RECOVERY_S = 30.0
"""How long the process has to stay below before the draft gets more again."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """What a draft may use: ``window`` 0 is to rest."""

    window: int
    width: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What the driver measured."""

    resident_bytes: int
    """Of the process."""
    growth_bytes: int
    """What the next draft step may add."""
    held_tokens: int
    """Rows that are resident now."""


class MemoryGovernor(Protocol):
    """Decides what a draft may use of memory."""

    def observe(self, seen: Observation, now: float) -> Restriction | None:
        """The restriction that holds from now on; None: as before."""


class MemoryGuard:
    """Keeps ``resident + growth`` below ``budget - margin``.

    ``full`` is what was planned; ``bytes_per_token`` is what a row of the cache takes.
    """

    def __init__(
        self,
        budget_bytes: int,
        margin_bytes: int,
        full: Restriction,
        bytes_per_token: int,
        recovery_s: float = RECOVERY_S,
    ) -> None:
        self.current = full
        self.tightened = 0
        """How often a rung was left downwards."""
        self._most = budget_bytes - margin_bytes
        self._slack = margin_bytes
        self._full = full
        self._row_bytes = max(1, bytes_per_token)
        self._recovery_s = recovery_s
        self._calm_since: float | None = None

    def observe(self, seen: Observation, now: float) -> Restriction | None:
        excess = seen.resident_bytes + seen.growth_bytes - self._most
        if excess > 0:
            self._calm_since = None
            return self._tighten(seen, excess)
        if self.current == self._full:
            return None
        richer = self._richer()
        added = max(0, richer.window - seen.held_tokens) * self._row_bytes
        if seen.resident_bytes + added + self._slack > self._most:
            self._calm_since = None
            return None
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since < self._recovery_s:
            return None
        self._calm_since = now
        return self._changed(richer)

    def _tighten(self, seen: Observation, excess: int) -> Restriction | None:
        """The longest window that gives ``excess`` bytes back or does not take them.

        Formula: held + growth / row - ceil(excess / row) tokens. 1000 rows of 1 KiB held, 24 more
        to come and 100 KiB too much leave a window of 924."""
        current = self.current
        if not current.window:
            return None  # it has nothing to give
        reached = seen.held_tokens + seen.growth_bytes // self._row_bytes
        window = min(current.window, reached) + -excess // self._row_bytes
        if window >= SMALLEST_WINDOW:
            return self._changed(Restriction(window, current.width))
        if current.window > SMALLEST_WINDOW:
            return self._changed(Restriction(SMALLEST_WINDOW, current.width))
        if current.width > 1:
            return self._changed(Restriction(current.window, 1))
        return self._changed(Restriction(0, 0))

    def _richer(self) -> Restriction:
        current, full = self.current, self._full
        if not current.window:
            return Restriction(min(SMALLEST_WINDOW, full.window), 1)
        if current.width < full.width:
            return Restriction(current.window, full.width)
        return Restriction(min(full.window, 2 * current.window), full.width)

    def _changed(self, to: Restriction) -> Restriction:
        self.tightened += to.window < self.current.window or to.width < self.current.width
        self.current = to
        return to
