"""What a Ctrl-C does in a chat: it ends what runs, once, however often it is pressed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class CtrlC:
    """``arm`` it, inside of a ``try``, for each thing that a Ctrl-C may end. The next one cancels
    the ``task`` that was named since, and raises ``KeyboardInterrupt`` where there is none. Those
    behind it, of who is impatient, do nothing, so that what it ended can be tidied up."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self._armed = False

    def arm(self) -> None:
        self.task, self._armed = None, True

    def disarm(self) -> None:
        self._armed = False

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Meanwhile; one that whoever started us wants ignored stays so."""
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN:
            yield
            return
        signal.signal(signal.SIGINT, self._pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        armed, self._armed = self._armed, False
        if not armed:
            return
        if self.task is None:
            raise KeyboardInterrupt
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)
