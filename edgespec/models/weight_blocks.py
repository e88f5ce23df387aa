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

Blocks are rounded some thousand at a time, in threads. They lie side by side, [32, blocks], so each
step of the arithmetic is one vector operation on numbers that are in the processor's cache.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 32
CONTRIB = "com.microsoft"
INT8_ACCUMULATION = 4  # MatMulNBits accuracy_level: activations may be rounded to 8 bits

# Multiples of the full-range scale (largest magnitude over integer range) that are tried, with both
# signs.
_GRID_4 = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 1.07, 1.14)
_GRID_8 = (1.0, 128 / 127)  # the second is that of GGUF's Q8_0, whose integers are kept so
# Shares of a block's range that its integers may cover where it has a zero point. More shares, or
# other zero points, leave 0.2 % less error.
_RANGE_SHARES = (1.0, 0.93)
_BLOCKS_AT_ONCE: Final = 4096
"""Blocks whose numbers, 512 KiB, are rounded together; a few such arrays are in the cache."""
_MAX_THREADS: Final = 8

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """A matrix [N, columns] as ``MatMulNBits`` reads it."""

    integers: Bytes
    scales: Floats
    zero_points: Bytes | None
    """[N, ceil(B / 2)]: the zero points of the blocks, packed as 4-bit integers are; None where all
    are the implied one."""
    columns: int
    bits: int
    squares: float = 0.0
    """Sum of the squares of the weights."""
    lost_squares: float = 0.0
    """Sum of the squares of what rounding changed."""

    def values(self) -> Floats:
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
        whole: Floats = found.reshape(rows, -1)[:, : self.columns]
        return whole


_KINDS: Final = (
    ("embedding", ("embed",)),
    ("attention", ("_attn.", "q_proj", "o_proj", ".qkv", ".out")),
    ("MLP", (".mlp.", "gate", ".down")),
)
"""Kinds of matrices, and parts of the names by which they are known. All others are heads."""


class RoundingLoss:
    """The loss of rounding a model's matrices, by their kind."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        """Sums of the squares of the weights and of the differences."""

    def add(self, name: str, squares: float, lost_squares: float) -> None:
        """Add the matrix ``name``, with the sums of a ``RoundedMatrix``."""
        kind = next((one for one, parts in _KINDS if any(part in name for part in parts)), "head")
        before = self._sums.get(kind, (0.0, 0.0))
        self._sums[kind] = before[0] + squares, before[1] + lost_squares

    def relative_errors(self) -> dict[str, float]:
        """Return the error of each kind of matrix: the root of the summed squares of the
        differences over that of the weights."""
        return {kind: _divide_roots(*sums) for kind, sums in self._sums.items()}

    @property
    def relative_error(self) -> float:
        """The error of all matrices together; 0 if none was rounded."""
        squares, lost = (math.fsum(sums[part] for sums in self._sums.values()) for part in (0, 1))
        return _divide_roots(squares, lost)

    def __str__(self) -> str:
        parts = ", ".join(f"{kind} {one:.1%}" for kind, one in self.relative_errors().items())
        return f"rounding changed the weights by {self.relative_error:.1%} ({parts})"


def _divide_roots(squares: float, lost_squares: float) -> float:
    return math.sqrt(lost_squares / squares) if squares > 0.0 else 0.0


def quantize_matrix(weight: Floats, bits: int) -> tuple[Bytes, Floats]:
    """Return (integers, scales) of ``weight`` [N, K] in the layout described at the head of this
    file. Values are rounded to nearest with fitted block scales; the result is deterministic.
    Raises ``ValueError`` for ``bits`` other than 4 and 8."""
    found = round_matrix(weight, bits, shifts=False)
    return found.integers, found.scales


def round_matrix(weight: Floats, bits: int, *, shifts: bool = True) -> RoundedMatrix:
    """Return ``weight`` [N, K] rounded to ``bits``, 4 or 8.

    ``shifts`` is for a product that reads zero points: a block of 4-bit integers then has the
    symmetric form of ``quantize_matrix``, or integers from the smallest entry to the largest with a
    zero point of their own, whichever leaves less error. So a matrix whose blocks are symmetric
    already (GGUF's Q4_0) loses nothing. Raises ``ValueError`` for other ``bits``."""
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}, but must be 4 or 8")
    rows, columns = weight.shape
    blocks, shifts = -(-columns // BLOCK_SIZE), shifts and bits == 4
    if missing := blocks * BLOCK_SIZE - columns:
        weight = np.pad(weight, ((0, 0), (0, missing)))
    count = rows * blocks
    integers = np.empty((count, BLOCK_SIZE * bits // 8), np.uint8)
    scales, zero_points = np.empty(count, np.float32), np.full(count, 8, np.uint8)
    flat = weight.reshape(count, BLOCK_SIZE)

    def round_part(part: slice) -> tuple[float, float]:
        values = np.ascontiguousarray(flat[part].T, np.float32)
        squares = np.einsum("kn,kn->n", values, values)
        found, scale, lost = _fit_blocks(values, bits, squares)
        if shifts:
            zero_points[part] = _shift_where_better(values, found, scale, lost)
        scales[part] = scale
        whole = found.astype(np.uint8)
        if bits == 4:
            whole = whole[0::2] | (whole[1::2] << np.uint8(4))
        integers[part] = whole.T
        return float(squares.sum(dtype=np.float64)), float(lost.sum(dtype=np.float64))

    sums = _in_threads(round_part, list(_list_parts(count)))
    packed_zeros = None
    if shifts:
        even = np.full((rows, blocks + blocks % 2), 8, np.uint8)
        even[:, :blocks] = zero_points.reshape(rows, blocks)
        packed_zeros = _pack_nibbles(even)
    return RoundedMatrix(
        integers=integers.reshape(rows, blocks, -1),
        scales=scales.reshape(rows, blocks),
        zero_points=packed_zeros,
        columns=columns,
        bits=bits,
        squares=math.fsum(one for one, _ in sums),
        lost_squares=math.fsum(one for _, one in sums),
    )


def _list_parts(count: int) -> Iterator[slice]:
    for start in range(0, count, _BLOCKS_AT_ONCE):
        yield slice(start, min(count, start + _BLOCKS_AT_ONCE))


def _in_threads(
    work: Callable[[slice], tuple[float, float]], parts: list[slice]
) -> list[tuple[float, float]]:
    """Return the results of ``work`` for each part, in their order."""
    threads = min(_MAX_THREADS, os.cpu_count() or 1, len(parts))
    if threads <= 1:
        return [*map(work, parts)]
    with ThreadPoolExecutor(threads) as pool:
        return [*pool.map(work, parts)]


def _fit_blocks(values: Floats, bits: int, squares: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the integers (with zero point) of blocks [32, n], their scales and their squared
    errors, which are the least.

    For fixed integers q the best scale is <w, q> / <q, q>, which leaves the error <w, w> - <w,
    q>**2 / <q, q>. So the largest second term wins. ``squares`` are <w, w>."""
    half = 1 << (bits - 1)
    peak = np.abs(values).max(axis=0)
    inverse = np.divide(np.float32(half), peak, out=np.zeros_like(peak), where=peak > 0)
    best_gain, scales = np.full_like(peak, -1.0), np.zeros_like(peak)
    multipliers = np.zeros_like(peak)
    rounded, clipped = np.empty_like(values), np.empty_like(values)
    for factor in _GRID_4 if bits == 4 else _GRID_8:
        for sign in (-1.0, 1.0):
            multiplier = inverse * np.float32(sign / factor)
            if sign < 0.0:
                np.multiply(values, multiplier, out=rounded)
                np.rint(rounded, out=rounded)
                np.clip(rounded, -half, half - 1, out=clipped)
            elif half / factor < half - 0.5:
                break  # nothing is clipped, so the other sign gives the same error
            else:
                np.negative(rounded, out=clipped)
                np.clip(clipped, -half, half - 1, out=clipped)
            product = np.einsum("kn,kn->n", values, clipped)
            square = np.maximum(np.einsum("kn,kn->n", clipped, clipped), 1.0)
            gain = product * product / square
            better = gain > best_gain
            np.copyto(best_gain, gain, where=better)
            np.copyto(scales, product / square, where=better)
            np.copyto(multipliers, multiplier, where=better)
    np.multiply(values, multipliers, out=rounded)
    np.rint(rounded, out=rounded)
    np.clip(rounded, -half, half - 1, out=rounded)
    rounded += half
    return rounded, scales, np.maximum(squares - best_gain, 0.0)


def _shift_where_better(values: Floats, integers: Floats, scales: Floats, lost: Floats) -> Bytes:
    """Give blocks [32, n] zero points of their own where that leaves less error, and return the
    zero points. ``integers``, ``scales`` and ``lost``, the squared errors, are changed there."""
    zero_points = np.full(len(scales), 8, np.uint8)
    # The error of the symmetric form is computed as that of the other is, not from large terms.
    np.copyto(lost, _squared_error(values, integers - 8, scales))
    for share in _RANGE_SHARES:
        shifted, scale, zero = _fit_range(values, share)
        left = _squared_error(values, shifted - zero, scale)
        better = left < lost
        np.copyto(lost, left, where=better)
        np.copyto(integers, shifted, where=better)
        np.copyto(scales, scale, where=better)
        np.copyto(zero_points, zero.astype(np.uint8), where=better)
    return zero_points


def _squared_error(values: Floats, centred: Floats, scales: Floats) -> Floats:
    """Return the squared errors of blocks [32, n] as the integers ``centred`` times ``scales``."""
    left = values - centred * scales
    found: Floats = np.einsum("kn,kn->n", left, left)
    return found


def _fit_range(values: Floats, share: float) -> tuple[Floats, Floats, Floats]:
    """Return integers from 0 to 15, scales and zero points of blocks [32, n].

    The integers cover the middle ``share`` of the range from the smallest entry to the largest,
    with zero in it. For fixed integers the scale is the one that leaves the least error."""
    low = np.minimum(values.min(axis=0), 0)
    high = np.maximum(values.max(axis=0), 0)
    span = high - low
    step = np.maximum(span * np.float32(share / 15), np.float32(1e-30))
    zero = np.clip(np.rint(-(low + span * np.float32((1 - share) / 2)) / step), 0, 15)
    shifted = np.clip(np.rint(values / step) + zero, 0, 15)
    centred = shifted - zero
    product = np.einsum("kn,kn->n", values, centred)
    square = np.einsum("kn,kn->n", centred, centred)
    return shifted, product / np.maximum(square, 1.0), zero


def _pack_nibbles(integers: Bytes) -> Bytes:
    """Return 4-bit integers [..., even count] two a byte, low nibble first."""
    return integers[..., 0::2] | (integers[..., 1::2] << np.uint8(4))


def _unpack_nibbles(packed: Bytes) -> Bytes:
    """Undo ``_pack_nibbles``."""
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def matmul_attributes(rows: int, columns: int, bits: int) -> dict[str, Any]:
    """Return the attributes of ``MatMulNBits`` with a matrix [rows, columns]."""
    accuracy = {"block_size": BLOCK_SIZE, "accuracy_level": INT8_ACCUMULATION}
    return {"N": rows, "K": columns, "bits": bits, **accuracy}
