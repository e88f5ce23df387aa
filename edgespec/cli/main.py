"""Entry point of ``edgespec``: the table of commands, their help, and the start and end of a run.

``start`` makes sure that the arguments are UTF-8 and the standard streams are open, and ends
without a traceback when the reader of the output has gone.
"""

from __future__ import annotations

import importlib
import inspect
import io
import itertools
import os
import re
import shutil
import signal
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main
import typer.models

from edgespec.operating_system import prepare_console

FAILED, USAGE = 1, 2
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM."
_OUR_VARIABLES = "EDGESPEC_"
_HELP = {"help_option_names": ["-h", "--help"]}
# The order is that of `--help`: commands that people use first come first.
COMMANDS = {
    "demo": "edgespec.cli.demo:demo",
    "verifier": "edgespec.cli.verifier:verifier",
    "generate": "edgespec.cli.generate:generate",
    "chat": "edgespec.cli.chat:chat",
    "serve": "edgespec.cli.serve:serve",
    "pull": "edgespec.cli.models:pull",
    "models": "edgespec.cli.models:models",
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
    """Run ``app`` and exit with its code, whatever state the standard streams are in.

    A closed standard stream is replaced by one that reads and writes nothing. An argument or an
    ``EDGESPEC_*`` variable that is not UTF-8 is wrong usage. When the reader of the output has
    gone, the command ends silently with exit code 1."""
    code: str | int | None = 0
    try:
        _handle_ctrl_c(signal.default_int_handler)
        _open_closed_streams()
        prepare_console()
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # Characters that the encoding lacks are escaped, as on stderr. An exception would end
            # an output in the middle.
            sys.stdout.reconfigure(errors="backslashreplace")
        if problem := _find_not_utf8(sys.argv[1:], os.environ):
            print(f"error: {problem}", file=sys.stderr)
            code = USAGE
        else:
            app()
    except SystemExit as done:
        code = done.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        code = FAILED
    except OSError as error:  # an error of a standard stream; commands report all others
        print(f"error: {error}", file=sys.stderr)
        code = FAILED
    flushed = _flush_streams()
    _handle_ctrl_c(signal.SIG_DFL)  # exceptions during the interpreter's exit would be printed
    sys.exit(code if flushed else code or FAILED)


def _handle_ctrl_c(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Install ``handler`` for Ctrl-C, unless the parent process has it ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _open_closed_streams() -> None:
    """Open the null device in place of each closed standard stream. Python represents a closed one
    by None, and the next file that is opened would get its descriptor."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == number:
                os.set_inheritable(number, True)
            else:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def _find_not_utf8(arguments: Sequence[str], variables: Mapping[str, str]) -> str | None:
    """Return an error message for the first argument or ``EDGESPEC_*`` variable that is not UTF-8,
    or None."""
    named = [(f"argument {number}", text) for number, text in enumerate(arguments, 1)]
    named += [(key, text) for key, text in variables.items() if key.startswith(_OUR_VARIABLES)]
    for name, text in named:
        if any(0xD800 <= ord(character) < 0xE000 for character in text):
            return f"{name} is {os.fsencode(text)!r}, but must be UTF-8"
    return None


def _flush_streams() -> bool:
    """Flush standard output and error, and return whether everything could be written.

    A stream that cannot be written is connected to the null device. The interpreter would try again
    at exit, and print a traceback of its own."""
    is_flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            is_flushed = False
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, stream.fileno())
            os.close(null_device)
            if not isinstance(error, BrokenPipeError):  # a full disk
                print(f"error: cannot write to {stream.name}: {error.strerror}", file=sys.stderr)
    return is_flushed


def lazy_app(name: str, commands: Mapping[str, str]) -> typer.Typer:
    """Return an app whose commands are imported only when they are called.

    ``commands`` maps a command's name to its ``module:attribute``, in the order of ``--help``."""

    class Commands(typer.core.TyperGroup):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            _join_lines(self)
            _fit_narrow_terminals(self)

        def list_commands(self, ctx: Any) -> list[str]:
            return list(commands)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name in commands:
                return _import_attribute(cmd_name, commands[cmd_name])
            # typer suggests one of these names for a mistyped one.
            names: Any = dict.fromkeys(commands)
            self.commands = names
            return None

        def get_params(self, ctx: Any) -> list[Any]:
            params = super().get_params(ctx)
            for one in params:
                _hide_python_type(one)
            return params

    return typer.Typer(
        name=name,
        cls=Commands,
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings=_HELP,
        epilog=EXIT_CODES,
    )


class _Command(typer.core.TyperCommand):
    """A command that answers an option which is a key with ``--set``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {"--help"}.union(*((*one.opts, *one.secondary_opts) for one in self.params))
        words = itertools.takewhile(lambda word: word != "--", args)
        names = (word.partition("=")[0] for word in words if word.startswith("--"))
        if (unknown := next((name for name in names if name not in known), "")) and self.callback:
            from edgespec.cli.replaced_options import find_replacement

            if instead := find_replacement(inspect.unwrap(self.callback), unknown):
                ctx.fail(f"No such option: {unknown}; use {instead}")
        return super().parse_args(ctx, args)


@cache
def _import_attribute(name: str, where: str) -> Any:
    module, _, attribute = where.partition(":")
    found = getattr(_import_uninterrupted(module), attribute)
    # Without a callback typer would treat a group of one command as that command.
    group = typer.Typer(rich_markup_mode="rich", callback=lambda: None)
    if isinstance(found, typer.Typer):
        for below in found.registered_commands:
            _add_metavars(below.callback)
        runs_alone = found.info.invoke_without_command is True
        group.add_typer(found, name=name, no_args_is_help=not runs_alone, context_settings=_HELP)
    else:
        _add_metavars(found)
        group.command(name, cls=_Command)(found)
    command = typer.main.get_group(group).commands[name]
    _complete_help(command)
    return command


_METAVARS: Mapping[Any, str] = {bool: "", int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}
"""Metavar of an option that gives none, by the type of its value. typer would print the name of the
Python type."""


def _add_metavars(command: Any) -> None:
    """Give a metavar to each option of the function ``command`` that has none."""
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        # An annotation that is still text would be evaluated again, to another object.
        command.__annotations__[parameter.name] = parameter.annotation
        kind, *marks = typing.get_args(parameter.annotation) or (None,)
        kinds = [one for one in typing.get_args(kind) or (kind,) if one is not types.NoneType]
        if typing.get_origin(kinds[0]) is list:
            kinds = [*typing.get_args(kinds[0])]
        for mark in marks:
            if isinstance(mark, typer.models.OptionInfo) and mark.metavar is None:
                mark.metavar = _METAVARS.get(kinds[0])


def _hide_python_type(parameter: Any) -> None:
    """Let the help of an argument, or of a flag without a metavar, not show the name of a Python
    type, which typer 0.29 prints."""
    if parameter.param_type_name == "argument":
        parameter.display_type_rich = lambda ctx: None
    elif parameter.metavar is None and parameter.is_flag:
        parameter.metavar = ""


def _complete_help(command: Any) -> None:
    """Fit a command's help to the terminal's width, with each example on a line of its own. Add the
    exit codes at the end."""
    command.epilog = EXIT_CODES
    help_option = command.get_help_option(
        typer.Context(command, help_option_names=["-h", "--help"])
    )
    help_option.metavar = ""
    for parameter in command.params:
        _hide_python_type(parameter)
    _join_lines(command)
    _fit_narrow_terminals(command)
    for below in getattr(command, "commands", {}).values():
        _complete_help(below)


def _join_lines(command: Any) -> None:
    """Join the lines of each paragraph of a command's help. An example begins a line of its own."""
    if command.help:
        command.help = re.sub(r"(?<!\n)\n(?!\n|\[dim\])", " ", command.help)


_NARROW_COLUMNS = 60
"""Width below which typer's boxes would cut the names of options."""
_NAME_COLUMNS = 4
"""Width of an option's name in narrow help. All names are longer, so a line ends behind them."""
_MARKUP = re.compile(r"\[/?(?:dim|bold)?\]|\\(?=\[)")


def _fit_narrow_terminals(command: Any) -> None:
    """Let a command print its help without boxes where the terminal is narrow, and the text of each
    option below its name."""
    format_wide = command.format_help

    def format_help(ctx: Any, formatter: Any) -> None:
        if (columns := shutil.get_terminal_size().columns) >= _NARROW_COLUMNS:
            format_wide(ctx, formatter)
            return
        formatter.width = max(columns - 1, 20)
        formatter.write_dl = partial(formatter.write_dl, col_max=_NAME_COLUMNS)
        mode, command.rich_markup_mode = command.rich_markup_mode, None
        try:
            format_wide(ctx, formatter)
        finally:
            command.rich_markup_mode = mode
        formatter.buffer[:] = [_MARKUP.sub("", formatter.getvalue())]

    command.format_help = format_help


def _import_uninterrupted(module: str) -> ModuleType:
    """Import a module. A Ctrl-C meanwhile ends the process at once, as it ends other programs: an
    exception inside an import would be swallowed, or printed in one of many ways."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        return importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return importlib.import_module(module)
    finally:
        signal.signal(signal.SIGINT, handler)


app = lazy_app("edgespec", COMMANDS)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from edgespec.cli.installation import describe_installation

        typer.echo(describe_installation())
        raise typer.Exit


_VERSION = typer.Option(
    "--version",
    callback=_print_version,
    is_eager=True,
    metavar="",
    help="Print the version, its commit and the installed extras, and exit",
)


@app.callback()
def main(version: Annotated[bool, _VERSION] = False) -> None:
    """Speculative decoding between a device and a verifier.

    A small draft model on the device guesses tokens; the large target model on the verifier accepts
    or corrects them. The output is exactly the target's, token for token. Good drafts make it
    arrive sooner.

    [bold]Try[/]      edgespec demo

    [bold]Serve[/]    edgespec verifier

    [bold]Use[/]      edgespec generate "def fibonacci(n):"

    [bold]Connect[/]  edgespec serve (HTTP APIs for other programs)

    [bold]Plan[/]     edgespec plan link --rtt-ms 80 --acceptance 0.7

    [bold]Simulate[/] edgespec-sim run household (a deployment in virtual time)

    [bold]Check[/]    edgespec doctor
    """
