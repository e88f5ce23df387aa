"""A draft step as a drafter runs it: behind one leaf or several, its answer checked."""

from __future__ import annotations

import operator

from edgespec.core.device.events import StartStep, StepDone
from edgespec.core.ports import Cancelled, Candidate, Drafter, TreeDrafter


def run_step(drafter: Drafter, step: StartStep, cancelled: Cancelled) -> StepDone:
    """What ``drafter`` answers, as the session takes it. Raises what it raises, and ``TypeError``
    or ``ValueError`` for an answer that is none: that ends the drafting, too."""
    if step.rows is None:
        guesses = drafter.step(step.keep_length, step.feed, step.width, cancelled)
        return StepDone(_checked(guesses, step.width))
    if not isinstance(drafter, TreeDrafter):
        raise TypeError(f"{type(drafter).__name__} takes one leaf a step, but got rows of a tree")
    found: object = drafter.step_tree(step.keep_length, step.feed, step.rows, step.width, cancelled)
    if not isinstance(found, tuple) or len(found) != len(step.rows.leaves):
        count = len(step.rows.leaves)
        raise ValueError(f"the drafter must return a tuple of {count} answers, one a leaf")
    first, *others = [_checked(guesses, step.width) for guesses in found]
    return StepDone(first, tuple(others))


def _checked(guesses: object, width: int) -> tuple[Candidate, ...]:
    if not isinstance(guesses, tuple):
        raise TypeError(f"the drafter returned {type(guesses).__name__}, but must return a tuple")
    if len(guesses) > width:
        raise ValueError(f"the drafter returned {len(guesses)} guesses, but at most {width} count")
    for guess in guesses:
        if not isinstance(guess, Candidate) or operator.index(guess.token) < 0:
            raise ValueError(f"the drafter returned the guess {guess!r}, which is no token id")
    return guesses
