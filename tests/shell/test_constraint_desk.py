"""Grammars that are hard to read hold up their own key or, without keys, their own peer alone.
Oracle: how many threads read for it, and what others are told meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import Fault, FaultCode, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.credential import Credential
from edgespec.verifier.constraint_desk import ConstraintDesk

HARD = Constraint(ConstraintKind.REGEX, "hard")
EASY = Constraint(ConstraintKind.REGEX, "easy")


class Reader:
    """Reads ``HARD`` when it may go on; ``begun`` counts, ``at_once`` is the most at one time."""

    def __init__(self) -> None:
        self.started, self.go_on = threading.Event(), threading.Event()
        self.begun = self.reading = self.at_once = 0
        self._lock = threading.Lock()

    def __call__(self, constraint: Constraint) -> Constraint:
        if constraint == HARD:
            with self._lock:
                self.begun, self.reading = self.begun + 1, self.reading + 1
                self.at_once = max(self.at_once, self.reading)
            self.started.set()
            assert self.go_on.wait(60.0)
            with self._lock:
                self.reading -= 1
        return constraint


def asked(constraint: Constraint) -> Open:
    return Open("s", "", "", (1,), sampling=SamplingParams(constraint=constraint))


@pytest.fixture
def reader() -> Iterator[Reader]:
    found = Reader()
    yield found
    found.go_on.set()


async def test_one_peer_cannot_fill_the_line(reader: Reader) -> None:
    desk = ConstraintDesk(reader, (0,))
    many = [asyncio.create_task(desk.prepared(asked(HARD), "one")) for _ in range(64)]
    await asyncio.sleep(0)  # each is at the desk
    found = await desk.prepared(asked(EASY), "two")
    assert isinstance(found, Open)
    reader.go_on.set()
    said = await asyncio.gather(*many)
    refused = [one for one in said if isinstance(one, Fault)]
    assert 0 < len(refused) < len(said)
    assert {one.code for one in refused} == {FaultCode.OVERLOADED}
    assert isinstance(await desk.prepared(asked(EASY), "one"), Open)
    assert not desk._turns
    desk.close()


async def test_who_does_not_wait_any_more_still_has_its_thread(reader: Reader) -> None:
    """Oracle: the reader is never in two threads for one peer, however often it gives up."""
    desk = ConstraintDesk(reader, (0,))
    for _ in range(3):
        given_up = asyncio.create_task(desk.prepared(asked(HARD), "one"))
        await asyncio.to_thread(reader.started.wait)
        assert isinstance(await desk.prepared(asked(EASY), "two"), Open)  # threads had their turn
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
    last = asyncio.create_task(desk.prepared(asked(HARD), "one"))
    await asyncio.sleep(0)
    reader.go_on.set()
    assert isinstance(await last, Open)
    assert (reader.begun, reader.at_once) == (2, 1)
    assert not desk._turns
    desk.close()


async def test_a_key_that_loops_from_two_addresses_holds_up_no_other_key(reader: Reader) -> None:
    """Another key behind the same addresses, which came after it, and after five more such keys."""
    desk = ConstraintDesk(reader, (0,))
    keys = [Credential(name) for name in ("loop", "b", "c", "d", "e", "f")]
    many = [
        asyncio.create_task(desk.prepared(asked(HARD), peer, key))
        for key in keys
        for peer in ("one", "two")
        for _ in range(20)
    ]
    await asyncio.sleep(0)  # each is at the desk
    for peer in ("one", "two", "three"):
        for _ in range(4):
            assert isinstance(await desk.prepared(asked(EASY), peer, Credential("other")), Open)
    assert 1 <= reader.at_once <= len(keys)
    reader.go_on.set()
    said = await asyncio.gather(*many)
    whys = {one.message for one in said if isinstance(one, Fault)}
    assert whys == {f"16 grammars of {peer} wait to be read, limit 16" for peer in ("one", "two")}
    assert not desk._turns
    desk.close()


async def test_the_addresses_of_one_key_are_served_in_turn(reader: Reader) -> None:
    desk, key, done = ConstraintDesk(reader, (0,)), Credential("fleet"), list[str]()

    async def ask(peer: str) -> None:
        assert isinstance(await desk.prepared(asked(HARD), peer, key), Open)
        done.append(peer)

    many = [asyncio.create_task(ask("one")) for _ in range(8)]
    await asyncio.sleep(0)
    many.append(asyncio.create_task(ask("two")))
    await asyncio.sleep(0)
    reader.go_on.set()
    await asyncio.gather(*many)
    assert done.index("two") <= 2
    assert reader.at_once == 1
    desk.close()
