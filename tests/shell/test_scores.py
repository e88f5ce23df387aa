"""What a verifier says beside its tokens, and its own guesses, over real gRPC. Oracles: of
log-probabilities the toy's logits, and transformers' own model with ``log_softmax``, and the text
is that of a run without; of guesses one pass a token without any."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgespec
from edgespec.config import VerifierConfig
from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import TokenScore, score_token
from edgespec.core.toy_model import ToyModel
from edgespec.device.agent import Agent, Chunk
from edgespec.device.build import build_agent
from edgespec.models.toy import TOY_ALPHABET, TOY_CONTEXT_LENGTH, TOY_MODEL, ToyTokenizer
from edgespec.verifier.build import load_target
from edgespec.verifier.targets.toy import ToyTarget
from tests.present import present
from tests.shell.live_verifier import GatedTarget, daemon, serving, start, toy_text
from tests.shell.test_end_to_end import IDS, PROMPT, SAMPLED, config, tokens
from tests.shell.tiny_checkpoints import write_checkpoint

WITHIN_S = 120


async def scored(agent: Agent, params: SamplingParams, count: int) -> list[Chunk]:
    return [chunk async for chunk in agent.generate(PROMPT, params, logprobs=count)]


def told(chunks: list[Chunk]) -> list[TokenScore]:
    return [score for chunk in chunks for score in chunk.logprobs]


def expected(text: list[int], count: int) -> list[TokenScore]:
    whole = [*IDS, *text]
    return [
        score_token(TOY_MODEL.logits(whole[: len(IDS) + place]), token, count)
        for place, token in enumerate(text)
    ]


def same(found: list[TokenScore], right: list[TokenScore]) -> None:
    assert len(found) == len(right)
    for one, other in zip(found, right, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.margin == pytest.approx(other.margin, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [x for _, x in one.top] == pytest.approx([x for _, x in other.top], abs=1e-4)


@pytest.mark.parametrize("draft", ["toy", "none"])
async def test_each_token_has_the_score_of_its_own_row(draft: str) -> None:
    """Drafted trees and penalties too: scores are of the raw distribution."""
    async with serving() as (address, _):
        async with build_agent(config(address, draft)) as agent:
            chunks = await scored(agent, SAMPLED, 3)
            plain = await scored(agent, SAMPLED, 0)
            for wrong in (-1, 21):
                with pytest.raises(ValueError, match=rf"is {wrong}, but must be in \[0, 20\]"):
                    await scored(agent, SAMPLED, wrong)
    text = toy_text(IDS, SAMPLED)
    assert tokens(chunks) == tokens(plain) == text
    assert told(plain) == []
    same(told(chunks), expected(text, 3))
    for chunk in chunks:
        assert len(chunk.logprobs) == len(chunk.tokens)


async def test_a_lost_link_loses_no_score() -> None:
    target = GatedTarget(load_target(VerifierConfig(model="toy")), 8)
    async with serving(target) as (address, verifier):
        async with build_agent(config(address, "none")) as agent:
            found: list[Chunk] = []
            async for chunk in agent.generate(PROMPT, SAMPLED, logprobs=2):
                if not found:
                    for stream in tuple(verifier._streams.values()):
                        await stream.close()
                    target.gate.set()
                found.append(chunk)
            assert present(agent.stats).counters.reconnects == 1
    assert tokens(found) == toy_text(IDS, SAMPLED)
    same(told(found), expected(tokens(found), 2))


def test_the_command_line_and_the_synchronous_agent_tell_them() -> None:
    with daemon() as (address, _):
        line = ("generate", PROMPT, "--verifier", address, "--draft", "toy", "-n", "6")
        with start(*line, "--logprobs", "2") as device:
            out, _ = device.communicate(timeout=WITHIN_S)
        with edgespec.SyncAgent(address, draft="toy") as agent:
            params = edgespec.SamplingParams(max_tokens=6)
            chunks = list(agent.generate(PROMPT, params, logprobs=2))
    chunked = [json.loads(one) for one in out.splitlines()]
    logprobs = [score["logprob"] for chunk in chunked for score in chunk.get("logprobs", ())]
    assert logprobs == [score.logprob for score in told(chunks)]
    assert len(logprobs) == 6
    assert [token for one in chunked for token in one["tokens"]] == tokens(chunks)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("scored"))


def test_scores_are_those_of_transformers(checkpoint: Path) -> None:
    """A tree behind a prompt; each row against ``log_softmax`` of its path run alone."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    target = load_target(VerifierConfig(model=str(checkpoint), device="cpu"))
    prompt, nodes, parents = (5, 9, 2, 11), (3, 4, 8), (-1, 0, -1)
    for params in (SamplingParams(), SamplingParams(temperature=0.7, top_k=5, seed=3)):
        target.open("s", len(prompt), params)
        target.open("t", len(prompt), params)
        asking = PassRequest("s", 0, prompt, nodes, parents, logprobs=4)
        silent = replace(asking, key="t", logprobs=0)
        scored, plain = target.forward([asking, silent])
        target.close("s")
        target.close("t")
        assert plain.scores == ()
        assert scored.targets == plain.targets
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32
        )
        paths = [(), (3,), (3, 4), (8,)]
        for path, token, score in zip(paths, scored.targets, scored.scores, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *path]])).logits[0, -1]
            right = logits.float().log_softmax(-1)
            best = right.topk(4)
            assert score.logprob == pytest.approx(float(right[token]), abs=1e-4)
            assert [x for _, x in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert [token for token, _ in score.top] == best.indices.tolist()
            assert score.margin == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-4)


# Its greedy text runs into a circle soon, so it can be guessed.
CIRCLING = ToyModel(len(TOY_ALPHABET), order=1, seed=4)


def _target() -> ToyTarget:
    vocabulary = load_target(VerifierConfig(model="toy", port=0)).info.vocabulary
    return ToyTarget(CIRCLING, vocabulary=vocabulary, context_length=TOY_CONTEXT_LENGTH)


async def _passes(address: str, params: SamplingParams) -> int:
    """How many passes the text took; it is the target's own."""
    prompt = ToyTokenizer().encode("a circle")
    async with build_agent(config(address, "none")) as agent:
        chunks = [chunk async for chunk in agent.generate(prompt, params)]
        assert tokens(chunks) == toy_text(prompt, params, CIRCLING)
        counters = present(agent.stats).counters
        assert (counters.rows, counters.accepted) == (0, 0)
        return counters.passes


async def test_a_device_without_a_draft_is_told_several_tokens_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock by which each pass takes a millisecond, whatever its rows: none is too dear."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 1e-3 * next(ticks))
    monkeypatch.setattr("edgespec.verifier.daemon.time", clock)
    async with serving(_target()) as (address, verifier):
        assert verifier.engine.engine_limits.server_drafts
        assert await _passes(address, SamplingParams(max_tokens=120, ignore_eos=True)) < 60
