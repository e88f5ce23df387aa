"""Shares of the target between credentials. Oracle: pass times as stated, formulas by hand."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import FaultCode
from edgespec.core.verifier.credential import Credential
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.fairness import AGE_PASSES, Fairness
from edgespec.core.verifier.traffic_budget import FairShares, ShareLimits, fair_share, water_level
from tests.core.scenes import DECODE_S, PacedEngine

SESSION_S = 0.001

CROWD = Credential("crowd")

MANY = EngineLimits(max_sessions=512)


def single(number: int) -> Credential:
    return Credential(f"single {number}")


def crowded(crowd: int, singles: int, session_s: float = SESSION_S) -> PacedEngine:
    """The sessions of one key join those of keys with one each, whose passes are known by then."""
    paced = PacedEngine(0.0, MANY, session_s)
    for number in range(singles):
        paced.open(f"single {number}", credential=single(number))
        for _ in range(3):
            paced.run_pass()
    for number in range(crowd):
        paced.open(f"crowd {number}", credential=CROWD)
    return paced


def paces(paced: PacedEngine, seconds: float) -> dict[str, float]:
    """Tokens a second of each session from now on."""
    before, start = dict(paced.tokens), paced.now
    paced.run_until(start + seconds)
    lasted = paced.now - start
    return {name: (count - before[name]) / lasted for name, count in paced.tokens.items()}


def test_the_share_by_hand() -> None:
    assert water_level(0.020, [0.2] + [0.001] * 20) == pytest.approx(0.002)
    assert water_level(0.020, [0.2, 0.2, 0.001]) == pytest.approx(0.021)
    assert water_level(0.020, [0.2] * 3) >= 0.2
    assert water_level(0.020, [5.0]) >= 5.0
    for wants in ([0.2, 0.2, 0.001], [0.3, 0.01, 0.001]):
        share = water_level(0.020, wants)
        took = 0.020 + sum(min(want, share) for want in wants)
        assert share == pytest.approx(took / len(wants))


def test_one_key_with_200_sessions_hardly_slows_20_keys_with_one() -> None:
    paced = crowded(200, 20)
    alone = 1 / (DECODE_S + 20 * SESSION_S)
    paces(paced, 5.0)
    pace = paces(paced, 20.0)
    for number in range(20):
        assert pace[f"single {number}"] >= 0.9 * alone
    crowd = [pace[f"crowd {number}"] for number in range(200)]
    assert sum(crowd) >= 1.5 * alone  # about two sessions a pass
    assert min(crowd) >= 0.5 * max(crowd) > 0.0  # they take turns


def test_what_a_share_leaves_over_is_remembered() -> None:
    paced = crowded(10, 3, session_s=0.008)  # a share of (20 + 24) / 3 = 14.7 ms
    paces(paced, 5.0)
    sizes = [sum("crowd" in name for name in paced.run_pass()) for _ in range(60)]
    assert set(sizes) == {1, 2}
    assert sum(sizes) / 60 == pytest.approx(44 / 3 / 8, rel=0.05)


def test_higher_priorities_come_first_and_lower_ones_do_not_starve() -> None:
    paced = PacedEngine(0.0, EngineLimits(max_rows_per_pass=4))
    for number in range(6):
        paced.open(f"high {number}", credential=Credential("high", priority=5))
    for number in range(2):
        paced.open(f"low {number}", credential=Credential("low", priority=-1))
    paced.run_until(2.0)
    pace = paces(paced, 20.0)
    high = [pace[f"high {number}"] for number in range(6)]
    low = [pace[f"low {number}"] for number in range(2)]
    assert min(high) >= 2.0 * max(low)
    assert min(low) >= 0.9 / (DECODE_S * (AGE_PASSES + 2))


def test_prompts_of_one_key_do_not_hold_up_another_key() -> None:
    paced = PacedEngine(0.0001)
    paced.open("runs", credential=single(0))
    for _ in range(20):
        paced.run_pass()
    for number in range(30):
        paced.open(f"crowd {number}", 1_000, CROWD)
    for _ in range(40):
        paced.run_pass()
    paced.open("mine", 1_000, single(1))
    asked_s = paced.now
    while not paced.tokens["mine"]:
        paced.run_pass()
    # 37.5 of its rows a pass of 23.75 ms in the mean, in every second pass.
    assert paced.now - asked_s <= 1.2 * 2 * 1_000 / 37.5 * 0.02375


@pytest.mark.parametrize("rate", [5.0, 40.0, 300.0])
def test_a_rate_is_kept_within_a_twentieth(rate: float) -> None:
    paced = PacedEngine(0.0, MANY, SESSION_S)
    for number in range(30):
        paced.open(f"s {number}", credential=Credential("slow", tokens_per_s=rate))
    paced.open("other", credential=single(0))
    paced.run_until(3.0)
    pace = paces(paced, 30.0)
    mine = [pace[f"s {number}"] for number in range(30)]
    assert sum(mine) == pytest.approx(rate, rel=0.05)
    assert max(mine) - min(mine) <= 0.1 * rate / 30 + 2 / 30
    assert pace["other"] >= 0.5 / DECODE_S / 2


def test_a_key_over_its_rate_waits_without_busy_polls() -> None:
    paced = PacedEngine(0.0)
    paced.open("s", credential=Credential("slow", tokens_per_s=2.0))
    paced.run_until(10.0)
    polls = sum(not paced.run_pass() for _ in range(40))
    assert polls <= 30
    assert paced.tokens["s"] == pytest.approx(2.0 * paced.now + 8, abs=3)


def test_a_new_rate_counts_from_the_next_session_on() -> None:
    paced = PacedEngine(0.0)
    paced.open("s", credential=Credential("slow", tokens_per_s=2.0))
    paced.run_until(10.0)
    paced.close("s")
    paced.open("t", credential=Credential("slow", tokens_per_s=20.0))
    paced.run_until(20.0)
    assert paces(paced, 10.0)["t"] == pytest.approx(20.0, rel=0.05)


def test_at_its_limit_a_key_gives_up_its_own_useless_session_or_is_refused() -> None:
    paced = PacedEngine(0.0)
    two = Credential("two", max_sessions=2)
    for name in "abc":
        paced.open(name, credential=two)
    (fault,) = paced.faults
    assert fault.code is FaultCode.OVERLOADED
    assert "2 sessions of key 'two' are open, its limit" in fault.message
    paced.open("d", credential=single(1))
    paced.lose("a")
    paced.open("e", credential=two)
    assert set(paced.engine.sessions) == {"b", "d", "e"}


def test_a_key_has_a_context_and_models_of_its_own() -> None:
    paced = PacedEngine(0.0)
    short = Credential("short", context_length=100, models=("big",))
    paced.open("long", 100, short)
    assert "prompt of 100 tokens" in paced.faults[-1].message
    assert "context of 100, the limit of key 'short'" in paced.faults[-1].message
    paced.open("fits", 90, short)
    for _ in range(10):
        paced.run_pass()
    assert paced.tokens["fits"] == 10
    assert not paced.engine.running
    paced.open("other", credential=replace(short, models=("small", "tiny")))
    codes = [fault.code for fault in paced.faults]
    assert codes == [FaultCode.CONTEXT_TOO_LONG, FaultCode.UNKNOWN_MODEL]
    assert "key 'short' is for the models 'small', 'tiny'" in paced.faults[-1].message
    assert "this one is 'big'" in paced.faults[-1].message


def test_a_full_verifier_tells_the_place_in_line_and_when_to_come_back() -> None:
    paced = PacedEngine(0.0, EngineLimits(max_sessions=2))
    for number in range(2):
        paced.now = 3.0 * number
        paced.open(f"in {number}")
    for number in range(3):
        paced.open(f"waits {number}")
    paced.open("waits 1")
    places = [fault.message.rpartition("; ")[2] for fault in paced.faults]
    assert places == [f"{before} wait before it" for before in (0, 1, 2, 1)]
    assert [fault.retry_after_s for fault in paced.faults] == [3.0, 6.0, 9.0, 6.0]
    paced.close("in 0")
    paced.open("waits 0")
    paced.open("waits 2")
    assert paced.faults[-1].message.endswith("1 wait before it")
    paced.now += 60.0
    paced.open("late")
    assert paced.faults[-1].message.endswith("0 wait before it")


def test_accounts_that_nobody_uses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.core.verifier.fairness.MAX_ACCOUNTS", 8)
    table: dict[str, Credential] = {}
    fairness = Fairness(table)
    for number in range(100):
        table.clear()
        table["s"] = single(number)
        fairness.plan(["s"], (), 0.0)
    assert len(fairness._accounts) <= 8


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
