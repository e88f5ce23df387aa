"""Reads the constraints of new streams before the engine sees them, beside everything else.

To compile a grammar takes from a millisecond to seconds, so it happens in threads of its own: no
pass and no other stream waits for it. How many may wait, and how long, is bounded; and one peer has
one thread at a time, also while nobody waits for it any more, and half of the places: so whoever
sends hard ones keeps nobody else waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, runtime_checkable

from edgespec.core.protocol.constrained_text import ConstrainedText
from edgespec.core.protocol.constraint import Constraint, ConstraintError
from edgespec.core.protocol.messages import Fault, FaultCode, Open

_LOG = logging.getLogger(__name__)
_THREADS: Final = 4
_MOST_WAITING: Final = 32
_MOST_OF_A_PEER: Final = 16
WITHIN_S: Final = 40.0
"""A grammar that is not read by then is refused."""
ReadConstraint = Callable[[Constraint], Constraint]
"""Gives the constraint its matcher. Raises ``ConstraintError``."""


@runtime_checkable
class ReadyReader(Protocol):
    """What a ``ReadConstraint`` has beside, if it keeps something ready."""

    def get_ready(self) -> None:
        """Do what the first constraint would have to wait for. Not for an event loop."""

    def close(self) -> None: ...


@dataclass(slots=True)
class _Turn:
    """One peer's; its lock is held as long as a thread reads for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class ConstraintDesk:
    """``read`` None: constraints are left as they come, and the engine refuses them."""

    def __init__(self, read: ReadConstraint | None, end_tokens: tuple[int, ...]) -> None:
        self._read, self._end_tokens = read, end_tokens
        keeper: object = read
        self._keeper = keeper if isinstance(keeper, ReadyReader) else None
        self._waiting = 0
        self._turns: dict[str, _Turn] = {}
        """Of the peers that have something to be read."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="edgespec-grammar")

    def get_ready(self) -> None:
        """Do what the first constraint would have to wait for. Not for an event loop."""
        if self._keeper is not None:
            try:
                self._keeper.get_ready()
            except Exception as error:  # whoever sends a constraint is told; nobody did yet
                _LOG.info("constraints cannot be read: %s", error)

    async def prepared(self, request: Open, peer: str) -> Open | Fault:
        """The request with a constraint that can be kept, or why there is none."""
        constraint = request.sampling.constraint
        if constraint is None or self._read is None:
            return request
        if self._waiting >= _MOST_WAITING:
            why = f"{self._waiting} grammars wait to be read, limit {_MOST_WAITING}"
            return Fault(FaultCode.OVERLOADED, why, retry_after_s=1.0)
        turn = self._turns.setdefault(peer, _Turn())
        if turn.users >= _MOST_OF_A_PEER:
            why = f"{turn.users} grammars of {peer} wait to be read, limit {_MOST_OF_A_PEER}"
            return Fault(FaultCode.OVERLOADED, why, retry_after_s=1.0)
        turn.users, self._waiting = turn.users + 1, self._waiting + 1
        try:
            async with asyncio.timeout(WITHIN_S):
                await turn.lock.acquire()
                return await self._in_thread(request, self._read, peer, turn)
        except ConstraintError as error:
            return Fault(FaultCode.INVALID, str(error))
        except TimeoutError:
            why = f"the grammar was not read within {WITHIN_S:.0f} s"
            return Fault(FaultCode.OVERLOADED, why, retry_after_s=1.0)
        finally:
            turn.users, self._waiting = turn.users - 1, self._waiting - 1
            self._forget(peer, turn)

    def _in_thread(
        self, request: Open, read: ReadConstraint, peer: str, turn: _Turn
    ) -> asyncio.Future[Open]:
        """Read in the peer's turn, which ends with the thread's work, whoever waits for that."""
        loop = asyncio.get_running_loop()

        def over() -> None:
            turn.lock.release()
            self._forget(peer, turn)

        def tell(_: Future[Open]) -> None:
            with suppress(RuntimeError):  # the loop has ended before
                loop.call_soon_threadsafe(over)

        try:
            work = self._threads.submit(self._ready, request, read)
        except RuntimeError:  # closed
            over()
            raise
        work.add_done_callback(tell)
        return asyncio.wrap_future(work)

    def _forget(self, peer: str, turn: _Turn) -> None:
        if not (turn.users or turn.lock.locked()):
            self._turns.pop(peer, None)

    def _ready(self, request: Open, read: ReadConstraint) -> Open:
        constraint = request.sampling.constraint
        assert constraint is not None
        known = read(constraint)
        held = request.committed
        if held and self._end_tokens:
            taken = ConstrainedText(known, self._end_tokens).follow(held)
            if taken < len(held):
                raise ConstraintError(
                    f"the {known.kind.value} takes {taken} of the {len(held)} tokens that the"
                    " device holds already"
                )
        return replace(request, sampling=replace(request.sampling, constraint=known))

    def close(self) -> None:
        """What waits is not read any more; what is being read ends by itself, in its bounds."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._keeper is not None:
            self._keeper.close()
