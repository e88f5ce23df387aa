"""Drafters without a model, and the router.

Oracles: the longest match by hand over the whole text; for chances and tables, texts whose
followers are known; for the router, what its model says when it is asked alone.
"""

from __future__ import annotations

import random
import shutil
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec.config import AgentConfig, DraftSection, PolicyName, PolicySection, VerifierConfig
from edgespec.config.loading import ConfigError, load_config
from edgespec.core.ports import (
    Candidate,
    ModelInfo,
    StepCancelledError,
)
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.build import build_agent, load_drafter
from edgespec.device.drafters.text_drafter import LAG, SettledText, TextDrafter, TextGuesses
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.models.folders import Role, model_info, resolve_model
from edgespec.models.toy import TOY_CONTEXT_LENGTH, ToyTokenizer
from edgespec.verifier.build import load_target
from edgespec.verifier.targets.toy import ToyTarget
from tests.shell.live_verifier import serving, toy_text

SIZE = 64
INFO = ModelInfo("free", "toy", SIZE, 1 << 16)
GREEDY = SamplingParams()


# --- what is settled ------------------------------------------------------------------------


def test_a_token_that_was_not_offered_settles_what_stands_before_it() -> None:
    text = SettledText(INFO)
    text.begin(3)
    text.advance(0, [1, 2, 3])
    assert text.settled == 3
    text.offer([(4, 0.5), (5, 0.25)])
    text.advance(3, [5])
    assert (text.settled, text.reach) == (3, 0.25)
    text.offer([(6, 0.5)])
    text.advance(4, [6])
    assert (text.settled, text.reach) == (3, 0.125)
    text.advance(4, [9])
    assert (text.settled, text.reach, text.kept) == (5, 1.0, 4)


@pytest.mark.parametrize("seed", range(20))
def test_settled_tokens_are_the_targets_own(seed: int) -> None:
    """A session drafts up to a few tokens ahead on any branch; what is settled is committed."""
    dice = random.Random(seed)
    truth = [dice.randrange(4) for _ in range(200)]
    text, committed, held = SettledText(INFO), 1, 0
    text.begin(1)
    branch: list[int] = []
    offered: dict[tuple[int, ...], list[int]] = {}
    while committed < len(truth):
        want = [*truth[:committed], *branch]
        keep = 0
        while keep < min(held, len(want) - 1) and text.tokens[keep] == want[keep]:
            keep += 1
        text.advance(keep, want[keep:])
        held = len(want)
        assert text.settled <= committed or held - committed > LAG
        assert list(text.tokens) == want
        guesses = dice.sample(range(4), 2)
        text.offer((token, 0.5) for token in guesses)
        offered.setdefault(tuple(want), []).extend(guesses)
        if len(branch) < 6 and dice.random() < 0.7:
            branch.append(dice.choice(guesses))
        else:
            step = dice.randrange(1, 4)
            committed = min(len(truth), committed + step)
            branch = []


# --- guesses --------------------------------------------------------------------------------


def feed_all(drafter: TextDrafter, text: Sequence[int], prompt_length: int) -> list[int]:
    """Walk along a text; how many of its tokens were the first guess."""
    drafter.begin(prompt_length, GREEDY)
    hits, keep, feed = [], 0, list(text[:prompt_length])
    for token in text[prompt_length:]:
        guesses = drafter.step(keep, feed, 2)
        hits.append(int(bool(guesses) and guesses[0].token == token))
        keep, feed = keep + len(feed), [token]
    return hits


def test_what_was_said_outlives_a_generation() -> None:
    dice = random.Random(2)
    said = [dice.randrange(SIZE) for _ in range(120)]
    drafter = TextDrafter(INFO)
    assert sum(feed_all(drafter, [60, *said], 1)) < 20
    again = feed_all(drafter, [61, *said], 1)
    assert sum(feed_all(TextDrafter(INFO), [61, *said], 1)) < 20
    assert sum(again) > 60


def test_the_tables_are_bounded() -> None:
    info = ModelInfo("free", "toy", 1 << 20, 1 << 20)
    guesses, text, dice = TextGuesses(), SettledText(info), random.Random(0)
    text.begin(1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for at in range(12_000):
            text.advance(at, [dice.randrange(1 << 20)])
            guesses.read(text)
            guesses.named(text)
        text.begin(1)
        guesses.begin()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 200_000 < grown < 2 << 20


# --- the router -----------------------------------------------------------------------------


class CountingDrafter(ToyDrafter):
    """Keeps what it was asked."""

    def __init__(self, model: ToyModel) -> None:
        super().__init__(model, ModelInfo("toy", "toy", SIZE, 1 << 16))
        self.fed: list[int] = []
        self.fails = False

    def step(self, keep_length: int, feed: Sequence[int], *asked: Any) -> tuple[Candidate, ...]:
        if self.fails:
            raise StepCancelledError("as asked")
        self.fed.append(len(feed))
        return super().step(keep_length, feed, *asked)


CIRCLING = ToyModel(SIZE, order=1, seed=4)
SAMPLED = SamplingParams(temperature=0.7, seed=3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_catches_up_answers_as_if_it_had_been_asked_all_along(
    seed: int, sampling: SamplingParams
) -> None:
    dice, model = random.Random(seed), CountingDrafter(CIRCLING)
    routed, alone = TextDrafter(model.info, model=model), ToyDrafter(CIRCLING, model.info)
    for _ in range(2):
        routed.begin(6, sampling)
        alone.begin(6, sampling)
        held: list[int] = []
        want = [dice.randrange(SIZE) for _ in range(6)]
        for _ in range(150):
            keep = 0
            while keep < min(len(held), len(want) - 1) and held[keep] == want[keep]:
                keep += 1
            calls = len(model.fed)
            found = routed.step(keep, want[keep:], 2)
            own = alone.step(keep, want[keep:], 2)
            assert (routed.fed > 0) == (len(model.fed) > calls)
            if routed.fed:
                assert found == own
            held = list(want)
            if dice.random() < 0.2 and len(want) > 9:
                del want[len(want) - dice.randrange(1, 4) :]
            usual = found[0].token if found else own[0].token
            want.append(usual if dice.random() < 0.8 else dice.randrange(SIZE))
    assert any(fed > 1 for fed in model.fed[1:])


def test_a_text_that_repeats_itself_needs_no_model() -> None:
    model = CountingDrafter(CIRCLING)
    routed = TextDrafter(model.info, model=model)
    text = [5, 6, 7, 8, 9, 10] * 100  # not what the toy would say
    routed.begin(6, GREEDY)
    keep, feed = 0, text[:6]
    for token in text[6:]:
        routed.step(keep, feed, 2)
        keep, feed = keep + len(feed), [token]
    assert len(model.fed) < 120


def test_a_failed_step_of_the_model_leaves_what_was_kept() -> None:
    model = CountingDrafter(ToyModel(SIZE, order=3))
    routed = TextDrafter(model.info, model=model)
    routed.begin(8, GREEDY)
    first = routed.step(0, list(range(8)), 2)
    model.fails = True
    with pytest.raises(StepCancelledError):
        routed.step(8, [20], 2)
    model.fails = False
    assert routed.step(7, [7], 2) == first
    with pytest.raises(ValueError, match="keep_length is 9, but 8 tokens are cached"):
        routed.step(9, [1], 2)


# --- behind the composition root -------------------------------------------------------------


LONG = SamplingParams(max_tokens=120, ignore_eos=True)
WARM = SamplingParams(temperature=0.5, seed=9, max_tokens=60, ignore_eos=True, top_k=20)
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
        assert isinstance(drafter, TextDrafter)
        info, own = drafter.info, model_info(folder)
        assert (info.vocabulary, info.vocabulary_size) == (own.vocabulary, own.vocabulary_size)
        assert info.context_length > own.context_length


def test_what_is_configured_is_built() -> None:
    with pytest.raises(ConfigError, match="'none', which drafts nothing"):
        load_config(AgentConfig, None, {"draft.model": "none", "draft.lookup": True})
    for overrides, name in (
        ({"draft.model": "toy", "draft.lookup": True, "draft.draft_ms": 5.0}, "toy"),
        ({"draft.model": "lookup", "draft.lookup": True}, "lookup"),
    ):
        drafter = load_drafter(load_config(AgentConfig, None, {"tokenizer": "toy", **overrides}))
        assert isinstance(drafter, TextDrafter)
        assert drafter.info.name == name
