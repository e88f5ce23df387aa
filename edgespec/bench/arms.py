"""The arms of a comparison: settings of one machine.

``target-only`` is plain streaming; ``vanilla`` stop-and-wait split decoding at its best draft
length; ``pearl`` pre-verify and post-verify with its adaptive draft length; ``windowed`` streams
one chain of drafts; ``edgespec`` is what the agent does by default. The first needs no drafter,
the next three wait for drafts as the literature has it. Where the verifier has a draft model of its
own, ``server-draft`` is speculation there and no device's drafts, ``both`` is ``edgespec`` beside
it.
"""

from __future__ import annotations

from enum import Enum
from typing import assert_never

from edgespec.core.device.goodput_policy import make_policy
from edgespec.core.device.policy import DraftPolicy, FixedPolicy, PearlPolicy, WindowedPolicy
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
"""Those that every verifier serves."""


def arm_settings(
    arm: Arm, gamma: int | None = None, policy: DraftPolicy | None = None
) -> tuple[DraftPolicy, RunAhead]:
    """What a device is set to: how it drafts, and whether the verifier may decode on. ``gamma`` is
    the draft length of ``vanilla`` (None: adaptive), ``policy`` that of ``edgespec`` and ``both``
    (None: the agent's own default); others ignore them."""
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
