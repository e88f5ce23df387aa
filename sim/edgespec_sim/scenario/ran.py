"""A verifier's GPU that a radio access network shares (AI-RAN): which share it takes when, and how
long work then takes.

Theory of operation. The network goes first, since its slots have deadlines. A share s of the GPU
that it takes slows a pass down by 1 / (1 - s) while it lasts. So a pass that needs w seconds of the
whole GPU ends when the free share, summed over time, has reached w. The course is a day's curve
(hourly shares, interpolated), with bursts on it, or a table from a file, which repeats.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from edgespec.config.files import open_to_read
from edgespec.core.link_model import CapacitySchedule
from edgespec.core.protocol.checks import Section, check_limits, range_field
from edgespec_sim.links.network_trace import TraceError, find_file

_HOURS: Final = 24
_DAY_S: Final = 86_400.0
_STEPS_PER_HOUR: Final = 12
"""Steps of a day's curve, whose share is constant for five minutes of the day."""
MAX_SHARE: Final = 0.95
"""Most of the GPU that the network may take. With all of it no pass would ever end."""
MAX_ROWS: Final = 1_000_000
MAX_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class RanSection(Section):
    """A radio access network on the verifier's GPU. Its share is a day's curve with bursts on it,
    or the course of a ``file``. All arms meet the same course."""

    shares: tuple[float, ...] = range_field((), 0.0, MAX_SHARE)
    """Share of the GPU at 0 h, 1 h, ... 23 h, interpolated linearly; the day repeats. A list
    of one number stands for the whole day."""
    compress: float = range_field(1.0, 1.0, _DAY_S)
    """Seconds of the day that pass in one second of the world."""
    starts_at_h: float = range_field(0.0, 0.0, 24.0)
    """Hour of the day at which the world begins."""
    bursts_per_s: float = range_field(0.0, 0.0, 1000.0)
    """Mean number of bursts of traffic per second (Poisson)."""
    burst_ms: float = range_field(50.0, 0.01, 3_600_000.0)
    """Mean length of a burst, exponential."""
    burst_share: float = range_field(0.0, 0.0, MAX_SHARE)
    """Share of the GPU that a burst takes on top of the day's curve. Together they take at most
    0.95."""
    file: str = ""
    """CSV file with ``time_s`` and ``share``, in place of ``shares``. Each share holds until the
    next row. The course repeats after the last row, which lasts as long as the row before it."""

    def __post_init__(self) -> None:
        check_limits(self)
        if bool(self.shares) == bool(self.file):
            given = "both" if self.file else "none of them"
            raise ValueError(f"ran needs exactly one of shares and file, but names {given}")
        if self.shares and len(self.shares) not in (1, _HOURS):
            raise ValueError(f"shares has {len(self.shares)} numbers, but must have 1 or {_HOURS}")
        if bool(self.bursts_per_s) != bool(self.burst_share):
            raise ValueError(
                f"bursts_per_s is {self.bursts_per_s:g} and burst_share {self.burst_share:g}, but"
                " both must be above 0, or neither"
            )

    @property
    def about(self) -> str:
        """Description of the course for a report."""
        what = f"the course of {self.file}"
        if len(self.shares) == 1:
            what = f"{self.shares[0]:.0%} of it all day"
        elif self.shares:
            what = f"{min(self.shares):.0%} to {max(self.shares):.0%} of it over the day"
        if self.bursts_per_s:
            what += (
                f", and {self.burst_share:.0%} more in bursts of {self.burst_ms:g} ms,"
                f" {self.bursts_per_s:g} a second"
            )
        return what


class RanCapacity:
    """The part of a GPU that a radio access network leaves free, over time."""

    def __init__(self, free: CapacitySchedule) -> None:
        self._free = free

    @classmethod
    def draw(cls, section: RanSection, until_s: float, seed: str, folder: Path) -> RanCapacity:
        """Return the capacity for a world that ends at ``until_s`` at the latest.

        ``folder`` is the base of a relative file name. Raises ``TraceError``, and ``ValueError`` if
        the course has too many steps."""
        steps: _Steps
        period_s: float | None
        if section.file:
            path = find_file(section.file, folder)
            try:
                state = path.stat()
            except OSError as error:
                raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
            steps, period_s = read_shares(path, (state.st_mtime_ns, state.st_size))
        else:
            steps, period_s = _day_steps(section)
        if section.bursts_per_s:
            steps, period_s = _add_bursts(section, steps, period_s, until_s, seed), None
        free = tuple((at_s, 1.0 - min(share, MAX_SHARE)) for at_s, share in steps)
        return cls(CapacitySchedule(free, period_s))

    def free_share(self, now_s: float) -> float:
        """Return the share of the GPU that is free at a time."""
        return self._free.value_at(now_s)

    def finish_s(self, start_s: float, work_s: float) -> float:
        """Return when work ends that starts at ``start_s`` and takes ``work_s`` of the whole
        GPU."""
        return start_s + self._free.duration_s(start_s, work_s)


_Steps = Sequence[tuple[float, float]]
"""Pairs of time in seconds and the share of the network from then on."""


def _day_steps(section: RanSection) -> tuple[_Steps, float | None]:
    """Return the steps of the day's curve and its period, on the world's clock."""
    shares = section.shares
    if len(set(shares)) == 1:
        return ((0.0, shares[0]),), None
    period_s = _DAY_S / section.compress
    count = _HOURS * _STEPS_PER_HOUR
    steps = []
    for index in range(count):
        # The share of a step is that of its middle.
        hour = (section.starts_at_h + (index + 0.5) / _STEPS_PER_HOUR) % _HOURS
        low, part = int(hour) % _HOURS, hour - int(hour)
        share = (1.0 - part) * shares[low] + part * shares[(low + 1) % _HOURS]
        steps.append((index * period_s / count, share))
    return steps, period_s


def _add_bursts(
    section: RanSection, steps: _Steps, period_s: float | None, until_s: float, seed: str
) -> _Steps:
    """Return the course up to ``until_s`` with bursts on it."""
    expected = 2.0 * section.bursts_per_s * until_s
    expected += len(steps) * (until_s / period_s if period_s else 1.0)
    if expected > MAX_ROWS:
        raise ValueError(
            f"ran has about {expected:.0f} changes in {until_s:g} s, but at most {MAX_ROWS} are"
            " played: fewer bursts_per_s, or a smaller compress"
        )
    dice = random.Random(seed)
    changes: list[tuple[float, int]] = []
    at_s = dice.expovariate(section.bursts_per_s)
    while at_s < until_s:
        changes += [(at_s, 1), (at_s + dice.expovariate(1e3 / section.burst_ms), -1)]
        at_s += dice.expovariate(section.bursts_per_s)
    base: list[tuple[float, float]] = []
    for turn in itertools.count():
        start_s = turn * (period_s or math.inf) if turn else 0.0
        if start_s > until_s:
            break
        base += [(start_s + step_s, share) for step_s, share in steps]
    events = sorted(
        [(time_s, share, 0) for time_s, share in base]
        + [(t, -1.0, change) for t, change in changes]
    )
    found: list[tuple[float, float]] = []
    share, bursts = base[0][1], 0
    for time_s, new_share, change in events:
        bursts += change
        share = share if change else new_share
        total = min(MAX_SHARE, share + (section.burst_share if bursts else 0.0))
        if found and found[-1][0] == time_s:
            found.pop()
        found.append((time_s, total))
    return found


@lru_cache(maxsize=8)
def read_shares(path: Path, state: tuple[int, int]) -> tuple[_Steps, float]:
    """Return the steps of a file and its period. ``state`` changes with the file.

    Raises ``TraceError`` that names the file, the line and the fault."""
    found: list[tuple[float, float]] = []
    if state[1] > MAX_BYTES:
        raise TraceError(f"{path}: {state[1]} bytes, but at most {MAX_BYTES} are read")
    try:
        with open_to_read(path) as file:
            rows = csv.DictReader(file)
            header = [name.strip() for name in rows.fieldnames or ()]
            if not {"time_s", "share"} <= set(header):
                raise TraceError(
                    f"{path}:1: the header is {','.join(header)!r}, but must have time_s and share"
                )
            rows.fieldnames = header
            for row in rows:
                where = f"{path}:{rows.line_num}"
                at_s = _read_number(row["time_s"], where, "time_s", math.inf)
                share = _read_number(row["share"], where, "share", MAX_SHARE)
                if len(found) == MAX_ROWS:
                    raise TraceError(f"{where}: more than {MAX_ROWS} rows, which is the limit")
                if found and at_s <= found[-1][0]:
                    raise TraceError(f"{where}: time_s is {at_s:g}, but must increase row by row")
                found.append((at_s, share))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: not readable as text: {error}") from error
    if len(found) < 2:
        raise TraceError(f"{path}: has {len(found)} rows, but a course needs at least 2")
    start_s, last_s = found[0][0], found[-1][0] - found[-2][0]
    steps = tuple((at_s - start_s, share) for at_s, share in found)
    return steps, steps[-1][0] + last_s


def _read_number(value: str | None, where: str, name: str, most: float) -> float:
    try:
        number = float(value or "")
    except ValueError:
        raise TraceError(f"{where}: {name} is {value!r}, but must be a number") from None
    if not (0.0 <= number <= most and math.isfinite(number)):
        limit = f"in [0, {most:g}]" if most < math.inf else "finite and at least 0"
        raise TraceError(f"{where}: {name} is {value!r}, but must be {limit}")
    return number
