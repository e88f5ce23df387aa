"""Both directions of a link that does what a trace did, over and over.

Theory of operation. A trace's columns become the schedules of ``core/network/link_model.py``, each
at its own stage: RTT is split between the directions, capacity is the queue's, outages hold both
directions back. A probe is lost when it or its answer is, so of a measured loss p each direction
gets 1 - sqrt(1 - p). Schedules are made once a trace (``TraceLinks``) and shared by all the links
made from them, each of which starts at its own offset: a thousand devices on one trace cost little
more than one and do not stall together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec.core.link_model import (
    CapacitySchedule,
    DelaySchedule,
    LinkModel,
    LinkSettings,
    LossSchedule,
    OutageSchedule,
    SharedQueue,
)
from edgespec_sim.traces.network_trace import NetworkTrace


@dataclass(frozen=True, slots=True)
class TraceLinks:
    """The schedules of a trace; ``pair`` makes links from them."""

    up_delay: DelaySchedule
    down_delay: DelaySchedule
    loss: LossSchedule | None
    outages: OutageSchedule | None
    up_capacity: CapacitySchedule | None
    down_capacity: CapacitySchedule | None

    @classmethod
    def of(cls, trace: NetworkTrace, *, up_share: float = 0.5) -> TraceLinks:
        """``up_share`` of the RTT is the way up. Raises ``ValueError`` when it is not in [0, 1]."""
        if not 0.0 <= up_share <= 1.0:
            raise ValueError(f"up_share is {up_share}, but must be in [0, 1]")
        loss = trace.loss
        if loss is not None:
            loss = tuple(1.0 - math.sqrt(1.0 - both) for both in loss)
        return cls(
            up_delay=DelaySchedule(_steps(trace, trace.rtt_s, up_share), trace.duration_s),
            down_delay=DelaySchedule(_steps(trace, trace.rtt_s, 1.0 - up_share), trace.duration_s),
            loss=LossSchedule(_steps(trace, loss), trace.duration_s) if loss else None,
            outages=OutageSchedule(trace.outages_s, trace.duration_s) if trace.outages_s else None,
            up_capacity=_capacity(trace, trace.up_bits_per_s),
            down_capacity=_capacity(trace, trace.down_bits_per_s),
        )

    def queues(self, offset_s: float = 0.0) -> tuple[SharedQueue, SharedQueue]:
        """Up and down, of the trace's capacity; without limit where that was not measured."""
        up, down = (
            SharedQueue() if capacity is None else SharedQueue(capacity, offset_s=offset_s)
            for capacity in (self.up_capacity, self.down_capacity)
        )
        return up, down

    def pair(
        self,
        *,
        offset_s: float = 0.0,
        seed: int = 0,
        overhead_bytes: int = 0,
        outages_s: tuple[tuple[float, float], ...] = (),
        queues: tuple[SharedQueue, SharedQueue] | None = None,
    ) -> tuple[LinkModel, LinkModel]:
        """Up and down; at time 0 they are ``offset_s`` into the trace. ``queues`` None: queues of
        their own with the trace's capacity; else those, which others may share. ``outages_s`` come
        on top of the trace's, once, on the links' clock."""
        up_queue, down_queue = queues or self.queues(offset_s)
        up, down = (
            LinkSettings(
                overhead_bytes=overhead_bytes,
                outages_s=outages_s,
                schedule=delay,
                loss_schedule=self.loss,
                outage_schedule=self.outages,
                schedule_offset_s=offset_s,
                seed=link_seed,
            )
            for delay, link_seed in ((self.up_delay, 2 * seed), (self.down_delay, 2 * seed + 1))
        )
        return LinkModel(up, up_queue), LinkModel(down, down_queue)


def _steps(
    trace: NetworkTrace, column: tuple[float, ...], scale: float = 1.0
) -> tuple[tuple[float, float], ...]:
    # A trace may end with its last row; a period has to be longer than its steps.
    rows = zip(trace.time_s, column, strict=True)
    return tuple((time_s, value * scale) for time_s, value in rows if time_s < trace.duration_s)


def _capacity(trace: NetworkTrace, column: tuple[float, ...] | None) -> CapacitySchedule | None:
    if column is None:
        return None
    return CapacitySchedule(_steps(trace, column), trace.duration_s)
