"""The one thread that may touch the target: what is submitted runs in order, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from edgespec.core.ports import CapacityError, TargetLostError, TargetModel, use_adapter
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.engine_events import (
    BatchDone,
    CloseSequence,
    KeepNodes,
    OpenSequence,
    SequenceFailed,
)

_LOG = logging.getLogger(__name__)
SequenceWork = OpenSequence | CloseSequence | KeepNodes


class TargetWorker:
    """Sequence work is queued and carried out just before the next pass, in one hop to the thread.

    A piece of sequence work that raises is reported to ``failed``, on the event loop and before the
    pass ends; its session misses that pass, and all others go on.
    """

    def __init__(self, target: TargetModel, failed: Callable[[SequenceFailed], None]) -> None:
        self._target, self._failed = target, failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgespec-target")
        self._queued: list[SequenceWork] = []
        self._last: asyncio.Future[Any] | None = None
        """What was handed to the thread last: when it is over, so is all before it."""

    def queue(self, work: SequenceWork) -> None:
        self._queued.append(work)

    @property
    def has_queued(self) -> bool:
        return bool(self._queued)

    def submit(self, requests: tuple[PassRequest, ...]) -> asyncio.Future[BatchDone]:
        """One pass after the work queued so far; no requests, only the work. What is queued later
        waits for the next call. The future has the results in the order of the requests."""
        loop = asyncio.get_running_loop()
        queued, self._queued = self._queued, []

        def work() -> BatchDone:
            missing: set[str] = set()
            for item in queued:
                failure = self._carry_out(item)
                if isinstance(item, OpenSequence):
                    missing.discard(item.key)
                if failure is not None:
                    missing.add(item.key)
                    loop.call_soon_threadsafe(self._failed, failure)
            batch = [request for request in requests if request.key not in missing]
            began_s = time.perf_counter()
            results = tuple(self._target.forward(batch)) if batch else ()
            return BatchDone(results, time.perf_counter() - began_s)

        self._last = done = loop.run_in_executor(self._thread, work)
        return done

    def probe(self, request: PassRequest) -> asyncio.Future[None]:
        """Open a sequence, run this one request, close it; the future has what went wrong."""

        def work() -> None:
            self._target.open(request.key, 1, SamplingParams())
            try:
                self._target.forward([request])
            finally:
                self._target.close(request.key)

        self._last = done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        return done

    def _carry_out(self, item: SequenceWork) -> SequenceFailed | None:
        try:
            match item:
                case OpenSequence(key, prompt_length, sampling, text, adapter):
                    self._target.open(key, prompt_length, sampling, text)
                    if adapter:
                        use_adapter(self._target, key, adapter)
                case KeepNodes(key, nodes):
                    self._target.keep(key, nodes)
                case CloseSequence(key):
                    self._target.close(key)
        except TargetLostError:
            raise  # Nobody's fault, and the end of all.
        except CapacityError as error:
            return SequenceFailed(item.key, str(error), full=True)
        except Exception as error:  # whatever a model raises ends one session, not the daemon
            _LOG.exception("%s of a session failed", type(item).__name__)
            return SequenceFailed(item.key, f"{type(error).__name__}: {error}")
        return None

    async def close(self, within_s: float) -> bool:
        """Take no more work and wait for what was handed over; whether it was over by then. If not,
        its thread is left behind, for which the interpreter would wait at its end."""
        if self._last is not None:
            await asyncio.wait([self._last], timeout=within_s)
        over = self._last is None or self._last.done()
        self._thread.shutdown(wait=over, cancel_futures=True)
        return over
