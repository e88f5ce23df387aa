"""Tests whose cases stand in ``tables.yaml`` beside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

Test = TypeVar("Test", bound=Callable[..., Any])


@cache
def _tables(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def tabled(test: Test) -> Test:
    """The test for each of its cases; lists of the file are tuples here."""
    table = _tables(Path(inspect.getfile(test)).with_name("tables.yaml"))[test.__name__]
    marked: Test = pytest.mark.parametrize(table["names"], list(_frozen(table["cases"])))(test)
    return marked


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(one) for key, one in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
