"""Guesses from the text, over real gRPC and behind the composition root.

Oracle: the toy's text by the scalar specification; for the bundled pair, target-only streaming.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.config import AgentConfig, DraftSection, PolicyName, PolicySection, VerifierConfig
from edgespec.config.loading import ConfigError, load_config
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.build import build_agent, load_drafter
from edgespec.device.drafters.routed import RoutedDrafter
from edgespec.device.drafters.text_drafter import TextDrafter
from edgespec.models.folders import Role, model_info, resolve_model
from edgespec.models.toy import TOY_ALPHABET, TOY_CONTEXT_LENGTH, ToyTokenizer
from edgespec.verifier.build import load_target
from edgespec.verifier.targets.toy import ToyTarget
from tests.shell.live_verifier import serving, toy_text
from tests.sources import ROOT

# Its greedy text runs into a circle soon, so it can be guessed.
CIRCLING = ToyModel(len(TOY_ALPHABET), order=1, seed=4)
GREEDY = SamplingParams(max_tokens=120, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.5, seed=9, max_tokens=60, ignore_eos=True, top_k=20)
PROMPT = ToyTokenizer().encode("a circle")
DRAFTS = (DraftSection("lookup"), DraftSection("toy", lookup=True))


@pytest.mark.parametrize("draft", DRAFTS, ids=["lookup", "routed"])
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
            for params in (GREEDY, SAMPLED, GREEDY):  # the last one is known already
                found = [t async for c in agent.generate(PROMPT, params) for t in c.tokens]
                assert found == toy_text(PROMPT, params, CIRCLING)
            assert agent.stats is not None
            counters = agent.stats.counters
            assert counters.draft_failure == ""
            if run_ahead is RunAhead.NEVER:  # else the toy's passes are over before a draft comes
                assert counters.accepted > 30
                assert counters.passes < GREEDY.max_tokens


@pytest.mark.slow
async def test_the_bundled_targets_text_is_the_same_with_any_of_them() -> None:
    drafts = (DraftSection("none"), DraftSection("lookup"), DraftSection("bundled", lookup=True))
    settings = VerifierConfig(model="bundled", port=0, server_drafts=False)
    prompt = "def add(a, b):\n    return a + b\n\ndef add_three(a, b, c):\n"
    texts: list[list[list[int]]] = []
    async with serving(load_target(settings), config=settings) as (address, _):
        for draft in drafts:
            waits = PolicySection(run_ahead=RunAhead.NEVER)  # for drafts, however slow they are
            async with build_agent(AgentConfig(address, draft=draft, policy=waits)) as agent:
                texts.append([])
                for temperature in (0.0, 0.7):
                    params = SamplingParams(temperature, seed=5, max_tokens=24, ignore_eos=True)
                    chunks = agent.generate(prompt, params)
                    texts[-1].append([t async for c in chunks for t in c.tokens])
                assert agent.stats is not None
                assert agent.stats.counters.draft_failure == ""
                assert (agent.stats.counters.sent > 0) == (draft.model != "none")
    assert [len(text) for text in texts[0]] == [24, 24]
    assert texts[1:] == [texts[0]] * 2


def test_a_lookup_needs_a_tokenizer_and_no_more(tmp_path: Path) -> None:
    folder = resolve_model("bundled", Role.DRAFT)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    for reference in (str(tmp_path), "bundled", str(resolve_model("bundled", Role.TARGET))):
        config = AgentConfig(tokenizer=reference, draft=DraftSection("lookup"))
        drafter = load_drafter(config)
        assert isinstance(drafter, TextDrafter)
        info, own = drafter.info, model_info(folder)
        assert (info.vocabulary, info.vocabulary_size) == (own.vocabulary, own.vocabulary_size)
        assert info.context_length > own.context_length


def test_a_lookup_loads_no_model_library() -> None:
    code = (
        "import sys\n"
        "for name in ('onnxruntime', 'onnx', 'torch'): sys.modules[name] = None\n"
        "from edgespec.device.build import load_drafter\n"
        "from edgespec.config import AgentConfig, DraftSection\n"
        "drafter = load_drafter(AgentConfig(draft=DraftSection('lookup')))\n"
        "print(drafter.info.name)\n"
    )
    path = os.pathsep.join((str(ROOT), str(ROOT / "sim")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("lookup\n", "")


def test_what_is_configured_is_built() -> None:
    overrides = {"tokenizer": "toy", "draft.model": "toy", "draft.lookup": True}
    assert isinstance(load_drafter(load_config(AgentConfig, None, overrides)), RoutedDrafter)
    overrides |= {"draft.draft_ms": 5.0}
    assert isinstance(load_drafter(load_config(AgentConfig, None, overrides)), RoutedDrafter)
    overrides |= {"draft.lookup": False, "draft.draft_ms": 0.0}
    assert not isinstance(load_drafter(load_config(AgentConfig, None, overrides)), RoutedDrafter)
    overrides |= {"draft.model": "lookup", "draft.lookup": True}
    assert isinstance(load_drafter(load_config(AgentConfig, None, overrides)), TextDrafter)
    with pytest.raises(ConfigError, match="'none', which drafts nothing"):
        load_config(AgentConfig, None, {"draft.model": "none", "draft.lookup": True})
