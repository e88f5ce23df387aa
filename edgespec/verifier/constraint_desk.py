"""Reads the constraints of new streams before the engine sees them, beside everything else.

To compile a grammar takes from a millisecond to seconds, so it happens in threads of its own. Each
key or, where no keys are asked for, each address has one thread at a time, also while nobody waits
for that any more, and the addresses of one key have it in turn: so whoever sends hard grammars
keeps no other key waiting. How many may wait, and how long, is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from edgespec.core.protocol.constraint import ConstrainedText, ConstraintBusyError, ConstraintError
from edgespec.core.protocol.messages import Fault, FaultCode, Open
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.models.grammar import GrammarReader, ReadConstraint

_LOG = logging.getLogger(__name__)
_THREADS: Final = 64
_MOST_OF_A_KEY: Final = 32
_MOST_OF_A_PEER: Final = 16
WITHIN_S: Final = 40.0
"""A grammar that is not read by then is refused."""


@dataclass(slots=True)
class _Turn:
    """Of a key, or of an address; its lock is held as long as a thread reads for it."""

    whose: str
    most: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class ConstraintDesk:
    """``read`` None: constraints are left as they come, and the engine refuses them."""

    def __init__(self, read: ReadConstraint | None, end_tokens: tuple[int, ...]) -> None:
        self._read, self._end_tokens = read, end_tokens
        self._keeper = read if isinstance(read, GrammarReader) else None
        self._turns: dict[tuple[str, str], _Turn] = {}
        """Of those that have something to be read, by key and address: empty for all of a key."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="edgespec-grammar")

    def get_ready(self) -> None:
        """Do what the first constraint would have to wait for. Not for an event loop."""
        if self._keeper is not None:
            try:
                self._keeper.get_ready()
            except Exception as error:  # whoever sends a constraint is told; nobody did yet
                _LOG.info("constraints cannot be read: %s", error)

    async def prepared(
        self, request: Open, peer: str, credential: Credential = ANYBODY
    ) -> Open | Fault:
        constraint = request.sampling.constraint
        if constraint is None or self._read is None:
            return request
        turns = self._turns_of(peer, credential.name)
        full = next((one for one in turns if one.users >= one.most), None)
        if full is not None:
            self._forget_idle_turns()
            why = f"{full.users} grammars of {full.whose} wait to be read, limit {full.most}"
            return Fault(FaultCode.OVERLOADED, why, retry_after_s=1.0)
        for turn in turns:
            turn.users += 1
        try:
            async with asyncio.timeout(WITHIN_S):
                return await self._in_turn(request, self._read, turns)
        except ConstraintBusyError as error:
            return Fault(FaultCode.OVERLOADED, str(error), retry_after_s=1.0)
        except ConstraintError as error:
            return Fault(FaultCode.INVALID, str(error))
        except TimeoutError:
            why = f"the grammar was not read within {WITHIN_S:.0f} s"
            return Fault(FaultCode.OVERLOADED, why, retry_after_s=1.0)
        finally:
            for turn in turns:
                turn.users -= 1
            self._forget_idle_turns()

    def _turns_of(self, peer: str, key: str) -> list[_Turn]:
        """The address first: so each has one place in the line of its key."""
        turns = [self._turns.setdefault((key, peer), _Turn(peer, _MOST_OF_A_PEER))]
        if key:
            of_key = self._turns.setdefault((key, ""), _Turn(f"key {key!r}", _MOST_OF_A_KEY))
            turns.append(of_key)
        return turns

    async def _in_turn(self, request: Open, read: ReadConstraint, turns: list[_Turn]) -> Open:
        """Read in these turns, which end with the thread's work, whoever waits for that."""
        loop = asyncio.get_running_loop()
        with ExitStack() as held:
            for turn in turns:
                await turn.lock.acquire()
                held.callback(turn.lock.release)
            work = self._threads.submit(self._ready, request, read)
            release = held.pop_all().close

        def over() -> None:
            release()
            self._forget_idle_turns()

        def tell(_: Future[Open]) -> None:
            with suppress(RuntimeError):  # the loop has ended before
                loop.call_soon_threadsafe(over)

        work.add_done_callback(tell)
        return await asyncio.wrap_future(work)

    def _forget_idle_turns(self) -> None:
        idle = [who for who, one in self._turns.items() if not (one.users or one.lock.locked())]
        for who in idle:
            del self._turns[who]

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
