"""The decorator of plain data that is made at every event: frozen for the type checker only.

A frozen dataclass calls ``object.__setattr__`` for each field of each object, which makes it four
times as dear as a plain one: an eighth of a simulated session's time. These classes are checked by
mypy like frozen ones and compare and hash by their fields like frozen ones; at run time nothing
stops a change. What is made once (settings, laws) stays ``@dataclass(frozen=True)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Class = TypeVar("Class")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def statically_frozen(cls: type[Class]) -> type[Class]:
    """The decorated class is a slotted dataclass that compares and hashes by its fields."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
