"""The one thread that may touch the target: what is submitted runs in order, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.engine_events import (
    BatchDone,
    CloseSequence,
    KeepNodes,
    OpenSequence,
    SequenceFailed,
)
from edgespec.ports import CapacityError, TargetLostError, TargetModel, use_adapter

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

        return loop.run_in_executor(self._thread, work)

    def probe(self, request: PassRequest) -> asyncio.Future[None]:
        """Open a sequence, run this one request, close it; the future has what went wrong."""

        def work() -> None:
            self._target.open(request.key, 1, SamplingParams())
            try:
                self._target.forward([request])
            finally:
                self._target.close(request.key)

        return asyncio.get_running_loop().run_in_executor(self._thread, work)

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

    def close(self, *, wait: bool) -> None:
        """No more work is taken; with ``wait``, what is running ends first."""
        self._thread.shutdown(wait=wait, cancel_futures=True)
