"""How long refused calls are held. Oracle: the numbers of the theory."""

from __future__ import annotations

import asyncio

import pytest

from edgespec.wire.callers import LAST_S, MAX_HELD, MAX_HELD_IN_ALL, PER_S, Refusals


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
