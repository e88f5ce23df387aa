"""A check that a value is present."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def require(value: T | None) -> T:
    """Return ``value``, which must not be None."""
    assert value is not None
    return value
