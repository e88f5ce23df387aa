"""Reads the constraints of new streams in threads, before the engine receives their ``Open``.

To read a grammar means to compile it, which takes from a millisecond to seconds, so it happens in
threads of its own. Each API key (or each address, on a verifier without API keys) uses one thread
at a time, even after all requests that waited for that thread have gone. The addresses of one API
key take turns. So clients with hard grammars do not delay other API keys. How many grammars may
wait, and for how long, is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from edgespec.core.protocol import messages as m
from edgespec.core.protocol.constraint import (
    ConstrainedText,
    ConstraintBusyError,
    ConstraintError,
    ConstraintKind,
    with_tokens_matcher,
)
from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.models.grammar import GrammarReader, ReadConstraint

_LOG = logging.getLogger(__name__)

_THREADS: Final = 64
_MAX_PER_API_KEY: Final = 32
_MAX_PER_ADDRESS: Final = 16
GRAMMAR_WITHIN_S: Final = 40.0
"""Seconds after which a grammar that was not read is refused."""


@dataclass(slots=True)
class _ReadQueue:
    """The queue of an API key or of an address; the lock is held while a thread works for it."""

    owner: str
    max_users: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class ConstraintReader:
    """Reads the constraints of new streams in threads, fairly between API keys.

    ``read`` None means that this verifier supports no constraints: they pass unchanged, and the
    engine refuses them.
    """

    def __init__(self, read: ReadConstraint | None, end_tokens: tuple[int, ...]) -> None:
        self._read, self._end_tokens = read, end_tokens
        self._reader = read if isinstance(read, GrammarReader) else None
        self._queues: dict[tuple[str, str], _ReadQueue] = {}
        """Queues in use, by API key and address; the address is empty for the queue of a whole API
        key."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="edgespec-grammar")

    def warm_up(self) -> None:
        """Do the work for which the first constraint would otherwise have to wait. It blocks, so it
        must not run in an event loop."""
        if self._reader is not None:
            try:
                self._reader.warm_up()
            except Exception as error:  # a request with a constraint will get the error
                _LOG.info("constraints cannot be read: %s", error)

    async def read_constraint(
        self, request: m.Open, peer: str, credential: Credential = ANYBODY
    ) -> m.Open | m.Fault:
        constraint = request.sampling.constraint
        if constraint is None or self._read is None:
            return request
        is_list = constraint.kind is ConstraintKind.TOKENS
        read = with_tokens_matcher if is_list else self._read
        # The address comes first, so each address has one place in the queue of its API key.
        key = credential.name
        queues = [self._queues.setdefault((key, peer), _ReadQueue(peer, _MAX_PER_ADDRESS))]
        if key:
            of_key = self._queues.setdefault(
                (key, ""), _ReadQueue(f"key {key!r}", _MAX_PER_API_KEY)
            )
            queues.append(of_key)
        for queue in queues:
            queue.users += 1
        try:
            for queue in queues:
                if queue.users > queue.max_users:
                    limit = queue.max_users
                    why = f"{limit} grammars of {queue.owner} wait to be read, limit {limit}"
                    raise ConstraintBusyError(why)
            async with asyncio.timeout(GRAMMAR_WITHIN_S):
                return await self._read_in_turn(request, read, queues)
        except ConstraintBusyError as error:
            why = str(error)
        except ConstraintError as error:
            return m.Fault(m.FaultCode.INVALID, str(error))
        except TimeoutError:
            why = f"the grammar was not read within {GRAMMAR_WITHIN_S:.0f} s"
        finally:
            for queue in queues:
                queue.users -= 1
            self._forget_idle_queues()
        return m.Fault(m.FaultCode.OVERLOADED, why, retry_after_s=1.0)

    async def _read_in_turn(
        self, request: m.Open, read: ReadConstraint, queues: list[_ReadQueue]
    ) -> m.Open:
        """Read the constraint once all queues allow it. The queues are released when the
        thread's work ends, even if the stream is gone by then."""
        loop = asyncio.get_running_loop()
        with ExitStack() as locks:
            for queue in queues:
                await queue.lock.acquire()
                locks.callback(queue.lock.release)
            work = self._threads.submit(self._read_now, request, read)
            release = locks.pop_all().close

        def release_queues() -> None:
            release()
            self._forget_idle_queues()

        def on_done(_: Future[m.Open]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(release_queues)

        work.add_done_callback(on_done)
        return await asyncio.wrap_future(work)

    def _forget_idle_queues(self) -> None:
        idle = [name for name, one in self._queues.items() if not (one.users or one.lock.locked())]
        for name in idle:
            del self._queues[name]

    def _read_now(self, request: m.Open, read: ReadConstraint) -> m.Open:
        constraint = request.sampling.constraint
        assert constraint is not None
        compiled = read(constraint)
        held = request.committed
        if held and self._end_tokens:
            accepted = ConstrainedText(compiled, self._end_tokens).follow(held)
            if accepted < len(held):
                raise ConstraintError(
                    f"the {compiled.kind.value} accepts only {accepted} of the {len(held)} tokens"
                    " that the device already holds"
                )
        return replace(request, sampling=replace(request.sampling, constraint=compiled))

    def close(self) -> None:
        """Drop the constraints that wait. Reading that has begun ends by itself, within its
        bounds."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._reader is not None:
            self._reader.close()
