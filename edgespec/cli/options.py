"""Options that stand for keys of a configuration, and how they override its file.

One source: the dataclasses of ``edgespec.config``. A command names the keys that people set every
day; each becomes an option with the key's own type, default and documentation. All others are set
by ``--set KEY=VALUE`` or in the file, and ``--help-all`` lists them. An option wins over an
environment variable, that over the file, and the file over the default.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgespec.cli.running import reported
from edgespec.config import ConfigError, dump_config, load_config
from edgespec.config.documents import Key, documented_keys
from edgespec.config.loading import NULL
from edgespec.wire.access import check_file_permissions

_Config = TypeVar("_Config")

TEXT, WHERE, DRAFTING, OUTPUT, SETTINGS = "The text", "Where", "Drafting", "Output", "Settings"


@dataclass(frozen=True, slots=True)
class Flag:
    """An option for the configuration's ``key``. Without ``names`` it is called as the last part of
    the key; ``environment`` names a variable that gives it, too. An ``argument`` has no name."""

    key: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    environment: str | None = None
    panel: str | None = None
    argument: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        return self.names or ("--" + self.key.rpartition(".")[2].replace("_", "-"),)

    @property
    def parameter(self) -> str:
        """The name that the command line's library gives to its value."""
        return self.options[0].removeprefix("--").replace("-", "_")


# --- a device's, in the order of `--help` ----------------------------------------------------

SAMPLING_FLAGS = (
    Flag("sampling.max_tokens", ("--max-tokens", "-n"), panel=TEXT),
    Flag("sampling.temperature", ("--temperature", "-t"), panel=TEXT),
    Flag("sampling.top_p", panel=TEXT),
    Flag("sampling.seed", panel=TEXT),
)
STOP_FLAG = Flag("sampling.stop", metavar="TEXT", panel=TEXT)
VERIFIER_FLAGS = (
    Flag("verifier", metavar="HOST:PORT", environment="EDGESPEC_VERIFIER", panel=WHERE),
    Flag("tls.ca", metavar="FILE", panel=WHERE),
    Flag("api_key_file", metavar="FILE", panel=WHERE),
)
DEVICE_FLAGS = (
    *VERIFIER_FLAGS,
    Flag("model", metavar="NAME", panel=WHERE),
    Flag(
        "draft.model", ("--draft",), metavar="MODEL", environment="EDGESPEC_DRAFT", panel=DRAFTING
    ),
    Flag(
        "draft.memory_budget", metavar="SIZE", environment="EDGESPEC_MEMORY_BUDGET", panel=DRAFTING
    ),
    Flag("tokenizer", metavar="MODEL", panel=DRAFTING),
    Flag("policy.name", ("--policy",), metavar="NAME", panel=DRAFTING),
    Flag("link.rtt_ms", panel=DRAFTING),
)
LOG_FLAGS = (
    Flag("trace", metavar="FILE", panel=SETTINGS),
    Flag("log_level", metavar="LEVEL", environment="EDGESPEC_LOG_LEVEL", panel=SETTINGS),
)

Stats = Annotated[
    bool, typer.Option("--stats", help="Show numbers at the end, on stderr", rich_help_panel=OUTPUT)
]
Color = Annotated[
    bool | None,
    typer.Option(
        "--color/--no-color",
        help="Mark accepted tokens (default: auto)",
        rich_help_panel=OUTPUT,
    ),
]

# --- those of every command that has a configuration -----------------------------------------

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        envvar="EDGESPEC_CONFIG",
        show_envvar=False,
        metavar="FILE",
        help="Read settings from this YAML file",
        rich_help_panel=SETTINGS,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any key, such as link.loss=0.01",
        rich_help_panel=SETTINGS,
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config", help="Print all settings as YAML and stop", rich_help_panel=SETTINGS
    ),
]
HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", help="Explain every key for --set and stop", rich_help_panel=SETTINGS
    ),
]
_COMMON: Mapping[str, tuple[Any, object]] = {
    "config": (Config, None),
    "set_keys": (Set, None),
    "print_config": (PrintConfig, False),
    "help_all": (HelpAll, False),
}


def from_config(
    kind: type[_Config], *flags: Flag
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose first argument, a ``kind``, comes from a file, the environment and options.

    The other parameters of the command are options of its own, as typer reads them. Errors of the
    configuration and of the command are told as ``running.reported`` tells them.
    """
    keys = documented_keys(kind)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = list(signature.parameters.values())[1:]

        def called(**given: Any) -> None:
            with reported():
                settings = _configured(kind, flags, given)
                command(settings, **{one.name: given[one.name] for one in own})

        shared = [
            *((flag.parameter, _annotation(flag, keys[flag.key]), None) for flag in flags),
            *((name, annotation, default) for name, (annotation, default) in _COMMON.items()),
        ]
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for name, annotation, default in shared
        ]
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        # What typer reads.
        called.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in (*own, *added)}
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__module__ = command.__module__
        return called

    return decorate


def _annotation(flag: Flag, key: Key) -> Any:
    """What typer reads for a flag: the key's type, or None where the option is left out."""
    names = list(flag.options)
    kind = _plain_type(key.hint)
    if kind is bool:
        names = [f"{names[0]}/--no-{names[0].removeprefix('--')}"]
    if flag.argument:
        return Annotated[kind | None, typer.Argument(metavar=flag.metavar, help=key.first_sentence)]
    default = (
        f" (default: {_shown(key.default)})" if key.default not in (None, "", (), False) else ""
    )
    option = typer.Option(
        *names,
        envvar=flag.environment,
        show_envvar=False,
        metavar=flag.metavar,
        help=escape(key.first_sentence + default),
        rich_help_panel=flag.panel,
    )
    return Annotated[kind | None, option]


def _plain_type(hint: Any) -> Any:
    """The type of an option's value: of a key that holds one or several, a list."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [one for one in typing.get_args(hint) if one is not types.NoneType]
        hint = next((one for one in kinds if typing.get_origin(one) is tuple), kinds[0])
    return list[str] if typing.get_origin(hint) in (tuple, Mapping) else hint


def _configured(kind: type[_Config], flags: tuple[Flag, ...], given: Mapping[str, Any]) -> _Config:
    """``--config``'s file with ``--set`` and then the options on top. Raises ``ConfigError``."""
    if given["help_all"]:
        _explain(kind, flags)
        raise typer.Exit
    overrides: dict[str, Any] = dict(_assigned(kind, text) for text in given["set_keys"] or ())
    for flag in flags:
        value = given[flag.parameter]
        if value is None or value in ([], ()):
            continue
        overrides[flag.key] = value[0] if flag.key == "verifier" and len(value) == 1 else value
    if (path := given["config"]) is not None:
        check_file_permissions(path, secret=False)
    config = load_config(kind, path, overrides)
    if given["print_config"]:
        typer.echo(dump_config(config), nl=False)
        raise typer.Exit
    return config


def _assigned(kind: type[Any], text: str) -> tuple[str, object]:
    """``KEY=VALUE`` as an override: YAML, but text stays as it is typed. Raises ``ConfigError``."""
    name, equals, written = text.partition("=")
    if not equals:
        raise ConfigError(f"--set is {text!r}, but must be KEY=VALUE, such as link.loss=0.01")
    key = documented_keys(kind).get(name)
    if key is not None and key.hint is str:
        return name, written
    try:
        value = yaml.safe_load(written)
    except yaml.YAMLError:
        raise ConfigError(f"--set {name}: {written!r} is not readable as YAML") from None
    return name, NULL if value is None else value


def _explain(kind: type[Any], flags: tuple[Flag, ...]) -> None:
    options = {flag.key: ", ".join(flag.options) for flag in flags if not flag.argument}
    table = Table("key, and its option", "default", "what it is", box=None, pad_edge=False)
    for key in documented_keys(kind).values():
        name = f"{key.name}\n  {options[key.name]}" if key.name in options else key.name
        table.add_row(escape(name), escape(_shown(key.default)), escape(key.text))
    Console(soft_wrap=False).print(table)


def _shown(value: object) -> str:
    """A default as YAML on one line."""
    if isinstance(value, Enum):
        value = value.value
    elif isinstance(value, tuple):
        value = list(value)
    elif isinstance(value, Mapping):
        value = dict(value)
    text: str = yaml.safe_dump(value, default_flow_style=True)
    return text.removesuffix("...\n").strip()
