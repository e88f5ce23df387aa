"""What every key of a configuration is for, read from where it is declared.

The text below a field of a configuration's dataclass is its documentation everywhere: in the
source, in ``--help``, in ``--help-all``. The first sentence has to do for ``--help``.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


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


def documented_keys(kind: type[Any]) -> dict[str, Key]:
    """All keys of the dataclass ``kind`` and its sections, in the order of their declaration."""
    found: dict[str, Key] = {}
    _walk(kind, kind(), "", found)
    return found


def _walk(kind: type[Any], defaults: object, place: str, found: dict[str, Key]) -> None:
    texts, hints = _field_texts(kind), typing.get_type_hints(kind)
    for field in fields(kind):
        name, default = place + field.name, getattr(defaults, field.name)
        hint = hints[field.name]
        if is_dataclass(hint):
            _walk(typing.cast("type[Any]", hint), default, f"{name}.", found)
        else:
            found[name] = Key(name, hint, default, texts.get(field.name, ""))


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
