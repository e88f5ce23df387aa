"""Turns. Oracle: a list of who waits, served strictly in order, in random schedules."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.endpoint.request_json import ApiError
from edgespec.endpoint.service import Admission

CAPACITY, WAITING = 4, 5
Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "leave", "end"]), st.integers(1, CAPACITY)), max_size=40
)


class Client:
    """Holds its turn until it is told to end."""

    def __init__(self, admission: Admission, texts: int) -> None:
        self.texts, self.has_turn = texts, False
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission: Admission) -> None:
        async with admission.turn(self.texts):
            self.has_turn = True
            await self._end.wait()

    def end(self) -> None:
        self._end.set()


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def play(steps: list[Step]) -> None:
    admission = Admission(CAPACITY, WAITING)
    clients: list[Client] = []
    for kind, number in steps:
        waiting = [one for one in clients if not one.has_turn]
        if kind == "ask":
            client = Client(admission, number)
            await settle()
            if len(waiting) >= WAITING:
                with pytest.raises(ApiError, match=f"{WAITING} requests wait"):
                    await client.task
            else:
                clients.append(client)
        elif clients:
            client = clients[number % len(clients)]
            if kind == "leave":
                client.task.cancel()
            else:
                client.end()  # one that waits will end in its turn
            await settle()
        check(admission, clients)
    for client in clients:
        client.task.cancel()
    await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
    assert (admission.running, admission.waiting) == (0, 0)


def check(admission: Admission, clients: list[Client]) -> None:
    clients[:] = [one for one in clients if not one.task.done()]
    running = sum(one.texts for one in clients if one.has_turn)
    waiting = [one for one in clients if not one.has_turn]
    assert admission.running == running <= CAPACITY
    assert admission.waiting == len(waiting) <= WAITING
    assert clients[len(clients) - len(waiting) :] == waiting, "a large request is not overtaken"
    assert not waiting or running + waiting[0].texts > CAPACITY


@settings(max_examples=40)
@given(steps=STEPS)
def test_turns_are_never_lost_and_never_too_many(steps: list[Step]) -> None:
    asyncio.run(play(steps))


async def test_a_turn_that_comes_with_the_cancellation_is_given_back() -> None:
    admission = Admission(1, 2)
    first = Client(admission, 1)
    await settle()
    second, third = Client(admission, 1), Client(admission, 1)
    await settle()
    first.end()
    await first.task  # the second's turn is set, and it has not run yet
    second.task.cancel()
    await settle()
    assert third.has_turn
    third.end()
    await third.task
    assert admission.running == 0
