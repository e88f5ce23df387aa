"""The link model: each stage by itself with exact figures, then what has to hold for all of them.

Figures: 1000 bytes at 8 Mbit/s take 1 ms to serialise.
"""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.link_model import (
    LEAST_TIMEOUT_S,
    DelaySchedule,
    JitterLaw,
    LinkModel,
    LinkSettings,
    SharedQueue,
    late_s,
)

RATE = 8e6
MS = 1e-3


def near(*values: float) -> list[object]:
    return [pytest.approx(value, abs=1e-12) for value in values]


def arrivals(model: LinkModel, *messages: tuple[float, int]) -> list[float]:
    return [model.arrival(now_s, size_bytes) for now_s, size_bytes in messages]


def test_a_perfect_link_takes_no_time() -> None:
    assert arrivals(LinkModel(), (1.0, 10**9), (2.0, 0)) == [1.0, 2.0]


def test_propagation_delays_every_message_alike_and_does_not_queue() -> None:
    model = LinkModel(LinkSettings(one_way_s=0.05))
    assert arrivals(model, (0.0, 1000), (0.0, 9000), (0.01, 10)) == near(0.05, 0.05, 0.06)


def test_serialisation_queues_and_frees_the_link_before_propagation_ends() -> None:
    model = LinkModel(LinkSettings(one_way_s=0.05), SharedQueue(RATE))
    messages = ((0.0, 1000), (0.0, 1000), (0.01, 2000))
    assert arrivals(model, *messages) == near(0.051, 0.052, 0.062)


def test_overhead_is_serialised_with_each_message() -> None:
    model = LinkModel(LinkSettings(overhead_bytes=500), SharedQueue(RATE))
    assert arrivals(model, (0.0, 500), (0.0, 0)) == near(1 * MS, 1.5 * MS)


def test_links_that_share_a_queue_share_its_bandwidth() -> None:
    queue = SharedQueue(RATE)
    near_link = LinkModel(LinkSettings(), queue)
    far_link = LinkModel(LinkSettings(one_way_s=0.1), queue)
    alone = LinkModel(LinkSettings(), SharedQueue(RATE))
    assert near_link.arrival(0.0, 1000) == pytest.approx(1 * MS)
    assert far_link.arrival(0.0, 1000) == pytest.approx(102 * MS)
    assert near_link.arrival(0.0, 1000) == pytest.approx(3 * MS)
    assert alone.arrival(0.0, 1000) == pytest.approx(1 * MS)


def test_a_link_that_is_out_does_not_hold_up_those_it_shares_with() -> None:
    queue = SharedQueue(RATE)
    out = LinkModel(LinkSettings(outages_s=((0.0, 1.0),)), queue)
    up = LinkModel(LinkSettings(), queue)
    assert out.arrival(0.5, 1000) == pytest.approx(1.001)
    assert up.arrival(0.5, 1000) == pytest.approx(0.501)
    # Only the slot that the first one has reserved is taken.
    assert up.arrival(0.9995, 1000) == pytest.approx(1.002)


def test_nothing_leaves_in_an_outage_and_what_is_in_flight_arrives() -> None:
    model = LinkModel(
        LinkSettings(one_way_s=0.05, outages_s=((0.1, 0.3), (0.3, 0.4), (9.0, 10.0))),
        SharedQueue(RATE),
    )
    assert arrivals(
        model,
        (0.09, 1000),  # leaves before, arrives during
        (0.0995, 1000),  # would be cut off in the middle
        (0.2, 1000),
        (0.5, 1000),
    ) == near(0.141, 0.451, 0.452, 0.551)


def test_an_outage_behind_a_queue_counts_too() -> None:
    queue = SharedQueue(RATE)
    assert LinkModel(LinkSettings(), queue).arrival(0.0, 100_000) == pytest.approx(0.1)
    model = LinkModel(LinkSettings(outages_s=((0.05, 0.2),)), queue)
    assert model.arrival(0.0, 1000) == pytest.approx(0.201)


def test_a_late_message_holds_up_the_ones_behind_it() -> None:
    schedule = DelaySchedule(((0.0, 0.5), (1.0, 0.01)))
    model = LinkModel(LinkSettings(schedule=schedule))
    messages = ((0.9, 10), (1.0, 10), (1.5, 10))
    assert arrivals(model, *messages) == near(1.4, 1.4, 1.51)


def test_a_schedule_steps_holds_its_ends_and_repeats() -> None:
    steps = ((1.0, 0.1), (2.0, 0.2))
    once, again = DelaySchedule(steps), DelaySchedule(steps, period_s=3.0)
    assert [once.one_way_s(t) for t in (0.0, 1.0, 1.9, 2.0, 99.0)] == [0.1, 0.1, 0.1, 0.2, 0.2]
    assert [again.one_way_s(t) for t in (2.5, 3.0, 4.5, 5.5)] == [0.2, 0.1, 0.1, 0.2]


@pytest.mark.parametrize("law", JitterLaw)
def test_jitter_has_the_mean_it_says(law: JitterLaw) -> None:
    settings = LinkSettings(one_way_s=0.02, jitter_s=0.01, jitter_law=law, seed=5)
    model = LinkModel(settings)
    delays = [model.arrival(float(n), 100) - n for n in range(4000)]
    assert min(delays) >= 0.02
    assert statistics.fmean(delays) == pytest.approx(0.03, rel=0.03)


def test_a_lost_message_is_late_by_a_retransmission_and_never_missing() -> None:
    model = LinkModel(LinkSettings(one_way_s=0.01, loss=0.1, seed=3))
    delays = [model.arrival(10.0 * n, 100) - 10.0 * n for n in range(4000)]
    late = [delay for delay in delays if delay > 0.011]
    assert len(late) == pytest.approx(400, rel=0.15)
    # Nothing follows within ten seconds, so it is the timeout: a round trip and 200 ms.
    assert min(late) == pytest.approx(0.01 + 0.02 + LEAST_TIMEOUT_S)
    twice = [delay for delay in late if delay > 0.4]
    assert min(twice) == pytest.approx(0.01 + 3 * (0.02 + LEAST_TIMEOUT_S))
    assert len(twice) == pytest.approx(40, rel=0.4)


def mean_added_s(gap_s: float, loss: float, rtt_s: float) -> float:
    """To the one-way delay of messages that come so often, head-of-line blocking included."""
    model = LinkModel(LinkSettings(one_way_s=rtt_s / 2, loss=loss, seed=11))
    times_s = [gap_s * number for number in range(60_000)]
    return statistics.fmean(model.arrival(time_s, 60) - time_s for time_s in times_s) - rtt_s / 2


def blocked_s(wait_s: float, gap_s: float, loss: float) -> float:
    """The same by hand: what is sent while a lost message is waited for is as late as it."""
    count = math.ceil(wait_s / gap_s)
    return loss * sum(wait_s - index * gap_s for index in range(count))


def test_a_sender_that_goes_on_finds_a_loss_with_its_next_packet() -> None:
    """1 % loss, 20 ms RTT, a message every 8 ms: RACK adds 0.6 ms, three duplicate
    acknowledgements would add 1.4, and a timeout for every loss 25."""
    added_s = mean_added_s(0.008, 0.01, 0.020)
    assert added_s == pytest.approx(blocked_s(0.020 + 0.008, 0.008, 0.01), rel=0.15)
    assert blocked_s(0.020 + 3 * 0.008, 0.008, 0.01) == pytest.approx(0.0014, rel=0.05)
    assert blocked_s(LEAST_TIMEOUT_S, 0.008, 0.01) == pytest.approx(0.0255, rel=0.05)


def test_packets_that_may_have_overtaken_are_waited_for() -> None:
    """Messages of a millisecond apart: a quarter of the round trip, not the gap."""
    model = LinkModel(LinkSettings(one_way_s=0.02, loss=0.01, seed=2))
    delays_s = [model.arrival(0.001 * n, 60) - 0.001 * n for n in range(4000)]
    assert max(delays_s) >= 0.02 + 0.04 + 0.01 - 1e-9
    once = [late_s(0.005, 0.01, 0.01, 0.04, gap_s) for gap_s in (0.0, 0.001, 0.02, 0.3, math.inf)]
    assert once == pytest.approx([0.05, 0.05, 0.06, 0.24, 0.24])


def test_a_long_round_trip_makes_a_retransmission_later() -> None:
    model = LinkModel(LinkSettings(one_way_s=0.3, loss=0.99))
    assert model.arrival(0.0, 100) >= 0.3 + 0.6


def test_a_large_message_is_lost_more_often() -> None:
    def late(size_bytes: int) -> int:
        model = LinkModel(LinkSettings(one_way_s=0.01, loss=0.02, seed=1))
        return sum(model.arrival(9.0 * n, size_bytes) > 9.0 * n + 0.011 for n in range(500))

    assert late(100) * 3 < late(14_000)


def test_changing_the_loss_leaves_the_jitter_alone() -> None:
    one = LinkModel(LinkSettings(jitter_s=0.01, seed=7))
    two = LinkModel(LinkSettings(jitter_s=0.01, loss=0.3, seed=7))
    for now_s in range(0, 5000, 100):
        difference_s = two.arrival(now_s, 1) - one.arrival(now_s, 1)
        assert difference_s < 1e-9 or difference_s > LEAST_TIMEOUT_S * 0.999


TIMES = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 5000), st.integers(0, 1)), max_size=30
)


@given(TIMES, st.integers(0, 9))
def test_messages_arrive_in_order_after_they_could_and_the_same_each_time(
    messages: list[tuple[int, int, int]], seed: int
) -> None:
    def run() -> list[tuple[int, float, float]]:
        queue = SharedQueue(RATE)
        settings = LinkSettings(
            one_way_s=0.02,
            jitter_s=0.01,
            loss=0.2,
            outages_s=((0.5, 0.6), (0.65, 1.0)),
            seed=seed,
        )
        links = (LinkModel(settings, queue), LinkModel(settings, queue))
        now_s, found = 0.0, []
        for gap_ms, size_bytes, link in messages:
            now_s += gap_ms * MS
            found.append((link, now_s, links[link].arrival(now_s, size_bytes)))
        return found

    found = run()
    assert found == run()
    for link in (0, 1):
        times = [arrival_s for number, _, arrival_s in found if number == link]
        assert times == sorted(times)
    for (_, size_bytes, _), (_, now_s, arrival_s) in zip(messages, found, strict=True):
        assert arrival_s >= now_s + size_bytes * 8 / RATE + 0.02 - 1e-9
    if messages:  # the queue cannot have carried more than its bandwidth
        total_s = sum(size_bytes for _, size_bytes, _ in messages) * 8 / RATE
        assert max(a for _, _, a in found) >= found[0][1] + total_s + 0.02 - 1e-9


def test_a_full_queue_stays_one_slot() -> None:
    queue = SharedQueue(RATE)
    model = LinkModel(LinkSettings(), queue)
    assert arrivals(model, *((0.0, 1000),) * 1000)[-1] == pytest.approx(1.0)
    assert queue.slot_count <= 2


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: SharedQueue(0.0), "bits_per_s is 0.0, but must be above 0"),
        (lambda: LinkSettings(one_way_s=-1.0), "one_way_s is -1.0"),
        (lambda: LinkSettings(loss=1.0), r"loss is 1.0, but must be in \[0, 1\)"),
        (lambda: LinkSettings(outages_s=((2.0, 3.0), (1.0, 2.0))), r"outage \(1.0, 2.0\)"),
        (lambda: DelaySchedule(()), "a schedule has 0 steps"),
        (lambda: DelaySchedule(((1.0, 0.1), (1.0, 0.2))), "must increase"),
        (lambda: DelaySchedule(((1.0, -0.1),)), "one_way_s at 1.0 s is -0.1"),
        (lambda: DelaySchedule(((1.0, 0.1),), period_s=1.0), "period_s is 1.0"),
    ],
)
def test_a_setting_out_of_range_is_named(build: object, text: str) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match=text):
        build()
