"""What a device meets beside its own drafting: battery, heat, other programs, memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from edgespec.core.device.memory import SMALLEST_WINDOW
from edgespec.core.protocol.checks import bounded

MOST_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class ConditionSection:
    """What holds from ``at_s`` on. What is left out stays as the row before said, or is not known;
    a device says as little about itself where it has no such sensor."""

    at_s: float
    battery: float | None = None
    """Charge from 0 to 1, of a battery that is being emptied."""
    celsius: float | None = None
    """Of the hottest sensor."""
    others_load: float | None = None
    """Share of all cores that other programs use. It is what the device reads, and slows nothing
    down by itself: that is ``slowdown``."""
    resident_mib: float | None = None
    """What the agent's process holds beside the draft's keys and values."""
    slowdown: float | None = None
    """How many times as long draft steps take, under every arm that drafts."""

    def __post_init__(self) -> None:
        bounded("at_s", self.at_s, 0.0, 1e6)
        for name, value, low, high in (
            ("battery", self.battery, 0.0, 1.0),
            ("celsius", self.celsius, -50.0, 150.0),
            ("others_load", self.others_load, 0.0, 1.0),
            ("resident_mib", self.resident_mib, 0.0, 1e6),
            ("slowdown", self.slowdown, 0.01, 100.0),
        ):
            if value is not None:
                bounded(name, value, low, high)


@dataclass(frozen=True, slots=True)
class ConditionsSection:
    """A course of conditions, and the memory budget that the device's governor keeps. The arm
    ``edgespec`` walks the product's ladder on it; the others draft as their papers say."""

    course: tuple[ConditionSection, ...] = ()
    """Rows in order of time, the first of them at 0; the last one holds to the end."""
    file: str = ""
    """The same, recorded: CSV with a header of ``at_s`` and any of the other names."""
    spread_s: float = 0.0
    """Device i of the group meets everything i times so much later, and the first row until then.
    """
    budget_mib: float | None = None
    """What the process may hold; null: no budget. ``resident_mib`` of the course counts in it."""
    window: int = 4096
    """Tokens whose keys and values the draft holds at most, with a budget."""
    token_kib: float = 112.0
    """What those of one token take: 28 layers of 8 heads of 128 in float16, as Qwen3-0.6B has."""

    def __post_init__(self) -> None:
        if bool(self.course) == bool(self.file):
            said = "both are given" if self.file else "neither is given"
            raise ValueError(f"conditions take either course or file, but {said}")
        check_order(self.course)
        bounded("spread_s", self.spread_s, 0.0, 1e6)
        bounded("window", self.window, SMALLEST_WINDOW, 1 << 20)
        bounded("token_kib", self.token_kib, 1e-3, 1e5)
        if self.budget_mib is not None:
            bounded("budget_mib", self.budget_mib, 1.0, 1e6)


def check_order(course: tuple[ConditionSection, ...]) -> None:
    """Raises ``ValueError`` unless rows begin at 0 and each is later than the one before."""
    if len(course) > MOST_ROWS:
        raise ValueError(f"course has {len(course)} rows, but at most {MOST_ROWS} go")
    if course and course[0].at_s != 0.0:
        raise ValueError(f"course begins at {course[0].at_s:g} s, but must begin at 0")
    for before, after in itertools.pairwise(course):
        if after.at_s <= before.at_s:
            raise ValueError(f"course has {after.at_s:g} s behind {before.at_s:g} s")
