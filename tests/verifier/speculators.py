"""Speculators for the bundled target on vLLM: heads with random numbers, and drafts made of the
bundled one, as folders in the formats that vLLM reads.

EAGLE's and DFlash's heads are random, so they are right by luck alone. Medusa's are fitted to the
target's hidden states over this project's pages, and are right now and then. The drafts are right
as often as the bundled draft is: PARD's folder has its weights, so the first place of a block is
right and the masked ones are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from edgespec.device.build import load_tokenizer
from edgespec.models.model_source import Purpose, resolve_source

WEIGHTS: Final = "model.safetensors"
MASK: Final = 4095
"""Token id that stands for tokens that are not known yet."""
AUX_LAYERS: Final = (1, 3, 5)
"""Layers of the target whose hidden states EAGLE-3 and DFlash read."""

PAGES: Final = Path(__file__).parents[2] / "docs"
FITTED_TEXTS: Final = 32
FITTED_LENGTH: Final = 256

SPECULATORS: Final = (
    *("ngram", "draft_model", "eagle", "eagle3"),
    *("pard", "peagle", "dflash", "medusa"),
)
BLOCKS: Final = frozenset({"pard", "peagle", "dflash", "medusa"})


def write_speculator(name: str, folder: Path, tokens: int) -> dict[str, Any]:
    """Write a speculator's files to ``folder``, and return vLLM's settings of it."""
    settings: dict[str, Any] = {"num_speculative_tokens": tokens}
    if name == "ngram":
        return {**settings, "method": name, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    if name == "draft_model":
        source = resolve_source("bundled", Purpose.DRAFT)
        return {**settings, "method": name, "model": str(source.folder)}
    folder.mkdir(parents=True)
    settings["model"] = str(folder)
    config = _read_config(Purpose.TARGET) | {"dtype": "float32", "num_hidden_layers": 1}
    draw = torch.Generator().manual_seed(5)
    match name:
        case "pard":
            settings |= {"method": "draft_model", "parallel_drafting": True}
            draft = resolve_source("bundled", Purpose.DRAFT).folder
            config = _read_config(Purpose.DRAFT) | {"pard_token": MASK}
            tensors = load_file(draft / WEIGHTS)
        case "eagle":
            settings["method"] = name
            tensors = _decoder_layer("layers.0.", config, draw)
            tensors |= _matrices({"fc": (config["hidden_size"], 2 * config["hidden_size"])}, draw)
            del tensors["layers.0.input_layernorm.weight"]
        case "eagle3" | "peagle":
            settings["method"] = "eagle3"
            config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 4096}
            config["eagle_aux_hidden_state_layer_ids"] = list(AUX_LAYERS)
            tensors = _decoder_layer("midlayer.", config, draw, inputs=2)
            tensors |= _combining(config, draw)
            tensors["midlayer.hidden_norm.weight"] = torch.ones(config["hidden_size"])
            if name == "peagle":
                settings["parallel_drafting"] = True
                config["ptd_token_id"] = MASK
                size = config["hidden_size"] * len(AUX_LAYERS)
                tensors["mask_hidden"] = torch.randn(1, size, generator=draw)
        case "dflash":
            settings["method"] = name
            config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
            layers = [layer - 1 for layer in AUX_LAYERS]
            config["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": layers}
            tensors = _decoder_layer("layers.0.", config, draw) | _combining(config, draw)
            tensors["hidden_norm.weight"] = torch.ones(config["hidden_size"])
            for norm in ("q_norm", "k_norm"):
                tensors[f"layers.0.self_attn.{norm}.weight"] = torch.ones(config["head_dim"])
        case "medusa":
            settings["method"] = name
            hidden, words = config["hidden_size"], config["vocab_size"]
            config = {"model_type": "medusa", "hidden_size": hidden, "vocab_size": words}
            config |= {"medusa_num_heads": tokens, "medusa_num_layers": 1, "dtype": "float32"}
            tensors = _fit_heads(tokens)
        case _:
            raise ValueError(name)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return settings


def _read_config(purpose: Purpose) -> dict[str, Any]:
    text = (resolve_source("bundled", purpose).folder / "config.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _matrices(shapes: dict[str, tuple[int, int]], draw: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        f"{name}.weight": torch.randn(shape, generator=draw) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }


def _decoder_layer(
    prefix: str, config: dict[str, Any], draw: torch.Generator, inputs: int = 1
) -> dict[str, torch.Tensor]:
    """Return the tensors of a Llama layer whose attention reads ``inputs`` hidden states."""
    hidden, inner, size = (
        config[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    heads, pairs = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (heads, inputs * hidden),
        "self_attn.k_proj": (pairs, inputs * hidden),
        "self_attn.v_proj": (pairs, inputs * hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found = _matrices({prefix + name: shape for name, shape in shapes.items()}, draw)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found[f"{prefix}{norm}.weight"] = torch.ones(hidden)
    return found


def _combining(config: dict[str, Any], draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Return what makes one hidden state of several layers' states, and the last norm."""
    hidden = config["hidden_size"]
    found = _matrices({"fc": (hidden, hidden * len(AUX_LAYERS))}, draw)
    return found | {"norm.weight": torch.ones(hidden)}


def _fit_heads(heads: int) -> dict[str, torch.Tensor]:
    """Return Medusa's heads: head n predicts the hidden state n + 1 places ahead by least squares,
    and reads the word from it as the target does."""
    from transformers import AutoModelForCausalLM

    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
    ids = load_tokenizer("bundled").encode(text)[: FITTED_TEXTS * FITTED_LENGTH]
    target: Any = AutoModelForCausalLM.from_pretrained(
        resolve_source("bundled", Purpose.TARGET).folder, dtype=torch.float32
    )
    with torch.inference_mode():
        given = torch.tensor(ids).view(FITTED_TEXTS, FITTED_LENGTH)
        hidden = target(given, output_hidden_states=True).hidden_states[-1]
    words, size = target.get_input_embeddings().weight.detach(), hidden.shape[-1]
    found: dict[str, torch.Tensor] = {}
    for head in range(heads):
        now = hidden[:, : -1 - head].reshape(-1, size).double()
        later = hidden[:, 1 + head :].reshape(-1, size).double()
        damped = now.T @ now + torch.eye(size, dtype=torch.float64) * len(now) * 0.01
        step = torch.linalg.solve(damped, now.T @ later).float()
        found[f"blocks.{head}.layers.0.weight"] = torch.zeros(size, size)
        found[f"lm_heads.{head}.weight"] = (words @ step.T).contiguous()
    return found
