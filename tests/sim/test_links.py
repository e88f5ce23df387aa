"""Links from traces, paths of several hops, cross traffic, handovers.

Oracle: the trace's own columns for a link made from it; for paths, conservation (each message out
once, in order, never before it can be) and arithmetic on small cases; for cross traffic, the mean
wait of an M/D/1 queue (Pollaczek and Khinchine) and a run with an event a packet.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.network_trace import NetworkTrace
from edgespec_sim.links.path import (
    Handover,
    LoadedQueue,
    ManyHops,
    OneHop,
    Path,
    TraceLinks,
)

RATE = 8e6
MS = 0.001
TRACE = NetworkTrace(
    name="made",
    source="test",
    time_s=(0.0, 10.0, 20.0),
    rtt_s=(0.020, 0.100, 0.040),
    duration_s=30.0,
    loss=(0.0, 0.0, 0.19),
    up_bits_per_s=(RATE, RATE / 2, RATE),
    down_bits_per_s=(RATE * 2, RATE * 2, RATE),
    outages_s=((5.0, 6.0),),
)


# --- links from a trace -----------------------------------------------------------------------


def test_a_link_does_what_its_trace_did_and_repeats() -> None:
    up, down = TraceLinks.of(TRACE).pair()
    for period_s in (0.0, 30.0, 300.0):
        assert up.arrival(period_s, 1000) == pytest.approx(period_s + 1 * MS + 10 * MS)
        assert up.arrival(period_s + 5.5, 1000) == pytest.approx(period_s + 6.011)
        assert up.arrival(period_s + 12, 1000) == pytest.approx(period_s + 12 + 2 * MS + 50 * MS)
        assert down.arrival(period_s + 12, 1000) == pytest.approx(period_s + 12.0505)


def test_the_loss_of_both_ways_is_that_of_the_trace() -> None:
    up, down = TraceLinks.of(TRACE).pair(offset_s=20.0, seed=4)
    lost = 0
    for n in range(4000):
        at_s = 30.0 * n
        lost += up.arrival(at_s, 100) > at_s + 0.2 or down.arrival(at_s, 100) > at_s + 0.2
    assert lost / 4000 == pytest.approx(0.19, abs=0.02)


def test_links_of_one_trace_share_its_schedules_and_may_share_a_queue() -> None:
    links = TraceLinks.of(TRACE)
    queues = links.queues()
    (one, _), (two, _) = links.pair(queues=queues), links.pair(seed=1, queues=queues)
    assert one.arrival(0.0, 1000) == pytest.approx(11 * MS)
    assert two.arrival(0.0, 1000) == pytest.approx(12 * MS)


# --- paths ------------------------------------------------------------------------------------


def test_serialisation_counts_on_every_hop_and_propagation_once_on_each() -> None:
    events = EventQueue()
    links = [LinkModel(LinkSettings(one_way_s=0.01), SharedQueue(RATE)) for _ in range(3)]
    path, arrived = ManyHops(events, links), list[float]()
    for _ in range(2):
        path.send(1000, lambda: arrived.append(events.now))
    events.run(1.0)
    # Store and forward: the second is one serialisation behind, not three.
    assert arrived == pytest.approx([33 * MS, 34 * MS])


SENDS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4000)), min_size=1, max_size=40)


def one_hop(events: EventQueue) -> Path:
    return OneHop(events, _link(0.02, 1))


def many_hops(events: EventQueue) -> Path:
    return ManyHops(events, [_link(0.005, 1), _link(0.02, 2), _link(0.001, 3)])


def handed_over(events: EventQueue) -> Path:
    path = Handover(events, one_hop(events), gap_s=0.08)
    events.at(0.3, lambda: path.change(OneHop(events, _link(0.001, 4))))
    events.at(0.6, lambda: path.change(one_hop(events)))
    return path


def _link(one_way_s: float, seed: int) -> LinkModel:
    settings = LinkSettings(one_way_s=one_way_s, jitter_s=0.01, loss=0.05, seed=seed)
    return LinkModel(settings, SharedQueue(RATE))


@pytest.mark.parametrize("build", [one_hop, many_hops, handed_over])
@given(sends=SENDS)
def test_a_path_delivers_each_message_once_and_in_order(
    build: Callable[[EventQueue], Path], sends: list[tuple[int, int]]
) -> None:
    assert violations(build, sends) == []


def violations(build: Callable[[EventQueue], Path], sends: list[tuple[int, int]]) -> list[str]:
    events, found, arrived = EventQueue(), list[str](), list[int]()
    path = build(events)

    def send(number: int, size_bytes: int) -> None:
        sent_s = events.now

        def deliver() -> None:
            arrived.append(number)
            if events.now < sent_s + size_bytes * 8 / RATE + 0.001 - 1e-9:
                found.append(f"message {number} was faster than its link")

        path.send(size_bytes, deliver)

    at_s = 0.0
    for number, (gap_ms, size_bytes) in enumerate(sends):
        at_s += gap_ms * MS
        events.at(at_s, functools.partial(send, number, size_bytes))
    events.run(math.inf)
    if arrived != list(range(len(sends))):
        found.append(f"arrived {arrived}")
    return found


class Lossy(OneHop):
    """Planted fault: every tenth message disappears."""

    sent = 0

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self.sent += 1
        if self.sent % 10:
            super().send(size_bytes, deliver)


class Overtaking(OneHop):
    """Planted fault: a link a message, so that a small one passes a large one."""

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self._link = LinkModel(LinkSettings(one_way_s=0.01), SharedQueue(RATE))
        super().send(size_bytes, deliver)


class Instant(OneHop):
    """Planted fault: no serialisation."""

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self._queue.after(0.001, deliver)


@pytest.mark.parametrize("faulty", [Lossy, Overtaking, Instant])
def test_a_faulty_path_is_caught(faulty: type[OneHop]) -> None:
    sends = [(1, 4000 if n % 2 else 40) for n in range(40)]
    assert violations(one_hop, sends) == []
    assert violations(lambda events: faulty(events, _link(0.01, 1)), sends) != []


# --- handover ---------------------------------------------------------------------------------


def test_nothing_leaves_in_the_gap_and_order_holds_across_it() -> None:
    events, arrived = EventQueue(), list[tuple[int, float]]()
    old = LinkModel(LinkSettings(one_way_s=0.5, outages_s=((1.0, 1.2),)), SharedQueue(RATE))
    new = LinkModel(LinkSettings(one_way_s=0.01), SharedQueue(RATE))
    path = Handover(events, OneHop(events, old), gap_s=0.2)
    events.at(1.0, lambda: path.change(OneHop(events, new)))

    def send(number: int) -> None:
        path.send(1000, lambda: arrived.append((number, events.now)))

    for number, at_s in enumerate((0.5, 0.9, 1.0, 1.1, 1.2, 2.0)):
        events.at(at_s, functools.partial(send, number))
    events.run(10.0)
    assert [number for number, _ in arrived] == list(range(6))
    # The third to fifth arrive at the new cell at about 1.21 s, but the second comes at 1.401 s.
    assert [at_s for _, at_s in arrived] == pytest.approx(
        [1.001, 1.401, 1.401, 1.401, 1.401, 2.011]
    )


# --- cross traffic ----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_mean_wait_is_that_of_a_loaded_queue(share: float) -> None:
    """M/D/1: the mean wait is share / (2 (1 - share)) packets' time. Probes of size 0 see it."""
    queue = LoadedQueue(RATE, share, packet_bytes=1000, seed=1)
    chance, now_s, waits_s = random.Random(2), 0.0, list[float]()
    for _ in range(8000):
        now_s += chance.expovariate(1 / 0.004)
        waits_s.append(queue.first_free_s(now_s, now_s, 0) - now_s)
    expected_s = share / (2 * (1 - share)) * 1 * MS
    assert sum(waits_s) / len(waits_s) == pytest.approx(expected_s, rel=0.15)


def test_packets_played_late_wait_as_those_with_an_event_each() -> None:
    lazy = LoadedQueue(RATE, 0.6, packet_bytes=1000, seed=7)
    eager = LoadedQueue(RATE, 0.6, packet_bytes=1000, seed=7)
    chance, now_s = random.Random(3), 0.0
    for _ in range(300):
        later_s = now_s + chance.expovariate(1 / 0.01)
        while now_s < later_s:  # asked often enough, no packet is played late
            now_s = min(now_s + 0.0002, later_s)
            eager.first_free_s(now_s, now_s, 0)
        found = lazy.first_free_s(now_s, now_s, 500), eager.first_free_s(now_s, now_s, 500)
        assert found[0] == pytest.approx(found[1], abs=1e-12)
        for queue in (lazy, eager):
            queue.take(found[0], found[0] + queue.serialisation_s(found[0], 500), 500)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: LoadedQueue(RATE, 0.99), r"share is 0.99, but must be in \[0, 0.95\]"),
        (lambda: LoadedQueue(RATE, 0.5, packet_bytes=0), "packet_bytes is 0"),
    ],
)
def test_cross_traffic_out_of_range_is_named(build: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()
