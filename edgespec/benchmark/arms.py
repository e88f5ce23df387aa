"""The arms of a bench: five settings of one machine.

``target-only`` is plain streaming; ``vanilla`` stop-and-wait split decoding at its best draft
length; ``pearl`` pre-verify and post-verify with its adaptive draft length; ``windowed`` streams
one chain of drafts; ``edgespec`` is what the agent does by default. The first needs no drafter,
the next three wait for drafts as the literature has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import assert_never

from edgespec.agent.agent import AgentOptions
from edgespec.core.draft_policy import FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.messages import RunAhead


class Arm(Enum):
    TARGET_ONLY = "target-only"
    VANILLA = "vanilla"
    PEARL = "pearl"
    WINDOWED = "windowed"
    EDGESPEC = "edgespec"

    @property
    def drafts(self) -> bool:
        return self is not Arm.TARGET_ONLY


def arm_options(arm: Arm, gamma: int | None = None) -> AgentOptions:
    """``gamma`` is the draft length of ``vanilla``; the others do not look at it."""
    match arm:
        case Arm.TARGET_ONLY:
            return AgentOptions(run_ahead=RunAhead.ALWAYS)
        case Arm.VANILLA:
            return AgentOptions(policy=FixedPolicy(gamma), run_ahead=RunAhead.NEVER)
        case Arm.PEARL:
            return AgentOptions(policy=PearlPolicy(), run_ahead=RunAhead.NEVER)
        case Arm.WINDOWED:
            return AgentOptions(policy=WindowedPolicy(width=1), run_ahead=RunAhead.NEVER)
        case Arm.EDGESPEC:
            return AgentOptions()
        case _:
            assert_never(arm)


def parse_arms(text: str) -> tuple[Arm, ...]:
    """A comma-separated list of names. Raises ``ValueError`` for an unknown or repeated one."""
    arms = tuple(_arm(name.strip()) for name in text.split(",") if name.strip())
    _distinct("arms", [arm.value for arm in arms])
    return arms


def parse_rtts_ms(text: str) -> tuple[float, ...]:
    """A comma-separated list of round-trip times. Raises ``ValueError``."""
    try:
        rtts_ms = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"rtt-ms is {text!r}, but must be numbers with commas between") from None
    _distinct("rtt-ms", [f"{rtt_ms:g}" for rtt_ms in rtts_ms])
    return rtts_ms


def rotated(arms: Sequence[Arm], by: int) -> tuple[Arm, ...]:
    """The same arms from another start: none is always the one that runs first."""
    by %= len(arms)
    return (*arms[by:], *arms[:by])


def _arm(name: str) -> Arm:
    try:
        return Arm(name)
    except ValueError:
        known = ", ".join(arm.value for arm in Arm)
        raise ValueError(f"arm {name!r} is unknown; there are {known}") from None


def _distinct(what: str, names: Sequence[str]) -> None:
    if not names:
        raise ValueError(f"{what} is empty, but must name at least one")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} names {', '.join(twice)} more than once")
