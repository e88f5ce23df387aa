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
from edgespec.core.protocol.checks import make_one_line
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.telemetry.agent_status import VerifierState, VerifierStatus
from edgespec.telemetry.logs import log_failure

PROBE_TIMEOUT_S: Final = 3.0
_FRESH_S: Final = 1.0
"""Seconds for which an answer is fresh: for a caller that waits for it, and for a status page."""
_DISPLAY_FRESH_S: Final = 5.0
_ANSWERING_STATES: Final = {VerifierState.READY, VerifierState.REFUSES}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The outcome of one probe. ``info`` is None if it failed; ``error`` holds the reason."""

    info: VerifierInfo | None = None
    rtt_s: float | None = None
    error: LinkError | None = None

    @property
    def why(self) -> str:
        return "" if self.error is None else make_one_line(str(self.error))


async def probe(
    transport: Transport, timeout_s: float = PROBE_TIMEOUT_S, *, timed: bool = False
) -> ProbeResult:
    """Request the verifier's ``VerifierInfo`` and measure the round-trip time. Never raises.

    ``timeout_s`` is the limit in seconds. If ``timed``, a second request is measured, because the
    first one also opens the channel."""
    try:
        async with asyncio.timeout(timeout_s):
            if timed:
                await transport.info()
            sent_s = time.monotonic()
            info = await transport.info()
        return ProbeResult(info, time.monotonic() - sent_s)
    except TimeoutError:
        error = LinkError(f"no answer within {timeout_s:g} s")
    except LinkError as refusal:
        error = refusal
    except Exception as raised:
        error = LinkError(f"{type(raised).__name__}: {raised}")
    return ProbeResult(error=error)


async def probe_all(
    transports: Mapping[str, Transport], timeout_s: float = PROBE_TIMEOUT_S, *, timed: bool = False
) -> dict[str, ProbeResult]:
    """Probe all verifiers at the same time. Return their answers under the same names."""
    probes = [probe(one, timeout_s, timed=timed) for one in transports.values()]
    return dict(zip(transports, await asyncio.gather(*probes), strict=True))


class VerifierMonitor:
    """Probes all verifiers every ``every_s`` seconds, or every ``away_every_s`` while none is
    ready.

    ``find_misfit`` returns the reason why a verifier's models are of no use here, or None. Call
    ``close`` at the end, which closes the transports too."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        find_misfit: Callable[[VerifierInfo], str | None] = lambda info: None,
        *,
        every_s: float = 15.0,
        away_every_s: float = 2.0,
    ) -> None:
        self._transports, self._find_misfit = dict(transports), find_misfit
        self._every_s, self._away_every_s = every_s, away_every_s
        self.statuses = tuple(map(VerifierStatus, transports))
        """Status of each verifier, in the given order."""
        self.infos: dict[str, VerifierInfo] = {}
        """Latest info of each verifier, by its address."""
        self.refreshed_at = self._began_at = -math.inf
        self._task: asyncio.Task[None] | None = None
        self._refresh_now = asyncio.Event()
        self._lock = asyncio.Lock()

    @property
    def ready(self) -> bool:
        return any(one.state is VerifierState.READY for one in self.statuses)

    @property
    def is_away(self) -> bool:
        """Whether no verifier can be reached: none is ready, at least one did not answer, and none
        answered that it refuses this device."""
        states = {one.state for one in self.statuses}
        return VerifierState.AWAY in states and not states & _ANSWERING_STATES

    @property
    def known_infos(self) -> tuple[VerifierInfo, ...]:
        """Latest info of every verifier whose model fits, ready ones first."""
        order = sorted(self.statuses, key=lambda one: one.state is not VerifierState.READY)
        fits = [one.address for one in order if one.state is not VerifierState.MISFIT]
        return tuple(self.infos[one] for one in fits if one in self.infos)

    async def refresh(self) -> None:
        self._began_at = time.monotonic()
        answers = await probe_all(self._transports)
        self.statuses = tuple(
            self._update_status(one, answers[one.address]) for one in self.statuses
        )
        self.refreshed_at = time.monotonic()

    async def refresh_if_stale(self) -> None:
        """Probe now, unless that was done within the last second."""
        async with self._lock:
            if time.monotonic() - self.refreshed_at >= _FRESH_S:
                await self.refresh()

    async def refresh_after(self, at_s: float) -> None:
        """Probe now, unless that was begun after ``at_s``, on the clock of ``time.monotonic``."""
        async with self._lock:
            if self._began_at < at_s:
                await self.refresh()

    def start(self) -> None:
        self._task = asyncio.create_task(self._refresh_forever())

    def refresh_soon(self) -> None:
        """Start the next probe now instead of at its time."""
        self._refresh_now.set()

    def refresh_for_display(self) -> None:
        """Start the next probe now if the answers are too old for a status page."""
        if time.monotonic() - self.refreshed_at >= _DISPLAY_FRESH_S:
            self.refresh_soon()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        links = [one.close() for one in self._transports.values()]
        await asyncio.gather(*links, return_exceptions=True)

    async def _refresh_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s if self.ready else self._away_every_s):
                    await self._refresh_now.wait()
            self._refresh_now.clear()
            try:
                await self.refresh()
            except Exception as error:  # One failed probe must not end the loop.
                what = "asking the verifiers failed"
                log_failure(_log, what, error=error, may_quote_client=False)

    def _update_status(self, before: VerifierStatus, answer: ProbeResult) -> VerifierStatus:
        if (info := answer.info) is None:
            refuses = answer.error is not None and not answer.error.retryable
            why = answer.why.removeprefix(f"verifier at {before.address}: ")
            state = VerifierState.REFUSES if refuses else VerifierState.AWAY
            return replace(before, state=state, why=why)
        self.infos[before.address] = info
        why = self._find_misfit(info) or ""
        state = VerifierState.MISFIT if why else VerifierState.READY
        return replace(before.with_info(info), state=state, why=why, rtt_s=answer.rtt_s)
