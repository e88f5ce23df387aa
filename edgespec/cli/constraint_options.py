"""What ``edgespec generate`` holds its text to: options, and the files that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgespec.config import ConfigError
from edgespec.config.bounded_file import read_text
from edgespec.core.protocol.constraint import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind

_PANEL = "Sampling"
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        help="The text is JSON that fits this schema (the verifier needs edgespec\\[grammar])",
        rich_help_panel=_PANEL,
    ),
]
Grammar = Annotated[
    Path | None,
    typer.Option(
        "--grammar",
        metavar="FILE",
        help="The text is one of this grammar, in Lark's notation as llguidance takes it",
        rich_help_panel=_PANEL,
    ),
]


def constraint_of(json_schema: Path | None, grammar: Path | None) -> Constraint | None:
    """What the options ask for; None: nothing. Raises ``ConfigError``, ``OSError``."""
    if json_schema is not None and grammar is not None:
        raise ConfigError("--json-schema and --grammar are both given, but a text is held to one")
    if json_schema is not None:
        return _read(json_schema, ConstraintKind.JSON_SCHEMA)
    return None if grammar is None else _read(grammar, ConstraintKind.GRAMMAR)


def _read(path: Path, kind: ConstraintKind) -> Constraint:
    try:
        return Constraint(kind, read_text(path, MAX_CONSTRAINT_BYTES))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
