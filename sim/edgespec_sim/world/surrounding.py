"""What a world of a scenario is built from besides the scenario itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec_sim.association import Choice
from edgespec_sim.token_sources.source import TokenSource


@dataclass(frozen=True, slots=True)
class Surrounding:
    """The token source, the association and the checks that all arms of a comparison share."""

    source: TokenSource
    association: Choice
    folder: Path
    """Where relative file names of the scenario start."""
    checks: bool = True
    """Whether the laws of ``conservation.py`` are judged while the world is played."""
