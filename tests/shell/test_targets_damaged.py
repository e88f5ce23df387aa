"""Checkpoints and sessions whose numbers are none: refused once, by name.

Oracle: a tensor spoilt on purpose must be named at the start; a token whose embedding is spoilt
later must cost its own session the pass and no other session a token.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.ports import ModelOutputError, PassRequest
from edgespec.targets.loading import UnsupportedModelError
from edgespec.targets.torch_target import TorchTarget
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
