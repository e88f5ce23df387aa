"""Worlds of a recorded pair (``pair_worlds.py``).

Oracles: the target's own text, token by token; a drafter that was never recorded, for the steps and
the times; and a run without any draft model, for what the store holds.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.drafters.toy import ToyDrafter, toy_info
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.token_sources.source import target_tokens
from tests.sim.pair_worlds import (
    STREAMING,
    WAYS,
    DraftModel,
    RecordedDrafter,
    Text,
    Times,
    constant_link,
    play,
    read_texts,
    record_texts,
    write_texts,
)

MODEL = ToyModel(vocabulary_size=64, order=3, sharpness=2.0, eos_token=1, eos_probability=0.01)
INFO = toy_info(MODEL)
PROMPTS = [("chat", "chat-1", (5, 6, 7)), ("code", "code-1", (9,)), ("code", "code-2", (3, 3))]
TIMES = Times.of_ms(25.0, 8.0, 2.5)


def texts_of(temperature: float) -> list[Text]:
    target = ToyTarget(MODEL, max_sessions=8, max_cached_tokens=1 << 16)
    return record_texts(target, PROMPTS, temperature, 40)


def drafter() -> ToyDrafter:
    return ToyDrafter(MODEL.perturbed(0.4))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recorded_texts_are_those_of_the_target_alone(temperature: float, tmp_path: Path) -> None:
    texts = texts_of(temperature)
    for number, text in enumerate(texts):
        sampling = SamplingParams(temperature, seed=number, max_tokens=40)
        own, _ = target_tokens(MODEL, text.prompt, sampling, 1 << 16)
        assert text.tokens == own
    write_texts(tmp_path / "texts.jsonl", texts)
    assert read_texts(tmp_path / "texts.jsonl") == texts


@pytest.mark.parametrize("name", WAYS)
def test_a_second_run_needs_no_draft_model(name: str, tmp_path: Path) -> None:
    texts, way = texts_of(0.8), WAYS[name]
    link = constant_link(20.0)
    first = play(texts, way, link, TIMES, DraftModel(INFO, tmp_path, drafter))
    again = play(texts, way, link, TIMES, DraftModel(INFO, tmp_path))
    assert [*map(asdict, first)] == [*map(asdict, again)]
    if way is STREAMING:
        assert [round(one.tpot_ms, 6) for one in first] == [25.0] * len(texts)


def test_candidates_are_those_of_the_drafter(tmp_path: Path) -> None:
    """Steps forward, back and off the text, as a device and a server in turns make them."""
    (text, *_), real = texts_of(0.8), drafter()
    model = DraftModel(INFO, tmp_path, drafter)
    model.choose(text)
    one, other = RecordedDrafter(model), RecordedDrafter(model)
    for end in (real, one, other):
        end.begin(len(text.prompt), text.sampling)
    held = [*text.prompt]
    for keep, feed in ((0, held), (3, (text.tokens[0],)), (3, (8, 9)), (4, (2,)), (3, (7,))):
        expected = real.step(keep, feed, 2)
        for end in (one, other):
            found = end.step(keep, feed, 2)
            assert [c.token for c in found] == [c.token for c in expected]
            assert [c.logprob for c in found] == pytest.approx(
                [c.logprob for c in expected], abs=1e-4
            )


def test_an_unknown_context_without_a_model_is_an_error(tmp_path: Path) -> None:
    model = DraftModel(INFO, tmp_path)
    model.choose(texts_of(0.0)[0])
    with pytest.raises(ValueError, match="chat-1: no candidates are kept behind"):
        model.candidates((1, 2))
