"""Rotary position tables for the graph: cos and sin of position times frequency.

Frequencies follow Su et al. 2021 (RoFormer) with theta from the config; ``linear`` divides
positions by a factor (Chen et al. 2023), ``llama3`` stretches only the long wavelengths, with a
linear blend between two wavelength limits (Llama 3.1 model card), ``yarn`` blends by how often a
dimension turns within the original context and makes the attention sharper by a factor on both
tables (Peng et al. 2023, section 3).
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
    factor = np.float32(_yarn_sharpness(rope) if rope["rope_type"] == "yarn" else 1.0)
    return np.cos(angles) * factor, np.sin(angles) * factor


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
        case "yarn":
            return _yarn(rope, plain, head_dim)
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


def _yarn(
    rope: Mapping[str, Any], plain: NDArray[np.float32], head_dim: int
) -> NDArray[np.float32]:
    length, theta = float(rope["original_max_position_embeddings"]), float(rope["rope_theta"])

    def dimension(turns: float) -> float:
        """The dimension that turns so often within the original context."""
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(rope.get("beta_fast") or 32.0))
    high = dimension(float(rope.get("beta_slow") or 1.0))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as the reference does, against a division by zero
    steps = np.arange(len(plain), dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    slow = plain / np.float32(rope["factor"])
    blended: NDArray[np.float32] = (slow * ramp + plain * (1.0 - ramp)).astype(np.float32)
    return blended


def _yarn_sharpness(rope: Mapping[str, Any]) -> float:
    """What both tables are multiplied with: 0.1 ln(factor) + 1, if the config says nothing else."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        factor = float(rope["factor"])
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    weight, over_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if weight and over_all:
        return scale(float(weight)) / scale(float(over_all))
    return scale(1.0)
