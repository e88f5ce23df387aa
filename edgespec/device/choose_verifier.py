"""Which of several verifiers a device uses: ask all at once, then let an association policy say.

Round trips are timed on an open channel: the first call opens it, the second is timed. A verifier
that does not answer, or that serves what the device cannot use, is left out and named.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from edgespec.core.association.policies import AssociationPolicy, DeviceView, LinkView, VerifierView
from edgespec.core.ports import LinkError, Transport
from edgespec.core.protocol.checks import one_line
from edgespec.core.protocol.estimators import GUESSED_PASS_S
from edgespec.core.protocol.messages import VerifierInfo

PROBE_S: Final = 2.0
# Of a verifier that does not tell how many sessions it takes.
_NOT_TOLD: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Answer:
    """What one verifier said, and how long the question took."""

    address: str
    info: VerifierInfo
    rtt_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The verifier to use, and the addresses left out, each with the reason."""

    chosen: Answer
    left_out: tuple[tuple[str, str], ...]
    others: tuple[str, ...] = ()
    """What is left if that one goes: those that fit, the best first, then those that did not
    answer and may come back."""


class NoneFitsError(ValueError):
    """No verifier can be used; ``reasons`` has one for each address, in order."""

    def __init__(self, reasons: tuple[tuple[str, str], ...]) -> None:
        lines = [f"none of {len(reasons)} verifiers can be used"]
        super().__init__("\n".join(lines + [f"  {address}: {why}" for address, why in reasons]))
        self.reasons = reasons


async def choose_verifier(
    transports: Mapping[str, Transport],
    policy: AssociationPolicy,
    device: DeviceView,
    misfit: Callable[[VerifierInfo], str | None] = lambda info: None,
    *,
    timeout_s: float = PROBE_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """Ask the verifiers behind ``transports`` (by address) and choose. ``misfit`` says why what
    one serves is of no use here. Each call has ``timeout_s``. Raises ``NoneFitsError``."""
    probes = [_probe(address, link, timeout_s, clock) for address, link in transports.items()]
    answers: list[Answer] = []
    left_out: list[tuple[str, str]] = []
    silent: list[str] = []
    for address, found in zip(transports, await asyncio.gather(*probes), strict=True):
        why = found if isinstance(found, str) else misfit(found.info)
        if isinstance(found, Answer) and why is None:
            answers.append(found)
        else:
            left_out.append((address, str(why)))
            silent += [address] if isinstance(found, str) else []
    if not answers:
        raise NoneFitsError(tuple(left_out))
    ranked: list[Answer] = []
    while answers:
        links = [LinkView(answer.rtt_s) for answer in answers]
        (best,) = policy.assign([device], _views(answers), [links])
        ranked.append(answers.pop(best))
    others = [answer.address for answer in ranked[1:]]
    return Choice(ranked[0], tuple(left_out), (*others, *silent))


async def _probe(
    address: str, transport: Transport, timeout_s: float, clock: Callable[[], float]
) -> Answer | str:
    """The answer, or why there is none. What one transport raises leaves out one verifier."""
    try:
        async with asyncio.timeout(timeout_s):
            await transport.info()
        async with asyncio.timeout(timeout_s):
            asked_s = clock()
            info = await transport.info()
            return Answer(address, info, clock() - asked_s)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except LinkError as error:
        return one_line(str(error))
    except Exception as error:
        return one_line(f"{type(error).__name__}: {error}")


def _views(answers: list[Answer]) -> list[VerifierView]:
    """What they told, as policies see it. The pass told is one under the load of late, so nothing
    is added for the sessions there; one not timed yet counts as an average one."""
    timed_s = [answer.info.pass_us / 1e6 for answer in answers if answer.info.pass_us]
    usual_s = fmean(timed_s) if timed_s else GUESSED_PASS_S
    return [
        VerifierView(
            answer.address,
            answer.info.pass_us / 1e6 or usual_s,
            answer.info.sessions,
            answer.info.max_sessions or _NOT_TOLD,
        )
        for answer in answers
    ]
