"""A draft step as a drafter runs it: its answer checked."""

from __future__ import annotations

import operator

from edgespec.core.device.events import StartStep, StepDone
from edgespec.core.ports import Cancelled, Candidate, Drafter


def run_step(drafter: Drafter, step: StartStep, cancelled: Cancelled) -> StepDone:
    """What ``drafter`` answers, as the session takes it. Raises what it raises, and ``TypeError``
    or ``ValueError`` for an answer that is none: that ends the drafting, too."""
    guesses = drafter.step(step.keep_length, step.feed, step.width, cancelled)
    return StepDone(_checked(guesses, step.width))


def _checked(guesses: object, width: int) -> tuple[Candidate, ...]:
    if not isinstance(guesses, tuple):
        raise TypeError(f"the drafter returned {type(guesses).__name__}, but must return a tuple")
    if len(guesses) > width:
        raise ValueError(f"the drafter returned {len(guesses)} guesses, but at most {width} count")
    for guess in guesses:
        if not isinstance(guess, Candidate) or operator.index(guess.token) < 0:
            raise ValueError(f"the drafter returned the guess {guess!r}, which is no token id")
    return guesses
