"""Command-line options that set keys of a configuration.

The dataclasses of ``edgespec.config`` are the one source of types, defaults and help: the text
below a field is its documentation everywhere. A command names the keys that people set every day.
Each of them becomes an option with the key's type and default, and the first sentence of the key's
text is its help. All other keys are set by ``--set KEY=VALUE`` or in a file, and ``--help-all``
explains them. An option wins over an environment variable, the variable over the file, and the file
over the default.
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
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import yaml
from rich.markup import escape

from edgespec.cli.replaced_options import KEYS_OF_COMMANDS
from edgespec.cli.running import reporting_errors, set_up_logging
from edgespec.config import AgentConfig, ConfigError, VerifierConfig, load_config
from edgespec.config.file_permissions import check_file_permissions
from edgespec.config.groups import HEADINGS, Group, group_of
from edgespec.config.loading import NULL, plain

_Config = TypeVar("_Config", bound=AgentConfig | VerifierConfig)
GENERATION, VERIFIER, DRAFTING = "Generation", "Verifier", "Drafting"
OUTPUT, SETTINGS = "Output", "Settings"
"""Panels of ``--help``, with ``_GROUP_PANELS``."""
_GROUP_PANELS = {Group.ADVANCED: "Advanced", Group.EMULATION: "Emulation"}
_COLUMNS = 88


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a configuration."""

    name: str
    """Dotted name, such as ``link.rtt_ms``."""
    hint: Any
    """Type annotation of the key's field."""
    default: object
    text: str
    """Text below the key's field, in one line and without markup."""
    group: Group

    @property
    def first_sentence(self) -> str:
        return self.text.partition(". ")[0].rstrip(".")


@dataclass(frozen=True, slots=True)
class Flag:
    """Option that sets one key of a configuration."""

    key: str
    names: tuple[str, ...] = ()
    """Names of the option. Without any, it is named after the last part of the key."""
    metavar: str | None = None
    panel: str | None = None
    """Panel of ``--help``. An advanced or emulation key always has the panel of its group."""
    is_argument: bool = False
    """The values stand on the command line without the option's name."""

    @property
    def options(self) -> tuple[str, ...]:
        return self.names or ("--" + self.key.rpartition(".")[2].replace("_", "-"),)

    @property
    def parameter(self) -> str:
        """Name of the Python parameter that typer passes the value by."""
        return self.options[0].removeprefix("--").replace("-", "_")


# --- options of a device, in the order of `--help` ---------------------------------------------

MAX_TOKENS = Flag("sampling.max_tokens", ("--max-tokens", "-n"), panel=GENERATION)
TEMPERATURE = Flag("sampling.temperature", ("--temperature", "-t"), panel=GENERATION)
RULE = Flag("rule", metavar="NAME", panel=GENERATION)
FALLBACK = Flag("fallback", metavar="MODEL", panel=DRAFTING)
VERIFIER_FLAGS = (
    Flag("verifier", metavar="HOST:PORT", panel=VERIFIER),
    Flag("tls.ca", metavar="FILE", panel=VERIFIER),
    Flag("api_key_file", metavar="FILE", panel=VERIFIER),
)
DRAFT = Flag("draft.model", ("--draft",), metavar="MODEL", panel=DRAFTING)
DEVICE_FLAGS = (
    *VERIFIER_FLAGS,
    Flag("model", metavar="NAME", panel=VERIFIER),
    DRAFT,
    Flag("draft.corpus", ("--draft-corpus",), metavar="PATH", panel=DRAFTING),
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
"""Keys that can be set by a variable of the environment, by the variable's name."""
_SEPARATORS = {"verifier": None, "draft.corpus": os.pathsep}
"""Separators of variables that hold several values, by key. None means white space."""


def option(text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """Return an option of a command, for typer. ``text`` is its help. Without ``names`` the option
    is named after its parameter."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_envvar=False, **more)


_setting_option = partial(option, panel=SETTINGS)
_CONFIG_FILE = _setting_option(
    "YAML file with settings; options win over it",
    *("--config", "-c"),
    envvar="EDGESPEC_CONFIG",
    metavar="FILE",
)
_SET_KEYS = _setting_option(
    "Set any key that --help-all explains; may be given more than once",
    *("--set",),
    metavar="KEY=VALUE",
)
_HELP_ALL = _setting_option(
    "Print every key with its meaning and value, as a file for --config, and exit", "--help-all"
)


def from_config(
    kind: type[_Config], *flags: Flag
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a command of a function.

    The function's first argument is a configuration of this ``kind``, which is read from a file,
    the environment and the options ``flags``. The function's other parameters become options of
    their own, as typer reads them. Errors of the configuration and of the command are reported by
    ``running.reporting_errors``, and the log is set up as the configuration says."""
    keys = documented_keys(kind)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        KEYS_OF_COMMANDS[command] = tuple(keys)
        signature = inspect.signature(command, eval_str=True)
        own = list(signature.parameters.values())[1:]

        def called(**given: Any) -> None:
            with reporting_errors():
                settings = _load_configuration(kind, flags, given)
                set_up_logging(settings.log_level, settings.log_format)
                command(settings, **{one.name: given[one.name] for one in own})

        added = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters = [
            *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own),
            *(
                added(one.parameter, annotation=_make_annotation(one, keys[one.key]))
                for one in flags
            ),
            added("config", annotation=Annotated[Path | None, _CONFIG_FILE]),
            added("set_keys", annotation=Annotated[list[str] | None, _SET_KEYS]),
            added("help_all", annotation=Annotated[bool, _HELP_ALL], default=False),
        ]
        update_wrapper(called, command)
        # typer reads the options from these two attributes.
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return called

    return decorate


def _make_annotation(flag: Flag, key: Key) -> Any:
    """Return the annotation from which typer makes an option for ``key``. Its value is None if the
    option is left out."""
    kind = _option_type(key.hint)
    if flag.is_argument:
        return Annotated[kind | None, typer.Argument(metavar=flag.metavar, help=key.first_sentence)]
    text = escape(key.first_sentence)
    if key.default not in (None, "", (), False):
        text += f" \\[default: {_yaml_line(key.default)}]"
    panel = _GROUP_PANELS.get(key.group, flag.panel)
    return Annotated[kind | None, option(text, *flag.options, panel=panel, metavar=flag.metavar)]


def _option_type(hint: Any) -> Any:
    """Return the type of an option's value, which is a list for a key that can hold several."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [one for one in typing.get_args(hint) if one is not types.NoneType]
        hint = next((one for one in kinds if typing.get_origin(one) is tuple), kinds[0])
    return list[str] if typing.get_origin(hint) in (tuple, Mapping) else hint


def _load_configuration(
    kind: type[_Config], flags: tuple[Flag, ...], given: Mapping[str, Any]
) -> _Config:
    """Return the configuration that the file of ``--config``, the environment, ``--set`` and the
    options make, of which the later ones win. Raises ``ConfigError``."""
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
        typer.echo(config_template(config, flags), nl=False)
        raise typer.Exit
    return config


def read_settings(
    assignments: Iterable[str], keys: Mapping[str, Key] | None = None, form: str = "KEY=VALUE"
) -> dict[str, object]:
    """Return the values of ``--set`` options by key.

    ``keys`` are the keys of the configuration, whose types separate text from other YAML.
    ``form`` is the form of an assignment, for the error message. Raises ``ConfigError``."""
    values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not (name and equals):
            raise ConfigError(f"--set is {assignment!r}, but must be {form}")
        values[name] = read_value((keys or {}).get(name), text, f"--set {name}")
    return values


def read_value(key: Key | None, text: str, source: str) -> object:
    """Return the value that ``text`` means for ``key``: the text itself for a key that holds text,
    else what it means as YAML. Raises ``ConfigError``, which names ``source``."""
    if key is not None and key.hint is str:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{source}: {text!r} is not readable as YAML") from None
    return NULL if value is None else value


def documented_keys(kind: type[Any]) -> dict[str, Key]:
    """Return all keys of the dataclass ``kind`` and of its sections by dotted name, in the order of
    their declaration."""
    return {key.name: key for key in _list_keys(kind, kind(), "", Group.STABLE)}


def _list_keys(kind: type[Any], defaults: object, place: str, section: Group) -> Iterator[Key]:
    texts, hints = _field_texts(kind), typing.get_type_hints(kind)
    for field in fields(kind):
        name, default, hint = place + field.name, getattr(defaults, field.name), hints[field.name]
        group = group_of(field, section)
        if is_dataclass(hint):
            yield from _list_keys(typing.cast("type[Any]", hint), default, f"{name}.", group)
        else:
            yield Key(
                name=name,
                hint=hint,
                default=default,
                text=texts.get(field.name, ""),
                group=group,
            )


def _field_texts(kind: type[Any]) -> dict[str, str]:
    """Return the string that stands below each field in the source of ``kind``."""
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


def config_template(config: object, flags: tuple[Flag, ...] = ()) -> str:
    """Return all settings of ``config`` as YAML that ``--config`` reads back.

    Each key stands below its meaning and the name of its option in ``flags``. Within the file and
    within each section, stable keys come first, then advanced ones, then emulation. Within each
    group, sections come last."""
    options = {flag.key: flag.options[0] for flag in flags if not flag.is_argument}
    lines = _template_lines(config, documented_keys(type(config)), options, "", None)
    return "\n".join(lines).lstrip("\n") + "\n"


def _template_lines(
    section: Any, keys: Mapping[str, Key], options: Mapping[str, str], place: str, own: Group | None
) -> Iterator[str]:
    """Yield the lines of one section, whose dotted name with a final dot is ``place``. A heading
    stands above each group but the section's ``own``."""
    indent = "  " * place.count(".")
    width = _COLUMNS - len(indent) - len("# ")
    for group in Group:
        members = [one for one in fields(section) if group_of(one, own or Group.STABLE) is group]
        if members and group is not own:
            yield from ("", f"{indent}# === {HEADINGS[group]} ===")
            if any(place + one.name in keys for one in members):
                yield ""
        for field in members:
            if (name := place + field.name) in keys:
                text = keys[name].text + (f" ({options[name]})" if name in options else "")
                for line in textwrap.wrap(text, width, break_on_hyphens=False):
                    yield f"{indent}# {line}"
                yield f"{indent}{field.name}: {_yaml_line(getattr(section, field.name))}"
        for field in members:
            if (name := place + field.name) not in keys:
                yield from ("", f"{indent}{field.name}:")
                below = getattr(section, field.name)
                yield from _template_lines(below, keys, options, f"{name}.", group)


def _yaml_line(value: object) -> str:
    """Return a value as YAML on one line."""
    form: dict[str, Any] = {"default_flow_style": True, "width": 1 << 20, "allow_unicode": True}
    text: str = yaml.safe_dump(plain(value), **form)
    return text.removesuffix("...\n").strip()
