"""The meaning of the columns of a table, as a user names it: ``QUANTITY=COLUMN:UNIT,...``.

A COLUMN is a name of the header, or the number of the column from 1, with a header or without one.
It may contain blanks, commas and colons: a comma separates two columns only if a quantity and ``=``
follow, and the unit is what stands behind the last colon, if it is a unit of that quantity.

    time=Timestamp:s,rtt=delay:ms,down=DL_bitrate:kbit/s

The quantities decide what the table is: a network, a workload or the movement of devices. A
quantity with its unit in its name, such as ``rtt_ms=delay``, means ``rtt=delay:ms``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from edgespec_sim.links.signal_quality import parse_quality_unit


class TableKind(Enum):
    """The subject of a table."""

    NETWORK = "network"
    WORKLOAD = "workload"
    MOBILITY = "mobility"


DATE: Final = "date"
"""The unit of a time that is a date and a time of day in ISO 8601."""
_SECONDS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_RATES: Final = {
    **{"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9},
    **{"bps": 1.0, "kbps": 1e3, "Mbps": 1e6, "mbps": 1e6, "Gbps": 1e9},
    **{"B/s": 8.0, "kB/s": 8e3, "MB/s": 8e6},
}
_METRES: Final = {"m": 1.0, "km": 1e3}
_UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "time": {**_SECONDS, DATE: 1.0},
    "rtt": _SECONDS,
    "loss": {"share": 1.0, "%": 1e-2, "percent": 1e-2},
    "up": _RATES,
    "down": _RATES,
    "prompt": {"tokens": 1.0},
    "output": {"tokens": 1.0},
    "device": {"name": 1.0},
    "x": _METRES,
    "y": _METRES,
    "lat": {"deg": 1.0},
    "lon": {"deg": 1.0},
}
"""For each quantity its units, in seconds, shares, bits per second, tokens, metres or degrees."""
_DEFAULTS: Final = {
    **{"time": DATE, "loss": "share", "prompt": "tokens", "output": "tokens", "device": "name"},
    **{"x": "m", "y": "m", "lat": "deg", "lon": "deg"},
}
"""Units that may be left out. A delay and a capacity need theirs."""
_WITH_UNIT: Final[Mapping[str, tuple[str, str]]] = {
    **{f"{what}_{unit}": (what, unit) for what in ("time", "rtt") for unit in _SECONDS},
    "loss_percent": ("loss", "%"),
    **{
        f"{what}_{unit}": (what, unit)
        for what in ("up", "down")
        for unit in ("bps", "kbps", "mbps")
    },
}
"""Quantities with the unit in their name."""
_KINDS: Final[Mapping[TableKind, frozenset[str]]] = {
    TableKind.NETWORK: frozenset({"rtt", "loss", "up", "down"}),
    TableKind.WORKLOAD: frozenset({"prompt", "output"}),
    TableKind.MOBILITY: frozenset({"device", "x", "y", "lat", "lon"}),
}
EXAMPLE: Final = "--columns time=NAME:s,rtt=NAME:ms,down=NAME:Mbit/s"
_EXAMPLES: Final[Mapping[TableKind, str]] = {
    TableKind.NETWORK: EXAMPLE,
    TableKind.WORKLOAD: "--columns time=NAME:s,prompt=NAME,output=NAME",
    TableKind.MOBILITY: "--columns time=NAME:s,device=NAME,x=NAME:m,y=NAME:m",
}
_SEPARATOR: Final = re.compile(r",(?=\s*\w+\s*=)")


@dataclass(frozen=True, slots=True)
class ColumnUse:
    """One column and its meaning."""

    what: str
    """The quantity without its unit, such as ``rtt``."""
    column: str
    """Name or number of the column."""
    unit: str

    @property
    def factor(self) -> float:
        """The factor that turns a value into seconds, shares, bits per second, tokens, metres or
        degrees. It is 1 for signal qualities, which ``quality`` converts."""
        return _UNITS[self.what].get(self.unit, 1.0)

    @property
    def quality(self) -> Callable[[float], float] | None:
        """The function from a signal quality to bits per second; None for other units."""
        return parse_quality_unit(self.unit) if self.what in ("up", "down") else None

    @property
    def is_date(self) -> bool:
        return self.unit == DATE


@dataclass(frozen=True, slots=True)
class Columns:
    """The meaning of a table's columns, each quantity at most once."""

    uses: tuple[ColumnUse, ...]

    @classmethod
    def of(cls, text: str, kind: TableKind | None = None) -> Columns:
        """Parse ``QUANTITY=COLUMN:UNIT,...`` for a table of a ``kind``, or of any.

        Raises ``ValueError`` that names what is wrong, and what would be right."""
        uses = tuple(_parse_use(item) for item in _SEPARATOR.split(text))
        for use in uses:
            count = sum(other.what == use.what for other in uses)
            if count > 1:
                raise ValueError(f"--columns names {count} columns for {use.what}")
        found = cls(uses)
        found._check(text, kind or found.kind)
        return found

    @property
    def kind(self) -> TableKind:
        """The subject of a table with these columns."""
        named = {use.what for use in self.uses}
        return next(
            (kind for kind in (TableKind.MOBILITY, TableKind.WORKLOAD) if named & _KINDS[kind]),
            TableKind.NETWORK,
        )

    def find(self, what: str) -> ColumnUse | None:
        """Return the column of a quantity. None if it is not named."""
        return next((use for use in self.uses if use.what == what), None)

    def _check(self, text: str, kind: TableKind) -> None:
        named = {use.what for use in self.uses}
        example = _EXAMPLES[kind]
        for use in self.uses:
            if use.what != "time" and use.what not in _KINDS[kind]:
                raise ValueError(
                    f"--columns is {text!r}, but {use.what} is no quantity of a {kind.value}:"
                    f" {example}"
                )
        if kind is TableKind.NETWORK and not {"rtt", "up", "down"} & named:
            raise ValueError(
                f"--columns is {text!r}, but must name a delay or a capacity: {example}"
            )
        if kind is TableKind.MOBILITY and not ({"x", "y"} <= named) ^ ({"lat", "lon"} <= named):
            raise ValueError(
                f"--columns is {text!r}, but must name x and y, or lat and lon: {example}"
            )


def _parse_use(item: str) -> ColumnUse:
    quantity, _, column = item.partition("=")
    quantity, column = quantity.strip(), column.strip()
    if quantity in _WITH_UNIT and column:
        what, unit = _WITH_UNIT[quantity]
        return ColumnUse(what, column, unit)
    if quantity not in _UNITS or not column:
        raise ValueError(
            f"--columns has {item!r}, but must be QUANTITY=COLUMN:UNIT with a quantity of"
            f" {', '.join(_UNITS)} (such as {EXAMPLE})"
        )
    name, _, unit = column.rpartition(":")
    if name and _is_unit(quantity, unit.strip()):
        return ColumnUse(quantity, name.strip(), unit.strip())
    if quantity in _DEFAULTS:
        return ColumnUse(quantity, column, _DEFAULTS[quantity])
    units = ", ".join(_UNITS[quantity])
    if quantity in ("up", "down"):
        units += ", cqi@20MHz, dB@20MHz"
    raise ValueError(
        f"--columns has {item!r}, but {quantity} needs a unit: {quantity}={column}:UNIT with one of"
        f" {units}"
    )


def _is_unit(quantity: str, unit: str) -> bool:
    is_quality = quantity in ("up", "down") and parse_quality_unit(unit) is not None
    return unit in _UNITS[quantity] or is_quality


def columns_of_header(
    names: list[str], known: Mapping[str, tuple[str, str]]
) -> dict[str, ColumnUse]:
    """Return the columns whose names alone say what they are, by quantity. ``known`` has more such
    names, with quantity and unit."""
    found: dict[str, ColumnUse] = {}
    for name in names:
        meaning = known.get(name) or _WITH_UNIT.get(name)
        if meaning is None and name == "loss":
            meaning = (name, _DEFAULTS[name])
        if meaning is not None:
            found.setdefault(meaning[0], ColumnUse(meaning[0], name, meaning[1]))
    return found
