"""Block-wise quantisation of weight matrices, in the layout of ``MatMulNBits``.

A matrix [N, K] (N outputs, K inputs) is cut along K into blocks of 32, the last of which is filled
up with zeros. A block has one float32 scale; an entry is an unsigned integer with the implied zero
point ``2**(bits - 1)``:

    weight = (integer - zero_point) * scale

4-bit integers are packed two a byte, low nibble first. With B = ceil(K / 32), ``packed`` is uint8
[N, B, 16 or 32], ``scales`` float32 [N, B], and there is no zero-point tensor except where
``round_matrix`` gives blocks of 4 bits zero points of their own. ``GatherBlockQuantized`` reads
the same bytes as uint8 [N, 16 B or 32 B], so one initializer can serve a tied embedding and head.

The integer range is not symmetric (-8..7 for 4 bits), so the sign of the scale matters: the entry
of largest magnitude may be mapped to -8. Per block the least-squares scale is fitted for a small
grid of roundings and the best one is kept (the practice of llama.cpp's ``make_qx_quants``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 32

# Multiples of the full-range scale (largest magnitude over integer range) that are tried, with both
# signs.
_GRID_4 = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 1.07, 1.14)
_GRID_8 = (1.0, 128 / 127)  # the second is that of GGUF's Q8_0, whose integers are kept so
# Shares of a block's range that its integers may cover where it has a zero point. More shares, or
# other zero points, leave 0.2 % less error.
_RANGE_SHARES = (1.0, 0.93)
_ROWS_AT_ONCE = 2048


def quantize_matrix(
    weight: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return (integers, scales) of ``weight`` [N, K] in the layout described at the head of this
    file. Values are rounded to nearest with fitted block scales; the result is deterministic.
    Raises ``ValueError`` for ``bits`` other than 4 and 8."""
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}, but must be 4 or 8")
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK_SIZE)
    if missing := blocks * BLOCK_SIZE - columns:
        weight = np.pad(weight, ((0, 0), (0, missing)))
    integers = np.empty((rows, blocks, BLOCK_SIZE), dtype=np.uint8)
    scales = np.empty((rows, blocks), dtype=np.float32)
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        values = weight[part].astype(np.float32).reshape(-1, blocks, BLOCK_SIZE)
        integers[part], scales[part] = _fit_blocks(values, bits)
    return integers if bits == 8 else _pack_nibbles(integers), scales


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """A matrix [N, columns] as ``MatMulNBits`` reads it."""

    integers: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8] | None
    """[N, ceil(B / 2)]: the zero points of the blocks, packed as 4-bit integers are; None where all
    are the implied one."""
    columns: int
    bits: int

    def values(self) -> NDArray[np.float32]:
        """Return float32 [N, columns]: the numbers that the integers represent."""
        rows, blocks = self.scales.shape
        integers, zero_points = self.integers, np.uint8(1 << (self.bits - 1))
        if self.bits == 4:
            integers = _unpack_nibbles(integers).reshape(rows, blocks, -1)
        found = integers.astype(np.float32)
        if self.zero_points is None:
            found -= zero_points
        else:
            found -= _unpack_nibbles(self.zero_points)[:, :blocks, None]
        found *= self.scales[..., None]
        whole: NDArray[np.float32] = found.reshape(rows, -1)[:, : self.columns]
        return whole


def round_matrix(weight: NDArray[np.float32], bits: int) -> RoundedMatrix:
    """Return ``weight`` [N, K] rounded to ``bits``, 4 or 8, for a product that reads zero points.

    A block of 4-bit integers has the symmetric form of ``quantize_matrix``, or integers from the
    smallest entry to the largest with a zero point of their own, whichever leaves less error. So a
    matrix whose blocks are symmetric already (GGUF's Q4_0) loses nothing."""
    if bits != 4:
        return RoundedMatrix(*quantize_matrix(weight, bits), None, weight.shape[1], bits)
    packed, scales = quantize_matrix(weight, 4)
    rows, blocks = scales.shape
    columns = weight.shape[1]
    integers = _unpack_nibbles(packed).reshape(rows, blocks, BLOCK_SIZE)
    zero_points = np.full((rows, blocks + blocks % 2), 8, dtype=np.uint8)
    if missing := blocks * BLOCK_SIZE - columns:
        weight = np.pad(weight, ((0, 0), (0, missing)))
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        values = weight[part].astype(np.float32).reshape(-1, blocks, BLOCK_SIZE)
        symmetric = (integers[part].astype(np.float32) - 8) * scales[part, :, None]
        error = np.square(values - symmetric).sum(axis=-1)
        for share in _RANGE_SHARES:
            shifted, scale, zero = _fit_range(values, share)
            rounded = (shifted - zero[..., None]) * scale[..., None]
            left = np.square(values - rounded).sum(axis=-1)
            better = left < error
            error = np.where(better, left, error)
            integers[part] = np.where(better[..., None], shifted, integers[part])
            scales[part] = np.where(better, scale, scales[part])
            zero_points[part, :blocks] = np.where(better, zero, zero_points[part, :blocks])
    return RoundedMatrix(_pack_nibbles(integers), scales, _pack_nibbles(zero_points), columns, 4)


def _fit_range(
    values: NDArray[np.float32], share: float
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return integers from 0 to 15, scales and zero points of blocks [R, B, 32].

    The integers cover the middle ``share`` of the range from the smallest entry to the largest,
    with zero in it. For fixed integers the scale is the one that leaves the least error."""
    low = np.minimum(values.min(axis=-1, keepdims=True), 0)
    high = np.maximum(values.max(axis=-1, keepdims=True), 0)
    span = high - low
    step = np.maximum(span * np.float32(share / 15), np.float32(1e-30))
    zero = np.clip(np.rint(-(low + span * np.float32((1 - share) / 2)) / step), 0, 15)
    shifted = np.clip(np.rint(values / step) + zero, 0, 15)
    centred = shifted - zero
    product = np.einsum("rbk,rbk->rb", values, centred)
    square = np.einsum("rbk,rbk->rb", centred, centred)
    return shifted, product / np.maximum(square, 1.0), zero[..., 0]


def _pack_nibbles(integers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return 4-bit integers [..., even count] two a byte, low nibble first."""
    return integers[..., 0::2] | (integers[..., 1::2] << np.uint8(4))


def _unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Undo ``_packed``."""
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def _fit_blocks(
    values: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return the integers (with zero point) and scales of blocks [R, B, 32] with the least squared
    error.

    For fixed integers q the best scale is <w, q> / <q, q>, which leaves the error <w, w> - <w,
    q>**2 / <q, q>. So the largest second term wins."""
    half = 1 << (bits - 1)
    peak = np.abs(values).max(axis=-1, keepdims=True)
    inverse_peak = np.divide(half, peak, out=np.zeros_like(peak), where=peak > 0)
    best = np.zeros_like(values)
    best_gain = np.full(values.shape[:2], -1.0, dtype=np.float32)
    scales = np.zeros(values.shape[:2], dtype=np.float32)
    for factor in _GRID_4 if bits == 4 else _GRID_8:
        for sign in (-1.0, 1.0):
            rounded = np.rint(values * (inverse_peak * np.float32(sign / factor)))
            np.clip(rounded, -half, half - 1, out=rounded)
            product = np.einsum("rbk,rbk->rb", values, rounded)
            square = np.einsum("rbk,rbk->rb", rounded, rounded)
            safe = np.maximum(square, 1.0)
            gain = product * product / safe
            better = gain > best_gain
            best_gain = np.where(better, gain, best_gain)
            scales = np.where(better, product / safe, scales)
            best = np.where(better[..., None], rounded, best)
    return (best + half).astype(np.uint8), scales


CONTRIB = "com.microsoft"
INT8_ACCUMULATION = 4  # MatMulNBits accuracy_level: activations may be rounded to 8 bits


def matmul_attributes(rows: int, columns: int, bits: int) -> dict[str, Any]:
    """Return the attributes of ``MatMulNBits`` with a matrix [rows, columns]."""
    accuracy = {"block_size": BLOCK_SIZE, "accuracy_level": INT8_ACCUMULATION}
    return {"N": rows, "K": columns, "bits": bits, **accuracy}
