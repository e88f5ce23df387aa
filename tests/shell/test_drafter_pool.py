"""Many generations on one agent, and the drafter's thread. Oracles: each text is the target's own
by the scalar specification; how many were drafted for; the order of calls; processes that end."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from edgespec.config import PacingSection, VerifierConfig
from edgespec.core.device.events import StepDone, StepFailed
from edgespec.core.ports import Candidate, Drafter
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import drafter_pool
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import connect
from edgespec.device.drafter_pool import DraftThread
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.verifier.build import load_target
from tests.present import present
from tests.shell.live_verifier import GatedTarget, python, serving, toy_text

TEXT = ToyTokenizer()
TOY = VerifierConfig(model="toy", port=0)
WITHIN_S = 150.0  # also on a machine that does much else
PROMPTS = [TEXT.encode(f"{word} once upon a time") for word in "abcdefghijklmnopqrst"]
HANGING = TEXT.encode("hangs here")


class Steps:
    """A tracer that counts draft steps with guesses by session, and keeps why they failed.
    ``drafted`` is set once so many sessions have had a step, well or badly."""

    def __init__(self, sessions: int = 0) -> None:
        self.done: Counter[str] = Counter()
        self.failed: list[str] = []
        self.drafted = threading.Event()
        self._wanted, self._seen = sessions, set[str]()
        self._look()

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        if isinstance(item, StepDone) and item.candidates:
            self.done[session] += 1
        if isinstance(item, StepFailed):
            self.failed.append(item.why)
        if isinstance(item, StepDone | StepFailed):
            self._seen.add(session)
            self._look()

    def _look(self) -> None:
        if len(self._seen) >= self._wanted:
            self.drafted.set()


class Fragile(ToyDrafter):
    """A toy with caches, of which ``most`` can be made. A text that begins as ``fails`` raises, one
    that begins as ``HANGING`` hangs until ``freed``; ``closed`` counts."""

    def __init__(self, most: int = 64) -> None:
        super().__init__(TOY_MODEL.perturbed(0.2), load_target(TOY).info)
        self.most, self.closed = most, Counter[str]()
        self.freed, self.hanging = threading.Event(), threading.Event()
        self.fails: list[int] = []

    def twin(self) -> Fragile:
        if self.most <= 1:
            raise MemoryError("no room")
        self.most -= 1
        twin = Fragile()
        same_trouble = {**self.__dict__, "_cache": twin._cache, "most": 0}
        twin.__dict__.update(same_trouble)
        return twin

    def step(self, *arguments: Any) -> tuple[Candidate, ...]:
        found = super().step(*arguments)
        held = list(self._cache.tokens)
        if self.fails and held[: len(self.fails)] == self.fails:
            raise RuntimeError("this text is too much")
        if held[: len(HANGING)] == HANGING:
            self.hanging.set()
            self.freed.wait(60)
        return found

    def close(self) -> None:
        super().close()
        self.closed["times"] += 1


@asynccontextmanager
async def crowd(
    drafter: Drafter,
    steps: Steps,
    caches: int = 4,
    pass_ms: float = 0.0,
    first_pass: threading.Event | None = None,
) -> AsyncIterator[Agent]:
    """The target waits with its first pass until ``first_pass``, or else ``steps.drafted``, is set:
    no text is over before it was drafted for. In the end every cache is free, and no task left."""
    before = asyncio.all_tasks()
    paced = load_target(VerifierConfig(model="toy", pacing=PacingSection(pass_ms=pass_ms)))
    held = GatedTarget(paced, 0)
    held.gate = first_pass or steps.drafted
    options = AgentOptions(draft_caches=caches)
    async with asyncio.timeout(WITHIN_S), serving(held) as (address, _):
        agent = Agent(connect(address), drafter, TEXT.encode, TEXT.stream, options, tracer=steps)
        try:
            async with agent:
                yield agent
                await asyncio.gather(*(one for driver in agent._drivers for one in driver.running))
                pool = present(agent._pool)
                await asyncio.wrap_future(pool._thread.submit(lambda: None))
                assert len(pool._free) == len(pool._drafters) <= caches
        finally:
            held.gate.set()
    while left := asyncio.all_tasks() - before:
        await asyncio.wait(left)


def params(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, ignore_eos=True)


async def text_of(agent: Agent, prompt: Sequence[int], length: int = 24) -> list[int]:
    found = agent.generate(prompt, params(length))
    return [token async for chunk in found for token in chunk.tokens]


def right(prompt: Sequence[int], length: int = 24) -> list[int]:
    return toy_text(prompt, params(length))


@pytest.mark.parametrize("caches", [1, 4, 20])
async def test_twenty_chats_share_a_drafter(caches: int) -> None:
    """As many as there are caches are drafted for, the others are streamed."""
    steps, length = Steps(len(PROMPTS)), 60
    async with crowd(Fragile(), steps, caches, pass_ms=8.0) as agent:
        texts = await asyncio.gather(*(text_of(agent, prompt, length) for prompt in PROMPTS))
    assert texts == [right(prompt, length) for prompt in PROMPTS]
    assert len(steps.done) >= caches
    assert steps.failed == []


async def test_a_text_takes_a_cache_that_was_given_back_and_begins_it_anew() -> None:
    drafter, steps = Fragile(), Steps()
    async with crowd(drafter, steps, 1, first_pass=drafter.hanging) as agent:
        chunks = agent.generate(HANGING, params(24))
        first = asyncio.create_task(anext(chunks))
        await asyncio.to_thread(drafter.hanging.wait)
        await first
        await chunks.aclose()
        other = asyncio.create_task(text_of(agent, PROMPTS[0], 60))
        await asyncio.sleep(0)
        drafter.freed.set()
        assert await other == right(PROMPTS[0], 60)
        while not sum(steps.done.values()):  # a text may end before its first step has
            assert await text_of(agent, PROMPTS[0], 60) == right(PROMPTS[0], 60)


async def test_a_step_that_raises_ends_the_drafts_of_one_text_alone() -> None:
    drafter, steps = Fragile(), Steps(6)
    drafter.fails += PROMPTS[3]
    async with crowd(drafter, steps, 6, pass_ms=8.0) as agent:
        texts = await asyncio.gather(*(text_of(agent, prompt, 60) for prompt in PROMPTS[:6]))
        assert texts == [right(prompt, 60) for prompt in PROMPTS[:6]]
        assert steps.failed == ["RuntimeError: this text is too much"]
        assert len(steps.done) == 5
        drafter.fails.clear()
        assert await text_of(agent, PROMPTS[3]) == right(PROMPTS[3])
    assert steps.failed == ["RuntimeError: this text is too much"]


async def test_a_step_that_hangs_costs_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_pool, "HANG_S", 0.5)
    drafter, steps = Fragile(), Steps()
    async with crowd(drafter, steps, 2, first_pass=drafter.hanging) as agent:
        hung = asyncio.create_task(text_of(agent, HANGING))
        await asyncio.to_thread(drafter.hanging.wait)
        texts = await asyncio.gather(*(text_of(agent, prompt) for prompt in PROMPTS[:4]))
        assert texts == [right(prompt) for prompt in PROMPTS[:4]]  # streamed all the same
        assert await hung == right(HANGING)
        drafter.freed.set()
        before = sum(steps.done.values())
        while sum(steps.done.values()) == before:  # until there are drafts again
            assert await text_of(agent, PROMPTS[0]) == right(PROMPTS[0])
    assert set(steps.failed) <= {"the draft model did not answer within 0.5 s"}


async def test_without_memory_for_more_caches_those_there_are_must_do() -> None:
    drafter, steps = Fragile(most=2), Steps(6)
    async with crowd(drafter, steps, 5) as agent:
        texts = await asyncio.gather(*(text_of(agent, prompt) for prompt in PROMPTS[:6]))
        assert texts == [right(prompt) for prompt in PROMPTS[:6]]
    assert steps.failed == []
    assert drafter.closed["times"] == 2


async def test_closing_the_agent_ends_all_chats_and_frees_every_cache() -> None:
    drafter, steps = Fragile(), Steps()
    async with serving() as (address, _):
        agent = Agent(connect(address), drafter, TEXT.encode, TEXT.stream, tracer=steps)
        chats = [agent.generate(prompt, params(500)) for prompt in PROMPTS[:3]]
        for chat in chats:
            assert (await anext(chat)).tokens
        await agent.close()
        for chat in chats:
            await chat.aclose()
    assert drafter.closed["times"] >= 1


NEVER_BACK = """
import asyncio, threading
from edgespec.device import agent, drafter_pool
from edgespec.device.agent import Agent
from edgespec.models.toy import TOY_MODEL, toy_info
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.models.toy import ToyTokenizer

agent._CLOSING_S = drafter_pool._CLOSING_S = 0.05
began = threading.Event()

class Stuck(ToyDrafter):
    def step(self, *_):
        began.set()
        threading.Event().wait()

class Silent:
    async def connect(self):
        await asyncio.Event().wait()

    async def close(self):
        pass

async def main():
    text = ToyTokenizer()
    one = Agent(Silent(), Stuck(TOY_MODEL, toy_info()), text.encode, text.stream)
    reading = asyncio.create_task(anext(one.generate("once")))
    await asyncio.to_thread(began.wait)
    reading.cancel()  # as a Ctrl-C does
    await asyncio.wait([reading])
    await one.close()

asyncio.run(main())
print("over")
"""


def test_a_step_that_never_comes_back_keeps_no_process_from_ending() -> None:
    done = python("-c", NEVER_BACK)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
    assert "a draft step still runs" in done.stderr


def test_what_was_held_up_is_let_go_when_the_step_comes_back() -> None:
    thread, hanging, back = DraftThread("test"), threading.Event(), threading.Event()
    freed = threading.Event()

    def hang() -> None:
        hanging.set()
        back.wait(WITHIN_S)

    step = thread.submit(hang)
    assert hanging.wait(WITHIN_S)
    behind = thread.submit(freed.set)
    assert not thread.close(freed.set, 0.0)
    assert behind.cancelled()
    assert not freed.is_set()
    back.set()
    assert freed.wait(WITHIN_S)
    assert step.result(WITHIN_S) is None
