"""What a layer does to attention scores beyond scaling them: windows, soft caps, sinks.

A window lets a row see its own position and the ``window - 1`` before it (Mistral, Gemma). A soft
cap c turns a score s into c tanh(s / c) (Gemma 2). A sink is a score of each head that takes its
share of the softmax and brings no value (gpt-oss). Windows are masks, made once a pass by
``pass_plan.py``; the other two change the arithmetic and are here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """The rule of one layer; without arguments, plain causal attention."""

    windowed: bool = False
    """Whether the layer sees the window of the pass plan instead of all earlier tokens."""
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    """[heads], in the units of the scaled scores."""

    @property
    def changes_scores(self) -> bool:
        """Whether a masked softmax of scaled products is not all there is to do."""
        return self.soft_cap is not None or self.sinks is not None

    def capped(self, scores: torch.Tensor, unit: float = 1.0) -> torch.Tensor:
        """``scores`` (times ``unit``) after the soft cap; changes them in place."""
        if self.soft_cap is None:
            return scores
        cap = self.soft_cap * unit
        return scores.div_(cap).tanh_().mul_(cap)

    def sink_scores(self, kv_heads: int, unit: float = 1.0) -> torch.Tensor | None:
        """float32 [kv_heads, heads per key head, 1, 1], times ``unit``; None without sinks."""
        if self.sinks is None:
            return None
        return self.sinks.float().mul(unit).view(kv_heads, -1, 1, 1)


CAUSAL = ScoreRule()


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    rule: ScoreRule,
) -> torch.Tensor:
    """Attention with ``rule`` in float32: [sessions, heads, rows, head_dim], type of ``query``.

    ``query`` [sessions, heads, rows, head_dim], ``key`` and ``value`` [sessions, kv_heads, keys,
    head_dim], ``mask`` bool [sessions, 1, rows, keys], True where a row sees a key.
    """
    sessions, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    q = query.float().mul(scale).view(sessions, kv_heads, -1, rows, head_dim)
    scores = rule.capped(q @ key.float().unsqueeze(2).transpose(-1, -2))
    scores.masked_fill_(~mask.unsqueeze(1), -torch.inf)
    best = scores.amax(dim=-1, keepdim=True)
    sinks = rule.sink_scores(kv_heads)
    if sinks is not None:
        best = torch.maximum(best, sinks)
    weights = (scores - best).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - best).exp_()
    out = (weights @ value.float().unsqueeze(2)) / total
    return out.view(sessions, heads, rows, head_dim).to(query.dtype)
