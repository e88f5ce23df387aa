"""How late an event loop is: what is to be done at a moment, and when it is done.

The lag is what every message and every pass waits for on top of its own work. A callback asks ten
times a second, which costs a ten-thousandth of the loop or so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from edgespec.telemetry.histogram import LAG_S, Histogram

EVERY_S = 0.1


class Handle(Protocol):
    """What takes a callback back."""

    def cancel(self) -> None: ...


class Loop(Protocol):
    """What is needed of an event loop."""

    def time(self) -> float:
        """Seconds on its clock."""

    def call_at(self, when: float, callback: Callable[[], None], /) -> Handle:
        """Call back at that time or soon after."""


class LoopLag:
    """Measures from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self.lag_s = Histogram(LAG_S)
        self._handle: Handle | None = None

    def start(self, loop: Loop) -> None:
        """From now on ask how late ``loop`` is."""
        due = loop.time() + EVERY_S

        def ask() -> None:
            self.lag_s.add(max(0.0, loop.time() - due))
            self.start(loop)

        self._handle = loop.call_at(due, ask)

    def stop(self) -> None:
        """Ask no more; a second call does nothing."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
