"""A trace of the first question of the first device, to draw arms beside each other."""

from __future__ import annotations

from typing import Final

from edgespec.core.device.events import Fail, Finish
from edgespec.telemetry.trace import Tracer

MOST_LINES: Final = 50_000


class FirstQuestion:
    """A ``Tracer`` that hands on what is said until the first session of a device has ended; of
    devices nothing but that session, and so many lines at most."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._session: str | None = None
        self._left = MOST_LINES

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        if self._left <= 0:
            return
        if side == "device":
            self._session = self._session or session
            if session != self._session:
                return
        self._left -= 1
        self._tracer.record(at_s, side, session, kind, item)
        if side == "device" and isinstance(item, Finish | Fail):
            self._left = 0
