"""An agent looks at its machine now and then while it generates, and walks its ladder.

A reading may take its time, as sensors behind slow buses do, or hang with a broken driver. So each
is made by a thread of its own that nobody waits for, at most one at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from edgespec.core.device.draft_ladder import DraftLadder, MachineReading

LOOK_EVERY_S: Final = 2.0
_CLOSING_S: Final = 1.0
_log = logging.getLogger(__name__)


class MachineWatch:
    """Tells ``ladder`` what ``read`` finds; ``soon`` costs nothing while no look is due."""

    def __init__(
        self,
        ladder: DraftLadder,
        read: Callable[[], MachineReading],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ladder = ladder
        self._read, self._clock = read, clock
        self._looked_at: float | None = None
        self._thread: threading.Thread | None = None
        self._failed = False

    def soon(self) -> None:
        """A generation goes on: look at the machine unless that was done of late."""
        now = self._clock()
        if self._looked_at is not None and now - self._looked_at < LOOK_EVERY_S:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._looked_at = now
        thread = threading.Thread(target=self._look, name="machine-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left: that ends no generation
            self._trouble(error)
        else:
            self._thread = thread

    def close(self) -> None:
        """Wait a moment for a look that runs; one that hangs ends with the process."""
        if self._thread is not None:
            self._thread.join(_CLOSING_S)

    def _look(self) -> None:
        try:
            seen = self._read()
        except Exception as error:  # whatever a system says about itself, or does not
            self._trouble(error)
            return
        ladder = self.ladder
        rung = ladder.observe(seen, self._clock())
        if rung is not None:
            _log.info("drafting: %s%s", rung.name.lower(), f", {ladder.why}" if ladder.why else "")

    def _trouble(self, error: Exception) -> None:
        """The log hears of the first one alone."""
        if not self._failed:
            self._failed = True
            _log.warning("this machine's sensors cannot be read any more: %s", error)
