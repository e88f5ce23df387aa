"""The verifier's own guesses over real gRPC. Oracle: the target's law, token by token, and one pass
a token without guesses."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from edgespec.config import AgentConfig, DraftSection, VerifierConfig
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.build import build_agent
from edgespec.models.toy import TOY_ALPHABET, TOY_CONTEXT_LENGTH, ToyTokenizer
from edgespec.verifier.build import load_target
from edgespec.verifier.targets.toy import ToyTarget
from tests.shell.live_verifier import serving, toy_text

# Its greedy text runs into a circle soon, so it can be guessed.
CIRCLING = ToyModel(len(TOY_ALPHABET), order=1, seed=4)
GREEDY = SamplingParams(max_tokens=120, ignore_eos=True)
PROMPT = "a circle"


def _target() -> ToyTarget:
    vocabulary = load_target(VerifierConfig(model="toy", port=0)).info.vocabulary
    return ToyTarget(CIRCLING, vocabulary=vocabulary, context_length=TOY_CONTEXT_LENGTH)


async def _passes(address: str, params: SamplingParams) -> int:
    """How many passes the text took; it is the target's own."""
    config = AgentConfig(address, tokenizer="toy", draft=DraftSection("none"))
    prompt = ToyTokenizer().encode(PROMPT)
    async with build_agent(config) as agent:
        tokens = [token async for chunk in agent.generate(prompt, params) for token in chunk.tokens]
        assert tokens == toy_text(prompt, params, CIRCLING)
        assert agent.stats is not None
        counters = agent.stats.counters
        assert (counters.rows, counters.accepted) == (0, 0)
        return counters.passes


async def test_a_device_without_a_draft_is_told_several_tokens_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock by which each pass takes a millisecond, whatever its rows: none is too dear."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 1e-3 * next(ticks))
    monkeypatch.setattr("edgespec.verifier.daemon.time", clock)
    config = VerifierConfig(model="toy", port=0)
    async with serving(_target(), config=config) as (address, verifier):
        assert verifier.engine.engine_limits.server_drafts
        assert await _passes(address, GREEDY) < GREEDY.max_tokens / 2


async def test_a_sampled_text_is_the_targets_own() -> None:
    params = SamplingParams(temperature=0.5, seed=9, max_tokens=100, ignore_eos=True)
    async with serving(_target(), config=VerifierConfig(model="toy", port=0)) as (address, _):
        assert await _passes(address, params) <= params.max_tokens
