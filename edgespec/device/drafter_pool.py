"""One drafter, its thread and its caches, for all generations of an agent.

Steps run one at a time, in a thread of their own, in the order in which they are submitted. A
generation drafts in a cache that it owns until it ends. The first cache is the drafter itself,
further ones are its twins (``ports.Twinned``), made when they are first needed. A generation that
finds no free cache gets no candidates until one is free; it is streamed meanwhile.

A cache keeps its rows when its generation ends. The next turn of a conversation gets the cache of
the turn before, whose tokens it begins with, and the drafter feeds only the rest. A generation that
continues no kept text takes the cache whose rows are worth least, so that the short requests which
a program sends beside a conversation do not cost it its rows.

The prompt of a long text takes many runs of the model. If other steps wait, its step is interrupted
after each run and goes on behind them, if the drafter can resume it (``ports.Resuming``).

An error in a step concerns that generation only: it goes on without drafts. A step that makes no
progress for ``STEP_TIMEOUT_S`` is abandoned, together with the steps that wait for it.

A text that the model writes by itself (``local_model.py``) uses a cache like any other. It waits
for a free one with ``acquire``, because it is nothing without its steps.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from edgespec.core import ports
from edgespec.core.device.events import StartStep, StepDone, StepFailed
from edgespec.core.device.token_cache import common_prefix_length
from edgespec.core.protocol.checks import check_range
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.shared_ids import SharedIds

STEP_TIMEOUT_S = 20.0
# Seconds that closing waits for a running step. It ends soon if the drafter checks for its end.
_CLOSE_TIMEOUT_S = 5.0
_NO_CANDIDATES: Final = StepDone(())
KEPT_CACHES: Final = 2
"""Caches that generations which follow one another use at most: one for a conversation, and one for
the requests that its program sends beside it. Generations that run at the same time may have
more."""
MIN_KEPT_TOKENS: Final = 512
"""Tokens from which on the rows of an ended generation are worth a further cache. A device feeds
fewer in about a second."""
_T = TypeVar("_T")
_Work = tuple[Future[Any], Callable[[], Any]]
_log = logging.getLogger(__name__)


@runtime_checkable
class Translated(Protocol):
    """A drafter in the ids of a target, on a model that has others (``translating_drafter.py``)."""

    @property
    def untranslated(self) -> ports.Drafter:
        """The drafter in the model's own ids, with the same cache."""


def in_own_ids(drafter: ports.Drafter) -> ports.Drafter:
    """Return the drafter in the ids of its own model."""
    return drafter.untranslated if isinstance(drafter, Translated) else drafter


@dataclass(slots=True, eq=False)
class DraftCache:
    """A drafter, and what its rows hold of the generation that used it last."""

    drafter: ports.Drafter
    tokens: list[int] = field(default_factory=list)
    has_draft_ids: bool = False
    """Whether ``tokens`` are ids of the draft instead of the target."""
    lease_number: int = 0
    """Number of the lease that used it last; numbers count up."""

    def shared_length(self, lease: DrafterLease) -> int:
        """Return how many of the lease's first tokens the rows hold."""
        if self.has_draft_ids is not lease.has_draft_ids:
            return 0
        return common_prefix_length(self.tokens, lease.tokens)


class DrafterPool:
    """Holds the caches of at most ``caches`` generations at once.

    ``shared`` names the ids that ``drafter`` shares with the target; None means all. Closing the
    pool closes the drafter and its twins."""

    def __init__(
        self,
        drafter: ports.Drafter,
        caches: int = ports.DEFAULT_CACHES,
        shared: SharedIds | None = None,
    ) -> None:
        check_range("caches", caches, 1, ports.MAX_CACHES)
        self._drafters, self._shared = [drafter], shared
        self._free = [DraftCache(drafter)]
        self._lease_count = 0
        self._max_drafters = caches if isinstance(drafter, ports.Twinned) else 1
        self._thread = DraftThread("edgespec-draft")
        self._progress_at = time.monotonic()
        """Time at which the running step last made progress. The drafter's thread writes it."""
        self._hung_step: Future[StepDone | None] | None = None
        """The step that hung last."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        """Events of the leases that wait for a cache, with their loops. Set when one is free."""

    def close(self) -> None:
        """Free the model.

        A running step is waited for, unless it hangs. Then its memory is freed when it comes back,
        or with the process, which may end before that."""

        def close_all() -> None:
            for drafter in reversed(self._drafters):
                drafter.close()

        step_hangs = self._hung_step is not None and not self._hung_step.done()
        if not self._thread.close(close_all, 0.0 if step_hangs else _CLOSE_TIMEOUT_S):
            _log.warning("a draft step still runs; the draft's memory is freed when it ends")

    async def step(self, lease: DrafterLease, step: StartStep) -> StepDone | StepFailed:
        """Run ``step`` for ``lease`` when the drafter is free. Called by ``DrafterLease``."""
        while (outcome := await self._submit_step(lease, step)) is None:
            pass  # The step was interrupted, and goes on behind the others that wait.
        return outcome

    async def _submit_step(
        self, lease: DrafterLease, step: StartStep
    ) -> StepDone | StepFailed | None:
        """Submit ``step`` and return its outcome. None if it was interrupted."""
        work = self._thread.submit(lambda: self._run_step(lease, step))
        submitted_at = time.monotonic()
        future = asyncio.wrap_future(work)
        while not (await asyncio.wait([future], timeout=STEP_TIMEOUT_S))[0]:
            if time.monotonic() - max(self._progress_at, submitted_at) >= STEP_TIMEOUT_S:
                self._hung_step = work
                future.cancel()  # The step runs on, unless it waits for the one that hangs.
                _log.warning("a draft step has not come back within %g s", STEP_TIMEOUT_S)
                return StepFailed(f"the draft model did not answer within {STEP_TIMEOUT_S:g} s")
        try:
            return future.result()
        except asyncio.CancelledError:
            return StepFailed("the drafter's thread was closed")
        except Exception as error:  # An error of a model ends the drafting, not the session.
            return StepFailed(f"{type(error).__name__}: {error}")

    async def acquire(self, lease: DrafterLease) -> bool:
        """Wait until ``lease`` has a cache. Return False if the pool was closed first."""
        waiting = asyncio.get_running_loop(), asyncio.Event()
        self._waiting.append(waiting)
        try:
            while True:
                waiting[1].clear()
                work = asyncio.wrap_future(self._thread.submit(lambda: self._begin(lease)))
                if not (await asyncio.wait([work]))[0] or work.cancelled():
                    return False
                if work.result():
                    return True
                await waiting[1].wait()
        finally:
            self._waiting.remove(waiting)

    # --- in the drafter's thread ---------------------------------------------------------------

    def _begin(self, lease: DrafterLease) -> bool:
        """Give a lease a cache and begin its sequence. Return False if no cache is free."""
        if lease.is_ended:
            return True
        if (cache := self._acquire_cache(lease)) is None:
            return False
        lease.cache = cache
        lease.model.begin(lease.prompt_length, lease.sampling)
        return True

    def _run_step(self, lease: DrafterLease, step: StartStep) -> StepDone | None:
        """Run ``step``. Return None if it was interrupted for the sake of others that wait."""
        checks, is_interrupted = 0, False

        def cancelled() -> bool:
            nonlocal checks, is_interrupted
            self._progress_at = time.monotonic()
            checks += 1
            # Something was fed since the first check, so the step gets on.
            is_interrupted = can_resume and checks > 1 and self._thread.has_waiting_work
            return lease.is_ended or is_interrupted

        if lease.is_ended:
            raise ports.StepCancelledError("the generation has ended")
        self._progress_at = time.monotonic()
        keep_length, feed = step.keep_length, step.feed
        lease.tokens[keep_length:] = feed
        if lease.cache is None and not self._begin(lease):
            return _NO_CANDIDATES
        assert lease.cache is not None
        if not lease.has_rows:
            keep_length, feed = 0, tuple(lease.tokens)
        drafter = lease.model
        can_resume = isinstance(drafter, ports.Resuming) and drafter.resumes_feeds
        shared = None if lease.has_draft_ids else self._shared
        if shared is not None:
            feed = tuple(shared.to_draft_ids(feed))
        try:
            places = ports.draft_places(
                drafter, keep_length, feed, step.width, step.places, cancelled
            )
        except ports.StepCancelledError:
            if not is_interrupted:
                raise
            return None
        lease.has_rows = True
        found = [_check_candidates(one, step.width) for one in places]
        if shared is not None:
            found = _keep_shared(found, shared)
        return StepDone(found[0] if found else (), tuple(found[1:]))

    def _acquire_cache(self, lease: DrafterLease) -> DraftCache | None:
        """Return the free cache that costs least to use, or a new one. None if there is none.

        Rows that the lease cannot use are lost. A loss counts less the longer the rows were not
        used: it is divided by the number of leases since then."""
        self._lease_count += 1
        shared = {id(cache): cache.shared_length(lease) for cache in self._free}

        def cost(cache: DraftCache) -> tuple[float, int]:
            lost, kept = len(cache.tokens) - shared[id(cache)], shared[id(cache)]
            return lost / (self._lease_count - cache.lease_number), -kept

        continued = [one for one in self._free if 2 * shared[id(one)] >= len(one.tokens)]
        best = max(continued, key=lambda one: shared[id(one)], default=None)
        if best is None and self._free:
            best = min(self._free, key=cost)
            lost = len(best.tokens) - shared[id(best)]
            if lost >= MIN_KEPT_TOKENS and len(self._drafters) < KEPT_CACHES:
                best = self._make_cache(is_needed=False) or best
        elif best is None:
            best = self._make_cache(is_needed=True)
        if best is not None:
            best.lease_number = self._lease_count
            if best in self._free:
                self._free.remove(best)
        return best

    def _make_cache(self, *, is_needed: bool) -> DraftCache | None:
        """Return a further cache. None if there is no room, which is logged as a warning if it
        ``is_needed`` for a generation to draft at all."""
        if len(self._drafters) >= self._max_drafters:
            return None
        first = self._drafters[0]
        try:
            assert isinstance(first, ports.Twinned)
            self._drafters.append(first.twin())
        except Exception as error:  # Whatever error the model raises, the existing caches suffice.
            self._max_drafters = len(self._drafters)
            level = logging.WARNING if is_needed else logging.INFO
            _log.log(level, "no room for %d caches of the draft: %s", self._max_drafters + 1, error)
            return None
        return DraftCache(self._drafters[-1])

    def release(self, lease: DrafterLease) -> None:
        """Free the cache of a lease that has ended, after its running step if there is one."""

        def put() -> None:
            if (cache := lease.cache) is not None:
                cache.tokens, cache.has_draft_ids = lease.tokens, lease.has_draft_ids
                lease.cache = None
                self._free.append(cache)
                for loop, is_free in tuple(self._waiting):
                    with suppress(RuntimeError):  # the loop was closed
                        loop.call_soon_threadsafe(is_free.set)

        self._thread.submit(put)


class DrafterLease:
    """The use of a pool by one generation; call ``end`` when it ends.

    ``tokens`` are the tokens that its cache holds, or would hold if it had one. They may be set to
    the prompt before the first step, so that the best cache is chosen. With ``has_draft_ids`` they
    are ids of the draft, and otherwise of the target."""

    def __init__(
        self,
        pool: DrafterPool,
        prompt_length: int,
        sampling: SamplingParams,
        *,
        has_draft_ids: bool = False,
    ) -> None:
        self.prompt_length, self.sampling = prompt_length, sampling
        self.has_draft_ids = has_draft_ids
        self.tokens: list[int] = []
        self.cache: DraftCache | None = None
        self.has_rows = False
        """Whether a step has fed the tokens into the cache."""
        self.is_ended = False
        self._pool = pool

    @property
    def model(self) -> ports.Drafter:
        """The drafter in the ids of this lease. The lease must have one."""
        assert self.cache is not None
        return in_own_ids(self.cache.drafter) if self.has_draft_ids else self.cache.drafter

    async def step(self, step: StartStep) -> StepDone | StepFailed:
        """Run ``step`` when the drafter is free. ``StepFailed`` ends the lease."""
        outcome = await self._pool.step(self, step)
        if isinstance(outcome, StepFailed):
            self.end()
        return outcome

    def end(self) -> None:
        """End the lease: the generation drafts no more. A second call does nothing."""
        if not self.is_ended:
            self.is_ended = True
            self._pool.release(self)


def _keep_shared(
    found: Sequence[tuple[ports.Candidate, ...]], shared: SharedIds
) -> list[tuple[ports.Candidate, ...]]:
    """Return the candidates of each place that the target has too. The places end behind a first
    candidate that it lacks, because they stand behind that token."""
    kept = list[tuple[ports.Candidate, ...]]()
    for candidates in found:
        kept.append(shared.keep_shared(candidates))
        if kept[-1][:1] != candidates[:1]:
            break
    return kept


def _check_candidates(candidates: object, width: int) -> tuple[ports.Candidate, ...]:
    """Return ``candidates``, or raise ``TypeError`` or ``ValueError`` if they are no valid
    candidates."""
    if not isinstance(candidates, tuple):
        raise TypeError(
            f"the drafter returned {type(candidates).__name__}, but must return a tuple"
        )
    if len(candidates) > width:
        raise ValueError(
            f"the drafter returned {len(candidates)} candidates, but at most {width} count"
        )
    for candidate in candidates:
        if not isinstance(candidate, ports.Candidate) or operator.index(candidate.token) < 0:
            raise ValueError(
                f"the drafter returned the candidate {candidate!r}, which is no token id"
            )
    return candidates


class DraftThread:
    """Runs submitted work in order. The thread ends with ``close``, or with the process.

    The pools of ``concurrent.futures`` are no alternative: the interpreter joins their threads when
    it ends, so a model that hangs would keep the process alive."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_run_queue, args=(self._work,), name=name, daemon=True
        )
        self._closed = False

    @property
    def has_waiting_work(self) -> bool:
        """Whether work waits for what runs now. Called by the thread itself."""
        return not self._work.empty()

    def submit(self, run: Callable[[], _T]) -> Future[_T]:
        """Return the future result of ``run``.

        It is cancelled after ``close``, and failed if the thread cannot be started."""
        future: Future[_T] = Future()
        if self._closed:
            future.cancel()
            return future
        try:
            if self._thread.ident is None:
                self._thread.start()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            self._work.put((future, run))
        return future

    def close(self, last: Callable[[], None], timeout_s: float) -> bool:
        """Drop work that has not begun, run ``last`` after the work that has, and accept no more.

        Waits at most ``timeout_s`` seconds, and returns False if ``last`` still waits for a step.
        Raises what ``last`` raises. A second call does nothing."""
        if self._closed:
            return True
        if self._thread.ident is None:
            self._closed = True
            last()
            return True
        with suppress(Empty):
            while (dropped := self._work.get_nowait()) is not None:
                dropped[0].cancel()
        done = self.submit(last)
        self._closed = True
        self._work.put(None)
        if not wait([done], timeout_s).done:
            return False
        self._thread.join()
        done.result()
        return True


def _run_queue(queue: SimpleQueue[_Work | None]) -> None:
    while (work := queue.get()) is not None:
        _run_work(*work)
        del work


def _run_work(future: Future[Any], run: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = run()
    except BaseException as error:  # The future carries the error to its owner.
        future.set_exception(error)
        del future, run  # Breaks the cycle error, traceback, frame, future, error.
    else:
        future.set_result(result)
