"""How a draft is trained: the names of the losses, and every number that changes the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


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


MAX_LENGTH = 8192
BITS = (4, 8, 32)


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The same settings, texts and models give the same weights on one machine, if the budget
    counts steps. Raises ``ValueError`` naming field, value and range."""

    loss: LossName = LossName.FORWARD_KL
    seed: int = 0
    length: int = 256
    """Tokens of a text, at most; a prompt takes up to half of them."""
    temperatures: tuple[float, ...] = (0.0, 0.7)
    """Of what the target, or the draft, writes: each for its share of the texts."""
    bits: int = 4
    """Of the export to come. With 4 the weights are trained through the rounding."""
    learning_rate: float = 0.0
    """0: by the size of the draft, times ``rate_share``."""
    rate_share: float = 1.0
    """Less for a draft that is good already: it forgets otherwise."""
    rows: int = 16
    """Texts of a step."""

    def __post_init__(self) -> None:
        _within("length", self.length, 16, MAX_LENGTH)
        _within("rows", self.rows, 1, 4096)
        _within("seed", self.seed, 0, 2**32 - 1)
        _within("learning_rate", self.learning_rate, 0.0, 1.0)
        for temperature in self.temperatures:
            _within("temperature", temperature, 0.0, 10.0)
        if self.bits not in BITS:
            raise ValueError(f"bits is {self.bits}, but must be one of {BITS}")


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: so many steps, or so many minutes."""

    steps: int = 0
    minutes: float = 0.0

    def __post_init__(self) -> None:
        if (self.steps > 0) == (self.minutes > 0):
            raise ValueError(
                f"steps is {self.steps} and minutes {self.minutes:g}, but one must be above 0"
            )

    def share(self, steps: int, seconds: float) -> float:
        """How much of it ``steps`` in ``seconds`` have used; 1.0 and more: all."""
        return steps / self.steps if self.steps else seconds / (60.0 * self.minutes)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} is {value:g}, but must be in [{low:g}, {high:g}]")
