"""Options that a command does not have, and what stands in their place.

Version 0.1.0 had an option for many settings that are keys now. The same answer helps a user who
takes a key for an option.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

KEYS_OF_COMMANDS: Final[dict[Callable[..., None], tuple[str, ...]]] = {}
"""Dotted keys that ``--set`` of each command takes, by the function behind the command."""
_BY_ANOTHER_OPTION: Final = {"--print-config": "--help-all"}


def find_replacement(command: Callable[..., None], name: str) -> str:
    """Return what to use in place of an option: ``--set`` with the key of that name, or "" if there
    is none.

    ``command``: the function behind the command. ``name``: the option, such as ``--top-k`` for
    ``sampling.top_k`` or ``--policy`` for ``policy.name``."""
    keys = KEYS_OF_COMMANDS.get(command, ())
    if keys and name in _BY_ANOTHER_OPTION:
        return _BY_ANOTHER_OPTION[name]
    words = {name.removeprefix(prefix).replace("-", "_") for prefix in ("--no-", "--")}
    found = [key for key in keys if key.rpartition(".")[2] in words]
    found += [f"{word}.name" for word in words if f"{word}.name" in keys]
    return " or ".join(f"--set {key}=VALUE" for key in found)
