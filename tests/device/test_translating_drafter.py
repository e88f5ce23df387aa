"""Tests of drafts with another tokenizer than the target's.

Oracles: the bytes of a text that a scripted draft knows; the sampling law on permuted ids; for
whole generations, the same verifier without a draft.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.cli.device import choose_verifier
from edgespec.config import AgentConfig, DraftSection, PolicySection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core import ports
from edgespec.core.device.goodput_policy import PolicyName
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import build
from edgespec.device.agent import Agent
from edgespec.device.drafter_pool import in_own_ids
from edgespec.device.status import StatusSource
from edgespec.device.translating_drafter import TranslatingDrafter
from edgespec.models.translation import Translation
from edgespec.sampling.arrays import NoiseIds, best_candidates
from tests.kit.live_verifier import serve_toy
from tests.kit.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint
from tests.kit.tokenizer_families import FAMILIES, load_pair, write_tokenizer
from tests.kit.translation_worlds import KnowingDrafter, play_text
from tests.present import require

CASES = 4
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


class NamingDrafter(KnowingDrafter):
    """A draft that names given words at each step, in turn, whatever its context is."""

    def __init__(self, pair: Translation, *steps: Sequence[tuple[int, float]]) -> None:
        super().__init__(pair.draft, b"")
        self.info = ports.ModelInfo("naming", "naming", pair.draft.size, 512)
        self._steps, self.fed = list(steps), list[tuple[int, tuple[int, ...]]]()
        self.error: Exception | None = None

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: ports.Cancelled = ports.never_cancelled,
    ) -> tuple[ports.Candidate, ...]:
        self._cache.advance(keep_length, feed)
        self.fed.append((keep_length, tuple(feed)))
        if self.error is not None:
            self._cache.truncate(keep_length)
            raise self.error
        self.steps += 1
        named = self._steps.pop(0) if self._steps else ()
        return tuple([ports.Candidate(*one) for one in named][:width])


def translate(pair: Translation, inner: ports.Drafter, **changes: Any) -> TranslatingDrafter:
    info = ports.ModelInfo("target", "target", pair.target.size, 512)
    return TranslatingDrafter(inner, pair, info, **changes)


def word(pair: Translation, text: str) -> int:
    (token,) = pair.draft.encode(text.encode())
    return token


@pytest.mark.parametrize("target", FAMILIES)
def test_a_draft_that_knows_the_text_writes_it(target: str, folder: Path) -> None:
    proposed = 0
    for draft in FAMILIES:
        for number in range(CASES):
            dice = random.Random(f"{target} {draft} {number}")
            proposed += play_text(load_pair(target, draft, folder), dice, number % 3)[0]
    assert proposed > 4 * CASES * len(FAMILIES)


def test_one_word_may_be_several_ids_and_needs_one_step(folder: Path) -> None:
    pair = load_pair("smollm", "gpt-oss", folder)
    long = next(
        one for _, one in pair.draft.words() if len(pair.target.encode(one)) == 3 and one.isalpha()
    )
    ids = list(pair.target.encode(long))
    inner = NamingDrafter(pair, [(word(pair, long.decode()), -0.5)])
    drafter = translate(pair, inner)
    prompt = list(pair.target.encode(b"the "))
    drafter.begin(len(prompt), GREEDY)
    found = [drafter.step(0, prompt, 2)]
    for place, token in enumerate(ids[:-1]):
        found.append(drafter.step(len(prompt) + place, [token], 2))
    assert [one[0].token for one in found] == ids
    assert [one[0].logprob for one in found] == [-0.5, 0.0, 0.0]
    assert inner.steps == 1


def test_several_words_may_be_one_id(folder: Path) -> None:
    pair = load_pair("gpt-oss", "smollm", folder)
    found = [one for _, one in pair.target.words() if len(pair.draft.encode(one)) == 2]
    long = next(one for one in found if one.startswith(b" ") and one.strip().isalpha())
    first, second = pair.draft.encode(long)
    steps = [(first, -0.5)], [(second, -0.25)], [(word(pair, " "), -1.0)]
    drafter = translate(pair, NamingDrafter(pair, *steps), lookahead_words=2)
    prompt = list(pair.target.encode(b"the"))
    drafter.begin(len(prompt), GREEDY)
    (best,) = drafter.step(0, prompt, 1)
    assert (pair.target.token_bytes(best.token), best.logprob) == (long, -0.75)


def test_other_candidates_become_siblings(folder: Path) -> None:
    pair = load_pair("llama3", "smollm", folder)
    end = pair.draft.tokenizer.added["<|im_end|>"]
    named = [(word(pair, " the"), -0.2), (word(pair, " a"), -2.0), (end, -3.0)]
    drafter = translate(pair, NamingDrafter(pair, named))
    prompt = list(pair.target.encode(b"over"))
    drafter.begin(len(prompt), GREEDY)
    found = drafter.step(0, prompt, 3)
    expected = [*pair.target.encode(b" the"), *pair.target.encode(b" a")]
    assert [one.token for one in found] == [*expected, pair.special_to_target[end]]
    assert [one.logprob for one in found] == [-0.2, -2.0, -3.0]
    assert drafter.step(len(prompt), expected[1:], 3) == ()  # the draft names nothing there


def test_both_readings_at_the_seam_are_siblings(folder: Path) -> None:
    pair = load_pair("llama3", "smollm", folder)
    alike = 0
    for committed, drafted in (("2", "34"), ("un", "der"), (" ", " x"), ("\n", "\n"), ("it", "'s")):
        text = translate(pair, NamingDrafter(pair))._text
        text.append(pair.target.encode(committed.encode()))
        readings = text.readings(drafted.encode())
        assert pair.target.encode(drafted.encode()) in readings
        whole = pair.target.encode((committed + drafted).encode())
        if whole[: len(text.tokens)] == tuple(text.tokens):
            assert (
                readings[0] == whole[len(text.tokens) :]
                or readings[0][0] == whole[len(text.tokens)]
            )
            alike += 1
        assert len({one[0] for one in readings}) == len(readings)
    assert alike >= 1


def test_an_end_without_a_twin_ends_the_chain(folder: Path) -> None:
    pair = load_pair("gemma", "mistral", folder)
    mark = pair.draft.tokenizer.added["[INST]"]
    drafter = translate(pair, NamingDrafter(pair, [(mark, -0.1)]))
    prompt = pair.target.tokenizer.encode("the fox")
    drafter.begin(len(prompt), GREEDY)
    assert drafter.step(0, prompt, 2) == ()
    start = pair.target.tokenizer.added["<start_of_turn>"]
    assert drafter.step(len(prompt), [start], 2) == ()


def test_a_contradicted_draft_is_forgotten_and_little_is_fed_again(folder: Path) -> None:
    pair = load_pair("smollm", "gemma", folder)
    inner = NamingDrafter(pair, *([(word(pair, one), -0.5)] for one in (" over", " the", " lazy")))
    drafter = translate(pair, inner)
    prompt = pair.target.tokenizer.encode("The quick brown fox jumps")
    drafter.begin(len(prompt), GREEDY)
    drafter.step(0, prompt, 1)
    other = pair.target.encode(b" under the dog")
    drafter.step(len(prompt), other, 1)
    keep, fed = inner.fed[-1]
    whole = pair.draft.tokenizer.encode("The quick brown fox jumps under the dog")
    assert whole[keep:] == list(fed)
    assert keep == len(pair.draft.tokenizer.encode("The quick brown fox jumps"))


def test_a_failed_step_loses_only_its_own_rows(folder: Path) -> None:
    pair = load_pair("smollm", "gemma", folder)
    inner = NamingDrafter(pair, [], [(word(pair, " the"), -0.5)])
    drafter = translate(pair, inner)
    prompt = pair.target.tokenizer.encode("jumps over")
    drafter.begin(len(prompt), GREEDY)
    assert drafter.step(0, prompt, 1) == ()
    more = list(pair.target.encode(b" and"))
    inner.error = ports.StepCancelledError("enough")
    with pytest.raises(ports.StepCancelledError):
        drafter.step(len(prompt), more, 1)
    inner.error = None
    (best,) = drafter.step(len(prompt), more, 1)
    assert pair.target.token_bytes(best.token) == b" the"
    keep, fed = inner.fed[-1]
    whole = pair.draft.tokenizer.encode("jumps over and")
    assert whole[keep:] == list(fed)


def test_a_text_that_outgrows_the_drafts_context_gets_no_candidates(folder: Path) -> None:
    pair = load_pair("gpt-oss", "smollm", folder)
    long = [word for _, word in pair.target.words() if len(pair.draft.encode(word)) > 2][-1]
    inner = NamingDrafter(pair, [(word(pair, " a"), -0.5)])
    inner.info = replace(inner.info, context_length=10)
    drafter = translate(pair, inner)
    prompt = list(pair.target.encode(long)) * 5
    drafter.begin(len(prompt), GREEDY)
    assert len(prompt) < 10
    assert drafter.step(0, prompt, 1) == ()
    assert inner.steps == 0


def test_a_constraint_and_a_minimum_hold_in_ids_of_the_target(folder: Path) -> None:
    pair = load_pair("llama3", "smollm", folder)
    end, twin = pair.draft.tokenizer.added["<|im_end|>"], pair.target.tokenizer.added["<|eot_id|>"]
    twin = pair.special_to_target.get(end, twin)
    named = [(end, -0.1), (word(pair, " a"), -2.0)]
    drafter = translate(pair, NamingDrafter(pair, named, named))
    prompt = list(pair.target.encode(b"over"))
    sampling = SamplingParams(min_tokens=5, stop_token_ids=(twin,))
    drafter.begin(len(prompt), sampling)
    (best,) = drafter.step(0, prompt, 2)
    assert pair.target.token_bytes(best.token) == b" a"


def test_a_draft_alone_uses_its_own_ids(folder: Path) -> None:
    pair = load_pair("smollm", "gemma", folder)
    inner = NamingDrafter(pair)
    drafter = translate(pair, inner)
    assert drafter.info.vocabulary == "target"
    assert drafter.info.name == "naming"
    assert in_own_ids(drafter) is inner
    assert in_own_ids(inner) is inner
    with pytest.raises(TypeError, match="one sequence only"):
        drafter.twin()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("params", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_noise_of_other_ids_is_that_of_a_permuted_row(
    temperature: float, params: dict[str, Any]
) -> None:
    dice = np.random.default_rng(3)
    for size in (40, 3000, 70_000):
        for flat in (0.3, 3.0):
            logits = (flat * dice.standard_normal(size)).astype(np.float32)
            ids = dice.permutation(size).astype(np.uint32)
            permuted = np.empty_like(logits)
            permuted[ids] = logits
            sampling = SamplingParams(temperature=temperature, seed=5, **params)
            own = best_candidates(logits, sampling, 11, 4, noise=NoiseIds.of(ids))
            theirs = best_candidates(permuted, sampling, 11, 4)
            assert [int(ids[one.token]) for one in own] == [one.token for one in theirs]


# --- whole generations ----------------------------------------------------------------------------


def write_model(folder: Path, family: str, seed: int) -> Path:
    """Write a tiny model with the tokenizer of a family."""
    size = {"smollm": 704, "gemma": 1664, "no bytes": 704}[family]
    config = tiny_config(vocab_size=size, eos_token_id=None)
    write_checkpoint(folder, config, tiny_tensors(config, seed))
    write_tokenizer(family, folder)
    ends = {"smollm": [0, 2], "gemma": [1, 5], "no bytes": [1]}[family]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def configure(address: str, draft: object) -> AgentConfig:
    return AgentConfig(
        verifier=address,
        draft=DraftSection(str(draft), bits=32),
        # A verifier that waits gets drafts however slow the machine is.
        policy=PolicySection(name=PolicyName.WINDOWED, run_ahead=RunAhead.NEVER),
    )


async def generate(agent: Agent, prompt: str, sampling: SamplingParams) -> list[int]:
    tokens = list[int]()
    async with aclosing(agent.generate(prompt, sampling)) as chunks:
        async for chunk in chunks:
            tokens += chunk.tokens
    return tokens


@pytest.mark.parametrize(("target", "draft"), [("smollm", "gemma"), ("gemma", "smollm")])
async def test_the_output_is_the_targets_own(
    target: str,
    draft: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    served = write_model(tmp_path / "target", target, 1)
    own = write_model(tmp_path / "draft", draft, 2)
    lines = list[str]()
    caplog.set_level(logging.INFO)
    async with serve_toy(config=VerifierConfig(model=str(served), port=0)) as (address, _):
        config, info = await choose_verifier(configure(address, own))
        plain, _ = await choose_verifier(configure(address, "none"))
        async with (
            build.build_agent(config, target=info, say=lines.append) as agent,
            build.build_agent(plain, target=info) as streaming,
        ):
            assert isinstance(agent.drafter, TranslatingDrafter)
            assert require(agent.options.translated_share) > 0.1
            assert any("draft translated: " in line for line in lines)
            sent = 0
            for seed, temperature in enumerate((0.0, 0.7, 1.0)):
                sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=24)
                for prompt in ("The quick brown fox", "机器学习 def f(x):\n"):
                    expected = await generate(streaming, prompt, sampling)
                    assert await generate(agent, prompt, sampling) == expected
                    counters = require(agent.stats).counters
                    assert not counters.draft_failure
                    sent += counters.sent
            assert sent > 20
            assert require(agent.stats).is_translated
            assert not require(streaming.stats).is_translated
            status = StatusSource(agent, (address,)).snapshot()
            assert status.translated_share == agent.options.translated_share
            assert StatusSource(streaming, (address,)).snapshot().translated_share is None
    judged = [line for line in caplog.messages if "translated draft was right at" in line]
    assert len(judged) <= 1


async def test_a_draft_without_bytes_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    served = write_model(tmp_path / "target", "smollm", 1)
    own = write_model(tmp_path / "poor", "no bytes", 2)
    async with serve_toy(config=VerifierConfig(model=str(served), port=0)) as (address, _):
        with pytest.raises(SetupError, match=r"cannot be translated: the tokenizer of .*poor"):
            await choose_verifier(configure(address, own))
