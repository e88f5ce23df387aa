"""Slots for streams and the addresses they are counted by. Oracle: a table kept by hand."""

from __future__ import annotations

import asyncio
import random

import pytest

from edgespec.core.verifier.credential import Credential
from edgespec.wire.callers import (
    LAST_S,
    MAX_HELD,
    MAX_HELD_IN_ALL,
    PER_S,
    Entry,
    Refusals,
    StreamSlots,
)
from edgespec.wire.grpc_calls import peer_address


@pytest.mark.parametrize(
    ("uri", "peer"),
    [
        ("ipv4:127.0.0.1:51234", "ipv4:127.0.0.1"),
        ("ipv6:%5B2001:db8:1:2:3::4%5D:51234", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2:ffff::9]:1", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:51234", "ipv4:10.0.0.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:51234", "ipv6:fe80::/64"),
        ("ipv6:nonsense:1", "ipv6:nonsense"),
        ("unix:", "unix"),
        ("unix:edge/verifier.sock", "unix"),
        ("unknown", "unknown"),
    ],
)
def test_all_connections_of_a_peer_share_an_address(uri: str, peer: str) -> None:
    assert peer_address(uri) == peer


def test_the_peer_with_most_idle_streams_gives_way() -> None:
    slots: StreamSlots[int] = StreamSlots(4, 1.0)
    slots.enter(1, "honest, in the middle of its round trip")
    for stream in (2, 3, 4):
        slots.enter(stream, "hostile")
    assert slots.enter(5, "another") == Entry(evicted=2)


@pytest.mark.parametrize("seed", range(20))
def test_random_comings_and_goings_keep_the_bounds(seed: int) -> None:
    dice = random.Random(seed)
    slots: StreamSlots[int] = StreamSlots(dice.randrange(1, 9), dice.choice((0.3, 0.75, 1.0)))
    held: dict[int, str] = {}
    opened: set[int] = set()
    for stream in range(400):
        peer = dice.choice("aaab")
        entry = slots.enter(stream, peer)
        if entry.evicted is not None:
            assert entry.refusal is None
            assert entry.evicted not in opened
            del held[entry.evicted]
        if entry.refusal is None:
            held[stream] = peer
        if dice.random() < 0.6:
            slots.opened(stream)
            opened |= {stream} & held.keys()
        if held and dice.random() < 0.4:
            left = dice.choice(list(held))
            slots.leave(left)
            slots.leave(left)
            del held[left]
        assert len(slots) == len(held) <= slots.max_streams
        assert sum(p == "a" for p in held.values()) <= slots.peer_streams
    for stream in list(held):
        slots.leave(stream)
    assert len(slots) == 0
    assert slots.enter(1000, "a") == Entry()


def test_a_key_with_few_sessions_has_few_streams_and_loses_its_own_idle_ones_first() -> None:
    slots: StreamSlots[int] = StreamSlots(100, 1.0)
    key = Credential("k", max_sessions=1)
    slots.enter(99, "peer", Credential("other"))
    for stream in range(10):
        assert slots.enter(stream, "peer", key) == Entry()
    assert slots.enter(10, "peer", key) == Entry(evicted=0)
    for stream in range(1, 11):
        slots.opened(stream)
    text = "10 streams of key 'k' are open, the limit is 10"
    assert slots.enter(11, "peer", key) == Entry(refusal=text)


def test_where_address_and_key_are_full_an_idle_stream_of_both_leaves() -> None:
    slots: StreamSlots[int] = StreamSlots(4, 0.5)
    mine, other = Credential("mine"), Credential("other")
    slots.enter(1, "here", other)
    slots.enter(2, "there", mine)
    slots.enter(3, "here", mine)
    assert slots.enter(4, "here", mine) == Entry(evicted=3)
    assert len(slots) == 3


class Calls:
    """Refused calls that are held until ``let_go``."""

    def __init__(self) -> None:
        self.refusals = Refusals()
        self.waits: list[float] = []
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def _wait(self, wait_s: float) -> None:
        self.waits.append(wait_s)
        await self._over.wait()

    async def come(self, payer: str, count: int) -> None:
        for _ in range(count):
            self._tasks.append(asyncio.create_task(self.refusals.hold(payer, self._wait)))
        await asyncio.sleep(0)

    async def let_go(self) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)


async def test_the_more_are_held_the_longer_they_are() -> None:
    calls = Calls()
    await calls.come("a", 150)
    await calls.come("b", 1)
    assert calls.waits[:10] == [0.5] * 10
    assert calls.waits[19] == pytest.approx(1.0)
    assert calls.waits[149] == pytest.approx(150 / PER_S)
    assert calls.waits[150] == 0.5  # another's
    assert calls.refusals.held == 151
    await calls.let_go()
    assert calls.refusals.held == 0


async def test_what_is_held_is_bounded_by_payer_and_in_all() -> None:
    calls = Calls()
    await calls.come("a", 2 * MAX_HELD)
    assert calls.refusals.held == len(calls.waits) == MAX_HELD
    assert max(calls.waits) == LAST_S
    for number in range(20):
        await calls.come(f"other {number}", MAX_HELD)
    assert calls.refusals.held == len(calls.waits) == MAX_HELD_IN_ALL
    await calls.let_go()
    assert calls.refusals.held == 0
