"""The torch target's tokens against transformers' own ``generate``, and against itself.

Oracles: greedy texts of every family equal ``generate`` of the same tiny random checkpoint (another
attention, another cache), with windows, soft caps and sinks that matter within the text; texts of
all kinds of sampling equal those of one token a pass alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from edgespec.core.ports import CapacityError, PassRequest
from edgespec.models.folders import MODEL_TYPES
from edgespec.verifier.targets.loading import FAMILIES
from tests.shell.family_models import FAMILY_MODELS, family_model
from tests.shell.torch_schedules import (
    GREEDY,
    SAMPLINGS,
    decode_alone,
    decode_beside,
    generated,
    torch_target,
)

PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2, 6], list(range(20, 150))]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    family_model("qwen3").save_pretrained(path)
    return path


@pytest.mark.parametrize("family", sorted(FAMILY_MODELS))
def test_greedy_texts_are_those_of_generate(family: str, tmp_path: Path) -> None:
    assert set(FAMILY_MODELS) == set(FAMILIES) == set(MODEL_TYPES)
    model = family_model(family)
    model.save_pretrained(tmp_path)
    texts = [generated(model, prompt, 40) for prompt in PROMPTS]
    assert len({token for text in texts for token in text}) > 15
    for canonical in (None, False):
        target = torch_target(tmp_path, canonical=canonical)
        assert decode_beside(target, PROMPTS, texts) == texts
        assert target.free_tokens == 2048


@pytest.mark.parametrize("canonical", [True, False])
def test_texts_are_those_of_one_token_a_pass_however_drafted_beside_whomever(
    folder: Path, canonical: bool
) -> None:
    target = torch_target(folder, canonical=canonical)
    assert target.canonical is canonical
    prompts = [PROMPTS[index % 3] for index in range(len(SAMPLINGS))]
    alone = [
        decode_alone(target, prompt, 80, params)
        for prompt, params in zip(prompts, SAMPLINGS, strict=True)
    ]
    assert decode_beside(target, prompts, alone, SAMPLINGS) == alone


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_every_schedule_agrees_with_the_cpu(folder: Path, dtype: str) -> None:
    """Near-ties may flip on a GPU, so only the first tokens are compared in bfloat16."""
    length = 60 if dtype == "float32" else 4
    expected = [decode_alone(torch_target(folder), PROMPTS[1], length)]
    target = torch_target(folder, device="cuda", dtype=dtype)
    assert not target.canonical
    assert [decode_alone(target, PROMPTS[1], length)] == expected
    assert decode_beside(target, PROMPTS[1:2], expected) == expected


def test_capacity_errors_leave_the_others_alone(folder: Path) -> None:
    target = torch_target(folder, max_cached_tokens=64, max_sessions=2, canonical=False)
    expected = decode_alone(target, [5], 30)
    target.open("a", 1, GREEDY)
    [first] = target.forward([PassRequest("a", 0, (5,))])
    assert first.targets == (expected[0],)
    target.open("b", 30, GREEDY)
    target.open("probe", 1, GREEDY)
    with pytest.raises(CapacityError, match="3 sessions are open, limit max_sessions 2"):
        target.open("c", 1, GREEDY)
    target.close("probe")
    batch = [PassRequest("a", 1, (expected[0],)), PassRequest("b", 0, (1,) * 60)]
    with pytest.raises(CapacityError, match=r"the 48 free of 64 \(max_cached_tokens\)"):
        target.forward(batch)
    assert target.forward(batch[:1])[0].targets == (expected[1],)
    target.close("b")
    with pytest.raises(CapacityError, match="prompt of 513 tokens, limit 1 to 512"):
        target.open("b", 513, GREEDY)


def test_a_bad_request_is_refused_before_the_pass(folder: Path) -> None:
    target = torch_target(folder, canonical=False)
    target.open("s", 2, GREEDY)
    before = target.forward([PassRequest("s", 0, (1, 2))])
    for request, message in (
        (PassRequest("s", 3, (1,)), "cache_length is 3, but 2 tokens are cached"),
        (PassRequest("s", 2, ()), "feed is empty"),
        (PassRequest("s", 2, (211,)), "token ids 211 to 211, limit 0 to 210"),
        (PassRequest("s", 2, (1,), (-1,), (-1,)), "token ids -1 to 1"),
        (PassRequest("s", 2, (1,), (2, 3), (1, -1)), "must come before"),
        (PassRequest("s", 2, (1,), (2,), (-1,), sample=False), "sample=True"),
        (PassRequest("s", 2, (1,), (2,), ()), "nodes need parents"),
        (PassRequest("t", 0, (1,)), "'t' is not open"),
        (PassRequest("s", 2, (1,) * 510, (1, 2), (-1, 0)), "514 tokens, limit context_length 512"),
    ):
        with pytest.raises((ValueError, CapacityError), match=message):
            target.forward([request])
    with pytest.raises(ValueError, match="same key"):
        target.forward([PassRequest("s", 2, (1,))] * 2)
    assert target.forward([PassRequest("s", 0, (1, 2))]) == before
    assert target.forward([]) == []


def test_bad_options_are_named(folder: Path) -> None:
    for options, message in (
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"device": "meta"}, "device is 'meta'"),
        ({"max_sessions": 0}, "max_sessions is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            torch_target(folder, **options)
