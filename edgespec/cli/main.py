"""``edgespec``: the commands, what ``--help`` says first, and where a command begins and ends:
arguments that can be used, streams that are open, no traceback for a reader that has gone."""

from __future__ import annotations

import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FrameType, ModuleType
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main

from edgespec import __version__

FAILED, USAGE = 1, 2
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM."
_OUR_VARIABLES = "EDGESPEC_"
_HELP = {"help_option_names": ["-h", "--help"]}
# In the order of `--help`: what people use first comes first.
COMMANDS = {
    "demo": "edgespec.cli.demo:demo",
    "verifier": "edgespec.cli.verifier:verifier",
    "generate": "edgespec.cli.generate:generate",
    "chat": "edgespec.cli.chat:chat",
    "serve": "edgespec.cli.serve:serve",
    "doctor": "edgespec.cli.doctor:doctor",
    "export": "edgespec.cli.export:export",
    "distill": "edgespec.cli.distill:distill",
    "bench": "edgespec.cli.bench:bench",
    "profile": "edgespec_sim.commands.profile:profile",
    "plan": "edgespec_sim.commands.plan:plan",
    "keys": "edgespec.cli.credentials:keys",
    "certs": "edgespec.cli.credentials:certs",
}


def start(app: Callable[[], object]) -> NoReturn:
    """Run ``app`` and exit with its code, whatever state the standard streams are in. A stream that
    was closed is one that reads and writes nothing. An argument or variable that is not UTF-8 is
    wrong usage. A reader that has gone ends the command with exit code 1, silently."""
    code: str | int | None = 0
    try:
        _answer_ctrl_c(signal.default_int_handler)
        _open_missing_streams()
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # What its encoding lacks is escaped, as on stderr: it would end a text in the middle.
            sys.stdout.reconfigure(errors="backslashreplace")
        if unusable := _not_utf8(sys.argv[1:], os.environ):
            print(f"error: {unusable}", file=sys.stderr)
            code = USAGE
        else:
            app()
    except SystemExit as done:
        code = done.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        code = FAILED
    except OSError as error:  # of the standard streams: all others are reported by their command
        print(f"error: {error}", file=sys.stderr)
        code = FAILED
    flushed = _flushed()
    _answer_ctrl_c(signal.SIG_DFL)  # the interpreter takes itself apart: no more exceptions
    sys.exit(code if flushed else code or FAILED)


def _answer_ctrl_c(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """From here on ``handler`` answers a Ctrl-C, unless whoever started us wants it ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _open_missing_streams() -> None:
    """A closed stream is None to Python, and its number is given to the next file opened."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == number:
                os.set_inheritable(number, True)
            else:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def _not_utf8(arguments: Sequence[str], variables: Mapping[str, str]) -> str | None:
    """What is wrong with the first argument or variable of ours that is not UTF-8, or None."""
    named = [(f"argument {number}", text) for number, text in enumerate(arguments, 1)]
    named += [(key, text) for key, text in variables.items() if key.startswith(_OUR_VARIABLES)]
    for name, text in named:
        if any(0xD800 <= ord(character) < 0xE000 for character in text):
            return f"{name} is {os.fsencode(text)!r}, but must be UTF-8"
    return None


def _flushed() -> bool:
    """Whether all that was written has left. If not, the interpreter must not try again at exit:
    it would print a traceback of its own."""
    fine = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            fine = False
            nowhere = os.open(os.devnull, os.O_WRONLY)  # what is left in the buffer goes there
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            if not isinstance(error, BrokenPipeError):  # a full disk
                print(f"error: cannot write to {stream.name}: {error.strerror}", file=sys.stderr)
    return fine


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
        context_settings=_HELP,
        epilog=EXIT_CODES,
    )


@cache
def _imported(name: str, where: str) -> Any:
    module, _, attribute = where.partition(":")
    found = getattr(_uninterrupted_import(module), attribute)
    # The callback keeps typer from taking a group of one command for that command.
    group = typer.Typer(rich_markup_mode="rich", callback=lambda: None)
    if isinstance(found, typer.Typer):
        group.add_typer(found, name=name, no_args_is_help=True, context_settings=_HELP)
    else:
        group.command(name)(found)
    command = typer.main.get_group(group).commands[name]
    _complete_help(command)
    return command


def _complete_help(command: Any) -> None:
    """A paragraph is as wide as the terminal, not as the docstring that it stands in; an example
    begins a line of its own. Exit codes stand at the end."""
    command.epilog = EXIT_CODES
    if command.help:
        command.help = re.sub(r"(?<!\n)\n(?!\n|\[dim\])", " ", command.help)
    for below in getattr(command, "commands", {}).values():
        _complete_help(below)


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


app = lazy_app("edgespec", COMMANDS)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgespec {__version__}")
        raise typer.Exit


_VERSION = typer.Option(
    "--version", callback=_print_version, is_eager=True, help="Print the version and stop"
)


@app.callback()
def main(version: Annotated[bool, _VERSION] = False) -> None:
    """Speculative decoding between a device and a verifier.

    A small draft model on the device guesses, the big model on the verifier decides.

    The text is the big model's own, token for token; good guesses make it come sooner.

    [bold]See it[/]   edgespec demo

    [bold]Serve[/]    edgespec verifier

    [bold]Use[/]      edgespec generate "def fibonacci(n):"

    [bold]Connect[/]  edgespec serve (OpenAI's API, for other programs)

    [bold]Plan[/]     edgespec plan link --rtt-ms 80 --acceptance 0.7

    [bold]Simulate[/] edgespec-sim run household (a deployment in virtual time)

    [bold]Check[/]    edgespec doctor
    """
