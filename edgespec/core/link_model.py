"""Arrival times of messages in one direction of a link.

Theory of operation. A message passes through four stages. They are modelled separately, because
mixing them up is the classical error of link simulators:

    outage         no message starts or continues to leave while the link is out; messages wait
    serialisation  size / bandwidth on a ``SharedQueue``, first come first served; links that share
                   a queue (one cell, one uplink) share its bandwidth and never each get all of it
    propagation    one-way delay, constant or from a schedule, plus jitter
    loss           the transport below sends a lost message again, so it arrives late and is never
                   missing (``retransmission_delay_s``)

Messages arrive in order: none arrives before the one that was sent ahead of it, as on one TCP
connection.

The model is pure: it reads no clock and does no I/O. ``now_s`` must not decrease from call to call.
Equal seeds and equal calls give equal results. Random numbers come from the counter-based hash of
``protocol/sampling.py`` over (seed, number of the message, purpose), so changing one impairment
does not change the random numbers of another.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import Final

from edgespec.core.protocol.sampling import keyed_bits, seed_key


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """A piecewise constant function of time.

    ``steps`` are pairs (time_s, value) with increasing times. Each value holds until the next step;
    the first one also holds before its time. ``period_s``, which must exceed the last time, repeats
    the function from 0 on, so that a recorded trace can be played for longer than it lasted."""

    steps: tuple[tuple[float, float], ...]
    period_s: float | None = None
    _times_s: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        times_s = [time_s for time_s, _ in self.steps]
        assert times_s == sorted(times_s)
        assert self.period_s is None or self.period_s > times_s[-1]
        object.__setattr__(self, "_times_s", times_s)

    def value_at(self, time_s: float) -> float:
        if self.period_s is not None:
            time_s %= self.period_s
        index = bisect.bisect_right(self._times_s, time_s)
        return self.steps[index - 1 if index else 0][1]


@dataclass(frozen=True, slots=True)
class CapacitySchedule(StepSchedule):
    """A link's capacity over time, in bits per second, always above 0."""

    def duration_s(self, start_s: float, bits: float) -> float:
        """Return how long ``bits`` take to leave if they start at ``start_s``.

        The result is the length of the interval from ``start_s`` over which the capacity integrates
        to ``bits``."""
        steps, period_s = self.steps, self.period_s
        phase_s = start_s if period_s is None else start_s % period_s
        index = max(bisect.bisect_right(self._times_s, phase_s) - 1, 0)
        passed_s = 0.0
        while True:
            rate = steps[index][1]
            last = index + 1 == len(steps)
            # The first step's value also holds before it, so the last step ends with the period.
            end_s = (math.inf if period_s is None else period_s) if last else steps[index + 1][0]
            if bits <= rate * (end_s - phase_s):
                return passed_s + bits / rate
            bits -= rate * (end_s - phase_s)
            passed_s += end_s - phase_s
            index, phase_s = (0, 0.0) if last else (index + 1, end_s)


@dataclass(frozen=True, slots=True)
class OutageSchedule:
    """Intervals [start, end) during which no message leaves.

    The intervals are in order, disjoint, and within the period if there is one. Raises
    ``ValueError`` if they cover the whole period."""

    intervals_s: tuple[tuple[float, float], ...]
    period_s: float | None = None
    _ends_s: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        edges_s = [edge_s for interval_s in self.intervals_s for edge_s in interval_s]
        assert edges_s == sorted(edges_s)
        out_s = math.fsum(end_s - start_s for start_s, end_s in self.intervals_s)
        if self.period_s is not None and not out_s < self.period_s:
            raise ValueError(f"the outages last all of period_s = {self.period_s}")
        object.__setattr__(self, "_ends_s", [end_s for _, end_s in self.intervals_s])

    def next_after(self, time_s: float) -> tuple[float, float] | None:
        """Return the outage in progress at ``time_s``, or else the next one; None if none
        follows."""
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


# The time that TCP takes to send a lost packet again, as Linux does it. RACK (RFC 8985) calls a
# packet lost once a packet sent after it has been acknowledged and a quarter of a round trip has
# passed, in which it might only have been overtaken. So a sender that goes on sending detects the
# loss one round trip plus the gap to its next packet later. A sender that falls silent waits for
# the retransmission timeout: a round trip plus at least 200 ms in Linux (RFC 6298 asks for more),
# doubled each time. A tail-loss probe comes no earlier for a lone packet. Congestion windows are
# not modelled, since messages are far below one. The gap to the *next* packet is not known when a
# message leaves, so the gap before it stands for it.

MIN_TIMEOUT_S: Final = 0.2
"""Minimum that Linux adds to the round trip for a retransmission timeout (TCP_RTO_MIN)."""

_REORDERING: Final = 0.25
"""Share of a round trip that RACK waits for packets that overtook one another."""

MAX_LOSSES: Final = 6


def retransmission_delay_s(
    draw: float, probability: float, loss: float, rtt_s: float, gap_s: float
) -> float:
    """Return how much later a message arrives because of lost packets, in seconds.

    ``draw`` in (0, 1) is the random number that decides. ``probability`` is the chance that any of
    the message's packets is lost at first, and ``loss`` the chance that a packet sent again is
    lost. ``gap_s`` is the time until the sender's next packet."""
    total_s = 0.0
    timeout_s = rtt_s + MIN_TIMEOUT_S
    for _ in range(MAX_LOSSES):
        if draw >= probability:
            break
        found_s = rtt_s + max(gap_s, _REORDERING * rtt_s)
        if found_s < timeout_s:
            total_s += found_s
        else:
            total_s += timeout_s
            timeout_s *= 2.0
        probability *= loss
    return total_s


# Past slots that are kept before all of them are deleted at once.
_MAX_PASSED: Final = 64


class SharedQueue:
    """Bandwidth that one or several links send through, one message at a time.

    The queue is a list of reserved slots in time. A message gets the first gap that is long enough,
    from the time at which it is ready. That is first come, first served, with one exception: a
    message that may only start later, because its link is out, reserves a later slot, and messages
    that are ready sooner use the gap before it. Adjacent slots are joined, and past slots are
    forgotten.

    ``bits_per_s`` is the capacity. If it is a schedule, the schedule's time 0 lies ``offset_s``
    before this clock's."""

    def __init__(
        self, bits_per_s: float | CapacitySchedule = math.inf, *, offset_s: float = 0.0
    ) -> None:
        self._schedule = bits_per_s if isinstance(bits_per_s, CapacitySchedule) else None
        self._bits_per_s = math.inf if isinstance(bits_per_s, CapacitySchedule) else bits_per_s
        assert self._bits_per_s > 0.0
        self._offset_s = offset_s
        self._busy: list[tuple[float, float]] = []
        self._passed = 0  # the number of leading slots that are past
        self.reserved_s = 0.0
        """Seconds for which the queue has been reserved in total, slots in the future included."""

    @property
    def slot_count(self) -> int:
        """Number of separate reserved stretches of time."""
        return len(self._busy) - self._passed

    def capacity_bits_per_s(self, time_s: float) -> float:
        if self._schedule is None:
            return self._bits_per_s
        return self._schedule.value_at(time_s + self._offset_s)

    def serialisation_s(self, start_s: float, size_bytes: int) -> float:
        """Return how long a message takes to leave if it starts at ``start_s`` and has the queue
        alone."""
        if self._schedule is None:
            return size_bytes * 8 / self._bits_per_s
        return self._schedule.duration_s(start_s + self._offset_s, size_bytes * 8)

    def first_free_s(self, now_s: float, ready_s: float, size_bytes: int) -> float:
        """Return the start of the first gap from ``ready_s`` on that the message fits into.

        Slots that ended by ``now_s`` are forgotten, so ``now_s`` must not decrease from call to
        call and must not be after ``ready_s``."""
        busy = self._busy
        if not busy:
            return ready_s
        count, first = len(busy), self._passed
        while first < count and busy[first][1] <= now_s:
            first += 1
        if first > _MAX_PASSED or first == count:
            del busy[:first]
            count, first = len(busy), 0
        self._passed = first
        start_s = ready_s
        for index in range(first, count):
            busy_start_s, busy_end_s = busy[index]
            if (
                start_s < busy_start_s
                and start_s + self.serialisation_s(start_s, size_bytes) <= busy_start_s
            ):
                break
            start_s = max(start_s, busy_end_s)
        return start_s

    def reserve(self, start_s: float, end_s: float, size_bytes: int) -> None:
        """Reserve a slot that ``first_free_s`` returned for this size, and join it with its
        neighbours."""
        if start_s == end_s:
            return
        busy = self._busy
        if not busy or busy[-1][1] <= start_s:  # the usual case: behind all others
            if busy and busy[-1][1] == start_s:
                start_s = busy.pop()[0]
            busy.append((start_s, end_s))
            return
        index = bisect.bisect(busy, (start_s, end_s), lo=self._passed)
        first, last = index, index
        if index > self._passed and busy[index - 1][1] == start_s:
            first, start_s = index - 1, busy[index - 1][0]
        if index < len(busy) and busy[index][0] == end_s:
            last, end_s = index + 1, busy[index][1]
        busy[first:last] = [(start_s, end_s)]


_PACKET_BYTES: Final = 1400

# Purposes of a random number: the hash's third argument.
_JITTER: Final = 0
_LOSS: Final = 1


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Settings of one direction of a link. Times are on the clock of ``arrival``'s ``now_s``; no
    value is negative."""

    one_way_s: float = 0.0
    """Propagation delay; ignored when there is a ``schedule``."""
    jitter_s: float = 0.0
    """Mean of the extra delay, which is exponentially distributed."""
    loss: float = 0.0
    """Probability that a packet (1400 bytes) is lost, each time it is sent."""
    overhead_bytes: int = 0
    """Bytes of framing that each message takes on the link beside its payload."""
    outages_s: tuple[tuple[float, float], ...] = ()
    """Intervals [start, end) during which no message leaves, in order and disjoint."""
    schedule: StepSchedule | None = None
    loss_schedule: StepSchedule | None = None
    """Loss probability over time; replaces ``loss``."""
    outage_schedule: OutageSchedule | None = None
    """Outages in addition to ``outages_s``; they may repeat."""
    schedule_offset_s: float = 0.0
    """Time in the three schedules that corresponds to the clock's time 0."""
    seed: int = 0


class LinkModel:
    """One direction of one link. ``queue`` None means unlimited bandwidth."""

    def __init__(
        self, settings: LinkSettings | None = None, queue: SharedQueue | None = None
    ) -> None:
        self._settings = settings or LinkSettings()
        self._queue = queue or SharedQueue()
        self._outages = [
            (schedule, offset_s)
            for schedule, offset_s in (
                (OutageSchedule(self._settings.outages_s), 0.0),
                (self._settings.outage_schedule, self._settings.schedule_offset_s),
            )
            if schedule is not None and schedule.intervals_s
        ]
        self._key = seed_key(self._settings.seed)
        self._message_count = 0
        self._now_s = -math.inf
        self._left_s = -math.inf
        self._arrived_s = -math.inf

    def arrival(self, now_s: float, size_bytes: int) -> float:
        """Return when a message sent at ``now_s`` arrives, in seconds, and advance the model."""
        gap_s = now_s - self._now_s
        flight_s, loss = self._set_out(now_s, size_bytes)
        if loss > 0.0:
            wire_bytes = size_bytes + self._settings.overhead_bytes
            flight_s += self._retransmission_s(wire_bytes, flight_s, loss, gap_s)
        return self._arrive(flight_s)

    def packet(self, now_s: float, size_bytes: int) -> float | None:
        """Return when a single packet arrives, or None if it is lost.

        Use this instead of ``arrival`` when the transport above models retransmission itself."""
        flight_s, loss = self._set_out(now_s, size_bytes)
        lost = loss > 0.0 and self._random_share(_LOSS) < loss
        return None if lost else self._arrive(flight_s)

    def _set_out(self, now_s: float, size_bytes: int) -> tuple[float, float]:
        """Send a message, and return the propagation time and loss probability when its last bit
        leaves."""
        assert now_s >= self._now_s, f"time went back from {self._now_s} to {now_s}"
        assert size_bytes >= 0, f"size_bytes is {size_bytes}"
        self._now_s = now_s
        self._message_count += 1
        settings = self._settings
        wire_bytes = size_bytes + settings.overhead_bytes
        self._left_s = left_s = self._reserve_queue(now_s, wire_bytes)
        flight_s = settings.one_way_s
        if settings.schedule is not None:
            flight_s = settings.schedule.value_at(left_s + settings.schedule_offset_s)
        loss = settings.loss
        if settings.loss_schedule is not None:
            loss = settings.loss_schedule.value_at(left_s + settings.schedule_offset_s)
        return flight_s, loss

    def _arrive(self, flight_s: float) -> float:
        if self._settings.jitter_s > 0.0:
            flight_s -= self._settings.jitter_s * math.log1p(-self._random_share(_JITTER))
        arrived_s = self._left_s + flight_s
        if arrived_s > self._arrived_s:  # ``max`` takes three times as long
            self._arrived_s = arrived_s
        return self._arrived_s

    def _reserve_queue(self, now_s: float, wire_bytes: int) -> float:
        """Reserve the queue for a message and return when its last bit leaves."""
        queue = self._queue
        start_s = now_s if now_s > self._left_s else self._left_s
        while True:
            up_s = self._after_outages_s(start_s, wire_bytes) if self._outages else start_s
            start_s = queue.first_free_s(now_s, up_s, wire_bytes)
            if start_s == up_s or not self._outages:
                break
        end_s = start_s + queue.serialisation_s(start_s, wire_bytes)
        queue.reserve(start_s, end_s, wire_bytes)
        queue.reserved_s += end_s - start_s
        return end_s

    def _after_outages_s(self, start_s: float, wire_bytes: int) -> float:
        """Return the first time from ``start_s`` on at which the link stays up until the last bit.

        A message that an outage would interrupt waits for the end of that outage. If a message fits
        between no two outages of a period, it is let through after the last of them; otherwise it
        would wait for ever."""
        tries = 2 + sum(len(schedule.intervals_s) for schedule, _ in self._outages)
        for _ in range(tries):
            before_s = start_s
            for schedule, offset_s in self._outages:
                outage = schedule.next_after(start_s + offset_s)
                if outage is None:
                    continue
                down_s, up_s = outage[0] - offset_s, outage[1] - offset_s
                end_s = start_s + self._queue.serialisation_s(start_s, wire_bytes)
                if start_s >= down_s or end_s > down_s:
                    start_s = max(start_s, up_s)
            if start_s == before_s:
                break
        return start_s

    def _random_share(self, purpose: int) -> float:
        """Return a random number, uniform in (0, 1)."""
        return (keyed_bits(self._key, self._message_count, purpose) + 0.5) * 2.0**-32

    def _retransmission_s(
        self, wire_bytes: int, one_way_s: float, loss: float, gap_s: float
    ) -> float:
        """Return the delay that losses add. ``gap_s`` is the time since the message before; a
        message of several packets has its next packet right behind it."""
        packet_count = max(1, math.ceil(wire_bytes / _PACKET_BYTES))
        probability = 1.0 - (1.0 - loss) ** packet_count
        next_s = gap_s if packet_count == 1 else 0.0
        return retransmission_delay_s(
            self._random_share(_LOSS), probability, loss, 2.0 * one_way_s, next_s
        )
