"""Tiny random models of every family that the torch target serves (``families.yaml``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

FAMILY_MODELS: dict[str, tuple[str, dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("families.yaml").read_text(encoding="utf-8")
)


def family_model(model_type: str, **changes: Any) -> Any:
    """Random, with every vector moved off its first value and an embedding that is not the head."""
    family, extra = FAMILY_MODELS[model_type]
    settings: dict[str, Any] = {
        "vocab_size": 211,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 7,
        "pad_token_id": None,
        **extra,
        **changes,
    }
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**settings)
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor), alpha=0.3)
    return model
