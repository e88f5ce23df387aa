"""Time on a device that may sleep.

While a machine sleeps, the monotonic clock of Linux and macOS stands still, and that of Windows
goes on. It also goes on while a process is stopped, or its virtual machine is paused. Nothing is
measured and nothing can be awaited in such a time, so generations run on a clock that always stands
still (``AwakeClock``). Whether the machine slept is found by comparing two clocks
(``SleepDetector``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

SLEPT_S: Final = 10.0
"""Seconds by which the wall clock must have run ahead of the monotonic one, which stands still
while a machine sleeps, for the machine to count as woken. Corrections of the clock are smaller."""
LOOK_EVERY_S: Final = 1.0
"""Seconds after which an ``AwakeClock`` that is in use has to be read again."""
_STOPPED_S: Final = 3.0
"""Seconds between two readings from which on the process counts as stopped. An event loop that is
merely busy is never late by that much."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks of a device, and how it waits."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class SleepDetector:
    """Finds out whether the machine has slept since the last look."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._apart_s = clocks.wall() - clocks.monotonic()

    def look(self) -> float:
        """Return the seconds for which the machine has slept since the last look; 0 if it has
        not. On Windows it is always 0."""
        apart_s = self._clocks.wall() - self._clocks.monotonic()
        slept_s, self._apart_s = apart_s - self._apart_s, apart_s
        return slept_s if slept_s > SLEPT_S else 0.0


class AwakeClock:
    """A monotonic clock that stands still while this process does not run.

    Read it every ``LOOK_EVERY_S`` seconds while it is in use. ``_STOPPED_S`` or more between two
    readings count as no time."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._read_at = monotonic()
        self._stopped_s = 0.0
        """Seconds for which the process did not run."""

    def now(self) -> float:
        """Return the time in seconds. It never goes back."""
        read_at = self._monotonic()
        if read_at - self._read_at >= _STOPPED_S:
            self._stopped_s += read_at - self._read_at
        self._read_at = read_at
        return read_at - self._stopped_s
