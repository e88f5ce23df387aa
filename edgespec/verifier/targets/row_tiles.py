"""Matrix products in which a row's bits depend neither on its neighbours nor on its place.

Theory of operation. A library of matrix products chooses its kernel by the shape, so the same row
can come out with other last bits among 8 rows than among 64. Here a product is only ever called
with row counts, called *sizes*, of a short list: the rows of a pass are padded to a multiple of the
smallest, the *base*, and cut into pieces. ``agreeing_sizes`` finds the list for one product: each
row, at each place, must have the bits that it has in the base. Base 1 computes row by row.

Kernels may also choose by alignment, so pieces start at multiples of ``ALIGNMENT_BYTES``. The
number of threads may change how sums are split, so a product always has the same number
(``cpu_threads.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional

from edgespec.verifier.targets import cpu_threads
from edgespec.verifier.targets.linear_layers import PackedLinear
from edgespec.verifier.targets.quantized_linear import QuantizedLinear

Product = Callable[[torch.Tensor], torch.Tensor]
"""Takes rows [count, width], gives rows [count, any]."""
TiledLayer = torch.nn.Linear | PackedLinear | QuantizedLinear

ALIGNMENT_BYTES = 64
# torch's longest vector loop takes this many elements at once: two vectors of 32 bfloat16.
_VECTOR_ELEMENTS = 64
# When a layer is tried, this many rows of the weights are random; further rows repeat them.
_DISTINCT_OUTPUTS = 512
# Each correction cancels what the others leave of a row's sum, down to the last bit of bfloat16.
_CORRECTIONS = 4
# Reading the weights once takes as long as computing 17 to 20 rows on two shapes
# (docs/measurements/passes.md).
_PIECE_ROWS = 16
SIZES = {
    1: (*range(1, 17), 32, 64, 128, 256, 512),
    2: (2, 4, 8, 16, 32, 64, 128),
    4: (4, 8, 16, 32, 64, 128),
    8: (8, 16, 32, 64, 128),
    16: (16, 32, 48, 64, 128),
    32: (32, 64, 96, 128),
    64: (64, 128, 256, 512, 1024),
    128: (128, 256, 512, 1024),
}


@dataclass(frozen=True, slots=True)
class RowTiles:
    """How a pass is padded and cut so that its arithmetic is the same under every schedule."""

    base: int = 8
    """The smallest row count of a matrix product. A layer may have a larger one of its own, to
    which it pads its rows."""
    row_multiple: int = 8
    """The rows of a pass are padded to a multiple of this."""
    attention_sizes: tuple[int, ...] = SIZES[8]
    """Row counts of an attention group, ascending."""
    attention_batch: int = 1
    """The number of attention groups that one call may compute together without changing a bit of
    them."""
    largest: int = 8
    """The largest row count that agrees with ``base`` in every matrix product."""

    def __str__(self) -> str:
        if self.largest == 1:
            return "row by row"
        more = f" to {self.largest}" if self.largest > self.base else ""
        return f"row tiles of {self.base}{more}"


def cut(count: int, sizes: tuple[int, ...], piece_rows: int = _PIECE_ROWS) -> tuple[int, ...]:
    """Return row counts among ``sizes`` (ascending) that cover ``count`` rows at the least cost,
    the largest first.

    A piece costs as much as its rows and ``piece_rows`` more, because it reads all weights. So 30
    rows are one piece of 32, and not pieces of 16, 8, 4 and 2."""
    whole, rest = divmod(count, sizes[-1])
    return (sizes[-1],) * whole + _cheapest_pieces(rest, sizes, piece_rows)


@lru_cache(maxsize=4096)
def _cheapest_pieces(count: int, sizes: tuple[int, ...], piece_rows: int) -> tuple[int, ...]:
    if count <= 0:
        return ()
    choices = [
        (size, *_cheapest_pieces(count - size, sizes, piece_rows)) for size in reversed(sizes)
    ]
    best = min(choices, key=lambda pieces: sum(pieces) + piece_rows * len(pieces))
    return tuple(sorted(best, reverse=True))


def whole_vector_rows(base: int, widths: Iterable[int]) -> int:
    """Return the least multiple of ``base`` at which rows of each of ``widths`` fill whole vectors.

    torch computes silu and cosine in vectors. Elements that do not fill a vector are computed by a
    scalar function, whose results differ in the last bit."""
    return math.lcm(base, *(_VECTOR_ELEMENTS // math.gcd(_VECTOR_ELEMENTS, w) for w in widths))


def agreeing_sizes(
    product: Product, probes: torch.Tensor, base: int, candidates: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the row counts at which ``product`` gives every row of ``probes`` [count, width] the
    bits that it has in ``base``, the base first.

    Row counts are the multiples of the base among ``candidates``, or ``SIZES`` of the base.
    Returns nothing when equal rows differ in the base itself."""
    expected = []
    for probe in probes:
        tile = product(probe.expand(base, -1).contiguous())
        if not torch.equal(tile, tile[:1].expand_as(tile)):
            return ()
        expected.append(tile[0].clone())
    reference, count = torch.stack(expected), len(probes)
    sizes = [base]
    larger = [size for size in candidates if size > base and size % base == 0]
    for size in larger if candidates else SIZES[base][1:]:
        # Repeated with a shift, so that no two neighbouring groups of rows look the same.
        which = torch.tensor([(i + i // count) % count for i in range(size)], device=probes.device)
        if torch.equal(product(probes[which]), reference[which]):
            sizes.append(size)
    return tuple(sizes)


def agreeing_linear_sizes(
    weight: torch.Tensor, bias: torch.Tensor | None, base: int
) -> tuple[int, ...]:
    """Return the ``agreeing_sizes`` of a linear layer.

    It is tried with weights of its shape and alignment whose products nearly cancel, because a
    bfloat16 result would hide most differences of its float32 sum."""
    tried = _cancelling_like(weight)
    zero_bias = None if bias is None else torch.zeros_like(bias)
    product = partial(functional.linear, weight=tried, bias=zero_bias)
    return agreeing_sizes(product, _equal_numbers(tried), base)


def agreeing_packed_sizes(layer: PackedLinear, base: int) -> tuple[int, ...]:
    """Return the ``agreeing_linear_sizes`` of a packed layer."""
    shape = (layer.out_features, layer.in_features)
    zero_bias = None if layer.bias is None else torch.zeros_like(layer.bias)
    # The plain weights are dropped once they are packed, for a large head takes much memory.
    tried = PackedLinear(_cancelling_like(torch.empty(shape, dtype=layer.dtype)), zero_bias)
    rows = _equal_numbers(torch.empty((1, layer.in_features), dtype=layer.dtype))
    return agreeing_sizes(partial(cpu_threads.in_threads, tried.product), rows, base)


def in_pieces(rows: torch.Tensor, product: Product, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return ``product`` of ``rows`` [..., width], computed in pieces whose row counts are among
    ``sizes``; rows of zeros fill up the last piece."""
    flat = rows.reshape(-1, rows.shape[-1])
    count, cuts = len(flat), cut(len(flat), sizes)
    if missing := sum(cuts) - count:
        flat = functional.pad(flat, (0, 0, 0, missing))
    pieces = [
        product(piece.clone() if piece.data_ptr() % ALIGNMENT_BYTES else piece)
        for piece in flat.split(cuts)
    ]
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out[:count].view(*rows.shape[:-1], -1)


def install(layers: Iterable[tuple[TiledLayer, tuple[int, ...]]]) -> None:
    """Make each layer compute in pieces of its sizes, until ``remove``."""
    for layer, sizes in layers:
        if isinstance(layer, torch.nn.Linear):
            product: Product = partial(functional.linear, weight=layer.weight, bias=layer.bias)
        elif isinstance(layer, PackedLinear):
            product = partial(cpu_threads.in_threads, layer.product)
        else:
            product = layer.product
        forward: Any = partial(in_pieces, product=product, sizes=sizes)
        layer.forward = forward  # type: ignore[method-assign]


def remove(layers: Iterable[TiledLayer]) -> None:
    """Undo ``install``. Layers that compute in one piece stay as they are."""
    for layer in layers:
        layer.__dict__.pop("forward", None)


def _cancelling_like(weight: torch.Tensor) -> torch.Tensor:
    """Return weights whose rows sum to nearly zero, with the shape, type and alignment of
    ``weight``."""
    outputs, width = weight.shape
    generator = torch.Generator().manual_seed(width)
    shape = (min(outputs, _DISTINCT_OUTPUTS), width)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    # Magnitudes spread over many powers of two, so that float32 has to round their sums.
    reach = 8 if weight.dtype == torch.float16 else 12
    block = sign * torch.exp2(reach * (2 * torch.rand(shape, generator=generator) - 1))
    block = block.to(weight.dtype)
    corrections = torch.randperm(width, generator=generator)[:_CORRECTIONS]
    block[:, corrections] = 0
    for column in corrections.tolist():
        block[:, column] = -block.double().sum(dim=1).to(weight.dtype)
    spare = ALIGNMENT_BYTES // weight.element_size()
    memory = torch.empty(weight.numel() + spare, dtype=weight.dtype, device=weight.device)
    distance = (weight.data_ptr() - memory.data_ptr()) % ALIGNMENT_BYTES
    start = distance // weight.element_size()
    like = memory[start : start + weight.numel()].view(outputs, width)
    repeats = -(-outputs // shape[0])
    return like.copy_(block.to(weight.device).repeat(repeats, 1)[:outputs])


def _equal_numbers(weight: torch.Tensor) -> torch.Tensor:
    """Return rows [4, inputs] to try with ``_cancelling_like`` weights; each row repeats one
    number."""
    scales = torch.tensor([1.0, -2.0, 4.0, -0.5], dtype=weight.dtype, device=weight.device)
    return scales[:, None].expand(-1, weight.shape[1])
