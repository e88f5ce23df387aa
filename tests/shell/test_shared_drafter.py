"""Many generations on one agent. Oracle: each text is the target's own by the scalar specification,
each got drafts, and when all are over no task, seat or cache owner is left."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from edgespec.config import PacingSection, VerifierConfig
from edgespec.core.device.events import StepDone, StepFailed
from edgespec.core.device.turn_policy import TurnPolicy
from edgespec.core.ports import Cancelled, Candidate, Drafter, never_cancelled
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import connect
from edgespec.device.drafters.text_drafter import TextDrafter
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.verifier.build import load_target
from tests.shell.live_verifier import GatedTarget, serving, toy_text

TEXT = ToyTokenizer()
TOY = VerifierConfig(model="toy", port=0)
LENGTH = 24
WITHIN_S = 150.0  # also on a machine that does much else
PROMPTS = [TEXT.encode(f"{word} once upon a time") for word in "abcdefghijklmnopqrst"]
HANGING = TEXT.encode("hangs here")


class Steps:
    """A tracer that counts draft steps by session, and keeps why they failed.

    ``drafted`` is set once so many sessions have had a step, well or badly.
    """

    def __init__(self, sessions: int = 0) -> None:
        self.done: Counter[str] = Counter()
        self.failed: list[str] = []
        self.drafted = threading.Event()
        self._wanted = sessions
        self._seen: set[str] = set()
        self._look()

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        if isinstance(item, StepDone):
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
    """A toy with caches: ``trouble`` is asked before each step, by the tokens held; ``most`` caches
    can be made; ``closed`` counts."""

    def __init__(self, most: int = 64) -> None:
        super().__init__(TOY_MODEL.perturbed(0.2), load_target(TOY).info)
        self.most, self.closed = most, Counter[str]()
        self.freed, self.hanging = threading.Event(), threading.Event()
        self.fails: Sequence[int] = ()

    def twin(self) -> Fragile:
        if self.most <= 1:
            raise MemoryError("no room")
        self.most -= 1
        twin = Fragile()
        twin.__dict__.update(
            {**self.__dict__, "_cache": twin._cache, "most": 0}  # the same trouble, another text
        )
        return twin

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        found = super().step(keep_length, feed, width, cancelled)
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
async def opened_in_the_end(held: GatedTarget) -> AsyncIterator[None]:
    try:
        yield
    finally:
        held.gate.set()


@asynccontextmanager
async def crowd(
    drafter: Drafter,
    steps: Steps,
    options: AgentOptions | None = None,
    pass_ms: float = 0.0,
    first_pass: threading.Event | None = None,
) -> AsyncIterator[Agent]:
    """The target waits with its first pass until ``first_pass``, or else ``steps.drafted``, is set:
    no text is over before it was drafted for."""
    before = asyncio.all_tasks()
    paced = load_target(VerifierConfig(model="toy", pacing=PacingSection(pass_ms=pass_ms)))
    held = GatedTarget(paced, 0)
    held.gate = first_pass or steps.drafted
    async with asyncio.timeout(WITHIN_S), serving(held) as (address, _), opened_in_the_end(held):
        agent = Agent(connect(address), drafter, TEXT.encode, TEXT.stream, options, tracer=steps)
        async with agent:
            yield agent
            assert agent._shared is not None
            turns = agent._shared.turns
            await asyncio.gather(*(task for driver in agent._drivers for task in driver.running))
            assert turns.running is None
            assert turns.members == {}
            assert turns.owners == {}
            assert agent._shared._seats == {}
    while left := asyncio.all_tasks() - before:
        await asyncio.wait(left)


async def text_of(agent: Agent, prompt: Sequence[int], length: int = LENGTH) -> list[int]:
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    return [token async for chunk in agent.generate(prompt, params) for token in chunk.tokens]


def right(prompt: Sequence[int], length: int = LENGTH) -> list[int]:
    return toy_text(prompt, SamplingParams(max_tokens=length, ignore_eos=True))


@pytest.mark.parametrize("caches", [1, 4, 20])
async def test_twenty_chats_are_drafted_for_in_turn(caches: int) -> None:
    steps, length = Steps(len(PROMPTS)), 120
    options = AgentOptions(draft_caches=caches, turns=TurnPolicy(turn_steps=2))
    async with crowd(Fragile(), steps, options, pass_ms=8.0) as agent:
        texts = await asyncio.gather(*(text_of(agent, prompt, length) for prompt in PROMPTS))
    assert texts == [right(prompt, length) for prompt in PROMPTS]
    assert len(steps.done) == len(PROMPTS)
    assert min(steps.done.values()) > 0
    assert steps.failed == []


async def test_a_drafter_without_a_model_is_shared_too() -> None:
    drafter, steps = TextDrafter(load_target(TOY).info, least_chance=0.0), Steps(6)
    async with crowd(drafter, steps) as agent:
        texts = await asyncio.gather(*(text_of(agent, prompt) for prompt in PROMPTS[:6]))
    assert texts == [right(prompt) for prompt in PROMPTS[:6]]
    assert len(steps.done) == 6


async def test_a_step_that_raises_ends_the_drafts_of_one_text_alone() -> None:
    drafter, steps = Fragile(), Steps(6)
    drafter.fails = PROMPTS[3]
    async with crowd(drafter, steps, AgentOptions(draft_caches=2), pass_ms=8.0) as agent:
        texts = await asyncio.gather(*(text_of(agent, prompt, 60) for prompt in PROMPTS[:6]))
        assert texts == [right(prompt, 60) for prompt in PROMPTS[:6]]
        assert steps.failed == ["RuntimeError: this text is too much"]
        drafter.fails = ()
        assert await text_of(agent, PROMPTS[3]) == right(PROMPTS[3])
    assert steps.failed == ["RuntimeError: this text is too much"]


async def test_a_step_that_hangs_costs_no_text() -> None:
    drafter, steps = Fragile(), Steps()
    options = AgentOptions(draft_caches=2, turns=TurnPolicy(hang_s=2.0))
    async with crowd(drafter, steps, options, first_pass=drafter.hanging) as agent:
        hung = asyncio.create_task(text_of(agent, HANGING))
        await asyncio.to_thread(drafter.hanging.wait)
        texts = await asyncio.gather(*(text_of(agent, prompt) for prompt in PROMPTS[:4]))
        assert texts == [right(prompt) for prompt in PROMPTS[:4]]  # streamed all the same
        assert await hung == right(HANGING)
        drafter.freed.set()
        before = sum(steps.done.values())
        while sum(steps.done.values()) == before:  # until there are drafts again
            assert await text_of(agent, PROMPTS[0]) == right(PROMPTS[0])
    assert set(steps.failed) <= {"the draft model did not answer within 2 s"}


async def test_a_text_that_is_left_in_its_turn_gives_the_cache_back() -> None:
    drafter, steps = Fragile(), Steps()
    options = AgentOptions(draft_caches=1)
    async with crowd(drafter, steps, options, first_pass=drafter.hanging) as agent:
        chunks = agent.generate(HANGING, SamplingParams(max_tokens=LENGTH, ignore_eos=True))
        first = asyncio.create_task(anext(chunks))
        await asyncio.to_thread(drafter.hanging.wait)
        await first
        await chunks.aclose()
        other = asyncio.create_task(text_of(agent, PROMPTS[0], 60))
        await asyncio.sleep(0)
        drafter.freed.set()
        assert await other == right(PROMPTS[0], 60)


async def test_without_memory_for_more_caches_those_there_are_are_shared() -> None:
    drafter, steps = Fragile(most=2), Steps(6)
    async with crowd(drafter, steps, AgentOptions(draft_caches=5)) as agent:
        texts = await asyncio.gather(*(text_of(agent, prompt) for prompt in PROMPTS[:6]))
        assert texts == [right(prompt) for prompt in PROMPTS[:6]]
        assert agent._shared is not None
        assert agent._shared.turns.caches == 2
    assert steps.failed == []
    assert drafter.closed["times"] == 2


async def test_closing_the_agent_ends_all_chats_and_frees_every_cache() -> None:
    drafter, steps = Fragile(), Steps()
    async with serving() as (address, _):
        agent = Agent(connect(address), drafter, TEXT.encode, TEXT.stream, tracer=steps)
        long = replace(SamplingParams(), max_tokens=500, ignore_eos=True)
        chats = [agent.generate(prompt, long) for prompt in PROMPTS[:3]]
        for chat in chats:
            assert (await anext(chat)).tokens
        await agent.close()
        for chat in chats:
            await chat.aclose()
    assert drafter.closed["times"] >= 1
