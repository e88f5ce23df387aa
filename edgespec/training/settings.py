"""Settings of a training: the names of the losses, and every number that changes the weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edgespec.core.protocol.checks import Section, choice_field, range_field


class LossName(Enum):
    """Loss between the draft's and the target's next-token distributions."""

    FIRST_CHOICE = "first-choice"
    FORWARD_KL = "forward-kl"
    REVERSE_KL = "reverse-kl"
    TOTAL_VARIATION = "total-variation"
    SELECTIVE = "selective"
    NEXT_TOKEN = "next-token"

    @property
    def reads_target(self) -> bool:
        """Whether the target is run on the texts that are learned from. Without it, their own
        tokens are learned."""
        return self is not LossName.NEXT_TOKEN

    @property
    def on_own_samples(self) -> bool:
        """Whether the draft itself writes the texts, which change as it learns."""
        return self in (LossName.REVERSE_KL, LossName.TOTAL_VARIATION)


@dataclass(frozen=True, slots=True)
class TrainingSettings(Section):
    """Settings that determine the weights: the same settings, texts and models give the same
    weights on one machine, if the budget counts steps. ``ValueError`` names field, value and range.
    """

    loss: LossName = LossName.FORWARD_KL
    seed: int = range_field(0, 0, 2**32 - 1)
    length: int = range_field(256, 16, 8192)
    """Longest text in tokens, of which a prompt takes up to half."""
    temperatures: tuple[float, ...] = range_field((0.0, 0.7), 0.0, 10.0)
    """Temperatures at which the target, or the draft, writes texts, in turn."""
    bits: int = choice_field(4, (4, 8, 32))
    """Bits of the later export. With 4 the weights are trained through the rounding."""
    learning_rate: float = range_field(0.0, 0.0, 1.0)
    """Learning rate. 0 derives it from the size of the draft, times ``rate_share``."""
    rate_share: float = 1.0
    """Factor of the derived learning rate. A good draft needs a lower one, or it forgets."""
    rows: int = range_field(16, 1, 4096)
    """Texts of one step."""
    parallel: int = range_field(1, 1, 16)
    """Positions that one run of the draft is taught to fill; 1 for an ordinary draft."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Length of a training: either a number of steps, or the minutes of the whole command."""

    steps: int = 0
    minutes: float = 0.0

    def __post_init__(self) -> None:
        if (self.steps > 0) == (self.minutes > 0):
            raise ValueError(
                f"steps is {self.steps} and minutes {self.minutes:g}, but one must be above 0"
            )
