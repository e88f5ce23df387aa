"""A plausible mistake, and what is enough to notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Patches = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    apply: Patches
    seeds: int
    """Random worlds that are enough to notice it (measured, and then some)."""
    scene: Callable[[], None] | None = None
    """The test that notices what costs time and changes no text; then no worlds are needed."""


def patch(owner: Any, name: str, mutant: Any) -> Patches:
    """Puts ``mutant`` in the place of an attribute."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, mutant)
