"""Checkpoints and sessions whose numbers are none: refused once, by name.

Oracle: a tensor spoilt on purpose must be named at the start; a token whose embedding is spoilt
later must cost its own session the pass and no other session a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from edgespec.core.ports import ModelOutputError, PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.checkpoints import UnsupportedModelError
from edgespec.verifier.targets.loading import load_model
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell.tiny_checkpoints import (
    VOCABULARY_SIZE,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
)

GREEDY = SamplingParams()
PENALISED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2)


def _target(folder: Path, **options: Any) -> TorchTarget:
    return TorchTarget(
        str(folder), name="tiny", vocabulary="v", device="cpu", max_cached_tokens=1024, **options
    )


def _spoilt(folder: Path, name: str, value: float) -> Path:
    config = tiny_config()
    tensors = tiny_tensors(config)
    tensors[name] = np.full_like(tensors[name], value)
    return write_checkpoint(folder, config, tensors)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path, value: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    folder = _spoilt(tmp_path / "damaged", name, value)
    message = f"damaged: the checkpoint is damaged: tensor {name} holds NaN or infinite values"
    with pytest.raises(UnsupportedModelError, match=message):
        _target(folder)


@pytest.mark.parametrize("canonical", [None, False])
def test_weights_whose_logits_overflow_are_refused_by_name(
    tmp_path: Path, canonical: bool | None
) -> None:
    folder = _spoilt(tmp_path / "huge", "model.norm.weight", 3e38)
    with pytest.raises(UnsupportedModelError, match="huge: the model's logits are NaN or infinite"):
        _target(folder, canonical=canonical)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_that_are_not_stored_as_real_numbers_are_refused_by_name(
    tmp_path: Path, dtype: torch.dtype, shards: int
) -> None:
    """As of a quantised checkpoint whose configuration does not say so: it would be served."""
    folder, name = write_checkpoint(tmp_path / "whole", shards=shards), "model.norm.weight"
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file(tensors | {name: (9 * tensors[name]).to(dtype)}, file, {"format": "pt"})
    message = rf"whole: 1 tensor is not stored as real numbers, .*: {name} \("
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(folder), device="cpu")


Tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def _refusal(folder: Path, change: Callable[[Tensors], object], **config: Any) -> str:
    """What is said of a checkpoint whose tensors were changed."""
    settings = tiny_config(**config)
    tensors = tiny_tensors(settings)
    change(tensors)
    write_checkpoint(folder, settings, tensors)
    with pytest.raises(UnsupportedModelError, match="does not fill the model") as raised:
        load_model(str(folder), device="cpu")
    return str(raised.value)


def test_a_head_that_is_not_there_is_not_made_up(tmp_path: Path) -> None:
    message = _refusal(
        tmp_path, lambda tensors: tensors.pop("lm_head.weight"), tie_word_embeddings=False
    )
    assert "1 tensor is missing: lm_head.weight (config.json says tie_word_embeddings" in message


def test_every_fault_of_a_checkpoint_is_named_at_once(tmp_path: Path) -> None:
    narrow = np.zeros((96, 63), dtype=np.float32)

    def change(tensors: Tensors) -> None:
        del tensors["model.layers.1.self_attn.q_proj.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = narrow
        tensors["model.layers.2.mlp.up_proj.weight"] = narrow
        tensors["model.layers.0.self_attn.q_proj.bias"] = narrow[0]

    message = _refusal(tmp_path, change)
    assert "1 tensor is missing: model.layers.1.self_attn.q_proj.weight;" in message
    assert (
        "2 tensors are in the checkpoint for which the model has no place: "
        "model.layers.0.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight;" in message
    )
    assert (
        "1 tensor is of another shape: model.layers.0.mlp.up_proj.weight is 96 x 63 in the "
        "checkpoint, 96 x 64 in the model" in message
    )


def _decode(target: TorchTarget, failing: PassRequest | None) -> list[int]:
    """Ten tokens of session "good"; some passes are first tried together with ``failing``."""
    target.open("good", 2, PENALISED)
    text = [5, 6]
    for step in range(10):
        cached = len(text) - 1 if step else 0
        good = PassRequest("good", cached, tuple(text[cached:]))
        if failing and 2 <= step < 5:
            with pytest.raises(ModelOutputError, match="'bad': the largest logit") as raised:
                target.forward([good, failing])
            assert raised.value.key == "bad"
        text.append(target.forward([good])[0].targets[0])
    return text[2:]


def test_a_session_whose_logits_are_no_numbers_is_named_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    folder = write_checkpoint(tmp_path / "good", tiny_config(tie_word_embeddings=False))
    expected = _decode(_target(folder), None)
    target = _target(folder)
    spoilt = next(token for token in range(VOCABULARY_SIZE) if token not in (5, 6, *expected))
    with torch.no_grad():
        target._model.model.embed_tokens.weight[spoilt] = torch.nan
    target.open("bad", 1, GREEDY)
    assert _decode(target, PassRequest("bad", 0, (spoilt,))) == expected
