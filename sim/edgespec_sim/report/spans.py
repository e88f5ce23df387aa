"""The parts of a timeline, and how spans that overlap share a lane."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

Args = dict[str, int | float | str]


class Lane(Enum):
    """What a span of time went on, in the order a token meets them."""

    DRAFT = "draft"
    UPLINK = "uplink"
    QUEUE = "queue"
    PASS = "pass"
    DOWNLINK = "downlink"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Span:
    session: str
    lane: Lane
    start_s: float
    end_s: float
    """At least ``start_s``."""
    name: str
    args: Args = field(default_factory=dict)
    """What a reader may want to know: tokens, rows, accepted."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that took no time: a correction, a lost link, a reconnect, the end."""

    session: str
    at_s: float
    name: str
    args: Args = field(default_factory=dict)


class CrossingKey(NamedTuple):
    """What both ends of a message's way agree on."""

    session: str
    lane: Lane
    number: int
    """First node id or position."""
    size: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """One end of a message's way over the link, on the clock of that end."""

    at_s: float
    name: str
    args: Args = field(default_factory=dict)


def rows_apart(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with a row number, such that spans of one session, lane and row do not overlap;
    the lowest free row is taken. ``spans`` by start."""
    ends: dict[tuple[str, Lane], list[float]] = {}
    for span in spans:
        rows = ends.setdefault((span.session, span.lane), [])
        row = next((i for i, end_s in enumerate(rows) if end_s <= span.start_s), len(rows))
        if row == len(rows):
            rows.append(span.end_s)
        rows[row] = span.end_s
        yield row, span
