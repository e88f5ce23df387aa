"""Options of a bench about how its arm ``edgespec`` drafts, and what it sets by them."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.bench.settings import BenchSettings
from edgespec.config import AgentConfig, DraftSection, PolicyName, PolicySection
from edgespec.core.device.preference import Prefer

Leaves = Annotated[
    int,
    typer.Option(
        "--leaves",
        help="Nodes that a draft step of the arm edgespec may run behind",
        rich_help_panel="What is compared",
    ),
]
Policy = Annotated[
    PolicyName,
    typer.Option(
        help="By which the arm edgespec drafts (see `edgespec generate --help`)",
        rich_help_panel="What is compared",
    ),
]
PreferOption = Annotated[
    Prefer,
    typer.Option(
        "--prefer",
        help="What its drafts have to be worth: rest where they bring less",
        rich_help_panel="What is compared",
    ),
]
DraftRowMs = Annotated[
    float,
    typer.Option(
        help="Of each of a step's leaves after the first", rich_help_panel="Emulated times"
    ),
]


def drafting_as(settings: BenchSettings, draft: str) -> AgentConfig:
    """A device with the paces of ``settings``; a step that takes what it takes has rows that do."""
    row_ms = settings.row_ms if settings.draft_ms else 0.0
    return AgentConfig(
        draft=DraftSection(model=draft, draft_ms=settings.draft_ms, row_ms=row_ms),
        policy=PolicySection(leaves=settings.leaves),
    )
