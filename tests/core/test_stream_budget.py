"""Budgets of streams and calls. Oracle: the formulas of the theory, counted by hand."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest

from edgespec.core.verifier.traffic_budget import (
    INFO_LIMITS,
    OPEN_LIMITS,
    CallBudget,
    StreamBudget,
    TokenBucket,
    UplinkBudget,
    UplinkLimits,
    Wait,
    without_keys,
)

LIMITS = UplinkLimits()
MAX_NODES = 128
ALONE = replace(LIMITS, total_message_rate=1e9, total_burst=1e9)


def test_a_bucket_fills_to_its_burst_and_waits_for_its_debt() -> None:
    bucket = TokenBucket(rate=10.0, burst=5.0, now=0.0)
    bucket.take(8.0, 0.0)
    assert bucket.level(0.0) == -3.0
    assert bucket.wait_s(0.0) == pytest.approx(0.3)
    assert bucket.wait_s(0.3) == pytest.approx(0.0)
    assert bucket.level(100.0) == 5.0
    bucket.add(9.0, 100.0)
    assert bucket.level(50.0) == 5.0  # a clock that steps back takes nothing away


def read_in_a_loop(budget: StreamBudget, until: float, commit_every_s: float, nodes: int) -> int:
    """A stream that sends whenever it is read; commits of one token go out all the while."""
    now, commit_at, read = 0.0, commit_every_s, 0
    while now < until:
        while commit_at <= now:
            budget.earn(1, MAX_NODES, commit_at)
            commit_at += commit_every_s
        read += 1
        now += max(1e-4, budget.spend(nodes, now))
    return read


@pytest.mark.parametrize(
    ("commit_every_s", "rate"),
    [(1e9, 100), (0.030, 100 + 18 / 0.030), (0.003, 1100)],
    ids=["no text", "a token every 30 ms", "a token every 3 ms"],
)
def test_a_stream_that_sends_in_a_loop_is_read_at_its_rate(
    commit_every_s: float, rate: float
) -> None:
    budget = UplinkBudget(ALONE, 0.0).open(0.0)
    read = read_in_a_loop(budget, 20.0, commit_every_s, nodes=1)
    assert read == pytest.approx(128 + 20 * rate, rel=0.02)


def test_a_stream_of_many_nodes_is_read_at_the_rate_of_nodes() -> None:
    budget = UplinkBudget(ALONE, 0.0).open(0.0)
    read = read_in_a_loop(budget, 20.0, 1e9, nodes=256)
    assert read * 256 == pytest.approx(1024 + 20 * 2000, rel=0.02)


@pytest.mark.parametrize("tokens_a_pass", [1, 3, 7, 15])
@pytest.mark.parametrize("pass_s", [0.003, 0.030, 0.200])
def test_a_device_with_steps_of_a_millisecond_is_never_slowed(
    pass_s: float, tokens_a_pass: int
) -> None:
    """It sends two nodes each millisecond until nothing more is worth drafting: a tree of 14 steps
    after a miss, and one for each token the text moved; and acknowledges every commit."""
    budget = UplinkBudget(LIMITS, 0.0).open(0.0)
    now = 0.0
    for _ in range(600):
        steps = min(round(pass_s * 1000) - 1, 14 + tokens_a_pass)
        for step in range(steps):
            assert budget.spend(2, now + step * 1e-3) == 0.0
        now += pass_s
        budget.earn(tokens_a_pass, MAX_NODES, now)
        assert budget.spend(0, now) == 0.0


def test_a_stream_may_send_a_whole_tree_before_its_first_commit() -> None:
    budget = UplinkBudget(LIMITS, 0.0).open(0.0)
    assert [budget.spend(1, 0.0) for _ in range(MAX_NODES)] == [0.0] * MAX_NODES
    assert budget.spend(1, 0.0) == pytest.approx(0.01)


def test_commits_without_tokens_earn_nothing() -> None:
    budget = UplinkBudget(LIMITS, 0.0).open(0.0)
    for _ in range(MAX_NODES):
        budget.spend(1, 0.0)
    budget.earn(0, MAX_NODES, 1e-9)
    assert budget.spend(1, 1e-9) > 0.0


@pytest.mark.parametrize(("streams", "rate"), [(10, 2_000), (100, 100 * 100)])
def test_the_busy_streams_pay_for_the_total_and_the_quiet_do_not(streams: int, rate: int) -> None:
    """They send what they earn, some 700 messages a second each."""
    shared = UplinkBudget(LIMITS, 0.0)
    busy = [shared.open(0.0) for _ in range(streams)]
    next_at = [0.0] * streams
    quiet, read = shared.open(0.0), 0
    for now in (tick * 0.001 for tick in range(10_000)):
        commit = round(now * 1000) % 30 == 0
        for index, stream in enumerate(busy):
            if commit:
                stream.earn(1, MAX_NODES, now)
            if next_at[index] <= now:
                read += 1
                next_at[index] = now + stream.spend(1, now)
        if commit:
            quiet.earn(1, MAX_NODES, now)
            assert quiet.spend(2, now) == 0.0
    at_first = streams * (64 + 7) + 2_000 + 500  # half of each burst, the shared one, the debt
    assert 0.95 * 10 * rate <= read <= at_first + 10 * rate


def test_random_spending_waits_a_finite_time() -> None:
    dice = random.Random(5)
    shared = UplinkBudget(LIMITS, 0.0)
    streams, now = [shared.open(0.0) for _ in range(5)], 0.0
    for _ in range(5_000):
        now += dice.choice((0.0, 1e-4, 0.05))
        stream = dice.choice(streams)
        if dice.random() < 0.2:
            stream.earn(dice.randrange(5), MAX_NODES, now)
        # Whoever waits as told owes at most one message and its nodes; here nobody waits.
        assert 0.0 <= stream.spend(dice.choice((0, 1, 256)), now) < 1e3


# --- calls ------------------------------------------------------------------------------------


def test_two_hundred_devices_behind_one_address_start_within_seconds() -> None:
    budget = CallBudget(OPEN_LIMITS, 0.0)
    waits = [budget.turn("ipv4:10.0.0.1", 0.0) for _ in range(200)]
    assert waits[:128] == [0.0] * 128
    assert max(waits) == pytest.approx((200 - 128) / 20)
    assert waits == sorted(waits)


def test_a_peer_that_opens_in_a_loop_waits_and_others_do_not() -> None:
    budget, now, opened = CallBudget(OPEN_LIMITS, 0.0), 0.0, 0
    while now < 30.0:
        now += max(1e-3, budget.turn("ipv4:10.0.0.1", now))
        opened += 1
        assert budget.turn("ipv4:10.0.0.2", now) == 0.0 if opened % 100 == 0 else True
    assert opened == pytest.approx(128 + 30 * 20, rel=0.02)


def test_who_would_wait_too_long_has_no_place_and_costs_none() -> None:
    budget = CallBudget(INFO_LIMITS, 0.0)
    waits = [budget.turn("a", 0.0) for _ in range(500)]
    placed = [wait for wait in waits if wait <= INFO_LIMITS.max_wait_s]
    assert len(placed) == 50 + 25
    assert waits[-1] == pytest.approx(26 / 25)
    assert budget.turn("b", 0.0) == 0.0  # 25 of the 100 are left
    assert budget.turn("a", 1.0) <= INFO_LIMITS.max_wait_s


def test_all_peers_together_meet_the_total() -> None:
    budget = CallBudget(INFO_LIMITS, 0.0)
    waits = [budget.turn(f"peer {index}", 0.0) for index in range(400)]
    assert sum(wait == 0.0 for wait in waits) == 100
    assert sum(wait <= 1.0 for wait in waits) == 150


def test_the_peers_remembered_are_bounded() -> None:
    budget = CallBudget(replace(OPEN_LIMITS, max_peers=3), 0.0)
    for peer in ("a", "b", "c", "a", "d"):
        budget.turn(peer, 0.0)
    assert budget.peer_count == 3
    for _ in range(200):
        budget.turn("a", 0.0)
    assert budget.turn("a", 0.0) > 0.0  # not forgotten: "b" was the one


# --- payers -----------------------------------------------------------------------------------


def test_a_payer_is_read_at_its_share_over_any_number_of_streams_old_or_new() -> None:
    """It opens a stream whenever it is let, and each sends messages of 1,024 bytes in a loop, which
    cost two; twenty devices with 5 messages a second each, and one that opens every second, never
    wait."""
    limits = UplinkLimits()
    shared = UplinkBudget(limits, 0.0)
    devices = [shared.open(0.0, f"device {number}") for number in range(20)]
    turns: list[tuple[float, int]] = []
    streams: list[StreamBudget] = []
    read = opened = 0
    open_at = 0.0
    for tick in range(10_000):
        now = tick * 1e-3
        if tick % 200 == 0:
            assert [device.spend(0, now) for device in devices] == [0.0] * 20
        if tick % 1_000 == 0:
            assert shared.turn("device 0", now, 10.0) == 0.0
        if tick >= 1_000 and open_at <= now:
            wait_s = shared.turn("flood", now, 10.0)
            open_at = now + max(1e-3, wait_s)
            if wait_s <= 10.0:
                opened += 1
                heapq.heappush(turns, (now + wait_s, len(streams)))
                streams.append(shared.open(now, "flood"))
        while turns and turns[0][0] <= now:
            _, number = heapq.heappop(turns)
            read += 1
            wait_s = streams[number].spend(1, now, 1_024)
            heapq.heappush(turns, (now + max(1e-3, wait_s), number))
    spent = 2.0 * read + limits.messages_per_open * opened
    share = limits.shares.rate - 20 * 5.0
    most = 2 * limits.shares.burst + 2.0 * len(streams) + 9.0 * share
    assert 0.5 * most <= spent <= 1.05 * most


def test_the_quiet_streams_of_a_payer_do_not_pay_for_a_busy_one() -> None:
    shared = UplinkBudget(UplinkLimits(), 0.0)
    other, busy, quiet = (shared.open(0.0, name) for name in ("other", "fleet", "fleet"))
    next_at = 0.0
    waits: list[float] = []
    for tick in range(5_000):
        now = tick * 1e-3
        if tick % 100 == 0:
            assert other.spend(0, now) == 0.0
            assert quiet.spend(1, now) == 0.0
        if next_at <= now:
            waits.append(busy.spend(1, now))
            next_at = now + waits[-1]
    assert waits[-1] > 0.0


@pytest.mark.parametrize(("accepted", "waits"), [(1, False), (0, True)], ids=["right", "wrong"])
def test_commits_add_to_the_share_of_a_payer_whose_drafts_are_right(
    accepted: int, waits: bool
) -> None:
    """A fleet of a hundred streams with a commit each 40 ms, each followed by two messages."""
    shared = UplinkBudget(UplinkLimits(), 0.0)
    other = shared.open(0.0, "other")
    fleet, waited = [shared.open(0.0, "fleet") for _ in range(100)], 0.0
    for tick in range(200):
        now = tick * 0.040
        assert other.spend(0, now) == 0.0
        for stream in fleet:
            stream.earn(1, MAX_NODES, now, accepted)
            waited += stream.spend(2, now) + stream.spend(0, now)
    assert (waited > 0.0) == waits


def test_an_address_may_be_a_whole_site() -> None:
    limits = without_keys(LIMITS)
    assert limits.shares.least_rate == limits.shares.rate == 1_000.0
    assert without_keys(replace(LIMITS, address_rate=1.0)) == replace(LIMITS, address_rate=1.0)
    shared = UplinkBudget(limits, 0.0)
    site = [shared.open(0.0, "site") for _ in range(100)]
    floods = [shared.open(0.0, f"flood {number}") for number in range(16)]
    for tick in range(100):
        now = tick * 0.1
        for flood in floods:
            flood.spend(0, now, 1 << 20)
        assert [stream.spend(0, now) for stream in site] == [0.0] * 100


def test_waits_are_told_with_their_reason() -> None:
    heard: list[tuple[Wait, float]] = []
    budget = UplinkBudget(LIMITS, 0.0, lambda *wait: heard.append(wait)).open(0.0)
    waits = [budget.spend(1, 0.0) for _ in range(130)]
    assert heard == [(Wait.STREAM, wait) for wait in waits if wait]


def test_a_newcomer_does_not_stand_in_the_line_of_a_flood() -> None:
    """A hundred addresses of one key ask whenever they are let: the whole line is theirs."""
    budget, now = CallBudget(OPEN_LIMITS, 0.0), 0.0
    asked = granted = 0
    while now < 30.0:
        now += 1e-3
        asked += 1
        wait_s = budget.turn(f"address {asked % 100}", now, "flood")
        granted += wait_s <= OPEN_LIMITS.max_wait_s
        if asked % 1_000 == 0:
            assert budget.turn("honest", now) <= 2 / 60.0
    assert granted <= 256 + 60 * (30.0 + OPEN_LIMITS.max_wait_s)
