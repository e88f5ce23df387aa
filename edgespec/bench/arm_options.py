"""The arms of a bench as options of an agent, and the lists of arms and round trips of its user."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.bench.arms import Arm, arm_settings
from edgespec.core.device.policy_names import DEFAULT_POLICY, PolicyName, named_policy
from edgespec.core.device.preference import Prefer
from edgespec.device.agent import AgentOptions


def arm_options(
    arm: Arm,
    gamma: int | None = None,
    policy: PolicyName = DEFAULT_POLICY,
    prefer: Prefer = Prefer.SPEED,
) -> AgentOptions:
    """``gamma`` is the draft length of ``vanilla``, ``policy`` and ``prefer`` are of ``edgespec``;
    the other arms do not look at them."""
    settings = arm_settings(arm, gamma, named_policy(policy, prefer=prefer))
    preferred = prefer if arm is Arm.EDGESPEC else Prefer.SPEED
    return AgentOptions(settings.policy, settings.run_ahead, prefer=preferred)


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
