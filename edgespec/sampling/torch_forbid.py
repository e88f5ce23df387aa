"""Masks of constraints over rows of logits, in torch (``core/protocol/sampling.masked``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from edgespec.sampling.torch_device_copies import to_device


def forbid(logits: torch.Tensor, masks: Sequence[bytes | None]) -> torch.Tensor:
    """``logits`` [rows, vocabulary] with -inf for each token that its row's mask forbids; None
    forbids nothing. ``logits`` itself is not changed, and returned where nothing is forbidden."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return logits
    size = logits.shape[-1]
    bits = np.zeros((len(rows), -(-size // 8)), dtype=np.uint8)
    for place, row in enumerate(rows):
        mask = np.frombuffer(masks[row] or b"", dtype=np.uint8)[: bits.shape[1]]
        bits[place, : mask.size] = mask
    allowed = np.unpackbits(bits, axis=1, count=size, bitorder="little").view(np.bool_)
    forbidden = to_device(~allowed, logits.device)
    if len(rows) == len(masks):
        return logits.masked_fill(forbidden, -torch.inf)
    changed = logits.clone()
    places = to_device(np.array(rows, dtype=np.int64), logits.device)
    changed[places] = logits[places].masked_fill(forbidden, -torch.inf)
    return changed
