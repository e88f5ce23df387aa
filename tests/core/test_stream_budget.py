"""Budgets of streams and calls. Oracle: the formulas of the theory, counted by hand."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.verifier.credential import MAX_KEYS, Credential, KeyChanges, KeyRing, digest
from edgespec.core.verifier.traffic_budget import (
    INFO_LIMITS,
    OPEN_LIMITS,
    CallBudget,
    StreamBudget,
    UplinkBudget,
    UplinkLimits,
    without_keys,
)

LIMITS = UplinkLimits()

ALONE = replace(LIMITS, total_message_rate=1e9, total_burst=1e9)


def read_in_a_loop(budget: StreamBudget, until: float, commit_every_s: float) -> int:
    """A stream that sends whenever it is read; commits of one token go out all the while."""
    now, commit_at, read = 0.0, commit_every_s, 0
    while now < until:
        while commit_at <= now:
            budget.earn(1, commit_at)
            commit_at += commit_every_s
        read += 1
        now += max(1e-4, budget.spend(now))
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
    read = read_in_a_loop(budget, 20.0, commit_every_s)
    assert read == pytest.approx(128 + 20 * rate, rel=0.02)


@pytest.mark.parametrize("tokens_a_pass", [1, 3, 7, 15])
@pytest.mark.parametrize("pass_s", [0.003, 0.030, 0.200])
def test_a_device_with_steps_of_a_millisecond_is_never_slowed(
    pass_s: float, tokens_a_pass: int
) -> None:
    """It sends a message each millisecond until nothing more is worth drafting: a tree of 14 steps
    after a miss, and one for each token the text moved; and acknowledges every commit."""
    budget = UplinkBudget(LIMITS, 0.0).open(0.0)
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
    """They send what they earn, some 700 messages a second each."""
    shared = UplinkBudget(LIMITS, 0.0)
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


def test_random_spending_waits_a_finite_time() -> None:
    dice = random.Random(5)
    shared = UplinkBudget(LIMITS, 0.0)
    streams, now = [shared.open(0.0) for _ in range(5)], 0.0
    for _ in range(5_000):
        now += dice.choice((0.0, 1e-4, 0.05))
        stream = dice.choice(streams)
        if dice.random() < 0.2:
            stream.earn(dice.randrange(5), now)
        # Whoever waits as told owes at most one message; here nobody waits.
        assert 0.0 <= stream.spend(now, dice.choice((0, 9, 4_000))) < 1e3


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


def test_the_peers_remembered_are_bounded() -> None:
    budget = CallBudget(replace(OPEN_LIMITS, max_peers=3), 0.0)
    for peer in ("a", "b", "c", "a", "d"):
        budget.turn(peer, 0.0)
    assert budget.peer_count == 3
    for _ in range(200):
        budget.turn("a", 0.0)
    assert budget.turn("a", 0.0) > 0.0  # not forgotten: "b" was the one


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
            assert [device.spend(now) for device in devices] == [0.0] * 20
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
            wait_s = streams[number].spend(now, 1_024)
            heapq.heappush(turns, (now + max(1e-3, wait_s), number))
    spent = 2.0 * read + limits.messages_per_open * opened
    share = limits.shares.rate - 20 * 5.0
    most = 2 * limits.shares.burst + 2.0 * len(streams) + 9.0 * share
    assert 0.5 * most <= spent <= 1.05 * most


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
            flood.spend(now, 1 << 20)
        assert [stream.spend(now) for stream in site] == [0.0] * 100


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


def ring(**keys: str) -> KeyRing:
    return KeyRing({name: (digest(key), Credential(name)) for name, key in keys.items()})


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=20), st.text())
def test_a_key_opens_for_its_owner_and_nobody_else(keys: dict[str, str], stranger: str) -> None:
    owners = {key: name for name, key in keys.items()}
    unique = {name: key for key, name in owners.items()}
    found = KeyRing({name: (digest(key), Credential(name)) for name, key in unique.items()})
    for key in (*owners, stranger):
        credential = found.credential(key)
        assert (credential.name if credential else None) == owners.get(key)


def test_changes_tell_added_revoked_and_limits_apart() -> None:
    old = ring(same="s", gone="g", rotated="before", tighter="t")
    keys = {name: (digest(key), Credential(name)) for name, key in (("same", "s"), ("new", "n"))}
    keys["rotated"] = digest("after"), Credential("rotated")
    keys["tighter"] = digest("t"), replace(Credential("tighter"), max_sessions=1)
    changes = old.changes(KeyRing(keys))
    assert changes == KeyChanges(("new", "rotated"), ("gone", "rotated"), ("tighter",))
    assert str(changes) == "added: new, rotated; revoked: gone, rotated; new limits: tighter"
    assert not old.changes(old)


def test_what_cannot_be_a_ring_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="'a' and 'b' have the same key"):
        ring(a="k", b="k")
    with pytest.raises(ValueError, match="digest of 'a' has 3 bytes, not 32"):
        KeyRing({"a": (b"abc", Credential("a"))})
    with pytest.raises(ValueError, match="'b' stands under 'a'"):
        KeyRing({"a": (digest("k"), Credential("b"))})
    with pytest.raises(ValueError, match=f"{MAX_KEYS + 1} keys, but at most {MAX_KEYS}"):
        ring(**{f"n{number}": f"k{number}" for number in range(MAX_KEYS + 1)})
