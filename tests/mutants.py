"""Plausible mistakes in the product, which a test's oracle has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

Mistake = TypeVar("Mistake", bound=Callable[..., Any])


class Mutants:
    """Mistakes by name, in the order of their definitions."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Any, str, Callable[..., Any]]] = {}
        self.seeds: dict[str, int] = {}
        """The number of random worlds that find the mistake: a measured number and a margin."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def of(self, owner: Any, method: str, *, seeds: int = 1) -> Callable[[Mistake], Mistake]:
        """Register the decorated function as a mistake of ``owner.method``. The function receives
        the true method, and then that method's arguments."""

        def add(mistake: Mistake) -> Mistake:
            true, name = getattr(owner, method), mistake.__name__
            made = lambda *given, **named: mistake(true, *given, **named)  # noqa: E731
            self._places[name], self.seeds[name] = (owner, method, made), seeds
            return mistake

        return add

    def make(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(*self._places[name])
