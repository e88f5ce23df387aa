"""Arms of a comparison: the settings that a benchmark or a simulation compares.

``target-only`` is plain streaming. ``vanilla`` is stop-and-wait split decoding at its best draft
length. ``pearl`` pre-verifies and post-verifies with its adaptive draft length. ``windowed``
streams one chain of drafts. ``edgespec`` is what the agent does by default. ``target-only`` needs
no drafter. In ``vanilla``, ``pearl`` and ``windowed`` the verifier waits for drafts, as in the
literature. If the verifier has a draft model of its own, ``server-draft`` uses its drafts alone,
and ``both`` adds them to ``edgespec``.
"""

from __future__ import annotations

from enum import Enum
from typing import assert_never

from edgespec.core.device.comparison_policies import FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.device.goodput_policy import make_policy
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.protocol.messages import RunAhead


class Arm(Enum):
    TARGET_ONLY = "target-only"
    VANILLA = "vanilla"
    PEARL = "pearl"
    WINDOWED = "windowed"
    EDGESPEC = "edgespec"
    SERVER_DRAFT = "server-draft"
    BOTH = "both"

    @property
    def drafts(self) -> bool:
        """Whether the device drafts."""
        return self not in (Arm.TARGET_ONLY, Arm.SERVER_DRAFT)

    @property
    def on_server(self) -> bool:
        """Whether the verifier drafts."""
        return self in (Arm.SERVER_DRAFT, Arm.BOTH)

    @property
    def is_ours(self) -> bool:
        """Whether the device does what the agent does by default."""
        return self in (Arm.EDGESPEC, Arm.BOTH)


DEVICE_ARMS = tuple(arm for arm in Arm if not arm.on_server)
"""Arms that need no draft model on the verifier."""


def arm_settings(
    arm: Arm, gamma: int | None = None, policy: DraftPolicy | None = None
) -> tuple[DraftPolicy, RunAhead]:
    """Return the draft policy of a device under ``arm``, and whether the verifier runs ahead.

    ``gamma`` is the draft length of ``vanilla``; None adapts it. ``policy`` is that of ``edgespec``
    and ``both``; None takes the agent's default. The other arms ignore both."""
    match arm:
        case Arm.TARGET_ONLY | Arm.SERVER_DRAFT:
            return make_policy(), RunAhead.ALWAYS
        case Arm.VANILLA:
            return FixedPolicy(gamma), RunAhead.NEVER
        case Arm.PEARL:
            return PearlPolicy(), RunAhead.NEVER
        case Arm.WINDOWED:
            return WindowedPolicy(width=1), RunAhead.NEVER
        case Arm.EDGESPEC | Arm.BOTH:
            return policy or make_policy(), RunAhead.AUTO
        case _:
            assert_never(arm)
