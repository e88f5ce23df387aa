"""Fair shares of a rate. Oracle: the theory's formula, and waiting lines played out in time."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.verifier.traffic_budget import FairShares, ShareLimits, fair_share

LIMITS = ShareLimits(rate=500.0, least_rate=100.0, burst=256.0, first=256.0)


@pytest.mark.parametrize(
    ("wants", "share"),
    [
        ([], 100.0),
        ([1e9], 100.0),
        ([10.0, 10.0, 1e9], 80.0),
        ([10.0, 1e9, 1e9], 45.0),
        ([10.0, 20.0, 30.0], 70.0),  # the greediest may have what the others leave
        ([50.0] * 4, 25.0),
    ],
)
def test_shares_are_max_min_fair(wants: list[float], share: float) -> None:
    assert fair_share(100.0, wants) == pytest.approx(share)


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=20))
def test_nobody_loses_by_a_share_what_others_do_not_get(wants: list[float]) -> None:
    share = fair_share(100.0, wants)
    assert share >= 100.0 / len(wants) * (1.0 - 1e-9)
    spent = sum(min(want, share) for want in wants)
    assert spent == pytest.approx(min(100.0, sum(wants)), rel=1e-6)


def play(
    shares: FairShares,
    until: float,
    floods: dict[str, int],
    steady: dict[str, float],
    cost: float = 1.0,
) -> dict[str, list[float]]:
    """When each payer spent: ``floods`` has places of each that send from 1.0 on whenever they are
    let, ``steady`` has messages a second of payers that are asserted never to wait."""
    moments: dict[str, list[float]] = {name: [] for name in (*floods, *steady)}
    turns = [(1.0, name, True) for name, places in floods.items() for _ in range(places)]
    turns += [(0.0, name, False) for name in steady]
    heapq.heapify(turns)
    while turns[0][0] < until:
        now, name, flood = heapq.heappop(turns)
        shares.spend(name, cost, now)
        moments[name].append(now)
        wait_s = shares.wait_s(name, now)
        if flood:
            heapq.heappush(turns, (now + max(wait_s, 1e-4), name, flood))
        else:
            assert wait_s == 0.0, f"{name} waits at {now}"
            heapq.heappush(turns, (now + 1.0 / steady[name], name, flood))
    return moments


def most_in(moments: list[float], window_s: float) -> int:
    """The most of these moments in any window."""
    first, most = 0, 0
    for last, moment in enumerate(moments):
        while moments[first] <= moment - window_s:
            first += 1
        most = max(most, last - first + 1)
    return most


@pytest.mark.parametrize("places", [1, 10, 200])
def test_a_flood_has_what_the_others_leave_over_however_many_places_it_asks_at(
    places: int,
) -> None:
    steady = {f"device {number}": 10.0 for number in range(20)}
    spent = play(FairShares(LIMITS, 0.0), 21.0, {"flood": places}, steady)
    assert len(spent["flood"]) <= 256 + places + 20 * 300 * 1.1
    assert len(spent["flood"]) >= 0.9 * 20 * 300
    assert most_in(spent["flood"], 1.0) <= 256 + places + 500


def test_a_flood_beside_many_has_the_least_rate() -> None:
    steady = {f"device {number}": 10.0 for number in range(64)}
    spent = play(FairShares(LIMITS, 0.0), 21.0, {"flood": 50}, steady)
    assert len(spent["flood"]) == pytest.approx(256 + 20 * 100, rel=0.2)


def test_floods_share_what_is_left_equally() -> None:
    spent = play(FairShares(LIMITS, 0.0), 21.0, {"one": 1, "many": 100}, {"device": 10.0})
    assert len(spent["one"]) == pytest.approx(len(spent["many"]), rel=0.1)
    assert len(spent["one"]) == pytest.approx(256 + 20 * 245, rel=0.1)


def test_who_is_alone_never_waits_and_starts_without_debts_when_another_comes() -> None:
    shares, now = FairShares(LIMITS, 0.0), 0.0
    for _ in range(5_000):
        now += 1e-3
        shares.spend("fleet", 1.0, now)
        assert shares.wait_s("fleet", now) == 0.0
    shares.spend("another", 1.0, now)
    shares.spend("fleet", 1.0, now)
    assert shares.wait_s("another", now) == 0.0
    assert 0.0 < shares.wait_s("fleet", now) <= 1.0 / 100.0


def test_a_cost_that_was_earned_does_not_count_and_saves_no_more_than_a_burst() -> None:
    shares = FairShares(LIMITS, 0.0)
    shares.spend("other", 1.0, 0.0)
    for _ in range(1_000):
        shares.spend("fleet", 1.0, 0.0)
        shares.earn("fleet", 1.0, 0.0)
    assert shares.wait_s("fleet", 0.0) == 0.0
    shares.earn("fleet", 1e9, 0.0)
    assert shares.wait_s("fleet", 0.0, cost=256.0) == 0.0
    assert shares.wait_s("fleet", 0.0, cost=257.0) > 0.0
    shares.earn("unknown", 1e9, 0.0)
    assert len(shares) == 2


def test_a_grace_reaches_beyond_the_debt_of_others_of_the_same_payer() -> None:
    shares = FairShares(LIMITS, 0.0)
    shares.spend("other", 1.0, 0.0)
    shares.spend("guilty", 256.0 + 100.0, 0.0)
    assert shares.wait_s("guilty", 0.0) == pytest.approx(100.0 / 500.0)
    assert shares.wait_s("guilty", 0.0, grace=100.0) == 0.0
    assert shares.wait_s("guilty", 0.0, grace=90.0) == pytest.approx(10.0 / 500.0)


def test_a_newcomer_without_a_burst_waits_for_its_part_of_the_whole() -> None:
    calls = replace(LIMITS, rate=50.0, least_rate=0.05, burst=4.0, first=0.0, free_alone=False)
    calls = replace(calls, idle_s=10.0)
    shares = FairShares(calls, 0.0)
    for number in range(99):
        shares.spend(f"caller {number}", 1.0, 0.0)
    assert shares.wait_s("newcomer", 0.0, cost=1.0) == pytest.approx(100.0 / 50.0)
    # Who has kept to its share for a while has a call saved.
    assert shares.wait_s("caller 0", 9.0, cost=1.0) == 0.0


def test_payers_that_owe_nothing_are_forgotten_and_their_number_is_bounded() -> None:
    shares = FairShares(replace(LIMITS, max_payers=10), 0.0)
    for number in range(1_000):
        shares.spend(f"payer {number}", 1e3, number * 1e-6)
    assert len(shares) == 10
    shares.spend("indebted", 2e4, 0.0)
    assert shares.wait_s("payer 999", 5.0) == 0.0  # asking is enough to forget the others
    assert len(shares) == 1
    shares.spend("another", 1.0, 5.0)
    assert shares.wait_s("indebted", 5.0) > 0.0


def test_no_debt_keeps_a_payer_waiting_for_long() -> None:
    shares = FairShares(LIMITS, 0.0)
    shares.spend("other", 1.0, 0.0)
    for _ in range(1_000):
        shares.spend("flood", 1e6, 0.0)
    assert shares.wait_s("flood", 0.0, grace=LIMITS.burst) == pytest.approx(LIMITS.max_wait_s)


@pytest.mark.parametrize("seed", range(5))
def test_within_the_least_rate_nobody_ever_waits(seed: int) -> None:
    """Whatever others spend, earn or ask, and however they come and go."""
    dice = random.Random(seed)
    shares, now, due = FairShares(replace(LIMITS, max_payers=2_000), 0.0), 0.0, 0.0
    for _ in range(20_000):
        now += dice.expovariate(2_000.0)
        name = f"other {dice.randrange(300)}"
        match dice.randrange(4):
            case 0:
                shares.earn(name, dice.uniform(0.0, 100.0), now)
            case 1:
                assert shares.wait_s(name, now) >= 0.0
            case _:
                shares.spend(name, dice.choice((1.0, 1.0, 8.0, 500.0)), now)
        while due <= now:
            shares.spend("modest", 1.0, due)
            assert shares.wait_s("modest", now) == 0.0
            due += 1.0 / 100.0
