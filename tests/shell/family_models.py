"""Tiny random models of every family that the torch target serves, by their model type.

Windows, soft caps, sinks and scales are set so that they matter within a few dozen tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 211
WINDOW = 12
SLIDING = {"sliding_window": WINDOW}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh"}
FAMILY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", SLIDING),
    "qwen2": ("Qwen2", {**SLIDING, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 8, "moe_intermediate_size": 64}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {**GEMMA, **SLIDING, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": (
        "Gemma3",
        {**GEMMA, **SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("Phi3", SLIDING),
    "granite": (
        "Granite",
        {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "gpt_oss": (
        "GptOss",
        {
            **EXPERTS,
            **SLIDING,
            "num_local_experts": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
"""Model type: the prefix of its classes, and what its configuration has beyond the common."""


def family_model(model_type: str, **changes: Any) -> Any:
    """Random, with every vector moved off its first value and an embedding that is not the head."""
    family, extra = FAMILY_MODELS[model_type]
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
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
