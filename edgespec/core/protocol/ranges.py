"""The one check of a number against its range, with the one wording of the error."""

from __future__ import annotations


def bounded(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """The value lies in [low, high], or in (low, high] where ``open_low``.

    Raises ``ValueError`` with the name, the value and the range; NaN lies in no range.
    """
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} is {value}, but must be in {bracket}{low}, {high}]")
