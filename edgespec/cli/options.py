"""Options that stand for keys of a configuration, and how they override its file.

One source: the dataclasses of ``edgespec.config``. The text below a field is its documentation
everywhere. A command names the keys that people set every day; each becomes an option with the
key's own type, default and first sentence. All others are set by ``--set KEY=VALUE`` or in the
file, and ``--help-all`` explains them. An option wins over an environment variable, that over the
file, and the file over the default.
"""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, update_wrapper
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import yaml
from rich.markup import escape

from edgespec.cli.running import reported, set_up_logging
from edgespec.config import AgentConfig, ConfigError, VerifierConfig, load_config
from edgespec.config.loading import NULL, plain
from edgespec.wire.access import check_file_permissions

_Config = TypeVar("_Config", bound=AgentConfig | VerifierConfig)
TEXT, WHERE, DRAFTING, OUTPUT, SETTINGS = "The text", "Where", "Drafting", "Output", "Settings"
_COLUMNS = 88


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a configuration: ``name`` is dotted (``link.rtt_ms``), ``hint`` its type."""

    name: str
    hint: Any
    default: object
    text: str

    @property
    def first_sentence(self) -> str:
        return self.text.partition(". ")[0].rstrip(".")


@dataclass(frozen=True, slots=True)
class Flag:
    """An option for the configuration's ``key``. Without ``names`` it is called as the last part of
    the key. An ``argument`` has no name."""

    key: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
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

MAX_TOKENS = Flag("sampling.max_tokens", ("--max-tokens", "-n"), panel=TEXT)
TEMPERATURE = Flag("sampling.temperature", ("--temperature", "-t"), panel=TEXT)
RULE = Flag("rule", metavar="NAME", panel=TEXT)
VERIFIER_FLAGS = (
    Flag("verifier", metavar="HOST:PORT", panel=WHERE),
    Flag("tls.ca", metavar="FILE", panel=WHERE),
    Flag("api_key_file", metavar="FILE", panel=WHERE),
)
DEVICE_FLAGS = (
    *VERIFIER_FLAGS,
    Flag("model", metavar="NAME", panel=WHERE),
    Flag("draft.model", ("--draft",), metavar="MODEL", panel=DRAFTING),
    Flag("draft.corpus", ("--draft-corpus",), metavar="FILE", panel=DRAFTING),
    Flag("draft.memory_budget", metavar="SIZE", panel=DRAFTING),
    Flag("draft.window", ("--draft-window",), metavar="TOKENS", panel=DRAFTING),
    Flag("record", metavar="FILE", panel=OUTPUT),
)
VARIABLES: Mapping[type[Any], Mapping[str, str]] = {
    AgentConfig: {
        "EDGESPEC_VERIFIER": "verifier",
        "EDGESPEC_DRAFT": "draft.model",
        "EDGESPEC_DRAFT_CORPUS": "draft.corpus",
        "EDGESPEC_MEMORY_BUDGET": "draft.memory_budget",
        "EDGESPEC_ENDPOINT_PORT": "endpoint.port",
        "EDGESPEC_LOG_LEVEL": "log_level",
        "EDGESPEC_LOG_FORMAT": "log_format",
    },
    VerifierConfig: {
        "EDGESPEC_MODEL": "model",
        "EDGESPEC_SERVER_DRAFT": "draft",
        "EDGESPEC_PORT": "port",
        "EDGESPEC_METRICS_PORT": "metrics_port",
        "EDGESPEC_LOG_LEVEL": "log_level",
        "EDGESPEC_LOG_FORMAT": "log_format",
    },
}
"""Keys that a variable of the environment gives."""
_SEPARATORS = {"verifier": None, "draft.corpus": os.pathsep}
"""Between the values of such a variable that holds several; None is white space."""


def option(text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """An option of a command, as typer reads it; ``text`` is its help. Without ``names`` it is
    called as its parameter."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_envvar=False, **more)


_setting = partial(option, panel=SETTINGS)
_CONFIG_FILE = _setting(
    "Read settings from this YAML file", "--config", "-c", envvar="EDGESPEC_CONFIG", metavar="FILE"
)
_SET_KEYS = _setting("Set any key; --help-all prints them all", "--set", metavar="KEY=VALUE")
_HELP_ALL = _setting(
    "Print every setting, explained, as a file for --config, and stop", "--help-all"
)


def from_config(
    kind: type[_Config], *flags: Flag
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose first argument, a ``kind``, comes from a file, the environment and options.
    The other parameters of the command are options of its own, as typer reads them. Errors of the
    configuration and of the command are told as ``running.reported`` tells them; the log is as the
    configuration says."""
    keys = documented_keys(kind)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = list(signature.parameters.values())[1:]

        def called(**given: Any) -> None:
            with reported():
                settings = _configured(kind, flags, given)
                set_up_logging(settings.log_level, settings.log_format)
                command(settings, **{one.name: given[one.name] for one in own})

        added = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters = [
            *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own),
            *(added(one.parameter, annotation=_annotation(one, keys[one.key])) for one in flags),
            added("config", annotation=Annotated[Path | None, _CONFIG_FILE]),
            added("set_keys", annotation=Annotated[list[str] | None, _SET_KEYS]),
            added("help_all", annotation=Annotated[bool, _HELP_ALL], default=False),
        ]
        update_wrapper(called, command)
        # What typer reads.
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return called

    return decorate


def _annotation(flag: Flag, key: Key) -> Any:
    """What typer reads for a flag: the key's type, or None where the option is left out."""
    kind = _plain_type(key.hint)
    if flag.argument:
        return Annotated[kind | None, typer.Argument(metavar=flag.metavar, help=key.first_sentence)]
    text = key.first_sentence
    if key.default not in (None, "", (), False):
        text += f" (default: {_shown(key.default)})"
    found = option(escape(text), *flag.options, panel=flag.panel, metavar=flag.metavar)
    return Annotated[kind | None, found]


def _plain_type(hint: Any) -> Any:
    """The type of an option's value: of a key that holds one or several, a list."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [one for one in typing.get_args(hint) if one is not types.NoneType]
        hint = next((one for one in kinds if typing.get_origin(one) is tuple), kinds[0])
    return list[str] if typing.get_origin(hint) in (tuple, Mapping) else hint


def _configured(kind: type[_Config], flags: tuple[Flag, ...], given: Mapping[str, Any]) -> _Config:
    """``--config``'s file with the environment, ``--set`` and the options on top, in this order.
    Raises ``ConfigError``."""
    keys = documented_keys(kind)
    overrides: dict[str, Any] = {}
    for variable, name in VARIABLES[kind].items():
        if text := os.environ.get(variable):
            if name in _SEPARATORS:
                overrides[name] = [part for part in text.split(_SEPARATORS[name]) if part]
            else:
                overrides[name] = read_value(keys[name], text, variable)
    overrides |= read_settings(given["set_keys"] or (), keys)
    for flag in flags:
        value = given[flag.parameter]
        if value is not None and value not in ([], ()):
            overrides[flag.key] = value
    if isinstance(addresses := overrides.get("verifier"), list) and len(addresses) == 1:
        overrides["verifier"] = addresses[0]
    if (path := given["config"]) is not None:
        check_file_permissions(path, secret=False)
    config = load_config(kind, path, overrides)
    if given["help_all"]:
        typer.echo(explained(config, flags), nl=False)
        raise typer.Exit
    return config


def read_settings(
    assignments: Iterable[str], keys: Mapping[str, Key] | None = None, form: str = "KEY=VALUE"
) -> dict[str, object]:
    """What each ``--set`` says, by key. Raises ``ConfigError``."""
    found = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not (name and equals):
            raise ConfigError(f"--set is {assignment!r}, but must be {form}")
        found[name] = read_value((keys or {}).get(name), text, f"--set {name}")
    return found


def read_value(key: Key | None, text: str, source: str) -> object:
    """A value as YAML, but text stays as it is typed. Raises ``ConfigError``."""
    if key is not None and key.hint is str:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{source}: {text!r} is not readable as YAML") from None
    return NULL if value is None else value


def documented_keys(kind: type[Any]) -> dict[str, Key]:
    """All keys of the dataclass ``kind`` and its sections, in the order of their declaration."""
    return {key.name: key for key in _keys(kind, kind(), "")}


def _keys(kind: type[Any], defaults: object, place: str) -> Iterator[Key]:
    texts, hints = _field_texts(kind), typing.get_type_hints(kind)
    for field in fields(kind):
        name, default, hint = place + field.name, getattr(defaults, field.name), hints[field.name]
        if is_dataclass(hint):
            yield from _keys(typing.cast("type[Any]", hint), default, f"{name}.")
        else:
            yield Key(name, hint, default, texts.get(field.name, ""))


def _field_texts(kind: type[Any]) -> dict[str, str]:
    """The string that stands below each field in the source of ``kind``."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for above, below in zip(body.body, body.body[1:], strict=False):
        match above, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split()).replace("``", "")
    return texts


def explained(config: object, flags: tuple[Flag, ...]) -> str:
    """All settings as YAML that ``--config`` reads back, each below what it is for."""
    options = {flag.key: flag.options[0] for flag in flags if not flag.argument}
    lines: list[str] = []
    section: list[str] = []
    for key in documented_keys(type(config)).values():
        *place, name = key.name.split(".")
        for depth, part in enumerate(place):
            if place[: depth + 1] != section[: depth + 1]:
                lines += ["", f"{'  ' * depth}{part}:"]
        section = place
        indent = "  " * len(place)
        option = f" ({options[key.name]})" if key.name in options else ""
        room = _COLUMNS - len(indent) - len("# ")
        about = textwrap.wrap(key.text + option, room, break_on_hyphens=False)
        lines += [f"{indent}# {line}" for line in about]
        lines.append(f"{indent}{name}: {_shown(attrgetter(key.name)(config))}")
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    """A value as YAML on one line."""
    form: dict[str, Any] = {"default_flow_style": True, "width": 1 << 20, "allow_unicode": True}
    text: str = yaml.safe_dump(plain(value), **form)
    return text.removesuffix("...\n").strip()
