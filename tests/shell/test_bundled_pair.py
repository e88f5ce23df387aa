"""The shipped pair, over the real wire: exact whatever drafts, and a draft worth shipping."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest

from edgespec.bench.measurement import LentDrafter
from edgespec.config import VerifierConfig
from edgespec.core.device.policy import PearlPolicy, WindowedPolicy
from edgespec.core.ports import Drafter, TargetModel
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import connect
from edgespec.models.folders import Role, resolve_model
from edgespec.models.tokenizer import TextTokenizer
from edgespec.verifier.build import build_verifier, load_target
from edgespec.verifier.daemon import Verifier
from edgespec.wire.grpc_server import GrpcServer

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

PROMPTS = (
    "Once upon a time there was a",
    "def read_lines(path):\n",
    "<|user|>A farmer has 12 hens and buys 7 more. How many hens are there?<|assistant|>",
    "The parser reads the file and",
)
LENGTH = 160
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=LENGTH, ignore_eos=True),
    "0.7, top-p, penalties": SamplingParams(
        temperature=0.7,
        top_p=0.9,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        seed=5,
        max_tokens=LENGTH,
        ignore_eos=True,
    ),
    "1.0": SamplingParams(temperature=1.0, seed=6, max_tokens=LENGTH, ignore_eos=True),
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return load_target(VerifierConfig(model="bundled"))


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(resolve_model("bundled", Role.TARGET))


@pytest.fixture(scope="module")
def drafters() -> Iterator[dict[str, Drafter]]:
    from edgespec.device.drafters.onnx_drafter import OnnxDrafter
    from edgespec.device.drafters.toy import RandomDrafter
    from tests.adversarial import AdversarialDrafter

    folder = resolve_model("bundled", Role.DRAFT)
    draft = OnnxDrafter(folder)
    yield {
        "draft": draft,
        "random": RandomDrafter(draft.info, seed=3),
        "adversarial": AdversarialDrafter(OnnxDrafter(folder)),
    }
    draft.close()


_ALONE: dict[tuple[tuple[int, ...], int], list[int]] = {}


def alone(target: TargetModel, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The target by itself, one token a pass; computed once for each prompt and seed."""
    known = (tuple(prompt), params.seed)
    if known not in _ALONE:
        _ALONE[known] = _alone(target, prompt, params)
    return _ALONE[known]


def _alone(target: TargetModel, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    tokens, cached = list(prompt), 0
    target.open("alone", len(prompt), params)
    while len(tokens) - len(prompt) < params.max_tokens:
        request = PassRequest("alone", cached, tuple(tokens[cached:]))
        cached = len(tokens)
        tokens.append(target.forward([request])[0].targets[0])
    target.close("alone")
    return tokens[len(prompt) :]


@asynccontextmanager
async def agent_for(
    target: TargetModel, drafter: Drafter, tokenizer: TextTokenizer, options: AgentOptions
) -> AsyncIterator[Agent]:
    config = VerifierConfig(model="bundled", port=0)
    verifier, server = build_verifier(config, target=target)
    await server.start()
    transport = connect(f"127.0.0.1:{server.port}")
    lent = LentDrafter(drafter)
    agent = Agent(transport, lent, tokenizer.encode, tokenizer.stream, options)
    try:
        yield agent
    finally:
        await agent.close()  # which waits for a step that still runs
        await _stop(verifier, server)


async def _stop(verifier: Verifier, server: GrpcServer) -> None:
    await verifier.stop()
    await server.stop(0.0)


def acceptance(
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    params: SamplingParams,
) -> float:
    """How often the first choice is right, asked on every prefix of the target's own texts."""
    hits = total = 0
    for prompt, tokens in zip(prompts, texts, strict=True):
        drafter.begin(len(prompt), params)
        keep, feed = 0, prompt
        for token in tokens:
            hits += drafter.step(keep, feed, 1)[0].token == token
            keep, feed, total = keep + len(feed), [token], total + 1
    return hits / total


OPTIONS = {
    "draft": AgentOptions(),
    "random": AgentOptions(WindowedPolicy(width=2), RunAhead.NEVER),
    "adversarial": AgentOptions(PearlPolicy(gamma=4), RunAhead.NEVER),
}


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(s, marks=pytest.mark.slow) if s != "greedy" else s for s in SAMPLINGS],
)
@pytest.mark.parametrize(
    "kind",
    ["draft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OPTIONS if kind != "draft")],
)
async def test_the_text_is_the_targets_own_whatever_drafts(
    kind: str,
    sampling: str,
    target: TargetModel,
    tokenizer: TextTokenizer,
    drafters: dict[str, Drafter],
) -> None:
    params = SAMPLINGS[sampling]
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    expected = [alone(target, prompt, params) for prompt in prompts]
    tried = 0
    async with agent_for(target, drafters[kind], tokenizer, OPTIONS[kind]) as agent:
        for prompt, tokens in zip(prompts, expected, strict=True):
            received = [t async for c in agent.generate(prompt, params) for t in c.tokens]
            assert received == tokens
            assert agent.stats is not None
            assert agent.stats.counters.draft_failure == ""
            tried += agent.stats.counters.tried
    assert tried > 0
    # Which of its drafts come in time is a matter of the machine; how good they are is not.
    rate = acceptance(drafters[kind], prompts[:2], expected[:2], params)
    if kind == "draft":
        assert rate >= 0.5
    elif kind == "random":
        assert rate <= 0.02
    else:
        assert rate <= 0.15
