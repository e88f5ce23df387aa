"""Each family of models on the torch target, and the refusal of all others.

Oracle: greedy texts equal ``generate`` of the same tiny random checkpoint, with windows, soft caps
and sinks that matter within the text, whatever is drafted and whoever shares the passes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from edgespec.models.folders import MODEL_TYPES
from edgespec.verifier.targets.checkpoints import FAMILIES, UnsupportedModelError, check_family
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell.family_models import FAMILY_MODELS, family_model
from tests.shell.ragged_decoding import decode_beside, generated
from tests.shell.random_schedules import Recorder, check_random_schedule

CHANGED_SCORES = {"gemma2", "gpt_oss", "mistral"}
"""These have code of their own in plain mode too."""
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], list(range(20, 61))]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _target(folder: Path, **options: Any) -> TorchTarget:
    settings: dict[str, Any] = {"device": "cpu", "max_cached_tokens": 1024, **options}
    return TorchTarget(str(folder), name="tiny", vocabulary="print", **settings)


@pytest.mark.parametrize("case", sorted(FAMILY_MODELS))
def test_greedy_texts_are_those_of_generate(case: str, tmp_path: Path) -> None:
    model = family_model(case)
    model.save_pretrained(tmp_path)
    texts = [generated(model, prompt, 20) for prompt in PROMPTS]
    assert len({token for text in texts for token in text}) > 15
    for canonical in (None, False) if case in CHANGED_SCORES else (None,):
        target = _target(tmp_path, canonical=canonical)
        assert decode_beside(target, PROMPTS, texts) == texts
        assert target.free_tokens == 1024


def test_every_family_is_tried() -> None:
    assert set(FAMILY_MODELS) == set(FAMILIES)


def test_the_command_line_lets_in_the_same_families() -> None:
    assert sorted(MODEL_TYPES) == sorted(FAMILIES)


def test_a_window_and_a_soft_cap_have_the_same_bits_under_every_schedule(tmp_path: Path) -> None:
    """The window is shorter than the distance of two tiles of keys, so tiles are left out."""
    family_model("gemma2").save_pretrained(tmp_path)
    recorder = Recorder(tmp_path, "float32")
    for length in (20, 300):
        check_random_schedule(random.Random(length), recorder, length)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "GPT2",
            {},
            r"model type 'gpt2' is not supported; supported are gemma \(Gemma\), .*Qwen3-MoE",
        ),
        ("Gemma3", {}, r"'gemma3' is not supported \(a model of text and other media; serve a"),
        (
            "Qwen3",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer types chunked_attention are not supported; supported are full_attention",
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type 'dynamic' depends on the length",
        ),
        (
            "Gemma3Text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "rope type 'dynamic' depends on the length",
        ),
        ("Gemma3Text", {"use_bidirectional_attention": True}, "attends in both directions"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    family: str, options: dict[str, Any], message: str
) -> None:
    common = {"max_position_embeddings": 512, "num_hidden_layers": 2} if family != "Gemma3" else {}
    config = getattr(transformers, f"{family}Config")(**{**common, **options})
    with pytest.raises(UnsupportedModelError, match=message):
        check_family(config)


def test_longrope_is_served_up_to_its_original_context() -> None:
    factors = [1.0] * 8
    config = transformers.Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        sliding_window=None,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": 64,
        },
    )
    assert check_family(config, 64) == 64
    with pytest.raises(UnsupportedModelError, match=r"limit it with --max-model-len 64$"):
        check_family(config, 65)


def test_a_context_longer_than_the_models_own_is_refused() -> None:
    config = transformers.MistralConfig(sliding_window=64, max_position_embeddings=512)
    assert check_family(config) == 512
    assert check_family(config, 64) == 64
    with pytest.raises(ValueError, match=r"context_length is 513, but must be in \[1, 512\]"):
        check_family(config, 513)


def test_a_layer_that_slides_without_a_window_is_refused() -> None:
    config = transformers.Qwen3Config(layer_types=["sliding_attention"], num_hidden_layers=1)
    config.sliding_window = None
    with pytest.raises(UnsupportedModelError, match="sliding_window is None; must be at least 1"):
        check_family(config)
