"""Probes of verifiers: whether they answer, which models they serve, and their round-trip time.

Generations do not wait for probes; the agent dials by itself.
"""

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
"""Seconds for which an answer is fresh: for a caller that waits for it, and for a status page."""
_NEW_TO_LOOK_AT_S: Final = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one probe. ``info`` is None if it failed; ``error`` holds the reason."""

    info: VerifierInfo | None = None
    rtt_s: float | None = None
    error: LinkError | None = None

    @property
    def why(self) -> str:
        return "" if self.error is None else one_line(str(self.error))


async def ask(transport: Transport, within_s: float = ANSWER_S, *, timed: bool = False) -> Answer:
    """Request the verifier's ``VerifierInfo`` and measure the round-trip time. Never raises.

    ``within_s`` is the limit in seconds. If ``timed``, a second request is measured, because the
    first one also opens the channel."""
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
    """Probe all verifiers at the same time. Return their answers under the same names."""
    asked = [ask(one, within_s, timed=timed) for one in transports.values()]
    return dict(zip(transports, await asyncio.gather(*asked), strict=True))


class VerifierWatch:
    """Probes all verifiers every ``every_s`` seconds, or every ``away_every_s`` while none is
    ready.

    ``misfit`` returns the reason why a verifier's models are of no use here, or None. Call
    ``close`` at the end, which closes the transports too."""

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
        """Status of each verifier, in the given order."""
        self.infos: dict[str, VerifierInfo] = {}
        """Latest info of each verifier, by its address."""
        self.looked_at = -math.inf
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    @property
    def ready(self) -> bool:
        return any(one.state is VerifierState.READY for one in self.statuses)

    @property
    def told(self) -> tuple[VerifierInfo, ...]:
        """Latest info of every verifier whose model fits, ready ones first."""
        order = sorted(self.statuses, key=lambda one: one.state is not VerifierState.READY)
        fits = [one.address for one in order if one.state is not VerifierState.MISFIT]
        return tuple(self.infos[one] for one in fits if one in self.infos)

    async def look(self) -> None:
        answers = await ask_all(self._transports)
        self.statuses = tuple(self._status(one, answers[one.address]) for one in self.statuses)
        self.looked_at = time.monotonic()

    async def look_anew(self) -> None:
        """Probe now, unless that was done within the last second."""
        async with self._one_at_a_time:
            if time.monotonic() - self.looked_at >= _NEW_S:
                await self.look()

    def start(self) -> None:
        self._task = asyncio.create_task(self._forever())

    def hurry(self) -> None:
        """Start the next probe now instead of at its time."""
        self._hurry.set()

    def looked_upon(self) -> None:
        """Start the next probe now if the answers are too old for a status page."""
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
            except Exception as error:  # One failed probe must not end the loop.
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
