"""Links from traces, paths of several hops, cross traffic, handovers, TCP of lossy links.

Oracle: the trace's own columns for a link made from it; for paths, conservation (each message
arrives once, in order, never before it can) and arithmetic on small cases; for cross traffic, the
mean wait of an M/D/1 queue (Pollaczek and Khinchine) and a run with one event per packet; for TCP,
rules of the RFCs and of Linux with exact figures.
"""

from __future__ import annotations

import functools
import math
import pathlib
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.bench.arms import Arm
from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.network_trace import NetworkTrace
from edgespec_sim.links.path import Handover, HopPath, LoadedQueue, Path, TraceSchedules
from edgespec_sim.links.tcp import MIN_TIMEOUT_S, RoundTrips, TcpConnection
from edgespec_sim.scenario.sections import LinkSection, load_scenario
from edgespec_sim.world.run import Job, play
from tests.sources import ROOT

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


def test_a_link_does_what_its_trace_did_and_repeats() -> None:
    up, down = TraceSchedules.from_trace(TRACE).make_links()
    for period_s in (0.0, 30.0, 300.0):
        assert up.arrival(period_s, 1000) == pytest.approx(period_s + 1 * MS + 10 * MS)
        assert up.arrival(period_s + 5.5, 1000) == pytest.approx(period_s + 6.011)
        assert up.arrival(period_s + 12, 1000) == pytest.approx(period_s + 12 + 2 * MS + 50 * MS)
        assert down.arrival(period_s + 12, 1000) == pytest.approx(period_s + 12.0505)


def test_the_loss_of_both_ways_is_that_of_the_trace() -> None:
    up, down = TraceSchedules.from_trace(TRACE).make_links(offset_s=20.0, seed=4)
    lost = 0
    for n in range(4000):
        at_s = 30.0 * n
        lost += up.arrival(at_s, 100) > at_s + 0.2 or down.arrival(at_s, 100) > at_s + 0.2
    assert lost / 4000 == pytest.approx(0.19, abs=0.02)


def test_links_of_one_trace_share_its_schedules_and_may_share_a_queue() -> None:
    links = TraceSchedules.from_trace(TRACE)
    queues = links.make_queues()
    (one, _), (two, _) = links.make_links(queues=queues), links.make_links(seed=1, queues=queues)
    assert one.arrival(0.0, 1000) == pytest.approx(11 * MS)
    assert two.arrival(0.0, 1000) == pytest.approx(12 * MS)


def test_serialisation_counts_on_every_hop_and_propagation_once_on_each() -> None:
    events = EventQueue()
    links = [LinkModel(LinkSettings(one_way_s=0.01), SharedQueue(RATE)) for _ in range(3)]
    path, arrived = HopPath(events, links), list[float]()
    for _ in range(2):
        path.send(1000, lambda: arrived.append(events.now))
    events.run(1.0)
    # Store and forward: the second message is one serialisation later, not three.
    assert arrived == pytest.approx([33 * MS, 34 * MS])


SENDS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4000)), min_size=1, max_size=40)


def one_hop(events: EventQueue) -> Path:
    return HopPath(events, [_link(0.02, 1)])


def many_hops(events: EventQueue) -> Path:
    return HopPath(events, [_link(0.005, 1), _link(0.02, 2), _link(0.001, 3)])


def handed_over(events: EventQueue) -> Path:
    path = Handover(events, one_hop(events), gap_s=0.08)
    events.at(0.3, lambda: path.change(HopPath(events, [_link(0.001, 4)])))
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


def test_nothing_leaves_in_the_gap_and_order_holds_across_it() -> None:
    events, arrived = EventQueue(), list[tuple[int, float]]()
    old = LinkModel(LinkSettings(one_way_s=0.5, outages_s=((1.0, 1.2),)), SharedQueue(RATE))
    new = LinkModel(LinkSettings(one_way_s=0.01), SharedQueue(RATE))
    path = Handover(events, HopPath(events, [old]), gap_s=0.2)
    events.at(1.0, lambda: path.change(HopPath(events, [new])))

    def send(number: int) -> None:
        path.send(1000, lambda: arrived.append((number, events.now)))

    for number, at_s in enumerate((0.5, 0.9, 1.0, 1.1, 1.2, 2.0)):
        events.at(at_s, functools.partial(send, number))
    events.run(10.0)
    assert [number for number, _ in arrived] == list(range(6))
    # The third to fifth messages arrive at the new cell at about 1.21 s, but the second arrives at
    # 1.401 s.
    assert [at_s for _, at_s in arrived] == pytest.approx(
        [1.001, 1.401, 1.401, 1.401, 1.401, 2.011]
    )


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_mean_wait_is_that_of_a_loaded_queue(share: float) -> None:
    """For M/D/1 the mean wait is share / (2 (1 - share)) times a packet's time. Probes of size 0
    measure it."""
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
        while now_s < later_s:  # queried often enough, no packet is played late
            now_s = min(now_s + 0.0002, later_s)
            eager.first_free_s(now_s, now_s, 0)
        found = lazy.first_free_s(now_s, now_s, 500), eager.first_free_s(now_s, now_s, 500)
        assert found[0] == pytest.approx(found[1], abs=1e-12)
        for queue in (lazy, eager):
            queue.reserve(found[0], found[0] + queue.serialisation_s(found[0], 500), 500)


ONE_WAY_S = 0.01
RTT_S = 2 * ONE_WAY_S
# The payload of a message that fills a packet of its own, without headers.
SMALL = 46


class Losing:
    """A link that loses the packets of these numbers, counted from 0; answers without data are not
    counted."""

    def __init__(self, *lost: int) -> None:
        self.lost, self.data = lost, 0

    def packet(self, now_s: float, size_bytes: int) -> float | None:
        if size_bytes:
            self.data += 1
            if self.data - 1 in self.lost:
                return None
        return now_s + ONE_WAY_S


class Played:
    """Messages sent up at given times; ``late_s`` is the delay of each over a lossless link."""

    def __init__(self, lost: tuple[int, ...], times_s: list[float], size: int = SMALL) -> None:
        queue, self.up = EventQueue(), Losing(*lost)
        self.connection = TcpConnection(queue, [self.up], [Losing()])
        self.arrived_s: list[float] = []
        # The round trip is known before anything is lost.
        for at_s in [-10.0, -9.0, -8.0, *times_s]:
            queue.at(at_s + 10.0, lambda: self._send(queue, size))
        queue.run(1e4)
        self.late_s = [
            round(arrived_s - at_s - 10.0 - ONE_WAY_S, 6)
            for arrived_s, at_s in zip(self.arrived_s[3:], times_s, strict=True)
        ]

    def _send(self, queue: EventQueue, size: int) -> None:
        self.connection.up.send(size, lambda: self.arrived_s.append(queue.now))


def test_the_next_packet_shows_a_loss_a_round_trip_later() -> None:
    """RACK: the answer to the second packet arrives 25 ms and a round trip after the first one was
    sent, which is more than a quarter of a round trip late. The first one is resent then, and later
    packets wait for it."""
    assert Played((3,), [0.0, 0.025, 0.5]).late_s == [0.025 + RTT_S, RTT_S, 0.0]


def test_a_lone_packet_is_probed_after_a_timeout_and_timeouts_double() -> None:
    """The probe comes first and is no timeout, so the waits are 1, 2 and then 4 timeouts."""
    found = [Played(lost, [0.0]) for lost in ((3,), (3, 4), (3, 4, 5))]
    timeout_s = RTT_S + MIN_TIMEOUT_S
    for played, count in zip(found, (1, 2, 4), strict=True):
        assert played.late_s[0] == pytest.approx(count * timeout_s, abs=0.015)
        assert played.connection.up.sender.probes == 1
    assert [played.connection.up.sender.timeouts for played in found] == [0, 1, 2]


def test_a_lost_tail_is_probed_after_two_round_trips() -> None:
    """RFC 8985, 7: two packets are unanswered. A probe replaces the timeout of 220 ms, and the
    answer to it shows the loss of the first packet."""
    played = Played((3, 4), [0.0, 0.001])
    assert played.late_s[1] == pytest.approx(3 * RTT_S, abs=0.006)
    assert played.late_s[0] == pytest.approx(3 * RTT_S, abs=0.008)
    assert played.connection.up.sender.timeouts == 0


def test_a_lost_retransmission_of_a_slow_sender_waits_for_a_timeout() -> None:
    """A window that recovers lets one packet out, so no later packet could show the loss."""
    played = Played((3, 5), [0.0, 0.025, 0.05, 0.075])
    assert played.late_s[0] > MIN_TIMEOUT_S
    assert played.connection.up.sender.timeouts == 1


def test_round_trips_are_smoothed_as_the_rfc_has_it() -> None:
    """RFC 6298, 2, with Linux's floor on the deviation's share."""
    trips = RoundTrips()
    trips.sample(0.1)
    assert trips.timeout_s == pytest.approx(0.1 + MIN_TIMEOUT_S)
    trips.sample(0.5)
    assert trips.smoothed_s == pytest.approx(0.1 * 7 / 8 + 0.5 / 8)
    assert trips.timeout_s == pytest.approx(0.15 + 4 * (0.05 * 3 / 4 + 0.4 / 4))
    assert trips.least_s == 0.1


def test_packets_that_leave_at_one_instant_left_one_after_the_other() -> None:
    """With a message every half round trip, an answer arrives when the next message leaves. A lost
    packet is resent after that message, so the answer to that message does not show it yet."""
    gap_s, queue = 1 / 32, EventQueue()
    up = LinkModel(LinkSettings(one_way_s=gap_s, loss=0.01, seed=1))
    down = LinkModel(LinkSettings(one_way_s=gap_s))
    connection = TcpConnection(queue, [up], [down])
    for number in range(2000):
        queue.at(number * gap_s, lambda: connection.up.send(SMALL, lambda: None))
    queue.run(math.inf)
    assert connection.up.lost > 15
    assert connection.up.sender.retransmissions == connection.up.lost


MESSAGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40_000)), max_size=25)


def _send_and_log(queue: EventQueue, path: Path, size: int, log: list[tuple[float, float]]) -> None:
    sent_s = queue.now
    path.send(size, lambda: log.append((sent_s, queue.now)))


@settings(deadline=None, max_examples=30)
@given(up=MESSAGES, down=MESSAGES, loss=st.sampled_from([0.0, 0.05, 0.3]), seed=st.integers(0, 99))
def test_every_message_arrives_once_in_order_and_not_before_it_could(
    up: list[tuple[int, int]], down: list[tuple[int, int]], loss: float, seed: int
) -> None:
    """The link is a queue of limited capacity, with losses both ways, of data and of answers."""

    def run() -> list[list[tuple[float, float]]]:
        queue = EventQueue()
        links = [
            LinkModel(
                LinkSettings(one_way_s=ONE_WAY_S, loss=loss, seed=seed + way), SharedQueue(4e7)
            )
            for way in (0, 100)
        ]
        connection = TcpConnection(queue, links[:1], links[1:])
        found: list[list[tuple[float, float]]] = [[], []]
        for path, messages, log in zip(
            (connection.up, connection.down), (up, down), found, strict=True
        ):
            now_s = 0.0
            for gap_ms, size in messages:
                now_s += gap_ms / 1e3

                queue.at(now_s, partial(_send_and_log, queue, path, size, log))
        queue.run(math.inf)
        return found

    found = run()
    assert found == run()
    for messages, log in zip((up, down), found, strict=True):
        assert len(log) == len(messages)
        assert [sent_s for sent_s, _ in log] == sorted(sent_s for sent_s, _ in log)
        assert all(arrived_s >= sent_s + ONE_WAY_S for sent_s, arrived_s in log)


WORLD = load_scenario(str(ROOT / "tests/sim/worlds/lossy.yaml"))


@pytest.mark.parametrize("loss", [0.0, 1e-9])
def test_only_the_first_request_of_a_device_pays_for_connecting(loss: float) -> None:
    """Later requests use the existing connection, like a gRPC channel. The connection took a round
    trip each for TCP and TLS."""
    wan = LinkSection(rtt_ms=100.0, loss=loss)
    device = replace(WORLD.devices["laptop"], count=1)
    world = replace(WORLD, links={"wan": wan}, devices={"laptop": device})
    records = play(Job(world, Arm.TARGET_ONLY, 0, 1, pathlib.Path())).meters.records
    ttfts_s = [record.ttft_s for record in records]
    assert ttfts_s[0] == pytest.approx(0.2 + 0.1 + 0.025, abs=1e-6)
    assert ttfts_s[1:] == pytest.approx([0.125] * (len(ttfts_s) - 1), abs=1e-6)
    assert len(ttfts_s) > 5
