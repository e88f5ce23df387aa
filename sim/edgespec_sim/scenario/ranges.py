"""Checks of scenario values; every message names the key, the value and the range."""

from __future__ import annotations


def bounded(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also catches NaN
        raise ValueError(f"{name} is {value:g}, but must be in [{low:g}, {high:g}]")


def exactly_one(what: str, given: dict[str, bool]) -> None:
    chosen = [name for name, is_given in given.items() if is_given]
    if len(chosen) != 1:
        said = " and ".join(chosen) if chosen else "none of them"
        raise ValueError(f"{what} needs exactly one of {', '.join(given)}, but names {said}")
