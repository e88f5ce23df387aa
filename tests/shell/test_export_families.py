"""Families beyond Llama's. Oracle: transformers' own logits of a small random checkpoint that it
wrote itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.device.export.checkpoint import (
    MODEL_TYPES,
    Checkpoint,
    CheckpointError,
    FamilyWeights,
    read_shape,
)
from edgespec.device.export.export import export_draft
from edgespec.device.export.parity import check_parity, reference_logits
from edgespec.models.folders import DRAFT_MODEL_TYPES, model_info
from tests.shell.test_drafters_export import TOKENS, draft_logits
from tests.shell.tiny_checkpoints import tiny_config, write_checkpoint, write_tokenizer

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
ROTATED = {"rope_theta": 1000.0, "rope_type": "default"}
GEMMA3_ROPE = {
    "full_attention": {"rope_theta": 5000.0, "rope_type": "default"},
    "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {"model_type": "phi3", "sliding_window": None},
    "phi3-window": {"model_type": "phi3", "sliding_window": 20},
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.3,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
    },
    "granite-untied": {
        "model_type": "granite",
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 1]},
    "smollm3-interval": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 12,
        "query_pre_attn_scalar": 40,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 24,
        "sliding_window": 12,
        "query_pre_attn_scalar": 40,
        "rope_parameters": GEMMA3_ROPE,
        "sliding_window_pattern": 2,
    },
}


def family_checkpoint(folder: Path, changes: dict[str, Any]) -> Any:
    """Random weights large enough that every part moves the logits; returns the model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    values = SMALL | {"rope_parameters": ROTATED} | changes
    config = transformers.AutoConfig.for_model(**values)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.15)
            if "norm" in name and "gemma" not in values["model_type"]:
                weight.add_(1.0)
            if "embed_tokens" in name or "lm_head" in name:
                weight.mul_(3.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_float_graph_is_the_model(family: str, tmp_path: Path) -> None:
    import torch

    source = tmp_path / "source"
    model = family_checkpoint(source, FAMILIES[family])
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    assert float(expected.std()) > 0.5  # the weights are not so small that anything would pass
    shape = read_shape(source)
    weights = FamilyWeights(Checkpoint(source), shape)
    np.testing.assert_allclose(reference_logits(shape, weights, TOKENS), expected, atol=2e-4)
    exact = export_draft(source, tmp_path / "exact", model_info(source), bits=32)
    np.testing.assert_allclose(
        draft_logits(tmp_path / "exact"), expected[[29, 30, 31, 79]], atol=2e-4
    )
    assert check_parity(source, tmp_path / "exact", exact) < 1e-4
    small = export_draft(source, tmp_path / "small", model_info(source), bits=4)
    assert check_parity(source, tmp_path / "small", small) < 0.15


def test_what_a_config_leaves_out_is_the_family_s_default(tmp_path: Path) -> None:
    """Against the configurations of transformers, for what a shape is made of."""
    transformers = pytest.importorskip("transformers")
    source = write_checkpoint(tmp_path / "source")
    sizes = {name: value for name, value in SMALL.items() if "token" not in name}
    for kind in ("gemma2", "gemma3_text"):
        sparse = {**sizes, "model_type": kind, "num_hidden_layers": 12}
        (source / "config.json").write_text(json.dumps(sparse))
        shape, known = read_shape(source), transformers.AutoConfig.for_model(**sparse)
        assert shape.head_dim == known.head_dim == 256
        assert shape.window == known.sliding_window
        assert shape.attention_scale == known.query_pre_attn_scalar**-0.5
        assert shape.attention_cap == (known.attn_logit_softcapping or 0.0)
        assert shape.logits_cap == (known.final_logit_softcapping or 0.0)
        assert shape.activation == "gelu_tanh"
        kinds = ["sliding_attention" if shape.slides(i) else "full_attention" for i in range(12)]
        assert kinds == known.layer_types
        rope = known.rope_parameters
        full = rope.get("full_attention", rope)
        assert (shape.rope_of(5) or {})["rope_theta"] == full["rope_theta"]
        local = rope.get("sliding_attention", rope)
        assert (shape.rope_of(0) or {})["rope_theta"] == local["rope_theta"]


def test_both_floors_name_the_same_families() -> None:
    assert sorted(DRAFT_MODEL_TYPES) == sorted(MODEL_TYPES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma"}, "model_type 'gemma' is not one of"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
        ({"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source")
    config = {k: v for k, v in tiny_config().items() if k != "rope_parameters"} | changes
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        export_draft(source, tmp_path / "out", model_info(source))
