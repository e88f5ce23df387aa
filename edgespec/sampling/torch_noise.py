"""The shared Gumbel noise of ``core/protocol/sampling.py`` for whole rows of words, in torch.

Integers are those of the scalar specification bit for bit: 32-bit arithmetic done in int64, with
a mask after every product and sum (a product of two 32-bit numbers may wrap around 64 bits; its
low 32 bits are right all the same). The variate itself is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from edgespec.core.protocol.sampling import GOLDEN, MASK_32, MIX_A, MIX_B, position_keys
from edgespec.sampling.torch_device_copies import to_device


def noise_bits(
    seeds: Sequence[int], positions: Sequence[int], vocabulary_size: int, device: torch.device
) -> torch.Tensor:
    """int64 [rows, vocabulary_size]: ``core.protocol.noise.noise_bits`` of every token id.

    Row r belongs to ``seeds[r]`` and ``positions[r]``.
    """
    keys = [position_keys(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    first, second = to_device(np.array(keys, dtype=np.int64), device).view(-1, 2, 1).unbind(1)
    bits = _token_base(vocabulary_size, device) + first
    _mix_in_place(bits)
    bits ^= second
    _mix_in_place(bits)
    return bits


def gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], vocabulary_size: int, device: torch.device
) -> torch.Tensor:
    """float32 [rows, vocabulary_size]: one standard Gumbel variate per row and token id."""
    bits = noise_bits(seeds, positions, vocabulary_size, device)
    # Exact in float32: 23 bits and a half.
    uniform = (bits >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


@lru_cache(maxsize=4)
def _token_base(vocabulary_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(vocabulary_size, dtype=torch.int64, device=device) * GOLDEN & MASK_32


def _mix_in_place(value: torch.Tensor) -> None:
    """``core.protocol.noise.mix`` of every element; what is above 32 bits on entry is ignored."""
    value &= MASK_32
    value ^= value >> 16
    value *= MIX_A
    value &= MASK_32
    value ^= value >> 13
    value *= MIX_B
    value &= MASK_32
    value ^= value >> 16
