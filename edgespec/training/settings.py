"""How a draft is trained: the names of the losses, and every number that changes the weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edgespec.core.protocol.checks import Section, among, limited


class LossName(Enum):
    """What the draft learns of the target's next-token distribution."""

    FIRST_CHOICE = "first-choice"
    FORWARD_KL = "forward-kl"
    REVERSE_KL = "reverse-kl"
    TOTAL_VARIATION = "total-variation"
    SELECTIVE = "selective"

    @property
    def on_own_samples(self) -> bool:
        """Whether the texts are the draft's own, which change as it learns."""
        return self in (LossName.REVERSE_KL, LossName.TOTAL_VARIATION)


@dataclass(frozen=True, slots=True)
class TrainingSettings(Section):
    """The same settings, texts and models give the same weights on one machine, if the budget
    counts steps. Raises ``ValueError`` naming field, value and range."""

    loss: LossName = LossName.FORWARD_KL
    seed: int = limited(0, 0, 2**32 - 1)
    length: int = limited(256, 16, 8192)
    """Tokens of a text, at most; a prompt takes up to half of them."""
    temperatures: tuple[float, ...] = limited((0.0, 0.7), 0.0, 10.0)
    """Of what the target, or the draft, writes: each for its share of the texts."""
    bits: int = among(4, (4, 8, 32))
    """Of the export to come. With 4 the weights are trained through the rounding."""
    learning_rate: float = limited(0.0, 0.0, 1.0)
    """0: by the size of the draft, times ``rate_share``."""
    rate_share: float = 1.0
    """Less for a draft that is good already: it forgets otherwise."""
    rows: int = limited(16, 1, 4096)
    """Texts of a step."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: so many steps, or so many minutes of the whole command."""

    steps: int = 0
    minutes: float = 0.0

    def __post_init__(self) -> None:
        if (self.steps > 0) == (self.minutes > 0):
            raise ValueError(
                f"steps is {self.steps} and minutes {self.minutes:g}, but one must be above 0"
            )
