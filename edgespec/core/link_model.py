"""When does a message arrive? One direction of a link, as arithmetic.

Theory of operation. A message of a given size goes through four stages, kept apart because mixing
them up is the classical error of link simulators:

    outage         nothing starts or continues to leave while the link is out; messages wait
    serialisation  size / bandwidth on a ``SharedQueue``, first come first served; links that share
                   a queue (one cell, one uplink) share its bandwidth and never each get all of it
    propagation    one-way delay, constant or from a ``DelaySchedule``, plus jitter
    loss           a lost message is sent again by the transport below: it is late, never missing

and is released in order: never before the message handed over ahead of it (one TCP connection).

Pure: no clock, no I/O; ``now_s`` has to be non-decreasing from call to call. Equal seeds and equal
calls give equal results: chance is the counter-based hash of ``core/noise.py`` over (seed, number
of the message, purpose), so changing one impairment leaves the other's numbers alone.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

from edgespec.core.noise import noise_bits

# Linux does not retransmit on time-out earlier (TCP_RTO_MIN, RFC 6298 asks for 1 s).
MIN_RETRANSMIT_S: Final = 0.2
_MAX_RETRANSMITS: Final = 6
_PACKET_BYTES: Final = 1400
_MAX_OUTAGES: Final = 10_000
_MAX_STEPS: Final = 1_000_000
# What a draw is for: the hash's third argument.
_JITTER: Final = 0
_LOSS: Final = 1


class JitterLaw(Enum):
    """How the delay beyond ``one_way_s`` is spread; ``jitter_s`` is its mean in both."""

    UNIFORM = "uniform"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True)
class DelaySchedule:
    """One-way delay over time: steps (time_s, one_way_s), each valid until the next one.

    Before the first step its value holds. ``period_s`` repeats the steps.
    """

    steps: tuple[tuple[float, float], ...]
    period_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.steps) <= _MAX_STEPS:
            raise ValueError(f"a schedule has {len(self.steps)} steps, but 1 to {_MAX_STEPS} go")
        times = [time_s for time_s, _ in self.steps]
        if any(later <= earlier for earlier, later in itertools.pairwise(times)):
            raise ValueError("the times of a schedule must increase from step to step")
        for time_s, one_way_s in self.steps:
            _at_least_0(f"one_way_s at {time_s} s", one_way_s)
        if self.period_s is not None and not self.period_s > times[-1]:
            raise ValueError(f"period_s is {self.period_s}, but must be above {times[-1]}")

    def one_way_s(self, time_s: float) -> float:
        if self.period_s is not None:
            time_s %= self.period_s
        index = bisect.bisect_right(self.steps, time_s, key=lambda step: step[0])
        return self.steps[max(index - 1, 0)][1]


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """One direction of a link. Times are on the clock of ``arrival``'s ``now_s``."""

    one_way_s: float = 0.0
    """Propagation; ignored when there is a ``schedule``."""
    jitter_s: float = 0.0
    """Mean of the extra delay."""
    jitter_law: JitterLaw = JitterLaw.EXPONENTIAL
    loss: float = 0.0
    """Probability that a packet (1400 bytes) is lost, each time it is sent."""
    overhead_bytes: int = 0
    """Framing that each message takes on the link beyond its payload."""
    outages_s: tuple[tuple[float, float], ...] = ()
    """Intervals [start, end) in which nothing leaves; in order, apart from one another."""
    schedule: DelaySchedule | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_0("one_way_s", self.one_way_s)
        _at_least_0("jitter_s", self.jitter_s)
        _at_least_0("overhead_bytes", self.overhead_bytes)
        if not 0.0 <= self.loss < 1.0:
            raise ValueError(f"loss is {self.loss}, but must be in [0, 1)")
        if len(self.outages_s) > _MAX_OUTAGES:
            raise ValueError(f"{len(self.outages_s)} outages, but at most {_MAX_OUTAGES} go")
        previous_end_s = -math.inf
        for start_s, end_s in self.outages_s:
            if not previous_end_s <= start_s < end_s < math.inf:
                raise ValueError(f"outage ({start_s}, {end_s}) is empty or not in order")
            previous_end_s = end_s


class SharedQueue:
    """Bandwidth that one or several links send through, one message at a time.

    A message that may start only later (its link is out) reserves a later slot; messages of other
    links that are ready sooner use the gap before it when they fit.
    """

    def __init__(self, bits_per_s: float = math.inf) -> None:
        if not bits_per_s > 0.0:
            raise ValueError(f"bits_per_s is {bits_per_s}, but must be above 0")
        self._bits_per_s = bits_per_s
        self._busy: list[tuple[float, float]] = []

    @property
    def slot_count(self) -> int:
        """Stretches of time reserved, as joined."""
        return len(self._busy)

    def serialisation_s(self, size_bytes: int) -> float:
        return size_bytes * 8 / self._bits_per_s

    def first_free_s(self, now_s: float, ready_s: float, duration_s: float) -> float:
        """Start of the first free slot of that length from ``ready_s`` on. Slots that ended by
        ``now_s`` are forgotten."""
        self._busy = [slot for slot in self._busy if slot[1] > now_s]
        start_s = ready_s
        for busy_start_s, busy_end_s in self._busy:
            if start_s + duration_s <= busy_start_s:
                break
            start_s = max(start_s, busy_end_s)
        return start_s

    def take(self, start_s: float, duration_s: float) -> None:
        """Occupy a slot that ``first_free_s`` found; joined with a neighbour it touches, so that
        there are only as many slots as gaps."""
        if duration_s == 0.0:
            return
        end_s = start_s + duration_s
        index = bisect.bisect(self._busy, (start_s, end_s))
        first, last = index, index
        if index > 0 and self._busy[index - 1][1] == start_s:
            first, start_s = index - 1, self._busy[index - 1][0]
        if index < len(self._busy) and self._busy[index][0] == end_s:
            last, end_s = index + 1, self._busy[index][1]
        self._busy[first:last] = [(start_s, end_s)]


class LinkModel:
    """One direction of one link; ``queue`` None is bandwidth without limit."""

    def __init__(
        self, settings: LinkSettings | None = None, queue: SharedQueue | None = None
    ) -> None:
        self._settings = settings or LinkSettings()
        self._queue = queue or SharedQueue()
        self._message_count = 0
        self._now_s = -math.inf
        self._outage = 0
        self._left_s = -math.inf
        self._arrived_s = -math.inf

    def arrival(self, now_s: float, size_bytes: int) -> float:
        """When a message handed over at ``now_s`` arrives, in seconds; advances the model."""
        assert now_s >= self._now_s, f"time went back from {self._now_s} to {now_s}"
        assert size_bytes >= 0, f"size_bytes is {size_bytes}"
        self._now_s = now_s
        self._message_count += 1
        wire_bytes = size_bytes + self._settings.overhead_bytes
        self._left_s = self._leave(now_s, wire_bytes)
        one_way_s = self._settings.one_way_s
        if self._settings.schedule is not None:
            one_way_s = self._settings.schedule.one_way_s(self._left_s)
        flight_s = one_way_s + self._jitter_s() + self._retransmission_s(wire_bytes, one_way_s)
        self._arrived_s = max(self._arrived_s, self._left_s + flight_s)
        return self._arrived_s

    def _leave(self, now_s: float, wire_bytes: int) -> float:
        """When its last bit is on the way."""
        duration_s = self._queue.serialisation_s(wire_bytes)
        start_s = max(now_s, self._left_s)
        while True:
            up_s = self._after_outages_s(now_s, start_s, duration_s)
            start_s = self._queue.first_free_s(now_s, up_s, duration_s)
            if start_s == up_s:
                break
        self._queue.take(start_s, duration_s)
        return start_s + duration_s

    def _after_outages_s(self, now_s: float, start_s: float, duration_s: float) -> float:
        """First time from ``start_s`` on at which a message finds the link up to its last bit; one
        that an outage would interrupt waits for the end of it."""
        outages_s = self._settings.outages_s
        while self._outage < len(outages_s) and outages_s[self._outage][1] <= now_s:
            self._outage += 1
        for down_s, up_s in outages_s[self._outage :]:
            if start_s < down_s and start_s + duration_s <= down_s:
                break
            start_s = max(start_s, up_s)
        return start_s

    def _chance(self, purpose: int) -> float:
        """Uniform in (0, 1)."""
        bits = noise_bits(self._settings.seed, self._message_count, purpose)
        return (bits + 0.5) * 2.0**-32

    def _jitter_s(self) -> float:
        share = self._chance(_JITTER)
        match self._settings.jitter_law:
            case JitterLaw.UNIFORM:
                return 2.0 * self._settings.jitter_s * share
            case JitterLaw.EXPONENTIAL:
                return -self._settings.jitter_s * math.log1p(-share)

    def _retransmission_s(self, wire_bytes: int, one_way_s: float) -> float:
        """Each wait is twice as long as the one before it."""
        packet_count = max(1, math.ceil(wire_bytes / _PACKET_BYTES))
        draw = self._chance(_LOSS)
        probability = 1.0 - (1.0 - self._settings.loss) ** packet_count
        wait_s = max(MIN_RETRANSMIT_S, 2.0 * one_way_s)
        late_s = 0.0
        for _ in range(_MAX_RETRANSMITS):
            if draw >= probability:
                break
            late_s += wait_s
            wait_s *= 2.0
            probability *= self._settings.loss  # that the packet sent again is lost too
        return late_s


def _at_least_0(name: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} is {value}, but must be finite and not negative")
