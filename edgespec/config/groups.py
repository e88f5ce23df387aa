"""Groups of configuration keys: the stable ones, the advanced ones, and emulation.

A key is stable unless its field is marked. ``advanced_field`` and ``emulation_field`` mark a field,
and with it every key of the section that it holds. ``--help``, ``--help-all`` and
``docs/settings.md`` show the groups apart.
"""

from __future__ import annotations

from dataclasses import Field, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

_MARK: Final = "group"


class Group(Enum):
    """Group of configuration keys. It states how far users may rely on the keys."""

    STABLE = "stable"
    """Keys for everyday use, which keep their names and meanings from release to release."""
    ADVANCED = "advanced"
    """Keys whose defaults suit nearly all users, and which a release may change."""
    EMULATION = "emulation"
    """Keys that make this machine behave like slower hardware or a longer link, for tests and
    demonstrations."""


HEADINGS: Final = {
    Group.STABLE: "Settings for everyday use.",
    Group.ADVANCED: "Advanced: the defaults suit nearly everybody; a release may change these.",
    Group.EMULATION: "Emulation: behave like a slower machine or a longer link, for trying out.",
}


def advanced_field(default: Any) -> Any:
    """Mark a field of a configuration as advanced. ``default`` is the field's default value, or the
    field itself, as ``range_field``, ``choice_field`` and ``dataclasses.field`` return it."""
    return _mark_field(default, Group.ADVANCED)


def emulation_field(default: Any) -> Any:
    """Mark a field of a configuration as emulation. ``default`` is as for ``advanced_field``."""
    return _mark_field(default, Group.EMULATION)


def _mark_field(default: Any, group: Group) -> Any:
    found = default if isinstance(default, Field) else field(default=default)
    found.metadata = MappingProxyType({**found.metadata, _MARK: group})
    return found


def group_of(key: Field[Any], section: Group = Group.STABLE) -> Group:
    """Return the group that a field is marked with, else the group of its ``section``."""
    group: Group = key.metadata.get(_MARK, section)
    return group
