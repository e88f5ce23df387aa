"""What one session has had of a shared draft model, and what it made of it."""

from __future__ import annotations

from dataclasses import dataclass

# Accepted tokens a step that a session is taken for until it has drafted, and for how many steps
# that counts; steps before the last fifty or so are forgotten.
_PRIOR, _PRIOR_STEPS, _MEMORY = 0.5, 16.0, 0.98


@dataclass(slots=True)
class DraftShare:
    """A session that drafts."""

    had_s: float
    """Drafting time over weight, from a common origin."""
    asks: bool = False
    """Whether it wants a step."""
    asked_by_s: float = 0.0
    """How long all sessions together had drafted when it began to want it."""
    cache: int | None = None
    turn_s: float = 0.0
    """Drafting in this turn."""
    cache_s: float = 0.0
    """Drafting since it was given its cache."""
    drafted_by_s: float = 0.0
    """How long all sessions together had drafted when it last did."""
    accepted: int = 0
    gained: float = 0.0
    steps: float = 0.0

    def learn(self, accepted: int) -> None:
        """It was told so many tokens of its drafts are the target's, in all."""
        self.gained += max(0, accepted - self.accepted)
        self.accepted = accepted

    def count_step(self) -> None:
        self.steps = self.steps * _MEMORY + 1.0
        self.gained *= _MEMORY

    @property
    def pay(self) -> float:
        """Accepted tokens a step, lately: (gained + 0.5 * 16) / (steps + 16). After 50 steps that
        brought nothing about 0.17."""
        return (self.gained + _PRIOR * _PRIOR_STEPS) / (self.steps + _PRIOR_STEPS)
