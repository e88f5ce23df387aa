"""Dataclasses to what JSON holds, and back by the types of their fields."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


def plain(value: Any) -> Any:
    """``value`` as dicts, lists, numbers and texts, floats to a millionth."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Enum):
        return value.value
    return round(value, 6) if isinstance(value, float) else value


def made(kind: type[_T], data: Any) -> _T:
    """The dataclass ``kind`` of a JSON object. Raises ``TypeError``, ``ValueError``."""
    found: _T = _made(kind, data, "")
    return found


_hints = cache(get_type_hints)


def _made(kind: Any, data: Any, place: str) -> Any:
    inside = get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(data, dict):
        hints = _hints(kind)
        if unknown := data.keys() - hints.keys():
            raise ValueError(f"{place}.{min(unknown)} is not known".lstrip("."))
        return kind(
            **{name: _made(hints[name], one, f"{place}.{name}") for name, one in data.items()}
        )
    if isinstance(kind, types.UnionType):
        return None if data is None else _made(inside[0], data, place)
    if get_origin(kind) is tuple and isinstance(data, list):
        return tuple(_made(inside[0], one, place) for one in data)
    if get_origin(kind) is dict and isinstance(data, dict):
        return {key: _made(inside[1], one, f"{place}.{key}") for key, one in data.items()}
    if kind is float and type(data) is int:
        return float(data)
    if kind is not Any and type(data) is not kind:
        wanted = getattr(kind, "__name__", str(kind))
        raise TypeError(f"{place.lstrip('.')} is {str(data)[:80]!r}, but must be {wanted}")
    return data
