"""Paths of messages from one end to the other, as events: over no hop, one or several.

Theory of operation. A path takes messages and delivers each once, in order. Over several hops each
arrival is an event, at which the message is handed to the next link. So a queue that paths share
receives messages in the order in which they reach it, not in the order in which they were sent.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from edgespec.core import link_model as lm
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.network_trace import NetworkTrace


class Link(Protocol):
    def arrival(self, now_s: float, size_bytes: int, /) -> float:
        """Return the arrival time of a message that is handed over now. It is never before an
        earlier message's."""


class Path(Protocol):
    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` when a message sent now has arrived: once, and in the order of
        sending."""


class HopPath:
    """A path over links in sequence, or over none, with a delay of ``fixed_s`` after the last."""

    def __init__(self, queue: EventQueue, links: Sequence[Link] = (), fixed_s: float = 0.0) -> None:
        self._queue, self._links, self._fixed_s = queue, tuple(links), fixed_s

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self._send_over(0, size_bytes, deliver)

    def _send_over(self, hop: int, size_bytes: int, deliver: Callable[[], None]) -> None:
        links, at_s = self._links, self._queue.now
        if hop < len(links):
            at_s = links[hop].arrival(at_s, size_bytes)
        if hop + 1 < len(links):
            self._queue.at(at_s, lambda: self._send_over(hop + 1, size_bytes, deliver))
        else:
            self._queue.at(at_s + self._fixed_s, deliver)


# --- a path whose attachment changes -----------------------------------------------------------
# Each attachment is a path of its own, in force until the next change. For ``gap_s`` after a change
# no message is handed over. Messages sent in that time wait, and go in order to the attachment in
# force when the gap ends. Messages that an old attachment had accepted still arrive, since the
# cells forward them. A message that a new attachment delivers sooner waits for those sent before
# it, so the order holds across the change.


class Handover:
    """A path that begins as ``path``; ``change`` attaches it to another one."""

    def __init__(self, queue: EventQueue, path: Path, gap_s: float) -> None:
        self._queue, self._path, self._gap_s = queue, path, gap_s
        self._up_from_s = 0.0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._order: deque[list[Callable[[], None] | None]] = deque()

    def change(self, path: Path) -> None:
        """Put ``path`` in force now. It passes messages when the gap has ended."""
        self._path, self._up_from_s = path, self._queue.now + self._gap_s

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        # The message's place in the order, which is empty until the message has arrived.
        cell: list[Callable[[], None] | None] = [None]
        self._order.append(cell)

        def arrive() -> None:
            assert cell[0] is None, "a path delivered a message twice"
            cell[0] = deliver
            while self._order and (first := self._order[0][0]) is not None:
                self._order.popleft()
                first()

        if self._waiting or self._up_from_s > self._queue.now:
            if not self._waiting:
                self._queue.at(self._up_from_s, self._flush)
            self._waiting.append((size_bytes, arrive))
            return
        self._path.send(size_bytes, arrive)

    def _flush(self) -> None:
        if self._up_from_s > self._queue.now:  # Another change came within the gap.
            self._queue.at(self._up_from_s, self._flush)
            return
        waiting, self._waiting = self._waiting, deque()
        for size_bytes, arrive in waiting:
            self._path.send(size_bytes, arrive)


# --- a shared queue with other traffic ---------------------------------------------------------
# Packets of cross traffic matter only to the messages behind them. So they are put into the queue
# when one of our messages requests a slot: all packets that arrived before that moment, in order,
# which is exactly what one event per packet would do. After a long pause only the last part is
# simulated, from an empty queue. Its length is ``_MEMORY`` / (1 - share)^2 packet times, several
# times the relaxation time of such a queue (M/D/1), so the state before it no longer matters. The
# cost of a message is thus bounded after any pause, and an unused queue costs nothing. As for any
# shared queue, the ``now_s`` of all calls must not decrease.

PACKET_BYTES: Final = 1400
_MEMORY: Final = 20.0


class LoadedQueue(lm.SharedQueue):
    """A ``SharedQueue`` in which cross traffic uses ``share`` of the capacity on average."""

    def __init__(
        self,
        bits_per_s: float | lm.CapacitySchedule,
        share: float,
        *,
        packet_bytes: int = PACKET_BYTES,
        seed: int = 0,
    ) -> None:
        super().__init__(bits_per_s)
        self._share = share
        self._packet_bytes = packet_bytes
        self._chance = random.Random(seed)
        self._next_s = self._gap_s(0.0) if share else float("inf")

    def first_free_s(self, now_s: float, ready_s: float, size_bytes: int) -> float:
        if self._next_s <= now_s:
            self._play_cross_traffic(now_s)
        return super().first_free_s(now_s, ready_s, size_bytes)

    def _play_cross_traffic(self, until_s: float) -> None:
        packet_s = self.serialisation_s(until_s, self._packet_bytes)
        memory_s = _MEMORY * packet_s / (1.0 - self._share) ** 2
        if until_s - self._next_s > memory_s:
            # Poisson arrivals have no memory: the next one after any moment is one gap away.
            start_s = until_s - memory_s
            self._next_s = start_s + self._gap_s(start_s)
        while self._next_s <= until_s:
            at_s = self._next_s
            size_bytes = self._packet_bytes
            start_s = super().first_free_s(at_s, at_s, size_bytes)
            end_s = start_s + self.serialisation_s(start_s, size_bytes)
            self.reserve(start_s, end_s, size_bytes)
            self._next_s = at_s + self._gap_s(at_s)

    def _gap_s(self, time_s: float) -> float:
        packets_per_s = self._share * self.capacity_bits_per_s(time_s) / (8 * self._packet_bytes)
        return self._chance.expovariate(packets_per_s)


# --- both directions of a link that replays a trace repeatedly ----------------------------------
# The columns of a trace become the schedules of ``edgespec/core/link_model.py``, each at its own
# stage: the RTT is split evenly between the directions, capacity applies to the queue, and outages
# hold back both directions. A probe is lost if either it or its answer is lost, so with a measured
# loss p each direction gets 1 - sqrt(1 - p). Schedules are made once per trace (``TraceSchedules``)
# and shared by all links made from them, each of which starts at its own offset. So a thousand
# devices on one trace cost little more than one, and do not stall together.

Queues = tuple[lm.SharedQueue, lm.SharedQueue]
"""Queues up and down."""
_PLAIN: Final = lm.LinkSettings()


@dataclass(frozen=True, slots=True)
class TraceSchedules:
    """The schedules of a trace; ``make_links`` makes links from them."""

    delay: lm.StepSchedule | None
    """One-way delay, half of the round trip. None if the trace has none; the links' settings then
    apply."""
    loss: lm.StepSchedule | None
    outages: lm.OutageSchedule | None
    up_capacity: lm.CapacitySchedule | None
    down_capacity: lm.CapacitySchedule | None

    @classmethod
    def from_trace(cls, trace: NetworkTrace) -> TraceSchedules:
        loss = trace.loss
        if loss is not None:
            loss = tuple(1.0 - math.sqrt(1.0 - both) for both in loss)
        return cls(
            delay=lm.StepSchedule(_make_steps(trace, trace.rtt_s, 0.5), trace.duration_s)
            if trace.rtt_s is not None
            else None,
            loss=lm.StepSchedule(_make_steps(trace, loss), trace.duration_s) if loss else None,
            outages=lm.OutageSchedule(trace.outages_s, trace.duration_s)
            if trace.outages_s
            else None,
            up_capacity=_make_capacity(trace, trace.up_bits_per_s),
            down_capacity=_make_capacity(trace, trace.down_bits_per_s),
        )

    def make_queues(self, offset_s: float = 0.0, others: Queues | None = None) -> Queues:
        """Return queues with the trace's capacity. Where it has none, ``others`` are used (None: no
        limit)."""
        others = others or (lm.SharedQueue(), lm.SharedQueue())
        up, down = (
            other if capacity is None else lm.SharedQueue(capacity, offset_s=offset_s)
            for capacity, other in zip((self.up_capacity, self.down_capacity), others, strict=True)
        )
        return up, down

    def make_links(
        self,
        *,
        offset_s: float = 0.0,
        seed: int = 0,
        queues: Queues | None = None,
        beside: lm.LinkSettings = _PLAIN,
    ) -> tuple[lm.LinkModel, lm.LinkModel]:
        """Return the links up and down, which are ``offset_s`` into the trace at time 0. With
        ``queues`` None they have their own queues with the trace's capacity, otherwise these, which
        others may share. Outages of ``beside`` are added to the trace's, once, on the links'
        clock."""
        settings = replace(
            beside,
            schedule=self.delay,
            loss_schedule=self.loss,
            outage_schedule=self.outages,
            schedule_offset_s=offset_s,
        )
        return make_both_links(settings, seed, queues or self.make_queues(offset_s))


def make_both_links(
    settings: lm.LinkSettings, seed: int, queues: Queues
) -> tuple[lm.LinkModel, lm.LinkModel]:
    """Return links up and down with separate random numbers."""
    up, down = (replace(settings, seed=one) for one in (2 * seed, 2 * seed + 1))
    return lm.LinkModel(up, queues[0]), lm.LinkModel(down, queues[1])


def _make_steps(
    trace: NetworkTrace, column: tuple[float, ...], scale: float = 1.0
) -> tuple[tuple[float, float], ...]:
    # The last row of a trace may be at its very end, but a period must be longer than its steps.
    rows = zip(trace.time_s, column, strict=True)
    return tuple((time_s, value * scale) for time_s, value in rows if time_s < trace.duration_s)


def _make_capacity(
    trace: NetworkTrace, column: tuple[float, ...] | None
) -> lm.CapacitySchedule | None:
    if column is None:
        return None
    return lm.CapacitySchedule(_make_steps(trace, column), trace.duration_s)
