"""The shared noise of ``core/protocol/sampling.py``, vectorised over token ids.

Integers agree with the scalar specification bit for bit; the Gumbel variate is its float32 value.
Array arithmetic on uint32 wraps silently, which is exactly the ``& MASK_32`` of the scalar form;
scalars would warn, so keys are folded by the scalar code and enter as array operands.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edgespec.core.protocol.sampling import GOLDEN, MIX_A, MIX_B, position_keys
from edgespec.sampling.workspace import Workspace

# Largest value ``gumbel`` can give: -log(-log(1 - 2**-24)) = 16.636, rounded up.
LARGEST_NOISE = 16.7


def noise_bits(seed: int, position: int, tokens: NDArray[np.integer]) -> NDArray[np.uint32]:
    """32 hash bits for each of ``tokens`` (any shape, ids >= 0) at ``position``."""
    return _keyed(tokens.astype(np.uint32) * np.uint32(GOLDEN), seed, position)


def gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Standard Gumbel variates, float32; only the upper 23 bits count, as in the scalar form."""
    uniform = (bits >> np.uint32(9)).astype(np.float32)
    uniform += np.float32(0.5)  # at most 24 significant bits: still exact
    uniform *= np.float32(2.0**-23)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    return uniform


def gumbel_noise(seed: int, position: int, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
    """The noise of each of ``tokens`` at ``position``."""
    return gumbel(noise_bits(seed, position, tokens))


def gumbel_row(seed: int, position: int, vocabulary_size: int) -> NDArray[np.float32]:
    """The noise of every token id below ``vocabulary_size`` at ``position``, shape [V]."""
    return gumbel(row_bits(seed, position, vocabulary_size))


def row_bits(
    seed: int, position: int, vocabulary_size: int, work: Workspace | None = None
) -> NDArray[np.uint32]:
    """``noise_bits`` of every token id below ``vocabulary_size``, shape [V]; they last until the
    next row of the same ``work``."""
    work = work or Workspace()
    bits = work.words("bits", vocabulary_size)
    bits[:] = _spread(vocabulary_size)
    return _keyed(bits, seed, position, work.words("shifted", vocabulary_size))


def least_bits(noise: float) -> np.uint32:
    """Bits below these give less than ``noise``: the noise grows with its bits.

    The inverse of ``gumbel``, exp(-exp(-noise)), with a margin for its float32 rounding: a few
    more bits pass than must. Of noise 3.0, for example, 4.9 % of all tokens have as much.
    """
    reached = noise - 1e-3 - 1e-6 * abs(noise)
    uniform = math.exp(-math.exp(-reached)) if reached > -5 else 0.0
    return np.uint32(max(0, math.floor(uniform * 2.0**23 - 0.5)) << 9)


@lru_cache(maxsize=4)
def _spread(vocabulary_size: int) -> NDArray[np.uint32]:
    spread = np.arange(vocabulary_size, dtype=np.uint32) * np.uint32(GOLDEN)
    spread.setflags(write=False)
    return spread


def _keyed(
    values: NDArray[np.uint32],
    seed: int,
    position: int,
    shifted: NDArray[np.uint32] | None = None,
) -> NDArray[np.uint32]:
    """Both rounds, in place; ``shifted`` is scratch of the same shape."""
    first, second = position_keys(seed, position)
    shifted = np.empty_like(values) if shifted is None else shifted
    values += np.uint32(first)
    _mix(values, shifted)
    values ^= np.uint32(second)
    _mix(values, shifted)
    return values


def _mix(values: NDArray[np.uint32], shifted: NDArray[np.uint32]) -> None:
    values ^= np.right_shift(values, np.uint32(16), out=shifted)
    values *= np.uint32(MIX_A)
    values ^= np.right_shift(values, np.uint32(13), out=shifted)
    values *= np.uint32(MIX_B)
    values ^= np.right_shift(values, np.uint32(16), out=shifted)
