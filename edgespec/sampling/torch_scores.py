"""Rows of logits to scores: ``core/protocol/scores.score_token`` in torch, float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.work import LEAST_LOGPROB, TokenScore
from edgespec.sampling.torch_device_copies import to_device


def score_passes(
    logits: torch.Tensor, batch: Sequence[PassRequest], chosen: Sequence[int]
) -> dict[str, tuple[TokenScore, ...]]:
    """The scores of every sampled row of the sessions that ask, by key; empty when none does.

    ``logits`` is [sampled rows of all requests, vocabulary] and is not changed; ``chosen`` are the
    rows' tokens.
    """
    if not any([request.logprobs for request in batch]):
        return {}
    found: dict[str, tuple[TokenScore, ...]] = {}
    first = 0
    for request in batch:
        if not request.sample:
            continue
        last = first + 1 + len(request.tokens)
        if request.logprobs:
            rows, tokens = logits[first:last], chosen[first:last]
            found[request.key] = _score_rows(rows, tokens, request.logprobs)
        first = last
    return found


def _score_rows(logits: torch.Tensor, tokens: Sequence[int], count: int) -> tuple[TokenScore, ...]:
    logits = logits.float()
    norms = logits.logsumexp(dim=-1, keepdim=True)
    best, ids = logits.topk(min(max(count, 2), logits.shape[-1]), dim=-1)
    best = (best - norms).clamp_(min=LEAST_LOGPROB)
    index = to_device(np.array(tokens, dtype=np.int64), logits.device)[:, None]
    own: list[float] = (logits.gather(-1, index) - norms).clamp_(min=LEAST_LOGPROB)[:, 0].tolist()
    return tuple(
        [
            TokenScore(
                logprob,
                values[0] - values[1] if len(values) > 1 else -LEAST_LOGPROB,
                tuple(zip(row[:count], values[:count], strict=True)),
            )
            for logprob, row, values in zip(own, ids.tolist(), best.tolist(), strict=True)
        ]
    )
