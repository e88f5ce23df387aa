"""Guesses from the text in whole agents, alone and beside a model. Oracle: the toy target."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgespec.config import AgentConfig, DraftSection, PolicyName, PolicySection, VerifierConfig
from edgespec.config.loading import load_config
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.build import agent_options, build_agent, load_drafter
from edgespec.device.drafters.toy import SilentDrafter
from edgespec.models.folders import Role, model_info, resolve_model
from edgespec.models.toy import TOY_CONTEXT_LENGTH, ToyTokenizer
from edgespec.verifier.build import load_target
from edgespec.verifier.targets.toy import ToyTarget
from tests.shell.live_verifier import serving, toy_text

CIRCLING = ToyModel(64, order=1, seed=4)
LONG = SamplingParams(max_tokens=120, ignore_eos=True)
WARM = SamplingParams(temperature=0.5, seed=9, max_tokens=60, ignore_eos=True, top_k=20)
PROMPT = ToyTokenizer().encode("a circle")
DRAFTS = (DraftSection("lookup"), DraftSection("toy", lookup=True))


@pytest.mark.parametrize("draft", DRAFTS, ids=["lookup", "beside a model"])
@pytest.mark.parametrize(
    ("policy", "run_ahead"),
    [
        (PolicyName.WINDOWED, RunAhead.AUTO),
        (PolicyName.WINDOWED, RunAhead.NEVER),
        (PolicyName.FIXED, RunAhead.NEVER),
    ],
)
async def test_the_text_is_the_targets_own(
    draft: DraftSection, policy: PolicyName, run_ahead: RunAhead
) -> None:
    vocabulary = load_target(VerifierConfig(model="toy", port=0)).info.vocabulary
    target = ToyTarget(CIRCLING, vocabulary=vocabulary, context_length=TOY_CONTEXT_LENGTH)
    served = VerifierConfig(model="toy", port=0, server_drafts=False)
    async with serving(target, config=served) as (address, _):
        policies = PolicySection(policy, run_ahead=run_ahead)
        config = AgentConfig(address, tokenizer="toy", draft=draft, policy=policies)
        async with build_agent(config) as agent:
            for params in (LONG, WARM, LONG):  # the last one is known already
                found = [t async for c in agent.generate(PROMPT, params) for t in c.tokens]
                assert found == toy_text(PROMPT, params, CIRCLING)
            assert agent.stats is not None
            counters = agent.stats.counters
            assert counters.draft_failure == ""
            if run_ahead is RunAhead.NEVER:  # else the toy's passes are over before a draft comes
                assert counters.accepted > 30
                assert counters.passes < LONG.max_tokens


def test_a_lookup_needs_a_tokenizer_and_no_more(tmp_path: Path) -> None:
    folder = resolve_model("bundled", Role.DRAFT)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    for reference in (str(tmp_path), "bundled", str(resolve_model("bundled", Role.TARGET))):
        config = AgentConfig(tokenizer=reference, draft=DraftSection("lookup"))
        drafter = load_drafter(config)
        assert isinstance(drafter, SilentDrafter)
        info, own = drafter.info, model_info(folder)
        assert (info.vocabulary, info.vocabulary_size) == (own.vocabulary, own.vocabulary_size)
        assert info.context_length > own.context_length


def test_what_is_configured_is_built() -> None:
    for overrides, name, text in (
        ({"draft.model": "toy", "draft.lookup": True, "draft.draft_ms": 5.0}, "toy", True),
        ({"draft.model": "toy"}, "toy", False),
        ({"draft.model": "lookup", "draft.lookup": True}, "lookup", True),
        ({"draft.model": "lookup"}, "lookup", True),
    ):
        config = load_config(AgentConfig, None, {"tokenizer": "toy", **overrides})
        drafter = load_drafter(config)
        assert drafter is not None
        assert drafter.info.name == name
        assert (agent_options(config, "").text is not None) == text
