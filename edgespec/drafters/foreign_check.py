"""Does a graph with a cache behave like one? Four tokens are decoded in four ways and compared.

    at once from nothing    a b c d
    one by one behind two   a b | c | d
    again after a rollback  a b c | d     the last token alone is taken back
    several behind a cache  a | b c d     all but the first token are taken back

The logits behind ``d`` must agree but for rounding. Activations that are rounded to 8 bits for a
whole tensor at a time differ a good deal between these ways, a wrong mask or a wrong row of the
cache far more, so the bound between them is wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
LARGEST_DIFFERENCE = 0.35
"""Root mean square of a difference of logits, over their standard deviation."""
TOKENS = (1, 2, 3, 1)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a graph may be used."""

    works: bool
    """Steps and rollbacks give what decoding from nothing gives."""
    chunks: bool = False
    """May several tokens be fed behind a cache, or one at a time only?"""
    in_place: bool = False
    """Is a rollback a smaller number, or a copy?"""
    reason: str = ""
    """Why it does not work, or why a rollback is a copy."""
    difference: float = 0.0
    """The largest that was let pass, as ``LARGEST_DIFFERENCE`` counts."""


def check_behaviour(decode: Callable[[int, Sequence[int]], Row], vocabulary_size: int) -> Behaviour:
    """``decode(keep, tokens)`` cuts the cache to ``keep`` tokens, feeds the others and returns a
    copy of the logits behind the last one."""
    a, b, c, d = (token % vocabulary_size for token in TOKENS)
    whole = decode(0, (a, b, c, d))
    if not np.isfinite(whole).all():
        return Behaviour(False, reason="its logits are not all finite")
    decode(0, (a, b))
    decode(2, (c,))
    single = decode(3, (d,))
    again = decode(3, (d,))
    ways = (
        (single, "decoding token by token differs from decoding at once"),
        (again, "decoding after a rollback differs from decoding at once"),
    )
    largest = 0.0
    for row, what in ways:
        difference = relative_difference(row, whole)
        if not difference <= LARGEST_DIFFERENCE:
            reason = f"{what} by {difference:.2f} standard deviations of the logits"
            return Behaviour(False, reason=reason, difference=difference)
        largest = max(largest, difference)
    several = relative_difference(decode(1, (b, c, d)), whole)
    chunks = several <= LARGEST_DIFFERENCE
    return Behaviour(True, chunks, difference=max(largest, several if chunks else 0.0))


def relative_difference(row: Row, reference: Row) -> float:
    """Root mean square of the difference over the reference's standard deviation."""
    scale = max(float(reference.std()), 1e-12)
    return float(np.sqrt(np.mean((row - reference) ** 2))) / scale
