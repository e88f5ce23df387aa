"""The link model: each stage with exact figures, then invariants of all stages.

Figures: 1000 bytes at 8 Mbit/s take 1 ms to serialise. Oracle of a queue's slots: capacity
integrated in small steps, and a plain list of intervals that is searched from the front for each
message. The property is conservation: the bytes sent through a queue by any time are at most the
sum of its capacity until then. A queue that gives each link the full rate, and one that forgets its
reservations, must fail it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.link_model import (
    MIN_TIMEOUT_S,
    CapacitySchedule,
    LinkModel,
    LinkSettings,
    OutageSchedule,
    SharedQueue,
    StepSchedule,
)

RATE = 8e6
TWICE = OutageSchedule(((1.0, 2.0), (4.0, 5.0)), period_s=10.0)
SCHEDULES: dict[Any, Any] = {
    "twice": TWICE,
    "half": OutageSchedule(((1.0, 2.0),), period_s=2.0),
    "late first": StepSchedule(((0.0, 0.5), (1.0, 0.01))),
}


@pytest.mark.parametrize(
    ("settings", "rate", "messages"),
    [
        ({}, None, ((1.0, 1000000000, 1.0), (2.0, 0, 2.0))),
        # Propagation delays every message alike and does not queue.
        ({"one_way_s": 0.05}, None, ((0.0, 1000, 0.05), (0.0, 9000, 0.05), (0.01, 10, 0.06))),
        # Serialisation queues, and frees the link before propagation ends.
        (
            {"one_way_s": 0.05},
            8000000.0,
            ((0.0, 1000, 0.051), (0.0, 1000, 0.052), (0.01, 2000, 0.062)),
        ),
        ({"overhead_bytes": 500}, 8000000.0, ((0.0, 500, 0.001), (0.0, 0, 0.0015))),
        # The first message leaves before an outage; the second would be cut off in the middle, and
        # waits.
        (
            {"one_way_s": 0.05, "outages_s": ((0.1, 0.3), (0.3, 0.4), (9.0, 10.0))},
            8000000.0,
            ((0.09, 1000, 0.141), (0.0995, 1000, 0.451), (0.2, 1000, 0.452), (0.5, 1000, 0.551)),
        ),
        # A late message delays the later ones.
        ({"schedule": "late first"}, None, ((0.9, 10, 1.4), (1.0, 10, 1.4), (1.5, 10, 1.51))),
        (
            {"outage_schedule": "twice", "schedule_offset_s": 3.0},
            None,
            ((0.5, 1, 0.5), (1.5, 1, 2.0), (8.5, 1, 9.0), (21.2, 1, 22.0)),
        ),
        ({"outage_schedule": "twice", "outages_s": ((2.0, 3.0),)}, None, ((1.5, 1, 3.0),)),
        # One message just fits between two outages, and one is longer than any gap.
        ({"outage_schedule": "half"}, 8.0, ((0.0, 1, 1.0), (9.0, 3, 17.0))),
    ],
)
def test_one_link(
    settings: dict[str, Any], rate: float | None, messages: list[tuple[float, int, float]]
) -> None:
    """Each entry of ``messages`` holds the send time, the size in bytes and the arrival time."""
    known = {name: SCHEDULES.get(value, value) for name, value in settings.items()}
    model = LinkModel(LinkSettings(**known), SharedQueue(rate) if rate else None)
    for now_s, size_bytes, arrival_s in messages:
        assert model.arrival(now_s, size_bytes) == pytest.approx(arrival_s, abs=1e-12)


@pytest.mark.parametrize(
    ("first", "second", "messages"),
    [
        (
            {},
            {"one_way_s": 0.1},
            ((0, 0.0, 1000, 0.001), (1, 0.0, 1000, 0.102), (0, 0.0, 1000, 0.003)),
        ),
        (
            {"outages_s": ((0.0, 1.0),)},
            {},
            ((0, 0.5, 1000, 1.001), (1, 0.5, 1000, 0.501), (1, 0.9995, 1000, 1.002)),
        ),
        ({}, {"outages_s": ((0.05, 0.2),)}, ((0, 0.0, 100000, 0.1), (1, 0.0, 1000, 0.201))),
    ],
)
def test_links_that_share_a_queue(
    first: dict[str, Any], second: dict[str, Any], messages: list[tuple[int, float, int, float]]
) -> None:
    queue = SharedQueue(RATE)
    links = [LinkModel(LinkSettings(**settings), queue) for settings in (first, second)]
    for link, now_s, size_bytes, arrival_s in messages:
        assert links[link].arrival(now_s, size_bytes) == pytest.approx(arrival_s)


def test_a_schedule_steps_holds_its_ends_and_repeats() -> None:
    steps = ((1.0, 0.1), (2.0, 0.2))
    once, again = StepSchedule(steps), StepSchedule(steps, period_s=3.0)
    assert [once.value_at(t) for t in (0.0, 1.0, 1.9, 2.0, 99.0)] == [0.1, 0.1, 0.1, 0.2, 0.2]
    assert [again.value_at(t) for t in (2.5, 3.0, 4.5, 5.5)] == [0.2, 0.1, 0.1, 0.2]
    capacity = CapacitySchedule(((1.0, RATE), (2.0, RATE / 2)))
    assert [capacity.duration_s(t, 8000) for t in (0.0, 50.0)] == pytest.approx([1 * MS, 2 * MS])
    outages = {
        0.0: (1.0, 2.0),
        1.5: (1.0, 2.0),
        2.0: (4.0, 5.0),
        5.0: (11.0, 12.0),
        37.0: (41.0, 42.0),
    }
    assert {t: TWICE.next_after(t) for t in outages} == outages


def test_jitter_has_the_mean_it_says() -> None:
    settings = LinkSettings(one_way_s=0.02, jitter_s=0.01, seed=5)
    model = LinkModel(settings)
    delays = [model.arrival(float(n), 100) - n for n in range(4000)]
    assert min(delays) >= 0.02
    assert statistics.fmean(delays) == pytest.approx(0.03, rel=0.03)


def test_a_lost_message_is_late_by_a_retransmission_and_never_missing() -> None:
    model = LinkModel(LinkSettings(one_way_s=0.01, loss=0.1, seed=3))
    delays = [model.arrival(10.0 * n, 100) - 10.0 * n for n in range(4000)]
    late = [delay for delay in delays if delay > 0.011]
    assert len(late) == pytest.approx(400, rel=0.15)
    # Nothing follows within ten seconds, so the timeout counts: a round trip and 200 ms.
    assert min(late) == pytest.approx(0.01 + 0.02 + MIN_TIMEOUT_S)
    twice = [delay for delay in late if delay > 0.4]
    assert min(twice) == pytest.approx(0.01 + 3 * (0.02 + MIN_TIMEOUT_S))
    assert len(twice) == pytest.approx(40, rel=0.4)


def mean_added_s(gap_s: float, loss: float, rtt_s: float) -> float:
    """Return the mean delay that losses add to the one-way delay of messages at intervals of
    ``gap_s``, head-of-line blocking included."""
    model = LinkModel(LinkSettings(one_way_s=rtt_s / 2, loss=loss, seed=11))
    times_s = [gap_s * number for number in range(60_000)]
    return statistics.fmean(model.arrival(time_s, 60) - time_s for time_s in times_s) - rtt_s / 2


def blocked_s(wait_s: float, gap_s: float, loss: float) -> float:
    """Compute the same by hand: messages sent while a lost one is awaited are as late as it is."""
    count = math.ceil(wait_s / gap_s)
    return loss * sum(wait_s - index * gap_s for index in range(count))


def test_a_sender_that_goes_on_finds_a_loss_with_its_next_packet() -> None:
    """With 1 % loss, 20 ms RTT and a message every 8 ms, RACK adds 0.6 ms. Three duplicate
    acknowledgements would add 1.4 ms, and a timeout for every loss 25 ms."""
    added_s = mean_added_s(0.008, 0.01, 0.020)
    assert added_s == pytest.approx(blocked_s(0.020 + 0.008, 0.008, 0.01), rel=0.15)
    assert blocked_s(0.020 + 3 * 0.008, 0.008, 0.01) == pytest.approx(0.0014, rel=0.05)
    assert blocked_s(MIN_TIMEOUT_S, 0.008, 0.01) == pytest.approx(0.0255, rel=0.05)


MS = 0.001
STEPS = CapacitySchedule(((0.0, RATE), (0.010, RATE / 4), (0.030, RATE * 2)), period_s=0.050)


def test_serialisation_integrates_over_the_capacity() -> None:
    queue = SharedQueue(STEPS)
    assert queue.serialisation_s(0.0, 1000) == pytest.approx(1 * MS)
    assert queue.serialisation_s(0.012, 1000) == pytest.approx(4 * MS)
    # Half is sent at the first rate, half at the second.
    assert queue.serialisation_s(0.0095, 1000) == pytest.approx(0.5 * MS + 2 * MS)
    # A period holds 10 + 5 + 40 kB; three of them and 10 kB more end 10 ms into the fourth.
    assert queue.serialisation_s(0.0, 3 * 55_000 + 10_000) == pytest.approx(0.160)
    assert SharedQueue(STEPS, offset_s=0.012).serialisation_s(0.0, 1000) == pytest.approx(4 * MS)


Sends = list[tuple[int, int, int]]


def measure_excess(
    build: Callable[[], SharedQueue], capacity: float | CapacitySchedule, sends: Sends
) -> float:
    """Return the most bytes by which three links together exceed the queue's capacity. A value
    above 0 means that the queue invented capacity. Propagation is 0, so arrivals are departures."""
    queue = build()
    links = [LinkModel(LinkSettings(outages_s=((0.02, 0.03 + 0.1 * n),)), queue) for n in range(3)]
    now_s, slots = 0.0, []
    for gap_ms, size_bytes, link in sends:
        now_s += gap_ms * MS
        slots.append((now_s, links[link].arrival(now_s, size_bytes), size_bytes))
    worst = -math.inf
    for from_s, _, _ in slots:
        for _, until_s, _ in slots:
            inside = sum(size for start, end, size in slots if from_s <= start and end <= until_s)
            if inside:
                worst = max(worst, inside - _carried_bytes(capacity, from_s, until_s))
    return worst


def _carried_bytes(capacity: float | CapacitySchedule, from_s: float, until_s: float) -> float:
    if isinstance(capacity, float):
        return capacity * (until_s - from_s) / 8
    assert capacity.period_s is not None
    edges = {from_s, until_s}
    for period in range(int(until_s / capacity.period_s) + 1):
        edges |= {period * capacity.period_s + time_s for time_s, _ in capacity.steps}
    inner = sorted(edge for edge in edges if from_s <= edge <= until_s)
    return sum(capacity.value_at((a + b) / 2) * (b - a) / 8 for a, b in itertools.pairwise(inner))


SENDS = st.tuples(st.integers(0, 20), st.integers(1, 20_000), st.integers(0, 2))


@given(st.lists(SENDS, min_size=1, max_size=40), st.sampled_from((RATE, STEPS)))
def test_no_queue_carries_more_than_its_capacity(
    sends: Sends, capacity: float | CapacitySchedule
) -> None:
    assert measure_excess(lambda: SharedQueue(capacity), capacity, sends) < 1e-3


def test_loss_follows_its_schedule() -> None:
    schedule = StepSchedule(((0.0, 0.0), (60.0, 0.5)), period_s=120.0)
    link = LinkModel(LinkSettings(loss=0.9, loss_schedule=schedule, seed=1))
    late = [link.arrival(30.0 * n, 100) > 30.0 * n for n in range(2000)]
    assert not any(one for n, one in enumerate(late) if n % 4 < 2)
    assert sum(late) == pytest.approx(1000 / 2, rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 4)), max_size=60))
def test_slots_are_those_of_a_plain_search(asked: list[tuple[int, int, int]]) -> None:
    queue, taken = SharedQueue(8.0), list[tuple[float, float]]()
    now = 0.0
    for gap, wait, size_bytes in asked:
        now += gap
        start_s = queue.first_free_s(now, now + wait, size_bytes)
        expected = now + wait
        for busy_start_s, busy_end_s in sorted(taken):
            if expected < busy_end_s and expected + max(size_bytes, 1e-9) > busy_start_s:
                expected = busy_end_s
        if size_bytes:
            assert start_s == expected
            taken.append((start_s, start_s + size_bytes))
        queue.reserve(start_s, start_s + size_bytes, size_bytes)
    assert queue.slot_count <= len(taken)
