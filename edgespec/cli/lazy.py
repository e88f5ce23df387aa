"""Commands that are imported when they are called.

``edgespec --version`` must not pay for gRPC, the simulator and every other command's imports. A
group holds the names of its commands and where each is found: ``"edgespec.cli.demo:demo"``, a
function or a ``typer.Typer`` of its own. Only the group's ``--help`` imports them all, for their
first lines.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

import typer
import typer.core
import typer.main

from edgespec.cli.entry import EXIT_CODES


def lazy_app(name: str, commands: Mapping[str, str]) -> typer.Typer:
    """An app whose ``commands``, name to ``module:attribute``, are imported when they are called
    and listed in the order given."""

    class Commands(typer.core.TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(commands)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name in commands:
                return _imported(cmd_name, commands[cmd_name])
            # Names alone, from which typer suggests one for a name that is mistyped.
            names: Any = dict.fromkeys(commands)
            self.commands = names
            return None

    return typer.Typer(
        name=name,
        cls=Commands,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=EXIT_CODES,
    )


@cache
def _imported(name: str, where: str) -> Any:
    module, _, attribute = where.partition(":")
    found = getattr(_uninterrupted_import(module), attribute)
    # The callback keeps typer from taking a group of one command for that command.
    group = typer.Typer(rich_markup_mode="rich", callback=lambda: None)
    if isinstance(found, typer.Typer):
        group.add_typer(found, name=name, epilog=EXIT_CODES)
    else:
        group.command(name, epilog=EXIT_CODES)(found)
    return typer.main.get_group(group).commands[name]


def _uninterrupted_import(module: str) -> ModuleType:
    """While a module is imported, a Ctrl-C ends the process as it ends any other program: an
    exception inside an import is swallowed or printed in many ways."""
    answer = signal.getsignal(signal.SIGINT)
    if answer is not signal.default_int_handler:
        return importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return importlib.import_module(module)
    finally:
        signal.signal(signal.SIGINT, answer)
