"""What a link does over time, as steps: delay, loss, capacity, outages.

Theory of operation. A ``StepSchedule`` is a piecewise constant function of time: each step holds
until the next one, the first one also before its time. ``period_s`` repeats it from 0 on, which is
how a recorded trace is played for longer than it lasted. Its kinds differ in the values that go.
``CapacitySchedule`` can also be integrated: how long bits take that start at a given time.
``OutageSchedule`` holds intervals instead, [start, end), in which nothing passes.

All are immutable, so one trace's schedules serve any number of links, each at its own offset.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass, field
from typing import ClassVar, Final

_MAX_STEPS: Final = 1_000_000
_MAX_OUTAGES: Final = 10_000


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """Steps (time_s, value); the names and bounds of the value are the subclass's."""

    steps: tuple[tuple[float, float], ...]
    period_s: float | None = None
    _times_s: list[float] = field(init=False, repr=False, compare=False)

    value_name: ClassVar[str] = "value"

    def __post_init__(self) -> None:
        if not 1 <= len(self.steps) <= _MAX_STEPS:
            raise ValueError(f"a schedule has {len(self.steps)} steps, but 1 to {_MAX_STEPS} go")
        times_s = [time_s for time_s, _ in self.steps]
        if any(later <= earlier for earlier, later in itertools.pairwise(times_s)):
            raise ValueError("the times of a schedule must increase from step to step")
        for time_s, value in self.steps:
            self._check(f"{self.value_name} at {time_s} s", value)
        if self.period_s is not None and not self.period_s > times_s[-1]:
            raise ValueError(f"period_s is {self.period_s}, but must be above {times_s[-1]}")
        object.__setattr__(self, "_times_s", times_s)

    def _check(self, name: str, value: float) -> None:
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} is {value}, but must be finite and not negative")

    def at(self, time_s: float) -> float:
        if self.period_s is not None:
            time_s %= self.period_s
        index = bisect.bisect_right(self._times_s, time_s)
        return self.steps[index - 1 if index else 0][1]


@dataclass(frozen=True, slots=True)
class DelaySchedule(StepSchedule):
    """One-way delay over time, in seconds."""

    value_name: ClassVar[str] = "one_way_s"

    def one_way_s(self, time_s: float) -> float:
        return self.at(time_s)


@dataclass(frozen=True, slots=True)
class LossSchedule(StepSchedule):
    """Probability over time that a packet is lost, each time it is sent."""

    value_name: ClassVar[str] = "loss"

    def _check(self, name: str, value: float) -> None:
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} is {value}, but must be in [0, 1)")


@dataclass(frozen=True, slots=True)
class CapacitySchedule(StepSchedule):
    """Capacity over time, in bits per second."""

    value_name: ClassVar[str] = "bits_per_s"

    def _check(self, name: str, value: float) -> None:
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} is {value}, but must be finite and above 0")

    def duration_s(self, start_s: float, bits: float) -> float:
        """How long ``bits`` take that start to leave at ``start_s``: the end of the interval from
        there on over which the capacity integrates to ``bits``."""
        steps, period_s = self.steps, self.period_s
        phase_s = start_s if period_s is None else start_s % period_s
        index = max(bisect.bisect_right(self._times_s, phase_s) - 1, 0)
        passed_s = 0.0
        while True:
            rate = steps[index][1]
            last = index + 1 == len(steps)
            # The value of the first step holds before it, so the last one's ends with the period.
            end_s = (math.inf if period_s is None else period_s) if last else steps[index + 1][0]
            if bits <= rate * (end_s - phase_s):
                return passed_s + bits / rate
            bits -= rate * (end_s - phase_s)
            passed_s += end_s - phase_s
            index, phase_s = (0, 0.0) if last else (index + 1, end_s)


@dataclass(frozen=True, slots=True)
class OutageSchedule:
    """Intervals [start, end) in which nothing leaves; in order, apart from one another."""

    intervals_s: tuple[tuple[float, float], ...]
    period_s: float | None = None
    _ends_s: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.intervals_s) > _MAX_OUTAGES:
            raise ValueError(f"{len(self.intervals_s)} outages, but at most {_MAX_OUTAGES} go")
        previous_end_s = -math.inf if self.period_s is None else 0.0
        last_s = math.inf if self.period_s is None else self.period_s
        for start_s, end_s in self.intervals_s:
            if not previous_end_s <= start_s < end_s < math.inf or end_s > last_s:
                raise ValueError(f"outage ({start_s}, {end_s}) is empty or not in order")
            previous_end_s = end_s
        out_s = sum(end_s - start_s for start_s, end_s in self.intervals_s)
        if self.period_s is not None and not out_s < self.period_s:
            raise ValueError(f"the outages last all of period_s = {self.period_s}")
        object.__setattr__(self, "_ends_s", [end_s for _, end_s in self.intervals_s])

    def next_after(self, time_s: float) -> tuple[float, float] | None:
        """The outage that holds at ``time_s`` or else comes next; None: there is none."""
        if not self.intervals_s:
            return None
        base_s = 0.0
        if self.period_s is not None:
            base_s = math.floor(time_s / self.period_s) * self.period_s
        index = bisect.bisect_right(self._ends_s, time_s - base_s)
        if index == len(self._ends_s):
            if self.period_s is None:
                return None
            index, base_s = 0, base_s + self.period_s
        start_s, end_s = self.intervals_s[index]
        return base_s + start_s, base_s + end_s
