"""When does a message arrive? One direction of a link, as arithmetic.

Theory of operation. A message of a given size goes through four stages, kept apart because mixing
them up is the classical error of link simulators:

    outage         nothing starts or continues to leave while the link is out; messages wait
    serialisation  size / bandwidth on a ``SharedQueue``, first come first served; links that share
                   a queue (one cell, one uplink) share its bandwidth and never each get all of it
    propagation    one-way delay, constant or from a ``DelaySchedule``, plus jitter
    loss           a lost message is sent again by the transport below: it is late, never missing
                   (``loss_recovery.py``: how late)

and is released in order: never before the message handed over ahead of it (one TCP connection).

Pure: no clock, no I/O; ``now_s`` has to be non-decreasing from call to call. Equal seeds and equal
calls give equal results: chance is the counter-based hash of ``core/protocol/noise.py`` over (seed,
number of the message, purpose), so changing one impairment leaves the other's numbers alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

from edgespec.core.network.link_schedules import DelaySchedule, LossSchedule, OutageSchedule
from edgespec.core.network.loss_recovery import late_s
from edgespec.core.network.shared_queue import SharedQueue
from edgespec.core.protocol.noise import keyed_bits, seed_key

__all__ = [
    "DelaySchedule",
    "JitterLaw",
    "LinkModel",
    "LinkSettings",
    "SharedQueue",
]

_PACKET_BYTES: Final = 1400
# What a draw is for: the hash's third argument.
_JITTER: Final = 0
_LOSS: Final = 1


class JitterLaw(Enum):
    """How the delay beyond ``one_way_s`` is spread; ``jitter_s`` is its mean in both."""

    UNIFORM = "uniform"
    EXPONENTIAL = "exponential"


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
    loss_schedule: LossSchedule | None = None
    """Takes the place of ``loss``."""
    outage_schedule: OutageSchedule | None = None
    """Outages beyond ``outages_s``, which may repeat."""
    schedule_offset_s: float = 0.0
    """Where in the three schedules the clock's time 0 lies."""
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_0("one_way_s", self.one_way_s)
        _at_least_0("jitter_s", self.jitter_s)
        _at_least_0("overhead_bytes", self.overhead_bytes)
        if not 0.0 <= self.loss < 1.0:
            raise ValueError(f"loss is {self.loss}, but must be in [0, 1)")
        if not math.isfinite(self.schedule_offset_s):
            raise ValueError(f"schedule_offset_s is {self.schedule_offset_s}, but must be finite")
        OutageSchedule(self.outages_s)  # Raises when they are out of order.


class LinkModel:
    """One direction of one link; ``queue`` None is bandwidth without limit."""

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
        """When a message handed over at ``now_s`` arrives, in seconds; advances the model."""
        gap_s = now_s - self._now_s
        flight_s, loss = self._set_out(now_s, size_bytes)
        if loss > 0.0:
            wire_bytes = size_bytes + self._settings.overhead_bytes
            flight_s += self._retransmission_s(wire_bytes, flight_s, loss, gap_s)
        return self._arrive(flight_s)

    def packet(self, now_s: float, size_bytes: int) -> float | None:
        """The same for one packet of a transport that is modelled above: None, when it is lost."""
        flight_s, loss = self._set_out(now_s, size_bytes)
        if loss > 0.0 and self._chance(_LOSS) < loss:
            return None
        return self._arrive(flight_s)

    def _set_out(self, now_s: float, size_bytes: int) -> tuple[float, float]:
        """Propagation time and loss at the moment it has left, which is noted."""
        assert now_s >= self._now_s, f"time went back from {self._now_s} to {now_s}"
        assert size_bytes >= 0, f"size_bytes is {size_bytes}"
        self._now_s = now_s
        self._message_count += 1
        settings = self._settings
        wire_bytes = size_bytes + settings.overhead_bytes
        self._left_s = left_s = self._leave(now_s, wire_bytes)
        flight_s = settings.one_way_s
        if settings.schedule is not None:
            flight_s = settings.schedule.at(left_s + settings.schedule_offset_s)
        loss = settings.loss
        if settings.loss_schedule is not None:
            loss = settings.loss_schedule.at(left_s + settings.schedule_offset_s)
        return flight_s, loss

    def _arrive(self, flight_s: float) -> float:
        if self._settings.jitter_s > 0.0:
            flight_s += self._jitter_s()
        self._arrived_s = max(self._arrived_s, self._left_s + flight_s)
        return self._arrived_s

    def _leave(self, now_s: float, wire_bytes: int) -> float:
        """When its last bit is on the way."""
        queue = self._queue
        start_s = max(now_s, self._left_s)
        while True:
            up_s = self._after_outages_s(start_s, wire_bytes) if self._outages else start_s
            start_s = queue.first_free_s(now_s, up_s, wire_bytes)
            if start_s == up_s or not self._outages:
                break
        end_s = start_s + queue.serialisation_s(start_s, wire_bytes)
        queue.take(start_s, end_s, wire_bytes)
        queue.sent_s += end_s - start_s
        return end_s

    def _after_outages_s(self, start_s: float, wire_bytes: int) -> float:
        """First time from ``start_s`` on at which a message finds the link up to its last bit; one
        that an outage would interrupt waits for the end of it. One that fits between no two
        outages of a period is let through after the last of them, or it would wait for ever."""
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

    def _chance(self, purpose: int) -> float:
        """Uniform in (0, 1)."""
        bits = keyed_bits(self._key, self._message_count, purpose)
        return (bits + 0.5) * 2.0**-32

    def _jitter_s(self) -> float:
        share, settings = self._chance(_JITTER), self._settings
        if settings.jitter_law is JitterLaw.UNIFORM:
            return 2.0 * settings.jitter_s * share
        return -settings.jitter_s * math.log1p(-share)

    def _retransmission_s(
        self, wire_bytes: int, one_way_s: float, loss: float, gap_s: float
    ) -> float:
        """``gap_s`` to the message before; of several packets the next one follows at once."""
        packet_count = max(1, math.ceil(wire_bytes / _PACKET_BYTES))
        probability = 1.0 - (1.0 - loss) ** packet_count
        next_s = gap_s if packet_count == 1 else 0.0
        return late_s(self._chance(_LOSS), probability, loss, 2.0 * one_way_s, next_s)


def _at_least_0(name: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} is {value}, but must be finite and not negative")
