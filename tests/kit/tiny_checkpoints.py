"""Tiny random checkpoints and tokenizers in Hugging Face's layout, for tests that need a model
folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
import yaml
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILY_MODELS: dict[str, tuple[str, dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("families.yaml").read_text(encoding="utf-8")
)


def family_model(model_type: str, **changes: Any) -> Any:
    """Build a random model with every vector moved off its first value and an embedding that is not
    the head."""
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


VOCABULARY_SIZE = 320
CONTEXT_LENGTH = 256
SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "zwölf Boxkämpfer jagen Viktor quer über den großen Deich",
    "def step(self, keep_length, feed, width):\n    return best_candidates(self.logits)",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    config = {
        "model_type": model_type,
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return config | changes


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Return random weights that are large enough for every part of the model to move the
    logits."""
    rng = np.random.default_rng(seed)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    dim, kind = config["head_dim"], config["model_type"]
    rows = {"q": config["num_attention_heads"] * dim}
    rows["k"] = rows["v"] = config["num_key_value_heads"] * dim

    def normal(*shape: int, scale: float = 0.15) -> NDArray[np.float32]:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=0.5),
        "model.norm.weight": 1 + normal(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = 1 + normal(hidden)
        for part, count in rows.items():
            tensors[f"{name}.self_attn.{part}_proj.weight"] = normal(count, hidden)
            if kind == "qwen2" or config.get("attention_bias"):
                tensors[f"{name}.self_attn.{part}_proj.bias"] = normal(count)
        tensors[f"{name}.self_attn.o_proj.weight"] = normal(hidden, rows["q"])
        if config.get("attention_bias"):
            tensors[f"{name}.self_attn.o_proj.bias"] = normal(hidden)
        if kind == "qwen3":
            tensors[f"{name}.self_attn.q_norm.weight"] = 1 + normal(dim)
            tensors[f"{name}.self_attn.k_norm.weight"] = 1 + normal(dim)
        tensors[f"{name}.mlp.gate_proj.weight"] = normal(wide, hidden)
        tensors[f"{name}.mlp.up_proj.weight"] = normal(wide, hidden)
        tensors[f"{name}.mlp.down_proj.weight"] = normal(hidden, wide)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=0.5)
    return tensors


def write_checkpoint(
    folder: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, NDArray[np.float32]] | None = None,
    *,
    bfloat16: bool = False,
    shards: int = 1,
) -> Path:
    """Write a complete model folder: the config, the weights in ``shards`` files, and the
    tokenizer."""
    config = config or tiny_config()
    tensors = tensors or tiny_tensors(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    dtype = ml_dtypes.bfloat16 if bfloat16 else np.float32
    stored = {name: np.asarray(value).astype(dtype) for name, value in tensors.items()}
    names = sorted(stored)
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {name: stored[name] for name in names[shard::shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level BPE of at most ``VOCABULARY_SIZE`` ids that cuts rare characters into
    pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(f"<|{name}|>", special=True) for name in ("end", "user", "assistant")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "<|end|>"}, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
