"""``edgespec serve --install``: this very command as a service of the user who is logged in."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgespec.cli.running import say
from edgespec.cli.service_unit import UNIT_NAME, ServiceSettings, render_unit
from edgespec.config import AgentConfig
from edgespec.config.setup_error import SetupError
from edgespec.config.whole_file import replace_file
from edgespec.core.device.memory_size import parse_budget
from edgespec.telemetry.process_memory import machine_memory

FLAG: Final = "--install"
_OURS: Final = "Made by edgespec"


def install_service(config: AgentConfig, words: Sequence[str]) -> None:
    """Write the unit that runs ``words``, a command line of edgespec, as they were typed here; but
    for ``--install``. Keys do not go into it: their environment file is named. Raises
    ``SetupError`` for a unit of that name which is not ours, and for a folder that cannot be
    written."""
    budget = config.draft.memory_budget
    settings = ServiceSettings(
        program=sys.executable,
        arguments=("-m", "edgespec", *(word for word in words if word != FLAG)),
        memory_budget_bytes=parse_budget(budget).resolve(machine_memory()) if budget else None,
        working_directory=str(Path.cwd()),
    )
    path = unit_folder() / UNIT_NAME
    try:
        if path.exists() and _OURS not in path.read_text(encoding="utf-8"):
            raise SetupError(f"{path} is there and was not made by edgespec; move it away first")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, render_unit(settings), 0o644)
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"cannot write {path}: {error}") from error
    say(f"wrote {path}")
    say("  keys, if any: EDGESPEC_API_KEY=... in ~/.config/edgespec/serve.env, mode 0600")
    say(f"  start it:     systemctl --user daemon-reload && systemctl --user enable --now {_UNIT}")
    say(f"  look at it:   systemctl --user status {_UNIT}; journalctl --user -u {_UNIT} -f")
    say("  beyond your logging out: loginctl enable-linger")


_UNIT: Final = UNIT_NAME.removesuffix(".service")


def unit_folder() -> Path:
    """Where systemd looks for the units of this user."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "systemd" / "user"
