"""Log-probabilities beside tokens, the verifier's own draft nodes, and relaxed rules, over real
gRPC.

Oracle of log-probabilities: the toy's logits, and transformers' own model with ``log_softmax``; and
the generation equals one without them. Oracle of draft nodes: one token per pass without any.
Oracle of rules: the toy's own token after every prefix, by the scalar specification. Oracle of
torch: the scalar scores.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgespec
from edgespec.cli.device import ReceivedTokens, describe_generation
from edgespec.config import PolicyName, VerifierConfig
from edgespec.core.device.events import TokenKind
from edgespec.core.ports import PassRequest
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.constraint import pack_mask
from edgespec.core.protocol.sampling import SamplingParams, choose, mask_logits, warp
from edgespec.core.protocol.work import TokenScore, score_node, score_token
from edgespec.core.toy_model import ToyModel
from edgespec.device.agent import Agent, Chunk, GenerationError
from edgespec.device.build import build_agent
from edgespec.models.toy import TOY_ALPHABET, TOY_CONTEXT_LENGTH, TOY_MODEL, ToyTokenizer
from edgespec.verifier.build import load_target
from edgespec.verifier.targets.toy import ToyTarget
from edgespec.wire import codec
from edgespec_sim.message_sizes import message_bytes
from tests.api.test_end_to_end import IDS, PROMPT, SAMPLED, collect, make_config, tokens_of
from tests.endpoint.live_endpoint import over_verifiers
from tests.kit.live_verifier import GatedTarget, serve_toy, start, start_daemon, toy_text
from tests.kit.tiny_checkpoints import write_checkpoint
from tests.present import require

WITHIN_S = 120


async def generate_scored(agent: Agent, params: SamplingParams, count: int) -> list[Chunk]:
    return [chunk async for chunk in agent.generate(PROMPT, params, logprobs=count)]


def scores_of(chunks: list[Chunk]) -> list[TokenScore]:
    return [score for chunk in chunks for score in chunk.logprobs]


def score_by_law(text: list[int], count: int) -> list[TokenScore]:
    whole = [*IDS, *text]
    return [
        score_token(TOY_MODEL.logits(whole[: len(IDS) + place]), token, count)
        for place, token in enumerate(text)
    ]


def check_same(found: list[TokenScore], right: list[TokenScore]) -> None:
    assert len(found) == len(right)
    for one, other in zip(found, right, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.margin == pytest.approx(other.margin, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [x for _, x in one.top] == pytest.approx([x for _, x in other.top], abs=1e-4)


@pytest.mark.parametrize("draft", ["toy", "none"])
async def test_each_token_has_the_score_of_its_own_row(draft: str) -> None:
    """Drafted trees and penalties do not matter: scores are of the raw distribution."""
    async with serve_toy() as (address, _):
        async with build_agent(make_config(address, draft)) as agent:
            chunks = await generate_scored(agent, SAMPLED, 3)
            plain = await generate_scored(agent, SAMPLED, 0)
            for wrong in (-1, 21):
                with pytest.raises(ValueError, match=rf"is {wrong}, but must be in \[0, 20\]"):
                    await generate_scored(agent, SAMPLED, wrong)
    text = toy_text(IDS, SAMPLED)
    assert tokens_of(chunks) == tokens_of(plain) == text
    assert scores_of(plain) == []
    check_same(scores_of(chunks), score_by_law(text, 3))
    for chunk in chunks:
        assert len(chunk.logprobs) == len(chunk.tokens)


async def test_a_lost_link_loses_no_score() -> None:
    target = GatedTarget(load_target(VerifierConfig(model="toy")), 8)
    async with serve_toy(target) as (address, verifier):
        async with build_agent(make_config(address, "none")) as agent:
            found: list[Chunk] = []
            async for chunk in agent.generate(PROMPT, SAMPLED, logprobs=2):
                if not found:
                    for stream in tuple(verifier._streams.values()):
                        await stream.close()
                    target.gate.set()
                found.append(chunk)
            assert require(agent.stats).counters.reconnects == 1
    assert tokens_of(found) == toy_text(IDS, SAMPLED)
    check_same(scores_of(found), score_by_law(tokens_of(found), 2))


def test_the_command_line_and_the_synchronous_agent_tell_them() -> None:
    with start_daemon() as (address, _):
        line = ("generate", PROMPT, "--verifier", address, "--draft", "toy", "-n", "6")
        with start(*line, "--logprobs", "2") as device:
            out, _ = device.communicate(timeout=WITHIN_S)
        with edgespec.SyncAgent(address, draft="toy") as agent:
            params = edgespec.SamplingParams(max_tokens=6)
            chunks = list(agent.generate(PROMPT, params, logprobs=2))
    chunked = [json.loads(one) for one in out.splitlines()]
    logprobs = [score["logprob"] for chunk in chunked for score in chunk.get("logprobs", ())]
    assert logprobs == [score.logprob for score in scores_of(chunks)]
    assert len(logprobs) == 6
    assert [token for one in chunked for token in one["tokens"]] == tokens_of(chunks)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("scored"))


def test_scores_are_those_of_transformers(checkpoint: Path) -> None:
    """A tree follows a prompt; each row is compared with ``log_softmax`` of its path run alone."""
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


# Its greedy text soon repeats in a circle, so it can be guessed.
CIRCLING = ToyModel(len(TOY_ALPHABET), order=1, seed=4)


def _target() -> ToyTarget:
    vocabulary = load_target(VerifierConfig(model="toy", port=0)).info.vocabulary
    return ToyTarget(CIRCLING, vocabulary=vocabulary, context_length=TOY_CONTEXT_LENGTH)


async def _passes(address: str, params: SamplingParams) -> int:
    """Return the number of passes of a generation; check that it is the target's own."""
    prompt = ToyTokenizer().encode("a circle")
    async with build_agent(make_config(address, "none")) as agent:
        chunks = [chunk async for chunk in agent.generate(prompt, params)]
        assert tokens_of(chunks) == toy_text(prompt, params, CIRCLING)
        counters = require(agent.stats).counters
        assert (counters.rows, counters.accepted) == (0, 0)
        return counters.passes


async def test_a_device_without_a_draft_is_told_several_tokens_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On this clock each pass takes a millisecond, whatever its rows, so no row is too
    expensive."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 1e-3 * next(ticks))
    monkeypatch.setattr("edgespec.verifier.daemon.time", clock)
    async with serve_toy(_target()) as (address, verifier):
        assert verifier.engine.engine_limits.server_drafts
        assert await _passes(address, SamplingParams(max_tokens=120, ignore_eos=True)) < 60


# --- relaxed rules, from the command line, Python and HTTP to the target and back -----------------


OFFER = VerifierConfig(model="toy", rules=("dsd", "typical:0.5,0.9"))
WARM = SamplingParams(max_tokens=200, temperature=0.9, seed=11, ignore_eos=True)


def held_against_the_target(chunks: list[Chunk], params: SamplingParams) -> int:
    """Count the tokens that are not the target's own, and check that their kinds mark them."""
    text, replaced = list(IDS), 0
    for chunk in chunks:
        for place, token in enumerate(chunk.tokens):
            own = choose(TOY_MODEL.logits(text), params, len(text), IDS, text[len(IDS) :])
            assert (chunk.pieces[place].kind is TokenKind.REPLACED) == (token != own)
            if chunk.logprobs:
                score = score_token(TOY_MODEL.logits(text), token, 1)
                assert chunk.logprobs[place].logprob == pytest.approx(score.logprob, abs=1e-4)
            replaced += token != own
            text.append(token)
    return replaced


@pytest.mark.parametrize("params", [WARM, replace(WARM, temperature=0.0)])
async def test_only_drafts_replace_and_each_is_told(params: SamplingParams) -> None:
    """A link breaks in the middle, and the generation goes on."""
    target = GatedTarget(load_target(OFFER), 8)
    async with serve_toy(target, config=OFFER) as (address, verifier):
        settings = replace(
            make_config(address, run_ahead=m.RunAhead.NEVER, width=1), rule="dsd:0.05"
        )
        async with build_agent(settings) as agent:
            chunks: list[Chunk] = []
            async for chunk in agent.generate(PROMPT, params, logprobs=1):
                if not chunks:
                    for stream in tuple(verifier._streams.values()):
                        await stream.close()
                    target.gate.set()
                chunks.append(chunk)
            stats = require(agent.stats)
            replaced = held_against_the_target(chunks, params)
            assert 0 < replaced == stats.counters.replaced < stats.counters.accepted
            assert (stats.rule, stats.counters.reconnects, len(tokens_of(chunks))) == (
                *("dsd:0.05", 1),
                200,
            )
            assert f"LOSSY (dsd:0.05): {replaced} tokens (" in describe_generation(
                ReceivedTokens(), stats
            )
            exact = [one async for one in agent.generate(PROMPT, params, rule="exact")]
            assert held_against_the_target(exact, params) == 0
            assert "LOSSY" not in describe_generation(ReceivedTokens(), agent.stats)
        assert verifier.engine.draft_counts.device.accepted > 0


@pytest.mark.parametrize("rule", ["margin:1", "typical"])
async def test_a_rule_that_is_not_offered_is_refused_before_any_token(rule: str) -> None:
    async with serve_toy(config=OFFER) as (address, _):
        async with build_agent(replace(make_config(address), rule=rule)) as agent:
            with pytest.raises(GenerationError, match=r"offered: exact, dsd, typical:0.5,0.9$"):
                await collect(agent, WARM)
            assert require(agent.stats).counters.committed == 0


def test_the_command_line_labels_a_lossy_text() -> None:
    with start_daemon("--rules", "dsd", "--rules", "typical") as (address, _):
        line = ("generate", PROMPT, "--verifier", address, "--draft", "toy", "-n", "60")
        chain = ("--set", "policy.width=1", "--set", "policy.run_ahead=never")
        with start(*line, *chain, "--json", "--stats", "--rule", "dsd:0") as device:
            out, err = device.communicate(timeout=WITHIN_S)
        with edgespec.SyncAgent(address, draft="toy", rule="typical") as agent:
            params = edgespec.SamplingParams(max_tokens=6)
            assert len(list(agent.generate(PROMPT, params, rule="dsd:1"))) > 0
            assert agent.stats is not None
            assert (agent.stats.rule, agent.stats.is_lossy) == ("dsd:1", True)
    *_, last = [json.loads(one) for one in out.splitlines()]
    kinds = [piece["kind"] for one in out.splitlines() for piece in json.loads(one)["pieces"]]
    assert (last["rule"], last["lossy"]) == ("dsd:0", True)
    assert last["replaced"] == kinds.count("replaced") > 0
    assert f"LOSSY (dsd:0): {last['replaced']} tokens" in err


async def test_http_takes_a_rule_and_tells_of_it() -> None:
    policy = make_config(
        "x", name=PolicyName.FIXED, gamma=2, run_ahead=m.RunAhead.NEVER, width=1
    ).policy
    async with serve_toy(config=OFFER) as (address, _):
        async with over_verifiers(address, policy=policy) as live, live.client() as client:
            asked: Any = {"model": "toy", "prompt": PROMPT, "max_tokens": 60, "seed": 3}
            for rule, lossy in ((None, False), ("dsd:0", True)):
                done = await client.completions.create(**asked, extra_body={"rule": rule})
                told = done.usage.model_dump()["edgespec"]
                assert (told["rule"], told["lossy"]) == (rule or "exact", lossy)
                assert bool(told["replaced_tokens"]) == lossy
            for rule in ("loose", "margin:1"):
                with pytest.raises(Exception, match=r"400.*(one of|offered): exact"):
                    await client.completions.create(**asked, extra_body={"rule": rule})


def test_what_was_replaced_travels_and_is_weighed() -> None:
    commit = m.Commit(5, (1, 2, 3), accepted=2, replaced=(0, 2))
    assert codec.decode_downlink(codec.encode_downlink(commit)) == commit
    assert message_bytes(commit) == codec.payload_bytes(commit)
    asking = m.Open("s", "", "", (1,), rule="typical:0.09,0.3")
    assert codec.decode_uplink(codec.encode_uplink(asking)) == asking
    more = message_bytes(asking) - message_bytes(replace(asking, rule="exact"))
    assert codec.payload_bytes(asking) - codec.payload_bytes(replace(asking, rule="exact")) == more


def test_torchs_scores_of_nodes_are_the_scalar_ones() -> None:
    """One pass holds sessions of all kinds (trees, penalties, bias, truncation, grammars), and
    between them sessions that do not request scores and sessions that do not sample."""
    torch = pytest.importorskip("torch")
    from edgespec.sampling import tensors

    dice, size = random.Random(5), 61
    kinds = (
        SamplingParams(),
        SamplingParams(0.7, 9, 0.8, 0.01),
        SamplingParams(repetition_penalty=1.3, logit_bias={3: 2.0, 60: -4.0}),
        SamplingParams(1.5, presence_penalty=0.5, frequency_penalty=0.7),
    )
    requests: list[PassRequest] = []
    blocks: list[tensors.SampleBlock] = []
    for number in range(16):
        params, key = kinds[number % 4], f"s{number}"
        nodes = tuple(dice.randrange(size) for _ in range(number % 7))
        parents = tuple(dice.randrange(-1, node) for node in range(len(nodes)))
        sample, asks = number != 8 or bool(nodes), number % 5 != 4
        requests.append(PassRequest(key, 0, (1, 2), nodes, parents, sample, node_scores=asks))
        counts = tensors.TextOccurrences(1)
        counts.update((1, 2, 2), 0)
        masks = [
            pack_mask(dice.sample(range(size), 30)) if number > 7 else None
            for _ in range(1 + len(nodes))
        ]
        before = counts.occurrences_before(nodes, parents)
        positions = range(3, 4 + len(nodes))
        blocks.append(tensors.SampleBlock(key, params, positions, before, masks))
    rows = sum(len(one.positions) for one in blocks)
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(1)) * 4
    found, first = tensors.score_nodes(logits, requests, blocks), 0
    assert found.keys() == {one.key for one in requests if one.node_scores and one.tokens}
    for request, block in zip(requests, blocks, strict=True):
        paths: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(request.parents):
            paths.append((*paths[1 + parent], request.tokens[node]))
            row = logits[first + 1 + parent].tolist()
            output = (2, 2, *paths[1 + parent])
            law = warp(mask_logits(row, block.masks[1 + parent]), block.params, (1,), output)
            right = score_node(law, row, request.tokens[node])
            if request.key in found:
                one = found[request.key][node]
                assert one.rank == right.rank
                for name in ("logprob", "best_logprob", "entropy", "raw_logprob"):
                    assert getattr(one, name) == pytest.approx(getattr(right, name), abs=2e-5)
        first += len(block.positions)
