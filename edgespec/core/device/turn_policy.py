"""How a shared draft model is given out in turns (``draft_turns.py``)."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_CACHES, MAX_CACHES = 4, 64


@dataclass(frozen=True, slots=True)
class TurnPolicy:
    """``turn_steps``: how many steps of the usual length a turn lasts. ``hang_s``: a step that
    shows no sign of life for so long is given up."""

    turn_steps: int = 8
    hang_s: float = 20.0

    def __post_init__(self) -> None:
        if not 1 <= self.turn_steps <= 1024:
            raise ValueError(f"turn_steps is {self.turn_steps}, but must be in [1, 1024]")
        if not 0.0 < self.hang_s <= 1e7:
            raise ValueError(f"hang_s is {self.hang_s}, but must be in (0, 1e7]")
