"""Answers that begin, or go on, without a verifier. Oracle: the toy model's text by the scalar
specification; a reader that keeps unverified text apart; what stands on stdout."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgespec.api import SyncAgent
from edgespec.cli.offline_view import OfflineView
from edgespec.cli.streaming import TextView
from edgespec.config import AgentConfig, DraftSection, VerifierConfig
from edgespec.core.device.offline import Correction, Offline, OfflinePolicy
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions, Chunk, GenerationError
from edgespec.device.build import build_agent, connect
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.device.reply import ReplyText, UnverifiedChunk
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.verifier.build import load_target
from tests.shell.gate import Gate
from tests.shell.live_verifier import daemon, ready, serving, start, toy_text

TEXT = ToyTokenizer()
LENGTH, MUCH = 40, 8
PROMPTS = [TEXT.encode(f"{word} day in may") for word in "abcdefghijklmnopqrst"]
WITHIN_S = 200.0  # nobody gives up for being on a busy machine
QUICK = ReconnectPolicy(first_s=0.01, longest_s=0.05, give_up_first_s=WITHIN_S, give_up_s=WITHIN_S)
SAMPLED = SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=3)


class Bytes:
    """A detokenizer by which every third token only begins a character that the next one ends, as
    with a multi-byte character."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, tokens: Sequence[int]) -> str:
        out = ""
        for token in tokens:
            self._held += chr(0x61 + token % 26)
            if token % 3:
                out, self._held = out + self._held, ""
        return out

    def flush(self) -> str:
        out, self._held = self._held, ""
        return out


def whole_text(tokens: Sequence[int]) -> str:
    decoder = Bytes()
    return decoder.push(tokens) + decoder.flush()


def offline_agent(address: str, noise: float = 0.25, reconnect: ReconnectPolicy = QUICK) -> Agent:
    drafter = ToyDrafter(TOY_MODEL.perturbed(noise), load_target(VerifierConfig(model="toy")).info)
    options = AgentOptions(reconnect=reconnect, offline=OfflinePolicy(Offline.DRAFT, grace_s=0.02))
    return Agent(connect(address), drafter, TEXT.encode, lambda ids: Bytes(), options)


class Followed:
    """What one reader was given."""

    def __init__(self) -> None:
        self.text, self.tokens = ReplyText(), list[int]()
        self.events: list[object] = []
        self.written, self.came, self.much = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def follow(self, agent: Agent, prompt: Sequence[int], params: SamplingParams) -> None:
        async for event in agent.follow(prompt, params):
            self.events.append(event)
            self.text.add(event)
            if isinstance(event, Chunk):
                self.tokens += event.tokens
                if event.tokens:
                    self.came.set()
                    assert event.position == len(prompt) + len(self.tokens) - len(event.tokens)
            elif isinstance(event, UnverifiedChunk):
                self.written.set()
                if event.position + len(event.tokens) >= len(prompt) + MUCH:
                    self.much.set()


async def first_of(job: asyncio.Task[None], event: asyncio.Event) -> None:
    """Until ``event`` is set, or the job is over."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait([job, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def test_twenty_answers_begun_with_the_link_down_are_the_targets_own() -> None:
    async with asyncio.timeout(WITHIN_S), Gate(None) as gate, serving() as (address, _):
        async with offline_agent(gate.address) as agent:
            readers = [Followed() for _ in PROMPTS]
            jobs = [
                asyncio.create_task(reader.follow(agent, prompt, SAMPLED))
                for reader, prompt in zip(readers, PROMPTS, strict=True)
            ]
            await asyncio.gather(*(reader.written.wait() for reader in readers))
            assert not any(isinstance(e, Chunk) for reader in readers for e in reader.events)
            assert all(reader.text.unverified for reader in readers)
            gate.port = int(address.rpartition(":")[2])
            await asyncio.gather(*jobs)
    for reader, prompt in zip(readers, PROMPTS, strict=True):
        expected = toy_text(prompt, SAMPLED)
        assert reader.tokens == expected
        assert reader.text.verified == whole_text(expected)
        assert reader.text.unverified == ""
    kinds = [type(event) for reader in readers for event in reader.events]
    assert kinds.count(Correction) > 0  # a draft that is wrong at times


async def test_a_link_that_drops_again_and_again_leaves_the_text_as_it_is() -> None:
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    async with asyncio.timeout(WITHIN_S), Gate(None) as gate, serving() as (address, _):
        port = int(address.rpartition(":")[2])
        async with offline_agent(gate.address) as agent:
            reader = Followed()
            job = asyncio.create_task(reader.follow(agent, PROMPTS[0], params))
            for _ in range(4):
                await first_of(job, reader.written)
                gate.port = port
                reader.came.clear()
                await first_of(job, reader.came)
                reader.written.clear()
                gate.kill()
            gate.port = port
            await job
    expected = toy_text(PROMPTS[0], params)
    assert reader.tokens == expected
    assert reader.text.verified == whole_text(expected)


@pytest.mark.parametrize("noise", [0.0, 0.25, 9.0])
async def test_a_stop_string_found_offline_pauses_and_the_target_decides(noise: float) -> None:
    plain = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    whole = whole_text(toy_text(PROMPTS[1], plain))
    stop = whole[12:14]
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, stop=(stop, "zzz"))
    async with asyncio.timeout(WITHIN_S), Gate(None) as gate, serving() as (address, _):
        async with offline_agent(gate.address, noise) as agent:
            reader = Followed()
            job = asyncio.create_task(reader.follow(agent, PROMPTS[1], params))
            await reader.much.wait()
            assert not job.done()
            assert stop not in reader.text.unverified
            gate.port = int(address.rpartition(":")[2])
            await job
    assert reader.text.verified == whole[: whole.index(stop)]
    assert isinstance(reader.events[-1], Chunk)
    assert reader.events[-1].finish is FinishReason.STOP


async def test_generate_never_gives_what_is_not_verified() -> None:
    async with asyncio.timeout(WITHIN_S), Gate(None) as gate, serving() as (address, _):
        async with offline_agent(gate.address, noise=9.0) as agent:

            async def generated() -> list[int]:
                found = agent.generate(PROMPTS[2], SAMPLED)
                return [token async for chunk in found for token in chunk.tokens]

            job = asyncio.create_task(generated())
            beside = Followed()
            other = asyncio.create_task(beside.follow(agent, PROMPTS[4], SAMPLED))
            await beside.much.wait()
            gate.port = int(address.rpartition(":")[2])
            assert await job == toy_text(PROMPTS[2], SAMPLED)
            await other


async def test_when_nobody_comes_back_the_unverified_text_is_taken_back() -> None:
    hasty = ReconnectPolicy(first_s=0.05, longest_s=0.1, give_up_first_s=0.3, give_up_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with asyncio.timeout(WITHIN_S), Gate(silent.getsockname()[1]) as gate:
            async with offline_agent(gate.address, reconnect=hasty) as agent:
                reader = Followed()
                job = asyncio.create_task(reader.follow(agent, PROMPTS[3], SAMPLED))
                await first_of(job, reader.written)  # nobody gives up before
                gate.kill()
                with pytest.raises(GenerationError, match="gave up on the verifier"):
                    await job
    assert reader.written.is_set()
    assert reader.text.verified == reader.text.unverified == ""
    assert isinstance(reader.events[-1], Correction)


def test_who_writes_offline_waits_longer_for_the_first_verifier() -> None:
    waits, drafts = AgentConfig(), AgentConfig(offline=Offline.DRAFT)
    assert waits.patience.give_up_first_s == waits.reconnect.give_up_first_s == 5.0
    assert drafts.patience.give_up_first_s == drafts.reconnect.give_up_s == 60.0


def test_the_synchronous_agent_follows_too() -> None:
    config = AgentConfig(
        verifier="127.0.0.1:1",
        tokenizer="toy",
        draft=DraftSection(model="toy"),
        offline=Offline.DRAFT,
        offline_grace_s=0.0,
    )
    with SyncAgent.of(build_agent(config)) as agent:
        first = next(agent.follow(PROMPTS[0], SAMPLED))
    assert isinstance(first, UnverifiedChunk)


def test_on_a_pipe_only_verified_text_is_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    view = OfflineView(TextView(color=False, terminal=False), dims=False)
    view.show_unverified(UnverifiedChunk(3, (1, 2), ("un", "sure")))
    view.show_unverified(Correction(4))
    view.show(Chunk(3, (1,), ()))
    view.show_unverified(UnverifiedChunk(4, (5,), ("yes\x1b[2J",)))
    view.show(Chunk(4, (5,), ()))
    view.end()
    assert out.getvalue() == ""
    assert err.getvalue() == (
        "[unverified] unsure\n[replaced: 1 of 2 tokens were verified]\n"
        "[unverified] yes\N{REPLACEMENT CHARACTER}[2J\n[verified: all 1 tokens]\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "prompt"), [("generate", "one day in may"), ("chat", "one day in may ")]
)
def test_a_command_writes_on_without_a_verifier_and_ends_with_the_targets_text(
    command: str, prompt: str, tmp_path: Path
) -> None:
    patient = tmp_path / "patient.yaml"
    patient.write_text("reconnect: {give_up_s: 600}")
    with daemon() as (address, process):
        process.kill()
        process.wait()
        common = ["--verifier", address, "--draft", "toy", "--tokenizer", "toy", "-n", "30"]
        talks = command == "chat"
        words = [] if talks else [prompt]
        options = (
            "--set",
            "offline=draft",
            "--set",
            "sampling.ignore_eos=true",
            "--config",
            str(patient),
        )
        child = start(command, *words, *common, *options, has_input=talks)
        assert child.stderr is not None
        if child.stdin is not None:
            child.stdin.write("/model\none day in may\n")
            child.stdin.flush()
        said = child.stderr.readline()
        assert said.startswith("offline: no verifier answers")
        while "[unverified]" not in said:
            more = child.stderr.read(1)
            assert more, said
            said += more
        assert not talks or "target  not known: no verifier had answered" in said
        port = address.rpartition(":")[2]
        with ready(start("verifier", "--model", "toy", "--port", port)):
            out, _ = child.communicate(timeout=WITHIN_S)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    assert TEXT.decode(toy_text(TEXT.encode(prompt), params)) + "\n" in out
    assert out.count("\n") == 1
    assert child.returncode == 0
