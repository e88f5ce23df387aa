"""The one thread that may touch the target: what is submitted runs in order, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from edgespec.core.engine_events import CloseSequence, KeepNodes, OpenSequence
from edgespec.core.work import PassRequest, PassResult
from edgespec.ports import CapacityError, TargetModel

SequenceWork = OpenSequence | CloseSequence | KeepNodes


class TargetWorker:
    """Sequence work is queued and carried out just before the next pass, in one hop to the thread.

    ``refused(key, why)`` is called on the event loop when a sequence could not be opened.
    """

    def __init__(self, target: TargetModel, refused: Callable[[str, str], None]) -> None:
        self._target, self._refused = target, refused
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgespec-target")
        self._queued: list[SequenceWork] = []

    def queue(self, work: SequenceWork) -> None:
        self._queued.append(work)

    @property
    def has_queued(self) -> bool:
        return bool(self._queued)

    async def forward(self, requests: tuple[PassRequest, ...]) -> tuple[PassResult, ...]:
        """One pass after the queued work; no requests, only the work."""
        loop = asyncio.get_running_loop()
        queued, self._queued = self._queued, []

        def work() -> tuple[PassResult, ...]:
            for item in queued:
                self._carry_out(item, loop)
            return tuple(self._target.forward(requests)) if requests else ()

        return await loop.run_in_executor(self._thread, work)

    def _carry_out(self, item: SequenceWork, loop: asyncio.AbstractEventLoop) -> None:
        match item:
            case OpenSequence(key, prompt_length, sampling):
                try:
                    self._target.open(key, prompt_length, sampling)
                except CapacityError as error:
                    loop.call_soon_threadsafe(self._refused, key, str(error))
            case KeepNodes(key, nodes):
                self._target.keep(key, nodes)
            case CloseSequence(key):
                self._target.close(key)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
