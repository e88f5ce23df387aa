"""Trace a decoder with its cache into ONNX, with torch's own exporter.

    python torch_export.py SOURCE TARGET

Runs in the exporter's environment (torch, transformers, onnx, onnxscript) and imports nothing of
ours. Inputs: input_ids, attention_mask, position_ids, past_key_values.N.key and .value; outputs:
logits of the last token and present.N.key and .value.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

# Of the example that is traced; neither may be 0 or 1, which tracers take for constants.
_FED, _PAST = 3, 5


class Step(torch.nn.Module):
    """One call of the model behind a cache, with plain tensors in and out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        pairs = list(zip(past[::2], past[1::2], strict=True))
        cache = DynamicCache(ddp_cache_data=pairs)
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        layers = found.past_key_values.layers
        present = [part for layer in layers for part in (layer.keys, layer.values)]
        return (found.logits, *present)


def main(source: Path, target: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = config.num_hidden_layers
    past = [torch.zeros(1, heads, _PAST, size) for _ in range(2 * layers)]
    ids = torch.ones(1, _FED, dtype=torch.int64)
    mask = torch.ones(1, _PAST + _FED, dtype=torch.int64)
    positions = torch.arange(_PAST, _PAST + _FED)[None]
    parts = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    dynamic = torch.export.Dim.DYNAMIC
    target.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"tracing {layers} layers\n")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Step(model),
            (ids, mask, positions, *past),
            str(target / "model.onnx"),
            dynamo=True,
            opset_version=20,
            input_names=[
                *("input_ids", "attention_mask", "position_ids"),
                *(f"past_key_values.{part}" for part in parts),
            ],
            output_names=["logits", *(f"present.{part}" for part in parts)],
            dynamic_shapes=(
                *({1: dynamic}, {1: dynamic}, {1: dynamic}),
                tuple({2: dynamic} for _ in past),
            ),
            external_data=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
