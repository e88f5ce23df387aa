"""The one way in which a session changes its state: along a move of its table.

``core/device/transitions.py`` and ``core/verifier/transitions.py`` hold the tables, each move with
its causes; ``docs/session-states.md`` is drawn from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

State = TypeVar("State", bound=Enum)


def transition(moves: Mapping[tuple[State, State], str], source: State, target: State) -> State:
    """The result is ``target``. A move that is not in the table is a failed assertion; staying in
    a state is always allowed."""
    assert source is target or (source, target) in moves, f"{source} -> {target}"
    return target
