"""Plausible mistakes in the product, which a test's oracle has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

Mistake = TypeVar("Mistake", bound=Callable[..., Any])


class Mutants:
    """By name, in the order in which they were written down."""

    def __init__(self) -> None:
        self._places: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {}
        self.seeds: dict[str, int] = {}
        """How many random worlds are enough to notice it (measured, and then some)."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def of(
        self, owner: Any, method: str, *, seeds: int = 1, name: str = ""
    ) -> Callable[[Mistake], Mistake]:
        """The function below is a mistake of ``owner.method``: it is handed the true one, and then
        what that is called with. Two of one ``name`` are made together."""

        def add(mistake: Mistake) -> Mistake:
            true, key = getattr(owner, method), name or mistake.__name__
            places = self._places.setdefault(key, [])
            places.append((owner, method, lambda *given, **named: mistake(true, *given, **named)))
            self.seeds[key] = seeds
            return mistake

        return add

    def make(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for place in self._places[name]:
            monkeypatch.setattr(*place)
