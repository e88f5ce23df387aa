"""Attention over the block pool, plugged into transformers' attention interface.

The pass context travels as the keyword ``edgespec_pass``. Keys and values of the pass are written
to the pool first; then every group of ``pass_plan.py`` is attended to.

Canonical attention, in float32 whatever the model's type: scores of the line of ancestors in tiles
of ``KEY_TILE`` keys, indexed by position, and the row's own key apart,

    out = (sum_tiles exp(S_tile - m) V_tile + exp(s_own - m) v_own) / (sums of the exps).

Tiles are added one after the other, and masked keys add exact zeros. A group has one of the row
counts of which ``canonical_mode.py`` found that they give the same bits, so no other shape occurs.

exp is taken as exp2 of scores that carry a factor log2(e): on CPUs it is several times faster and,
unlike exp, no slower where the result is zero. Only the own key's weight uses exp: its few
elements do not fill vectors, and exp2's scalar tail is another function to the last bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from edgespec.targets.pass_plan import CanonicalGroup, PassPlan, PlainGroup
from edgespec.targets.score_rules import CAUSAL, ScoreRule, masked_attention

IMPLEMENTATION = "edgespec_packed"
_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)


def register() -> None:
    """Make ``attn_implementation="edgespec_packed"`` known to transformers; repeatable."""
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    edgespec_pass: PassPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_ignored: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' signature: ``query`` [1, heads, rows, head_dim], ``key``/``value`` with the
    key-value heads; returns [1, rows, heads, head_dim]. ``s_aux`` [heads] are the layer's sinks.
    """
    assert edgespec_pass is not None, "the model was called without a pass plan"
    layer = module.layer_idx
    assert isinstance(layer, int)
    _, heads, rows, head_dim = query.shape
    scale = head_dim**-0.5 if scaling is None else scaling
    plan = edgespec_pass
    # A plan has a window when a layer of the model has one that is shorter than the context.
    rule = ScoreRule(sliding_window is not None and plan.windowed, softcap, s_aux)
    keys, values = plan.pool.data[0, layer], plan.pool.data[1, layer]
    keys.index_copy_(0, plan.write_slots, _as_rows(key, plan.row_count))
    values.index_copy_(0, plan.write_slots, _as_rows(value, plan.row_count))
    out = torch.zeros((rows, heads, head_dim), dtype=query.dtype, device=query.device)
    for group in plan.groups:
        if isinstance(group, CanonicalGroup):
            part = canonical_attention(query, key, value, keys, values, group, scale, rule)
            out[group.rows[: group.count]] = part
        else:
            out[group.rows.view(-1)[group.real]] = _plain(query, keys, values, group, scale, rule)
    return out.unsqueeze(0), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Masks are in the pass plan."""


def _as_rows(states: torch.Tensor, count: int) -> torch.Tensor:
    """[1, heads, rows, head_dim] -> [count, heads * head_dim]."""
    return states[0, :, :count].transpose(0, 1).reshape(count, -1)


def canonical_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: CanonicalGroup,
    scale: float,
    rule: ScoreRule = CAUSAL,
) -> torch.Tensor:
    """Attention of one group: [group.count, heads, head_dim] in the type of ``query``.

    ``query`` [1, heads, rows, head_dim], ``key`` and ``value`` with the key-value heads, are those
    of the whole pass; ``keys`` and ``values`` [slots, key-value heads * head_dim] are the pool's.
    """
    heads, head_dim, kv_heads = query.shape[1], query.shape[3], key.shape[1]
    rows, share = len(group.rows), heads // kv_heads
    # Query heads of one key head are stacked as rows: fewer, larger products, no repeated keys.
    q = query[0].index_select(1, group.rows).float().mul_(scale * _LOG2_E)
    q_4d = q.view(kv_heads, share, rows, head_dim)
    q = q.view(kv_heads, share * rows, head_dim)
    own_key = key[0].index_select(1, group.rows).float().unsqueeze(1)
    own_value = value[0].index_select(1, group.rows).float().unsqueeze(1)
    own_score = rule.capped((q_4d * own_key).sum(dim=-1, keepdim=True), _LOG2_E)
    scores: list[tuple[torch.Tensor, torch.Tensor]] = []
    best = own_score
    masks = group.window_masks if rule.windowed else group.masks
    for slots, mask in zip(group.key_slots, masks, strict=True):
        if mask is None:  # nobody sees a key of this tile: it would add exact zeros
            continue
        tile = keys.index_select(0, slots).float().view(-1, kv_heads, head_dim)
        score = torch.bmm(q, tile.permute(1, 2, 0)).view(kv_heads, share, rows, -1)
        score = rule.capped(score, _LOG2_E)
        score += mask
        scores.append((slots, score))
        best = torch.maximum(best, score.amax(dim=-1, keepdim=True))
    sinks = rule.sink_scores(kv_heads, _LOG2_E)
    if sinks is not None:
        best = torch.maximum(best, sinks)
    weight = (own_score - best).mul_(_LN_2).exp_()
    total = weight.clone()
    if sinks is not None:
        total += (sinks - best).mul_(_LN_2).exp_()
    out = weight * own_value
    for slots, score in scores:
        weights = (score - best).exp2_()
        total += weights.sum(dim=-1, keepdim=True)
        tile = values.index_select(0, slots).float().view(-1, kv_heads, head_dim)
        product = torch.bmm(weights.view(kv_heads, share * rows, -1), tile.transpose(0, 1))
        out += product.view(out.shape)
    out /= total
    out = out.view(heads, rows, head_dim)[:, : group.count].transpose(0, 1)
    return out.to(query.dtype)


def _plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: PlainGroup,
    scale: float,
    rule: ScoreRule,
) -> torch.Tensor:
    """[rows that are not padding, heads, head_dim]."""
    heads, head_dim = query.shape[1], query.shape[3]
    sessions, rows = group.rows.shape
    q = query[0][:, group.rows.view(-1)].view(heads, sessions, rows, head_dim).transpose(0, 1)
    shape = (sessions, group.key_slots.shape[1], -1, head_dim)
    flat_slots = group.key_slots.view(-1)
    k = keys.index_select(0, flat_slots).view(shape).transpose(1, 2)
    v = values.index_select(0, flat_slots).view(shape).transpose(1, 2)
    mask = group.window_mask if rule.windowed else group.mask
    assert mask is not None, "the plan of a model with windows has their mask"
    if rule.changes_scores:
        out = masked_attention(q, k, v, mask, scale, rule)
    else:
        grouped = k.shape[1] != heads
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    return out.transpose(1, 2).reshape(-1, heads, head_dim)[group.real]
