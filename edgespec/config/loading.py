"""Conversion of a YAML file and overrides to a configuration object, and back.

The reader is strict: unknown and repeated keys, wrong types and values out of range are errors that
name the key, its place and what would be right. ``ConfigError`` is all that a file can raise,
whatever it holds.
"""

from __future__ import annotations

import difflib
import logging
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from edgespec.config.files import TooLargeError, read_text
from edgespec.config.retired import REFUSED, WITHOUT_EFFECT
from edgespec.core.protocol.checks import is_unicode

MAX_CONFIG_BYTES = 1 << 20
NULL: Final = object()
"""Override that sets its key to null. (An override of None leaves the key as it is.)"""

_Config = TypeVar("_Config")
_LOG = logging.getLogger(__name__)

# Errors quote long values in part only, because aliases let a small file hold a huge value.
_shortened = reprlib.Repr()
_shortened.maxstring, _shortened.maxlevel = 200, 2


class ConfigError(ValueError):
    """A configuration cannot be used; the message names the file, the key and what is wrong."""


def load_config(
    kind: type[_Config],
    path: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    overrides_from: str = "command line",
) -> _Config:
    """Return a ``kind`` made of defaults, the YAML file at ``path`` and ``overrides``.

    ``path``: the file, or None for the defaults alone.
    ``overrides``: values by dotted key (``"link.rtt_ms"``), which win over the file. None leaves
    the file's value; ``NULL`` sets null.
    ``overrides_from``: source of the overrides, for error messages.

    Raises ``ConfigError``, which names the source, the key and what is wrong."""
    without_effect = WITHOUT_EFFECT.get(kind.__name__, {})
    data = {} if path is None else _read(path)
    if path is not None:
        for key, reason in without_effect.items():
            if _remove_key(data, key.split(".")):
                _LOG.warning("%s: %s has no effect: %s; remove it", path, key, reason)
        build(kind, data, str(path))  # an error in the file must not name the overrides' source
    for key, value in (overrides or {}).items():
        if key in without_effect:
            _LOG.warning("%s: %s has no effect: %s", overrides_from, key, without_effect[key])
        elif value is not None:
            _put(data, key.split("."), None if value is NULL else value)
    return build(kind, data, overrides_from)


def dump_config(config: object) -> str:
    """Return YAML from which ``load_config`` reads an equal object."""
    text: str = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
    return text


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, MAX_CONFIG_BYTES)
        loader = _Loader(text)
        loader.name = str(path)
        data = loader.get_single_data()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: sections and lists are nested too deep") from None
    except TooLargeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date or number
        raise ConfigError(f"{path}: not readable as YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a {type(data).__name__}, but must hold keys and values")
    return data


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses repeated keys and keys that are not single words. YAML loaders
    usually keep the last of two equal keys, which may not be the one that was meant."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            where = f"{self.name}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{where}: a key is a {key.id}, but must be a single word")
            if key.value in keys:
                raise ConfigError(
                    f"{where}: key {_shortened.repr(key.value)} stands there twice; keep one"
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def _put(data: dict[str, Any], keys: list[str], value: object) -> None:
    for key in keys[:-1]:
        section = data.get(key)
        data = data.setdefault(key, {}) if section is None else section
    data[keys[-1]] = value


def _remove_key(data: dict[str, Any], keys: list[str]) -> bool:
    """Remove a key from the data of a file, and return whether it was there."""
    section: Any = data
    for key in keys[:-1]:
        section = section.get(key)
        if not isinstance(section, dict):
            return False
    has_key = keys[-1] in section
    section.pop(keys[-1], None)
    return has_key


_hints: Any = cache(typing.get_type_hints)


def build(kind: type[_Config], data: object, source: str, place: str = "") -> _Config:
    """Return the dataclass ``kind`` made of plain data.

    ``source`` and ``place`` (a dotted key) locate the data in error messages. Raises
    ``ConfigError``."""
    where = f"{source}: {place}" if place else source
    if data is None:
        data = {}
    if not isinstance(data, dict):
        shown = _shortened.repr(data)
        raise ConfigError(f"{where} is {shown}, but must be a section of keys and values")
    hints = _hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type] # a dataclass
    values = {}
    for key in data:
        if key not in known:
            raise ConfigError(f"{where}: {_explain_unknown(kind, str(key), tuple(known))}")
    for key, value in data.items():
        below = f"{place}.{key}" if place else key
        converted = values[key] = _convert(hints[key], value, source, below)
        # Only a key whose default is infinite, which means no limit, may be infinite.
        if isinstance(converted, float) and not math.isfinite(converted):
            if converted != known[key].default:
                raise _make_error(source, below, converted, "a finite number")
    for name, field in known.items():
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if not (has_default or name in values):
            raise ConfigError(f"{where}: key {name!r} is missing")
    try:
        return kind(**values)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{source}: {place + '.' if place else ''}{error}") from None


def _explain_unknown(kind: type[Any], key: str, known: tuple[str, ...]) -> str:
    """Return what is wrong with a key that a section does not have, and what would be right."""
    if instead := REFUSED.get(kind.__name__, {}).get(key):
        return f"key {key!r} is gone; {instead}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return f"unknown key {_shortened.repr(key)}; {hint}"


def _convert(hint: Any, value: object, source: str, place: str) -> Any:
    if is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), value, source, place)
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        kinds = [a for a in arguments if a is not types.NoneType]
        lists = [a for a in kinds if typing.get_origin(a) is tuple]
        if len(kinds) > 1 and isinstance(value, list | tuple):
            kinds = lists
        return _convert(kinds[0], value, source, place)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _make_error(source, place, value, "a list")
        return tuple(_convert(arguments[0], item, source, place) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _make_error(source, place, value, "keys and values")
        key_hint, item_hint = arguments
        return {
            _convert(key_hint, key, source, place): _convert(
                item_hint, item, source, f"{place}.{key}"
            )
            for key, item in value.items()
        }
    return _convert_scalar(hint, value, source, place)


def _convert_scalar(hint: Any, value: object, source: str, place: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            known = ", ".join(member.value for member in hint)
            raise _make_error(source, place, value, f"one of {known}") from None
    if hint in (bool, int) and type(value) is hint:
        return value
    if hint is float and not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):  # YAML 1.1 takes 1e-3 for text
            return float(value)  # type: ignore[arg-type] # the error is suppressed
    if hint is str and isinstance(value, str):
        if not is_unicode(value):
            raise _make_error(source, place, value, "text that UTF-8 can hold")
        return value
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    raise _make_error(source, place, value, words.get(hint, "left out"))


def _make_error(source: str, place: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{source}: {place} is {_shortened.repr(value)}, but must be {wanted}")


def plain(value: object) -> Any:
    """Return ``value`` as mappings, lists and scalars, as YAML holds it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value
