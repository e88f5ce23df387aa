"""What a device would rather spend: time, charge or data. A preference is a price.

Theory of operation. Drafting costs a device its steps (time of its processor, energy) and its
uplink, and the verifier rows. What a step has to save at least, and with how large a chance a node
has to be right in its pass, is what all that is worth to somebody. The verifier's own price stands
beside it: the dearer of the two counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from edgespec.core.device.goodput_policy import LEAST_GAIN


class Prefer(Enum):
    SPEED = "speed"
    """Whatever may save time."""
    BALANCED = "balanced"
    """No step for less than a hundredth of a token, no node that is right once in ten times."""
    BATTERY = "battery"
    """A step has to save a tenth of a token."""
    DATA = "data"
    """So it has, and a node has to be right once in five times: hardly ever second guesses."""


@dataclass(frozen=True, slots=True)
class Worth:
    """``least_gain``: tokens that a draft step has to save. ``row_chance``: how likely a node has
    to be right in its pass."""

    least_gain: float
    row_chance: float


WORTH: Final = {
    Prefer.SPEED: Worth(LEAST_GAIN, 0.0),
    Prefer.BALANCED: Worth(0.01, 0.1),
    Prefer.BATTERY: Worth(0.1, 0.1),
    Prefer.DATA: Worth(0.1, 0.2),
}
