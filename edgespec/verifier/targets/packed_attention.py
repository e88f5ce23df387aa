"""Attention over the block pool, plugged into transformers' attention interface.

The pass travels as the keyword ``edgespec_pass``. Keys and values of the pass are written to the
pool first; then the plan's layout attends (``attention_backend.py``). No mask function is
registered beside it: transformers then makes no mask, and does not look for packed sequences,
which would make it wait for a GPU in every pass.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from edgespec.verifier.targets.attention_backend import LayerAttention, LayerStates
from edgespec.verifier.targets.pass_plan import PassPlan

IMPLEMENTATION = "edgespec_packed"


def register() -> None:
    """Make ``attn_implementation="edgespec_packed"`` known to transformers; repeatable."""
    AttentionInterface.register(IMPLEMENTATION, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    edgespec_pass: PassPlan | None = None,
    **_ignored: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' signature: ``query`` [1, heads, rows, head_dim], ``key``/``value`` with the
    key-value heads; returns [1, rows, heads, head_dim]. ``s_aux`` [heads] are the layer's sinks.
    """
    assert edgespec_pass is not None, "the model was called without a pass plan"
    layer = module.layer_idx
    assert isinstance(layer, int)
    plan = edgespec_pass
    data = plan.pool.data
    keys, values = data[0, layer], data[1, layer]
    keys.index_copy_(0, plan.write_slots, _as_rows(key, plan.row_count))
    values.index_copy_(0, plan.write_slots, _as_rows(value, plan.row_count))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = plan.attention.attend(
        LayerAttention(scale, sliding_window, softcap, s_aux),
        LayerStates(query[0], key[0], value[0], keys, values),
    )
    return out.unsqueeze(0), None


def _as_rows(states: torch.Tensor, count: int) -> torch.Tensor:
    """[1, heads, rows, head_dim] -> [count, heads * head_dim]."""
    return states[0, :, :count].transpose(0, 1).reshape(count, -1)
