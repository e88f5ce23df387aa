"""Rotary position tables for the graph: cos and sin of position times frequency.

Frequencies follow Su et al. 2021 (RoFormer) with theta from the config; ``linear`` divides
positions by a factor (Chen et al. 2023), ``llama3`` stretches only the long wavelengths, with a
linear blend between two wavelength limits (Llama 3.1 model card).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def rope_tables(
    rope: Mapping[str, Any], head_dim: int, context_length: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(cos, sin), float32 [context_length, head_dim / 2] each.

    The product is taken in float32, as the reference implementation does: at long positions a
    float64 product would differ from what the model was trained with.
    """
    frequencies = _frequencies(rope, head_dim)
    angles = np.outer(np.arange(context_length, dtype=np.float32), frequencies)
    return np.cos(angles), np.sin(angles)


def _frequencies(rope: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain: NDArray[np.float32] = (1.0 / np.float32(rope["rope_theta"]) ** exponents).astype(
        np.float32
    )
    match rope["rope_type"]:
        case "default":
            return plain
        case "linear":
            return (plain / float(rope["factor"])).astype(np.float32)
        case "llama3":
            return _llama3(rope, plain)
        case other:
            raise ValueError(f"rope_type {other!r} is not supported")


def _llama3(rope: Mapping[str, Any], plain: NDArray[np.float32]) -> NDArray[np.float32]:
    length = float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = length * plain / (2.0 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    slow = plain / float(rope["factor"])
    blended: NDArray[np.float32] = ((1.0 - share) * slow + share * plain).astype(np.float32)
    return blended
