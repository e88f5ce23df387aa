"""Verifiers are asked here whether they are there, what they serve, and how far away they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from edgespec.core.ports import LinkError, Transport
from edgespec.core.protocol.checks import one_line
from edgespec.core.protocol.messages import VerifierInfo

ANSWER_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one verifier said; ``info`` None: nothing of use, and ``error`` says why."""

    info: VerifierInfo | None = None
    rtt_s: float | None = None
    error: LinkError | None = None

    @property
    def why(self) -> str:
        return "" if self.error is None else one_line(str(self.error))


async def ask(
    transport: Transport,
    within_s: float = ANSWER_S,
    *,
    timed: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Never raises. ``timed``: the round trip is that of a second question, since the first opens
    the channel."""
    try:
        async with asyncio.timeout(within_s):
            if timed:
                await transport.info()
            asked_s = clock()
            info = await transport.info()
        return Answer(info, clock() - asked_s)
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
