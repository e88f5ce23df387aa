"""Draft policies by name, for command lines, configuration files and scenarios."""

from __future__ import annotations

from enum import Enum
from typing import Final, assert_never

from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.policy import (
    DEFAULT_WIDTH,
    GATHER_SHARE,
    DraftPolicy,
    FixedPolicy,
    PearlPolicy,
    WindowedPolicy,
)
from edgespec.core.device.round_policies import BanditPolicy, ConfidencePolicy


class PolicyName(Enum):
    WINDOWED = "windowed"
    PEARL = "pearl"
    FIXED = "fixed"
    GOODPUT = "goodput"
    SPECDEC = "specdec++"
    BANDIT = "bandit"


DEFAULT_POLICY: Final = PolicyName.GOODPUT
GAMMA_OF: Final = (PolicyName.FIXED, PolicyName.PEARL)
"""Those with a draft length."""
WINDOW_OF: Final = (PolicyName.GOODPUT, PolicyName.WINDOWED)
"""Those with a bound on steps outstanding."""


def named_policy(
    name: PolicyName,
    gamma: int | None = None,
    width: int = DEFAULT_WIDTH,
    window: int | None = None,
) -> DraftPolicy:
    """``gamma`` and ``window`` None adapt. ``width`` counts for policies that stream trees and for
    those of a given draft length."""
    match name:
        case PolicyName.WINDOWED:
            return WindowedPolicy(width=width, window=window, gather=GATHER_SHARE)
        case PolicyName.PEARL:
            return PearlPolicy(gamma=gamma, width=width)
        case PolicyName.FIXED:
            return FixedPolicy(gamma=gamma, width=width)
        case PolicyName.GOODPUT:
            return GoodputPolicy(width, gather=GATHER_SHARE, window=window)
        case PolicyName.SPECDEC:
            return ConfidencePolicy()
        case PolicyName.BANDIT:
            return BanditPolicy()
        case _:
            assert_never(name)


def default_policy() -> DraftPolicy:
    """An agent that was not told otherwise drafts by this policy."""
    return named_policy(DEFAULT_POLICY)
