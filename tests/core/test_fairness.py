"""Shares of the target between credentials; budgets of streams, calls and keys; and which session
loses its cache blocks, and how blocks are named.

Oracle: pass times as stated and formulas by hand; a session that cannot run keeps no other out; for
the rule of eviction the order of its text, scene by scene (``engine_scripts/sharing`` shows who
uses shared blocks); for the account of blocks a plain dict that lists the owner of each.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest

from edgespec.core.protocol.acceptance import ExactRule
from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier import traffic_budget as tb
from edgespec.core.verifier.block_ledger import BlockLedger, BlockNames
from edgespec.core.verifier.cache_scheduler import CacheScheduler
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.fairness import AGE_PASSES, Fairness
from edgespec.core.verifier.run_ahead import RUN_AHEAD
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import Attach, Detach, Offer, PassDone, RunPass
from tests.core.scenes import DECODE_S, LIMITS, REQUEST, TEXT, PacedEngine
from tests.core.scenes import MODEL as FIXED

SESSION_S = 0.001
MANY = EngineLimits(max_sessions=512)


def single_credential(number: int) -> Credential:
    return Credential(f"single {number}")


def join_crowd(crowd: int, singles: int, session_s: float = SESSION_S) -> PacedEngine:
    """Let the sessions of one key join keys with one session each, whose passes are known by
    then."""
    paced = PacedEngine(0.0, MANY, session_s)
    for number in range(singles):
        paced.open(f"single {number}", credential=single_credential(number))
        for _ in range(3):
            paced.run_pass()
    for number in range(crowd):
        paced.open(f"crowd {number}", credential=Credential("crowd"))
    return paced


def measure_paces(paced: PacedEngine, seconds: float) -> dict[str, float]:
    """Return the tokens per second of each session from now on."""
    before, start = dict(paced.tokens), paced.now
    paced.run_until(start + seconds)
    lasted = paced.now - start
    return {name: (count - before[name]) / lasted for name, count in paced.tokens.items()}


def test_the_share_by_hand() -> None:
    assert tb.water_level(0.020, [0.2] + [0.001] * 20) == pytest.approx(0.002)
    assert tb.water_level(0.020, [0.2, 0.2, 0.001]) == pytest.approx(0.021)
    assert tb.water_level(0.020, [0.2] * 3) >= 0.2
    assert tb.water_level(0.020, [5.0]) >= 5.0
    for wants in ([0.2, 0.2, 0.001], [0.3, 0.01, 0.001]):
        level = tb.water_level(0.020, wants)
        took = 0.020 + sum(min(want, level) for want in wants)
        assert level == pytest.approx(took / len(wants))
    for wants, share in (
        ([], 100.0),
        ([1e9], 100.0),
        ([10.0, 10.0, 1e9], 80.0),
        ([10.0, 1e9, 1e9], 45.0),
        ([10.0, 20.0, 30.0], 70.0),  # the greediest may have what the others do not use
        ([50.0] * 4, 25.0),
    ):
        assert tb.fair_share(100.0, wants) == pytest.approx(share)


def test_one_key_with_200_sessions_hardly_slows_20_keys_with_one() -> None:
    paced = join_crowd(200, 20)
    alone = 1 / (DECODE_S + 20 * SESSION_S)
    measure_paces(paced, 5.0)
    pace = measure_paces(paced, 20.0)
    for number in range(20):
        assert pace[f"single {number}"] >= 0.9 * alone
    crowd = [pace[f"crowd {number}"] for number in range(200)]
    assert sum(crowd) >= 1.5 * alone  # about two sessions per pass
    assert min(crowd) >= 0.5 * max(crowd) > 0.0  # they take turns


def test_what_a_share_leaves_over_is_remembered() -> None:
    paced = join_crowd(10, 3, session_s=0.008)  # a share of (20 + 24) / 3 = 14.7 ms
    measure_paces(paced, 5.0)
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
    pace = measure_paces(paced, 20.0)
    high = [pace[f"high {number}"] for number in range(6)]
    low = [pace[f"low {number}"] for number in range(2)]
    assert min(high) >= 2.0 * max(low)
    assert min(low) >= 0.9 / (DECODE_S * (AGE_PASSES + 2))


def test_prompts_of_one_key_do_not_hold_up_another_key() -> None:
    paced = PacedEngine(0.0001)
    paced.open("runs", credential=single_credential(0))
    paced.run_until(20 * DECODE_S)
    for number in range(30):
        paced.open(f"crowd {number}", 1_000, Credential("crowd"))
    for _ in range(40):
        paced.run_pass()
    paced.open("mine", 1_000, single_credential(1))
    asked_s = paced.now
    while not paced.tokens["mine"]:
        paced.run_pass()
    # The mean is 37.5 of its rows in a pass of 23.75 ms, in every second pass.
    assert paced.now - asked_s <= 1.2 * 2 * 1_000 / 37.5 * 0.02375


@pytest.mark.parametrize("rate", [5.0, 40.0, 300.0])
def test_a_rate_is_kept_within_a_twentieth(rate: float) -> None:
    paced = PacedEngine(0.0, MANY, SESSION_S)
    for number in range(30):
        paced.open(f"s {number}", credential=Credential("slow", tokens_per_s=rate))
    paced.open("other", credential=single_credential(0))
    paced.run_until(3.0)
    pace = measure_paces(paced, 30.0)
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
    paced.close("s")  # a new rate applies from the next session on
    paced.open("t", credential=Credential("slow", tokens_per_s=20.0))
    paced.run_until(paced.now + 10.0)
    assert measure_paces(paced, 10.0)["t"] == pytest.approx(20.0, rel=0.05)


SHARES = tb.ShareLimits(rate=500.0, least_rate=100.0, burst=256.0, initial_level=256.0)


def test_accounts_that_nobody_uses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.core.verifier.fairness.MAX_ACCOUNTS", 8)
    table: dict[str, Credential] = {}
    fairness = Fairness(table)
    for number in range(100):
        table.clear()
        table["s"] = single_credential(number)
        fairness.plan_pass(["s"], (), 0.0)
    assert len(fairness._accounts) <= 8


def test_payers_that_owe_nothing_are_forgotten_and_their_number_is_bounded() -> None:
    shares = tb.FairShares(replace(SHARES, max_payers=10), 0.0)
    for number in range(1_000):
        shares.spend(f"payer {number}", 1e3, number * 1e-6)
    assert len(shares) == 10
    shares.spend("indebted", 2e4, 0.0)
    assert shares.wait_s("payer 999", 5.0) == 0.0  # one question is enough to forget the others
    assert len(shares) == 1
    shares.spend("another", 1.0, 5.0)
    assert shares.wait_s("indebted", 5.0) > 0.0
    for _ in range(1_000):  # no debt keeps a payer waiting for long
        shares.spend("indebted", 1e6, 5.0)
    wait_s = shares.wait_s("indebted", 5.0, grace=SHARES.burst)
    assert wait_s == pytest.approx(SHARES.max_wait_s)


@pytest.mark.parametrize("seed", range(5))
def test_within_the_least_rate_nobody_ever_waits(seed: int) -> None:
    """The rate holds whatever other payers spend, earn or request, and however they come and go."""
    dice = random.Random(seed)
    shares, now, due = tb.FairShares(replace(SHARES, max_payers=2_000), 0.0), 0.0, 0.0
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


def test_a_session_over_its_keys_rate_keeps_no_newer_one_out_of_the_cache() -> None:
    paced = PacedEngine(0.0, EngineLimits(cache=CacheShape(1024, 16)))
    slow = Credential("slow", tokens_per_s=1.0)
    paced.open("first", credential=slow)
    while paced.engine.running:  # until the key has used up its allowance
        paced.run_pass()
    paced.open("second", credential=slow)
    assert not paced.engine.running
    paced.open("other", credential=Credential("other"))
    for _ in range(5):
        paced.run_pass()
    assert (paced.tokens["second"], paced.tokens["other"]) == (0, 5)
    paced.run_until(paced.now + 6.0)
    assert paced.tokens["second"] > 0  # the second session still gets its turn


def could_run(engine: VerifyEngine) -> bool:
    """Return whether the first waiting session within its rate has enough free blocks to run."""
    ledger, is_over_rate = engine.cache_scheduler.ledger, engine._scheduler.fairness.is_over_rate
    assert ledger is not None
    for key, session in engine.sessions.items():
        if session.rows_to_feed and not is_over_rate(key):
            wanted = session.cache_length + 1 if session.cache_length else session.prefix.length
            return ledger.missing_count(key, wanted) <= ledger.free_count
    return False


@pytest.mark.parametrize("seed", range(6))
def test_an_idle_verifier_leaves_nobody_waiting_who_could_run(seed: int) -> None:
    rng = random.Random(seed)
    blocks = 512 + rng.choice((0, 3, 40))
    paced = PacedEngine(0.0, EngineLimits(cache=CacheShape(blocks, 16), max_sessions=12))
    keys = [Credential(f"key {rate}", tokens_per_s=rate) for rate in (0.0, 1.0, 5.0)]
    for step in range(150):
        there = sorted(paced._stream_of)
        match rng.randrange(8):
            case 0 | 1:
                paced.open(f"s {step}", rng.choice((1, 40, 3_000)), rng.choice(keys))
            case 2 if there:
                rng.choice((paced.close, paced.lose))(rng.choice(there))
            case _ if paced.engine.deadline is not None:
                paced.run_pass()
        assert paced.engine.running or not could_run(paced.engine)


UPLINK = tb.UplinkLimits()


# Commits of one token go out all the while: none, one every 30 ms, one every 3 ms.
@pytest.mark.parametrize(
    ("commit_every_s", "rate"), [(1e9, 100), (0.030, 100 + 18 / 0.030), (0.003, 1100)]
)
def test_a_stream_that_sends_in_a_loop_is_read_at_its_rate(
    commit_every_s: float, rate: float
) -> None:
    alone = replace(UPLINK, total_message_rate=1e9, total_burst=1e9)
    budget = tb.UplinkBudget(alone, 0.0).open(0.0)
    now, commit_at, read = 0.0, commit_every_s, 0
    while now < 20.0:
        while commit_at <= now:
            budget.earn(1, commit_at)
            commit_at += commit_every_s
        read += 1
        now += max(1e-4, budget.spend(now))
    assert read == pytest.approx(128 + 20 * rate, rel=0.02)


@pytest.mark.parametrize("tokens_a_pass", [1, 3, 7, 15])
@pytest.mark.parametrize("pass_s", [0.003, 0.030, 0.200])
def test_a_device_with_steps_of_a_millisecond_is_never_slowed(
    pass_s: float, tokens_a_pass: int
) -> None:
    """The device sends a message each millisecond until nothing more is worth drafting: a tree of
    14 steps after a miss, and one step for each token that the text advanced. It acknowledges every
    commit."""
    budget = tb.UplinkBudget(UPLINK, 0.0).open(0.0)
    now = 0.0
    for _ in range(600):
        steps = min(round(pass_s * 1000) - 1, 14 + tokens_a_pass)
        for step in range(steps):
            assert budget.spend(now + step * 1e-3) == 0.0
        now += pass_s
        budget.earn(tokens_a_pass, now)
        assert budget.spend(now) == 0.0


@pytest.mark.parametrize(("streams", "rate"), [(10, 2_000), (100, 100 * 100)])
def test_the_busy_streams_pay_for_the_total_and_the_quiet_do_not(streams: int, rate: int) -> None:
    """Each busy stream sends as much as it earns, some 700 messages per second."""
    shared = tb.UplinkBudget(UPLINK, 0.0)
    busy = [shared.open(0.0) for _ in range(streams)]
    next_at = [0.0] * streams
    quiet, read = shared.open(0.0), 0
    for now in (tick * 0.001 for tick in range(10_000)):
        commit = round(now * 1000) % 30 == 0
        for index, stream in enumerate(busy):
            if commit:
                stream.earn(1, now)
            if next_at[index] <= now:
                read += 1
                next_at[index] = now + stream.spend(now)
        if commit:
            quiet.earn(1, now)
            assert quiet.spend(now) == 0.0
    at_first = streams * (64 + 7) + 2_000 + 500  # half of each burst, the shared one, the debt
    assert 0.95 * 10 * rate <= read <= at_first + 10 * rate


def test_who_would_wait_too_long_has_no_place_and_costs_none() -> None:
    budget = tb.CallBudget(tb.INFO_LIMITS, 0.0)
    waits = [budget.charge_call("a", 0.0) for _ in range(500)]
    placed = [wait for wait in waits if wait <= tb.INFO_LIMITS.max_wait_s]
    assert len(placed) == 50 + 25
    assert waits[-1] == pytest.approx(26 / 25)
    assert budget.charge_call("b", 0.0) == 0.0  # 25 of the 100 are unspent
    assert budget.charge_call("a", 1.0) <= tb.INFO_LIMITS.max_wait_s


def test_the_peers_remembered_are_bounded() -> None:
    budget = tb.CallBudget(replace(tb.OPEN_LIMITS, max_peers=3), 0.0)
    for peer in ("a", "b", "c", "a", "d"):
        budget.charge_call(peer, 0.0)
    assert len(budget._peers) == 3
    for _ in range(200):
        budget.charge_call("a", 0.0)
    assert budget.charge_call("a", 0.0) > 0.0  # "a" is not forgotten, "b" was


def test_a_payer_is_read_at_its_share_over_any_number_of_streams_old_or_new() -> None:
    """The payer opens a stream whenever it may. Each stream sends messages of 1,024 bytes in a
    loop, which cost two. Twenty devices with 5 messages per second each, and one that opens a
    stream every second, never wait."""
    limits = tb.UplinkLimits()
    shared = tb.UplinkBudget(limits, 0.0)
    devices = [shared.open(0.0, f"device {number}") for number in range(20)]
    turns: list[tuple[float, int]] = []
    streams: list[tb.StreamBudget] = []
    read = opened = 0
    open_at = 0.0
    for tick in range(10_000):
        now = tick * 1e-3
        if tick % 200 == 0:
            assert [device.spend(now) for device in devices] == [0.0] * 20
        if tick % 1_000 == 0:
            assert shared.charge_open("device 0", now, 10.0) == 0.0
        if tick >= 1_000 and open_at <= now:
            wait_s = shared.charge_open("flood", now, 10.0)
            open_at = now + max(1e-3, wait_s)
            if wait_s <= 10.0:
                opened += 1
                heapq.heappush(turns, (now + wait_s, len(streams)))
                streams.append(shared.open(now, "flood"))
        while turns and turns[0][0] <= now:
            _, number = heapq.heappop(turns)
            read += 1
            wait_s = streams[number].spend(now, 1_024)
            heapq.heappush(turns, (now + max(1e-3, wait_s), number))
    spent = 2.0 * read + limits.messages_per_open * opened
    share = limits.shares.rate - 20 * 5.0
    most = 2 * limits.shares.burst + 2.0 * len(streams) + 9.0 * share
    assert 0.5 * most <= spent <= 1.05 * most


def test_an_address_may_be_a_whole_site() -> None:
    limits = tb.limits_without_keys(UPLINK)
    assert limits.shares.least_rate == limits.shares.rate == 1_000.0
    assert tb.limits_without_keys(replace(UPLINK, address_rate=1.0)) == replace(
        UPLINK, address_rate=1.0
    )
    shared = tb.UplinkBudget(limits, 0.0)
    site = [shared.open(0.0, "site") for _ in range(100)]
    floods = [shared.open(0.0, f"flood {number}") for number in range(16)]
    for tick in range(100):
        now = tick * 0.1
        for flood in floods:
            flood.spend(now, 1 << 20)
        assert [stream.spend(now) for stream in site] == [0.0] * 100


def test_a_newcomer_does_not_stand_in_the_line_of_a_flood() -> None:
    """A hundred addresses of one key make requests whenever they may, so they fill the queue."""
    budget, now = tb.CallBudget(tb.OPEN_LIMITS, 0.0), 0.0
    asked = granted = 0
    while now < 30.0:
        now += 1e-3
        asked += 1
        wait_s = budget.charge_call(f"address {asked % 100}", now, "flood")
        granted += wait_s <= tb.OPEN_LIMITS.max_wait_s
        if asked % 1_000 == 0:
            assert budget.charge_call("honest", now) <= 2 / 60.0
    assert granted <= 256 + 60 * (30.0 + tb.OPEN_LIMITS.max_wait_s)


# --- blocks of the cache --------------------------------------------------------------------------


SIZE = 4
SYSTEM = (1, 2, 3, 4, 6, 7, 8, 9)
"""A prompt of two blocks."""


def test_every_block_has_one_owner_and_none_is_lost() -> None:
    rng = random.Random(0)
    ledger = BlockLedger(CacheShape(12, 4))
    owner: dict[int, str] = {}
    lengths = {key: 0 for key in "abc"}
    for _ in range(3000):
        key = rng.choice("abc")
        length = rng.randrange(0, 30)
        mine = [block for block in ledger.table(key)]
        match rng.randrange(3):
            case 0:
                fits = -(-length // 4) - len(mine) <= 12 - len(owner)
                assert ledger.reserve(key, length) is fits
                if fits:
                    lengths[key] = max(length, lengths[key])
                    assert ledger.table(key)[: len(mine)] == tuple(mine)
            case 1:
                ledger.trim(key, length)
                lengths[key] = min(length, lengths[key])
                assert ledger.table(key) == tuple(mine[: -(-length // 4)])
            case _:
                assert ledger.release(key) == len(mine)
                lengths[key] = 0
        owner = {block: key for key in "abc" for block in ledger.table(key)}
        held = sum(ledger.held_count(key) for key in "abc")
        assert len(owner) == held == 12 - ledger.free_count
        assert set(owner) <= set(range(1, 13))
        assert all(ledger.held_count(key) * 4 >= lengths[key] for key in "abc")


def _make_world(
    *prompts: int, blocks: int, share: bool = False
) -> tuple[CacheScheduler, BlockLedger, dict[str, VerifySession]]:
    """Return a cache scheduler, its ledger and sessions a, b, ... with prompts of the given
    lengths, which all begin alike. The sessions opened in this order, and each has had one pass if
    it has room."""
    sessions: dict[str, VerifySession] = {}
    wanted = replace(REQUEST, sampling=SamplingParams(max_tokens=50), run_ahead=RunAhead.ALWAYS)
    ledger = BlockLedger(CacheShape(blocks, SIZE))
    cache_scheduler = CacheScheduler(ledger, sessions, (lambda key: "") if share else None)
    for key, length in zip("abcdef", prompts, strict=False):
        request = replace(wanted, session_id=key, prompt=(1,) * length)
        run_ahead = RUN_AHEAD[RunAhead.ALWAYS]
        sessions[key] = VerifySession(request, FIXED, LIMITS, ExactRule(), run_ahead, 0.0)
        sessions[key].handle(Attach(request), 0.0)
    for key, session in sessions.items():
        if rows := cache_scheduler.rows_for(key, 100, (), 0, 0.0):
            [run] = session.handle(Offer(rows, 0.02), 0.0)
            assert isinstance(run, RunPass)
            cache_scheduler.reserve(key, session.prefix.length)
            session.handle(PassDone((TEXT[5],)), 0.0)
            cache_scheduler.settle_pass(run.request, session.prefix.length)
    return cache_scheduler, ledger, sessions


def test_nobody_enters_before_one_who_came_earlier() -> None:
    cache_scheduler, _, sessions = _make_world(4, 16, 1, blocks=4)
    assert sessions["a"].cache_length
    assert cache_scheduler.rows_for("b", 100, (), 0, 0.0) == 0
    assert cache_scheduler.rows_for("c", 100, (), 0, 0.0) == 0  # would fit, but b waits
    sessions["b"].handle(Detach(), 1.0)
    assert cache_scheduler.rows_for("c", 100, (), 0, 1.0) > 0


def test_the_gone_lose_their_blocks_first_then_those_who_wait_then_the_newest() -> None:
    cache_scheduler, _, sessions = _make_world(4, 4, 4, 4, 4, blocks=5)
    sessions["b"].device.unacknowledged_since = 0.5
    sessions["c"].handle(Detach(), 2.0)
    sessions["d"].handle(Detach(), 1.0)
    for length in (4, 8, 12, 16):  # at each step the oldest needs one more block
        sessions["a"].cache_length = length
        assert cache_scheduler.rows_for("a", 1, (), 0, 3.0) == 1
        cache_scheduler.reserve("a", length + 1)
    assert cache_scheduler.evicted == ["d", "c", "b", "e"]
    assert [sessions[key].cache_length for key in "bcde"] == [0, 0, 0, 0]
    sessions["a"].cache_length = 20
    assert cache_scheduler.rows_for("a", 1, (), 0, 3.0) == 0  # no session remains


def test_guesses_cost_nobody_a_block() -> None:
    cache_scheduler, _, _ = _make_world(4, 4, blocks=4)
    assert cache_scheduler.rows_for("a", 100, (), 0, 1.0) == 8  # the two free blocks
    # one is kept for sessions that may still join
    assert cache_scheduler.rows_for("a", 100, (), 1, 1.0) == 4
    assert cache_scheduler.evictions == 0


def test_an_eviction_frees_only_what_nobody_else_holds() -> None:
    cache_scheduler, ledger, sessions = _make_world(9, 9, 9, blocks=6, share=True)
    assert [ledger.held_count(key) for key in "abc"] == [3, 3, 3]
    assert ledger.free_count == 1  # two blocks are shared by all
    sessions["a"].cache_length = 12
    assert cache_scheduler.rows_for("a", 8, (), 0, 1.0) == 4
    assert ledger.reserve("a", 16)
    ledger.trim("c", 8)
    assert ledger.reserve("a", 20)  # uses the blocks that c released
    assert not cache_scheduler._make_room("a", 25, (), 1.0)  # no session can give two more
    assert cache_scheduler.evicted == []
    assert cache_scheduler._make_room("a", 24, (), 1.0)
    assert cache_scheduler.evicted == ["b"]  # c is newer but has no blocks of its own
    assert sessions["c"].cache_length > 0


def test_a_shared_block_cannot_be_written_and_one_with_two_holders_not_published() -> None:
    cache_scheduler, _, sessions = _make_world(9, blocks=6, share=True)
    sessions["a"].cache_length = 7  # beyond the published part
    with pytest.raises(AssertionError, match="a shared block would be written"):
        cache_scheduler.reserve("a", 12)
    ledger = BlockLedger(CacheShape(4, SIZE))
    assert ledger.reserve("a", 8)
    ledger.publish("a", 0, b"0")
    ledger.adopt("b", 0, ledger.table("a")[:1])
    ledger.withdraw("a")
    with pytest.raises(AssertionError, match="2 holders"):
        ledger.publish("b", 0, b"0")


def test_names_depend_on_owner_and_on_every_token_before() -> None:
    def names(*tokens: int, owner: str = "") -> list[bytes]:
        made = BlockNames(CommittedPrefix(tokens), SIZE, owner)
        return [made.name(place) for place in range(len(tokens) // SIZE)]

    first = names(*SYSTEM)
    assert names(*SYSTEM, 10) == first
    assert len({*first, *names(*SYSTEM, owner="x"), *names(*SYSTEM, owner="y")}) == 6
    for place in range(8):
        changed = list(SYSTEM)
        changed[place] += 1
        same = [a == b for a, b in zip(names(*changed), first, strict=True)]
        assert same == [place >= SIZE, False]
    grown = CommittedPrefix(SYSTEM[:5])
    lazy = BlockNames(grown, SIZE, "")
    assert lazy.name(0) == first[0]
    grown.extend(SYSTEM[5:])
    assert lazy.name(1) == first[1]
