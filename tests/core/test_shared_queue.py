"""A queue's slots and the schedules of a link.

Oracle: capacity integrated in small steps, closed forms for two-step schedules, and a plain list of
intervals that is searched from the front for each message. The property is conservation: what was
sent through a queue by any time is at most what its capacity adds up to by then. A queue that gives
each link the full rate, and one that forgets what it has taken, must fail it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.link_model import (
    CapacitySchedule,
    DelaySchedule,
    LinkModel,
    LinkSettings,
    LossSchedule,
    OutageSchedule,
    SharedQueue,
)

RATE = 8e6  # 1000 bytes take 1 ms.
MS = 0.001
STEPS = CapacitySchedule(((0.0, RATE), (0.010, RATE / 4), (0.030, RATE * 2)), period_s=0.050)


def test_serialisation_integrates_over_the_capacity() -> None:
    queue = SharedQueue(STEPS)
    assert queue.serialisation_s(0.0, 1000) == pytest.approx(1 * MS)
    assert queue.serialisation_s(0.012, 1000) == pytest.approx(4 * MS)
    # Half of it at the one rate, half of it at the other.
    assert queue.serialisation_s(0.0095, 1000) == pytest.approx(0.5 * MS + 2 * MS)
    # A period holds 10 + 5 + 40 kB; three of them and 10 kB more end 10 ms into the fourth.
    assert queue.serialisation_s(0.0, 3 * 55_000 + 10_000) == pytest.approx(0.160)
    assert SharedQueue(STEPS, offset_s=0.012).serialisation_s(0.0, 1000) == pytest.approx(4 * MS)


def test_a_schedule_that_does_not_repeat_keeps_its_ends() -> None:
    once = CapacitySchedule(((1.0, RATE), (2.0, RATE / 2)))
    assert once.duration_s(0.0, 8000) == pytest.approx(1 * MS)
    assert once.duration_s(50.0, 8000) == pytest.approx(2 * MS)


@given(st.floats(0.0, 0.2), st.integers(1, 200_000))
def test_the_integral_is_that_of_small_steps(start_s: float, size_bytes: int) -> None:
    end_s = start_s + STEPS.duration_s(start_s, size_bytes * 8)
    count = 4000
    step_s = (end_s - start_s) / count
    bits = sum(STEPS.at(start_s + (n + 0.5) * step_s) for n in range(count)) * step_s
    assert bits == pytest.approx(size_bytes * 8, rel=0.01)


# --- conservation -----------------------------------------------------------------------------

Sends = list[tuple[int, int, int]]
SENDS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 20_000), st.integers(0, 2)),
    min_size=1,
    max_size=40,
)
CAPACITIES = st.sampled_from((RATE, STEPS))


def overfull(
    build: Callable[[], SharedQueue], capacity: float | CapacitySchedule, sends: Sends
) -> float:
    """The bytes by which three links together exceed what the queue can carry, at the worst;
    above 0 means that the queue made capacity up. Propagation is 0, so arrivals are departures."""
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
                worst = max(worst, inside - _carried(capacity, from_s, until_s))
    return worst


def _carried(capacity: float | CapacitySchedule, from_s: float, until_s: float) -> float:
    if isinstance(capacity, float):
        return capacity * (until_s - from_s) / 8
    assert capacity.period_s is not None
    edges = {from_s, until_s}
    for period in range(int(until_s / capacity.period_s) + 1):
        edges |= {period * capacity.period_s + time_s for time_s, _ in capacity.steps}
    inner = sorted(edge for edge in edges if from_s <= edge <= until_s)
    return sum(capacity.at((a + b) / 2) * (b - a) / 8 for a, b in itertools.pairwise(inner))


@given(SENDS, CAPACITIES)
def test_no_queue_carries_more_than_its_capacity(
    sends: Sends, capacity: float | CapacitySchedule
) -> None:
    assert overfull(lambda: SharedQueue(capacity), capacity, sends) < 1e-3


class FullRateForEach(SharedQueue):
    """Planted fault: every message has the queue to itself."""

    def take(self, start_s: float, end_s: float, size_bytes: int) -> None:
        pass


class Forgetful(SharedQueue):
    """Planted fault: only the latest slot counts."""

    def take(self, start_s: float, end_s: float, size_bytes: int) -> None:
        self._busy = [(start_s, end_s)]


class NoSerialisation(SharedQueue):
    """Planted fault: serialisation is booked elsewhere, as if it were propagation."""

    def serialisation_s(self, start_s: float, size_bytes: int) -> float:
        return 0.0


@pytest.mark.parametrize("faulty", [FullRateForEach, Forgetful, NoSerialisation])
def test_a_planted_fault_breaks_conservation(faulty: type[SharedQueue]) -> None:
    sends = [(n % 3, 3000, n % 3) for n in range(30)]
    assert overfull(lambda: SharedQueue(RATE), RATE, sends) < 1e-3
    assert overfull(lambda: faulty(RATE), RATE, sends) > 1000


# --- slots ------------------------------------------------------------------------------------


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
        queue.take(start_s, start_s + size_bytes, size_bytes)
    assert queue.slot_count <= len(taken)


def test_slots_that_have_passed_are_forgotten() -> None:
    queue = SharedQueue(RATE)
    model = LinkModel(LinkSettings(), queue)
    for n in range(5000):
        model.arrival(float(n), 1000)
        assert queue.slot_count <= 2
    assert len(queue._busy) <= 70


# --- schedules in a link ----------------------------------------------------------------------


def test_outages_repeat_and_are_shifted() -> None:
    every = OutageSchedule(((1.0, 2.0), (4.0, 5.0)), period_s=10.0)
    assert every.next_after(0.0) == (1.0, 2.0)
    assert every.next_after(1.5) == (1.0, 2.0)
    assert every.next_after(2.0) == (4.0, 5.0)
    assert every.next_after(5.0) == (11.0, 12.0)
    assert every.next_after(37.0) == (41.0, 42.0)
    link = LinkModel(LinkSettings(outage_schedule=every, schedule_offset_s=3.0))
    assert [link.arrival(t, 1) for t in (0.5, 1.5, 8.5, 21.2)] == [0.5, 2.0, 9.0, 22.0]


def test_both_kinds_of_outage_hold_a_message_back() -> None:
    every = OutageSchedule(((1.0, 2.0),), period_s=10.0)
    link = LinkModel(LinkSettings(outages_s=((2.0, 3.0),), outage_schedule=every))
    assert link.arrival(1.5, 1) == 3.0


def test_a_message_longer_than_any_gap_passes_in_the_end() -> None:
    every = OutageSchedule(((1.0, 2.0),), period_s=2.0)
    link = LinkModel(LinkSettings(outage_schedule=every), SharedQueue(8.0))
    assert 4.0 < link.arrival(0.0, 3) < 20.0
    assert link.arrival(50.0, 1) == pytest.approx(51.0)  # and one that just fits does


def test_loss_follows_its_schedule() -> None:
    schedule = LossSchedule(((0.0, 0.0), (60.0, 0.5)), period_s=120.0)
    link = LinkModel(LinkSettings(loss=0.9, loss_schedule=schedule, seed=1))
    late = [link.arrival(30.0 * n, 100) > 30.0 * n for n in range(2000)]
    first = [x for n, x in enumerate(late) if n % 4 < 2]
    second = [x for n, x in enumerate(late) if n % 4 >= 2]
    assert sum(first) == 0
    assert sum(second) == pytest.approx(len(second) / 2, rel=0.1)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: CapacitySchedule(((0.0, 0.0),)), "bits_per_s at 0.0 s is 0.0"),
        (lambda: CapacitySchedule(((0.0, math.inf),)), "must be finite"),
        (lambda: LossSchedule(((0.0, 1.0),)), r"loss at 0.0 s is 1.0, but must be in \[0, 1\)"),
        (lambda: DelaySchedule(((0.0, -1.0),)), "one_way_s at 0.0 s is -1.0"),
        (lambda: OutageSchedule(((1.0, 2.0),), period_s=1.5), r"outage \(1.0, 2.0\)"),
        (lambda: OutageSchedule(((-1.0, 2.0),), period_s=5.0), r"outage \(-1.0, 2.0\)"),
        (lambda: OutageSchedule(((0.0, 2.0), (2.0, 5.0)), period_s=5.0), "last all of period_s"),
        (lambda: LinkSettings(schedule_offset_s=math.nan), "schedule_offset_s is nan"),
    ],
)
def test_a_schedule_out_of_range_is_named(build: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()
