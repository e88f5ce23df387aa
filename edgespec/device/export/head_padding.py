"""Attention heads of a size that the runtime's kernel takes, with the same results.

``GroupQueryAttention`` with rotary positions wants head sizes that are multiples of 16. A head of
another size d is widened to the next multiple P by entries that are zero in queries, keys and
values, so no product changes. Rotation pairs entry i with entry i + P / 2, so each half of the head
is widened by itself: entry i of the first half stays, entry d / 2 + i moves to P / 2 + i.

Three numbers would change with the size and are corrected: the attention's scale stays 1 / sqrt(d);
a norm over the head (Qwen3) divides by the mean over P entries instead of d, so its weight is
multiplied by sqrt(d / P) and its epsilon by d / P.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

HEAD_MULTIPLE = 16


def padded_head_dim(head_dim: int) -> int:
    """The smallest size that the kernel takes and that holds ``head_dim`` (even) entries; 24 gives
    32."""
    return -(-head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE


def pad_outputs(weight: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows (or entries of a bias) of a projection into heads, [heads * d, ...], widened to
    [heads * P, ...]."""
    size = padded_head_dim(head_dim)
    if size == head_dim:
        return weight
    half, rest = head_dim // 2, weight.shape[1:]
    heads = len(weight) // head_dim
    padded = np.zeros((heads, 2, size // 2, *rest), dtype=np.float32)
    padded[:, :, :half] = weight.reshape(heads, 2, half, *rest)
    return padded.reshape(heads * size, *rest)


def pad_inputs(weight: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Columns of a projection out of heads, [rows, heads * d], widened to [rows, heads * P]."""
    return np.ascontiguousarray(pad_outputs(np.ascontiguousarray(weight.T), head_dim).T)


def unpad_outputs(weight: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """What ``pad_outputs`` made wider, [heads * P, ...], as it was."""
    size, half, rest = padded_head_dim(head_dim), head_dim // 2, weight.shape[1:]
    split = weight.reshape(-1, 2, size // 2, *rest)
    return split[:, :, :half].reshape(-1, *rest)


def unpad_inputs(weight: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """What ``pad_inputs`` made wider, [rows, heads * P], as it was."""
    return np.ascontiguousarray(unpad_outputs(np.ascontiguousarray(weight.T), head_dim).T)


def pad_head_norm(weight: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """The weight [d] of a norm over a head, widened to [P] and corrected for the mean over P."""
    factor = math.sqrt(head_dim / padded_head_dim(head_dim))
    return pad_outputs(weight, head_dim) * np.float32(factor)


def padded_epsilon(epsilon: float, head_dim: int) -> float:
    """The epsilon of that norm."""
    return epsilon * head_dim / padded_head_dim(head_dim)


def pad_tables(
    cos: NDArray[np.float32], sin: NDArray[np.float32], head_dim: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rotary tables [positions, d / 2], widened to [positions, P / 2] by angles of zero."""
    added = ((0, 0), (0, (padded_head_dim(head_dim) - head_dim) // 2))
    return np.pad(cos, added, constant_values=1.0), np.pad(sin, added)
