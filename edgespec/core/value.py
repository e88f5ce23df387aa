"""``value``: the decorator of what is made at every event.

A frozen dataclass pays ``object.__setattr__`` for each field of each object, four times the cost of
a plain one: an eighth of a simulated session's time. A value is frozen for the type checker and,
like a frozen dataclass, compares and hashes by its fields; at run time nothing stands guard. What
is made once (settings, laws) stays ``@dataclass(frozen=True)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Class = TypeVar("Class")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[Class]) -> type[Class]:
    """A slotted dataclass that nothing changes."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
