"""Tests of a memory budget, from the option to the guarded draft, and of many generations that
share an agent and its drafter.

Oracles: the output of the same generation without a budget; scripted measurements of the process's
memory; files that look like a control group's; the scalar specification of the target's output; the
number of generations that were drafted for; the order of calls; processes that end.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from edgespec.cli.main import app
from edgespec.config import (
    AgentConfig,
    DraftSection,
    EndpointSection,
    PacingSection,
    PolicySection,
    VerifierConfig,
)
from edgespec.core.device.events import StepDone, StepFailed
from edgespec.core.device.memory import (
    MIB,
    DraftAllowance,
    KvType,
    MemoryGuard,
    MemoryPlanError,
)
from edgespec.core.guarded_drafter import MEASURE_EVERY_S, CacheGroup, GuardedDrafter
from edgespec.core.ports import Candidate, Drafter
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import drafter_pool
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import BUNDLED, build_agent, connect, load_drafter
from edgespec.device.drafter_pool import DraftThread
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.device.model_drafter import (
    list_variants,
    log_measure_failure,
    measure_memory_question,
    predict_variant,
    read_exported_variant,
)
from edgespec.models.folders import model_info
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.telemetry.process_memory import machine_memory, resident_bytes
from edgespec.verifier.build import load_target
from edgespec_sim.token_sources.source import Script, ScriptedTarget
from tests.kit.live_verifier import GatedTarget, run_python, serve_toy, toy_text
from tests.present import require

PROMPT = list(range(5, 45))


INFO = replace(
    model_info(resolve_source(BUNDLED, Purpose.DRAFT).folder), name="hashed", context_length=2048
)


def hash_positions(length: int, count: int) -> list[int]:
    """Return ``count`` tokens behind a prompt of ``length``; each is a hash of its position."""
    return [1 + at * 7919 % 4000 for at in range(length, length + count)]


def make_hashing_target() -> ScriptedTarget:
    """Make a target with the bundled draft's vocabulary that writes hashed texts."""
    return ScriptedTarget(
        INFO, lambda prompt, count: Script(hash_positions(len(prompt), count), ())
    )


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_plan_memory_as_json_says_the_same() -> None:
    result = call("plan", "memory", "--memory-budget", "4GiB", "--json")
    found = json.loads(result.stdout)
    assert found["predicted_bytes"] == sum(found["terms"].values())
    assert found["predicted_bytes"] + found["margin_bytes"] <= found["budget_bytes"] == 4096 * MIB
    assert found["width"] >= 1
    assert found["terms"]["keys and values"] > 0


def test_a_budget_that_is_too_small_names_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    # The process's memory varies, even from one call to the next.
    monkeypatch.setattr("edgespec.device.model_drafter.resident_bytes", lambda: 200 * MIB)
    refused = call("plan", "memory", "--memory-budget", "10MiB")
    assert refused.exit_code == 1
    needed = require(re.search(r"needs at least (\d+\.\d) MiB", refused.stderr))
    smallest = float(needed[1])
    for budget, code in ((smallest + 0.1, 0), (smallest - 0.1, 1)):
        assert call("plan", "memory", "--memory-budget", f"{budget:.1f}MiB").exit_code == code


def plan_corpus(budget: str, *paths: Path) -> Any:
    """Return the plan with these files and folders as the corpus."""
    options = [word for path in paths for word in ("--draft-corpus", str(path))]
    result = call("plan", "memory", "--memory-budget", budget, "--json", *options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_corpus_is_planned_by_its_text(tmp_path: Path) -> None:
    """Oracle: 3.2 bytes of the store for a byte of text and 10 MiB, and 4.8 bytes while it is made
    anew. Binary files count, since only reading them shows that they are left out; large files and
    links do not."""
    folder, alone = tmp_path / "project", tmp_path / "notes.txt"
    folder.mkdir()
    (folder / "a.py").write_text("a" * 700_000)
    (folder / "b.bin").write_bytes(bytes(100_000))
    (folder / "large.txt").write_text("a" * ((1 << 20) + 1))
    (folder / "link.txt").symlink_to(alone)
    alone.write_text("a" * 200_000)
    terms = plan_corpus("4GiB", folder, alone)["terms"]
    assert terms["corpus"] == int(3.2 * 1_000_000) + 10 * MIB
    assert terms["corpus, changing"] == int(4.8 * 1_000_000)
    without = json.loads(call("plan", "memory", "--memory-budget", "4GiB", "--json").stdout)
    assert "corpus" not in without["terms"]


def test_a_corpus_beyond_its_share_of_the_budget_is_planned_as_far_as_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a quarter of the budget less 10 MiB, over 8 bytes for each byte of text. The latest
    files are taken that fit."""
    # The process of a whole suite may hold more than the budget.
    monkeypatch.setattr("edgespec.device.model_drafter.resident_bytes", lambda: 100 * MIB)
    for number in range(24):
        (tmp_path / f"{number}.txt").write_text("a" * (1 << 20))
    terms = plan_corpus("600MiB", tmp_path)["terms"]
    fits = int((0.25 * 600 - 10) / 8)
    assert fits == 17
    assert terms["corpus"] == int(3.2 * fits * MIB) + 10 * MIB


@pytest.mark.parametrize(
    ("name", "why"),
    [
        pytest.param("gone", "No such file or directory", id="missing"),
        pytest.param("closed/inner", "Permission denied", id="unreadable"),
    ],
)
def test_a_corpus_that_cannot_be_looked_at_is_an_error_with_its_name(
    tmp_path: Path, name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, stat = tmp_path / "closed", Path.stat

    def refuse(path: Path, **options: Any) -> Any:
        if path.parent == closed:  # root may look everywhere, so a closed folder is played
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    result = call(
        "plan", "memory", "--memory-budget", "4GiB", "--draft-corpus", str(tmp_path / name)
    )
    assert result.exit_code == 2
    assert result.stderr == f"error: draft.corpus: {tmp_path / name}: {why}\n"


def test_a_draft_that_is_not_exported_yet_is_predicted_as_it_becomes() -> None:
    """Predict the bundled draft from its config.json alone, and compare with its exported
    folder."""
    folder = resolve_source(BUNDLED, Purpose.DRAFT).folder
    real, guessed = read_exported_variant(folder), predict_variant(folder, 4, KvType.FLOAT32)
    assert guessed.kv_bytes_per_token == real.kv_bytes_per_token
    assert abs(guessed.stored_bytes / real.stored_bytes - 1) < 0.05
    assert guessed.table_bytes == real.table_bytes
    assert real.inline
    (only,) = list_variants(DraftSection(), resolve_source(BUNDLED, Purpose.DRAFT))
    assert only == real


@pytest.mark.parametrize(
    ("endpoint", "size_mib"),
    [
        (EndpointSection(), 16),
        (EndpointSection(max_body_bytes=1 << 20), 16),
        (EndpointSection(max_body_bytes=1 << 10), 1 / 64),
        (EndpointSection(max_body_bytes=64 << 20), 128),
        (EndpointSection(max_bodies_bytes=256 << 20), 256),
    ],
    ids=["default", "small", "tiny", "large", "many"],
)
def test_a_budget_counts_the_requests_that_the_user_admits(
    endpoint: EndpointSection, size_mib: float
) -> None:
    """Oracle: the limit that the endpoint enforces."""
    question = measure_memory_question(DraftSection(), 2, endpoint)
    (term,) = [one for one in question.additions if one.name == "requests"]
    assert term.bytes == size_mib * (1 << 20) == endpoint.most_bodies_bytes(has_budget=True)


def test_a_budget_without_room_for_large_requests_is_refused() -> None:
    """The sizes of requests in the configuration of an agent reach its plan."""
    draft = DraftSection(memory_budget=f"{resident_bytes() // MIB + 512}MiB")
    require(load_drafter(AgentConfig(draft=draft))).close()
    large = EndpointSection(max_bodies_bytes=1 << 30)
    with pytest.raises(MemoryPlanError, match="needs at least"):
        load_drafter(AgentConfig(draft=draft, endpoint=large))


def test_a_budget_too_small_for_an_agent_is_refused_before_anything_is_loaded() -> None:
    config = AgentConfig(draft=DraftSection(memory_budget="10MiB"))
    with pytest.raises(MemoryPlanError, match="needs at least"):
        load_drafter(config)


async def test_a_text_does_not_depend_on_the_budget() -> None:
    """The bundled draft at windows shorter than the text, one below a memory budget, is compared
    with no draft."""
    texts, messages, stats = {}, list[str](), None
    async with serve_toy(make_hashing_target()) as (address, _):
        for name, draft in (
            ("none", DraftSection(model="none")),
            ("window", DraftSection(window=24)),
            ("budget", DraftSection(memory_budget="auto", window=128)),
        ):
            policy = PolicySection(run_ahead=RunAhead.NEVER)
            config = AgentConfig(verifier=address, draft=draft, policy=policy)
            agent = build_agent(config, say=messages.append)
            sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
            prompt = PROMPT * 4
            found = [token async for c in agent.generate(prompt, sampling) for token in c.tokens]
            texts[name] = found
            stats = require(agent.stats)
            assert (stats.counters.steps > 0) == (name != "none")
            await agent.close()
    assert texts["none"] == hash_positions(160, 40)
    assert texts["budget"] == texts["window"] == texts["none"]
    assert require(stats).counters.draft_failure == ""
    assert "window 128" in messages[-1]


def make_guarded(measure: Callable[[], int], clock: Callable[[], float]) -> GuardedDrafter:
    drafter = OnnxDrafter(resolve_source(BUNDLED, Purpose.DRAFT).folder, window=512)
    full = DraftAllowance(512, 4)
    drafter.restrict(full.window, full.width)
    guard = MemoryGuard(200 * MIB, 5 * MIB, full, drafter.growth_bytes(1))
    caches = CacheGroup(guard, measure, clock, on_measure_failed=log_measure_failure)
    return GuardedDrafter(drafter, caches)


def test_the_draft_gets_less_when_the_process_grows_and_more_when_it_shrinks() -> None:
    held, now = [100 * MIB], [0.0]
    drafter = make_guarded(lambda: held[0], lambda: now[0])
    drafter.begin(10, SamplingParams())
    text = PROMPT * 10
    widths = []
    for index, megabytes in enumerate([100, 100, 250, 250, 250, 250, 100, *[100] * 200]):
        held[0], now[0] = megabytes * MIB, index * 1.0
        keep, feed = (0, text) if index == 0 else (len(text) - 1, text[-1:])
        widths.append(len(drafter.step(keep, feed, 4)))
    assert widths[:2] == [4, 4]
    assert widths[2:6] == [4, 1, 0, 0]  # 64 rows, then one guess, then none
    assert widths[-1] == 4
    assert isinstance(drafter.inner, OnnxDrafter)
    assert drafter.inner.held_tokens == 400
    drafter.close()


def test_a_draft_with_a_window_takes_no_more_memory_behind_a_long_text() -> None:
    """Oracle: the process's resident memory. Without a window 12,000 tokens more would take 18 MB
    of keys and values."""
    drafter = OnnxDrafter(resolve_source(BUNDLED, Purpose.DRAFT).folder, window=512)
    text = [(17 * index + index // 7) % 4000 + 2 for index in range(14_000)]
    drafter.begin(len(text), SamplingParams())
    drafter.step(0, text[:2000], 1)
    held, resident = drafter.held_tokens, resident_bytes()
    drafter.step(2000, text[2000:], 1)
    assert drafter.held_tokens == held <= 512
    assert resident_bytes() - resident < 12_000 * drafter._store.bytes_per_token / 4
    drafter.close()


def test_a_measurement_that_fails_is_told_once_and_drafting_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]

    def fail() -> int:
        now[0] += 2 * MEASURE_EVERY_S
        raise OSError("no such file")

    drafter = make_guarded(fail, lambda: now[0])
    drafter.begin(10, SamplingParams())
    with caplog.at_level(logging.WARNING):
        for index in range(5):
            assert len(drafter.step(index, [PROMPT[index]], 4)) == 4
    assert len(caplog.records) == 1
    assert "no such file" in caplog.text
    drafter.close()


def write_control_group(root: Path, place: str, limit: str, used: int, *, version: int = 2) -> None:
    folder = root / ("memory" if version == 1 else "") / place
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, str(used)), strict=True):
        (folder / name).write_text(f"{value}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_control_group_counts(version: int, tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n" if version == 2 else "9:cpu:/\n4:memory:/a/b\n")
    free = machine_memory(tmp_path / "none", own)
    no_limit = "max" if version == 2 else str((1 << 63) - 4096)
    write_control_group(tmp_path, "", no_limit, 1 << 40, version=version)
    write_control_group(tmp_path, "a", str(100 * MIB), 90 * MIB, version=version)
    write_control_group(tmp_path, "a/b", str(300 * MIB), 10 * MIB, version=version)
    found = machine_memory(tmp_path, own)
    assert (found.total, found.available) == (100 * MIB, 10 * MIB)
    assert free.available > 10 * MIB
    # The system can drop cached files, so they count as available.
    folder = tmp_path / ("memory" if version == 1 else "") / "a"
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {40 * MIB}\n")
    assert machine_memory(tmp_path, own).available == 50 * MIB


def test_nonsense_in_a_control_group_is_no_limit(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("nonsense\n0::/a\n")
    write_control_group(tmp_path, "a", "many", 5)
    assert machine_memory(tmp_path, own).available > MIB
    assert machine_memory(tmp_path, tmp_path / "missing").total > MIB


def test_a_process_knows_what_it_holds() -> None:
    assert resident_bytes() > MIB


def test_further_caches_are_bounded_together() -> None:
    """A shorter window must be applied to each cache, and no more caches made than were planned."""
    tight = [False]

    class Halves(MemoryGuard):
        def observe(
            self, resident_bytes: int, growth_bytes: int, held_tokens: int, now: float
        ) -> DraftAllowance | None:
            assert held_tokens <= 256
            return DraftAllowance(64, 1) if tight[0] else None

    drafter = OnnxDrafter(resolve_source(BUNDLED, Purpose.DRAFT).folder, window=256)
    ticks = iter(range(1_000_000))

    def now() -> float:
        return float(next(ticks))

    halves = Halves(1, 0, DraftAllowance(256, 4), 1)
    first = GuardedDrafter(drafter, CacheGroup(halves, resident_bytes, now, 2))
    second, text = first.twin(), (PROMPT * 9)[:120]
    for one in (first, second):
        one.begin(40, SamplingParams())
        assert len(one.step(0, text, 4)) == 4
    with pytest.raises(MemoryError, match="planned with 2 caches"):
        first.twin()
    tight[0] = True
    assert len(first.step(120, text[:1], 4)) == 1
    assert len(second.step(120, text[:1], 4)) == 1
    assert drafter.held_tokens <= 64
    inner = second.inner
    assert isinstance(inner, OnnxDrafter)
    assert inner.held_tokens <= 64
    second.close()
    first.close()


# --- many generations on one agent, and the drafter's thread --------------------------------------


TEXT = ToyTokenizer()
TOY = VerifierConfig(model="toy", port=0)
WITHIN_S = 150.0  # enough on a busy machine too
PROMPTS = [TEXT.encode(f"{word} once upon a time") for word in "abcdefghijklmnopqrst"]
HANGING = TEXT.encode("hangs here")


class Steps:
    """A tracer that counts draft steps with candidates by session, and keeps the reasons of failed
    steps. ``drafted`` is set once ``sessions`` sessions have had a step, successful or not."""

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
    """A toy drafter of which at most ``most`` caches can be made. A text that begins with ``fails``
    raises; one that begins with ``HANGING`` hangs until ``freed``. ``closed`` counts the calls of
    close."""

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
async def start_crowd(
    drafter: Drafter,
    steps: Steps,
    caches: int = 4,
    pass_ms: float = 0.0,
    first_pass: threading.Event | None = None,
) -> AsyncIterator[Agent]:
    """Run an agent whose target waits with its first pass until ``first_pass``, or else
    ``steps.drafted``, is set. No generation can thus end before it was drafted for. At the end
    every cache must be free, and no task left."""
    before = asyncio.all_tasks()
    paced = load_target(VerifierConfig(model="toy", pacing=PacingSection(pass_ms=pass_ms)))
    held = GatedTarget(paced, 0)
    held.gate = first_pass or steps.drafted
    options = AgentOptions(draft_caches=caches)
    async with asyncio.timeout(WITHIN_S), serve_toy(held) as (address, _):
        agent = Agent(connect(address), drafter, TEXT.encode, TEXT.stream, options, tracer=steps)
        try:
            async with agent:
                yield agent
                await asyncio.gather(
                    *(one for driver in agent._drivers for one in driver.running_tasks)
                )
                pool = require(agent.drafter_pool)
                await asyncio.wrap_future(pool._thread.submit(lambda: None))
                assert len(pool._free) == len(pool._drafters) <= caches
        finally:
            held.gate.set()
    while remaining := asyncio.all_tasks() - before:
        await asyncio.wait(remaining)


def params(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, ignore_eos=True)


async def generate(agent: Agent, prompt: Sequence[int], length: int = 24) -> list[int]:
    found = agent.generate(prompt, params(length))
    return [token async for chunk in found for token in chunk.tokens]


def expected_tokens(prompt: Sequence[int], length: int = 24) -> list[int]:
    return toy_text(prompt, params(length))


@pytest.mark.parametrize("caches", [1, 4, 20])
async def test_twenty_chats_share_a_drafter(caches: int) -> None:
    """There are drafts for as many generations as there are caches; the others are streamed."""
    steps, length = Steps(len(PROMPTS)), 60
    async with start_crowd(Fragile(), steps, caches, pass_ms=8.0) as agent:
        texts = await asyncio.gather(*(generate(agent, prompt, length) for prompt in PROMPTS))
    assert texts == [expected_tokens(prompt, length) for prompt in PROMPTS]
    assert len(steps.done) >= caches
    assert steps.failed == []


async def test_a_text_takes_a_cache_that_was_given_back_and_begins_it_anew() -> None:
    drafter, steps = Fragile(), Steps()
    async with start_crowd(drafter, steps, 1, first_pass=drafter.hanging) as agent:
        chunks = agent.generate(HANGING, params(24))
        first = asyncio.create_task(anext(chunks))
        await asyncio.to_thread(drafter.hanging.wait)
        await first
        await chunks.aclose()
        other = asyncio.create_task(generate(agent, PROMPTS[0], 60))
        await asyncio.sleep(0)
        drafter.freed.set()
        assert await other == expected_tokens(PROMPTS[0], 60)
        while not sum(steps.done.values()):  # a generation may end before its first step does
            assert await generate(agent, PROMPTS[0], 60) == expected_tokens(PROMPTS[0], 60)


async def test_a_step_that_raises_ends_the_drafts_of_one_text_alone() -> None:
    drafter, steps = Fragile(), Steps(6)
    drafter.fails += PROMPTS[3]
    async with start_crowd(drafter, steps, 6, pass_ms=8.0) as agent:
        texts = await asyncio.gather(*(generate(agent, prompt, 60) for prompt in PROMPTS[:6]))
        assert texts == [expected_tokens(prompt, 60) for prompt in PROMPTS[:6]]
        assert steps.failed == ["RuntimeError: this text is too much"]
        assert len(steps.done) == 5
        drafter.fails.clear()
        assert await generate(agent, PROMPTS[3]) == expected_tokens(PROMPTS[3])
    assert steps.failed == ["RuntimeError: this text is too much"]


async def test_a_step_that_hangs_costs_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_pool, "STEP_TIMEOUT_S", 0.5)
    drafter, steps = Fragile(), Steps()
    async with start_crowd(drafter, steps, 2, first_pass=drafter.hanging) as agent:
        hung = asyncio.create_task(generate(agent, HANGING))
        await asyncio.to_thread(drafter.hanging.wait)
        texts = await asyncio.gather(*(generate(agent, prompt) for prompt in PROMPTS[:4]))
        assert texts == [expected_tokens(prompt) for prompt in PROMPTS[:4]]  # streamed all the same
        assert await hung == expected_tokens(HANGING)
        drafter.freed.set()
        before = sum(steps.done.values())
        while sum(steps.done.values()) == before:  # repeat until there are drafts again
            assert await generate(agent, PROMPTS[0]) == expected_tokens(PROMPTS[0])
    assert set(steps.failed) <= {"the draft model did not answer within 0.5 s"}


async def test_without_memory_for_more_caches_those_there_are_must_do() -> None:
    drafter, steps = Fragile(most=2), Steps(6)
    async with start_crowd(drafter, steps, 5) as agent:
        texts = await asyncio.gather(*(generate(agent, prompt) for prompt in PROMPTS[:6]))
        assert texts == [expected_tokens(prompt) for prompt in PROMPTS[:6]]
    assert steps.failed == []
    assert drafter.closed["times"] == 2


async def test_closing_the_agent_ends_all_chats_and_frees_every_cache() -> None:
    drafter, steps = Fragile(), Steps()
    async with serve_toy() as (address, _):
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

agent._CLOSE_TIMEOUT_S = drafter_pool._CLOSE_TIMEOUT_S = 0.05
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
    done = run_python("-c", NEVER_BACK)
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
