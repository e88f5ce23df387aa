"""Verifiers are asked here whether they are there, what they serve, and how far away they are: once
or now and then. Generations do not wait for this: the agent dials by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from edgespec.core.ports import LinkError, Transport
from edgespec.core.protocol.checks import one_line
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.telemetry.agent_status import VerifierState, VerifierStatus
from edgespec.telemetry.logs import log_failure

ANSWER_S: Final = 3.0
_NEW_S: Final = 1.0
"""What was told is new for so long, to who waits for it; and to who only looks."""
_NEW_TO_LOOK_AT_S: Final = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one verifier said; ``info`` None: nothing of use, and ``error`` says why."""

    info: VerifierInfo | None = None
    rtt_s: float | None = None
    error: LinkError | None = None

    @property
    def why(self) -> str:
        return "" if self.error is None else one_line(str(self.error))


async def ask(transport: Transport, within_s: float = ANSWER_S, *, timed: bool = False) -> Answer:
    """Never raises. ``timed``: a second question is timed, since the first opens the channel."""
    try:
        async with asyncio.timeout(within_s):
            if timed:
                await transport.info()
            asked_s = time.monotonic()
            info = await transport.info()
        return Answer(info, time.monotonic() - asked_s)
    except TimeoutError:
        error = LinkError(f"no answer within {within_s:g} s")
    except LinkError as said:
        error = said
    except Exception as raised:
        error = LinkError(f"{type(raised).__name__}: {raised}")
    return Answer(error=error)


async def ask_all(
    transports: Mapping[str, Transport], within_s: float = ANSWER_S, *, timed: bool = False
) -> dict[str, Answer]:
    """All at once, by their names."""
    asked = [ask(one, within_s, timed=timed) for one in transports.values()]
    return dict(zip(transports, await asyncio.gather(*asked), strict=True))


class VerifierWatch:
    """Asks all verifiers every ``every_s``, or every ``away_every_s`` while none is ready.
    ``misfit`` says why what one serves is of no use here. Close it in the end."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        misfit: Callable[[VerifierInfo], str | None] = lambda info: None,
        *,
        every_s: float = 15.0,
        away_every_s: float = 2.0,
    ) -> None:
        self._transports, self._misfit = dict(transports), misfit
        self._every_s, self._away_every_s = every_s, away_every_s
        self.statuses = tuple(map(VerifierStatus, transports))
        """One each, in the order given."""
        self.infos: dict[str, VerifierInfo] = {}
        """What each said last, by its address."""
        self.looked_at = -math.inf
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    @property
    def ready(self) -> bool:
        return any(one.state is VerifierState.READY for one in self.statuses)

    @property
    def told(self) -> tuple[VerifierInfo, ...]:
        """What the verifiers that fit said: those that are there, then those that were."""
        order = sorted(self.statuses, key=lambda one: one.state is not VerifierState.READY)
        fits = [one.address for one in order if one.state is not VerifierState.MISFIT]
        return tuple(self.infos[one] for one in fits if one in self.infos)

    async def look(self) -> None:
        answers = await ask_all(self._transports)
        self.statuses = tuple(self._status(one, answers[one.address]) for one in self.statuses)
        self.looked_at = time.monotonic()

    async def look_anew(self) -> None:
        """What is known may be old, and somebody waits: ask, unless that was done just now."""
        async with self._one_at_a_time:
            if time.monotonic() - self.looked_at >= _NEW_S:
                await self.look()

    def start(self) -> None:
        self._task = asyncio.create_task(self._forever())

    def hurry(self) -> None:
        """What is known may be old: look soon."""
        self._hurry.set()

    def looked_upon(self) -> None:
        """Somebody is shown what is known: look soon if it is old."""
        if time.monotonic() - self.looked_at >= _NEW_TO_LOOK_AT_S:
            self.hurry()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        links = [one.close() for one in self._transports.values()]
        await asyncio.gather(*links, return_exceptions=True)

    async def _forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s if self.ready else self._away_every_s):
                    await self._hurry.wait()
            self._hurry.clear()
            try:
                await self.look()
            except Exception as error:  # a look that fails must not be the last one
                what = "asking the verifiers failed"
                log_failure(_log, what, error=error, may_quote_client=False)

    def _status(self, before: VerifierStatus, answer: Answer) -> VerifierStatus:
        if (info := answer.info) is None:
            refuses = answer.error is not None and not answer.error.retryable
            why = answer.why.removeprefix(f"verifier at {before.address}: ")
            state = VerifierState.REFUSES if refuses else VerifierState.AWAY
            return replace(before, state=state, why=why)
        self.infos[before.address] = info
        why = self._misfit(info) or ""
        state = VerifierState.MISFIT if why else VerifierState.READY
        return replace(before.told(info), state=state, why=why, rtt_s=answer.rtt_s)
