"""Does a graph with a cache behave like one? Four tokens are decoded in four ways and compared.

    at once from nothing    a b c d
    one by one behind two   a b | c | d
    again after a rollback  a b c | d     the last token alone is taken back
    several behind a cache  a | b c d     all but the first token are taken back

The logits behind ``d`` must agree but for rounding. Early merged decoders were traced with one
token behind the cache, so that in a longer feed a token sees those after it. That moves the logits
behind ``d`` little, but those behind the first token of a long feed much, so they are compared too.
Activations that are rounded to 8 bits for a whole tensor at a time differ a good deal between all
these ways, a wrong mask or a wrong row of the cache far more, so the bound between them is wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Rows = NDArray[np.float32]
"""Logits of every token fed, or of the last one alone, [rows, V]."""
LARGEST_DIFFERENCE = 0.35
"""Root mean square of a difference of logits, over their standard deviation."""
TOKENS = (1, 2, 3, 1)
_LATER = (4, 5, 6, 7, 8, 9, 10, 11)
CHECKED_LENGTH = 2 + len(_LATER)
"""The most tokens that are cached while checking."""


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


def check_behaviour(
    decode_rows: Callable[[int, Sequence[int]], Rows], vocabulary_size: int
) -> Behaviour:
    """``decode_rows(keep, tokens)`` cuts the cache to ``keep`` tokens, feeds the others and returns
    a copy of the logits."""

    def decode(keep_length: int, tokens: Sequence[int]) -> Row:
        last: Row = decode_rows(keep_length, tokens)[-1]
        return last

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
    alone = decode(1, (b,))
    rows = decode_rows(1, (b, *(token % vocabulary_size for token in _LATER)))
    if len(rows) > 1:
        several = max(several, relative_difference(rows[0], alone))
    chunks = several <= LARGEST_DIFFERENCE
    return Behaviour(True, chunks, difference=max(largest, several if chunks else 0.0))


def relative_difference(row: Row, reference: Row) -> float:
    """Root mean square of the difference over the reference's standard deviation."""
    scale = max(float(reference.std()), 1e-12)
    return float(np.sqrt(np.mean((row - reference) ** 2))) / scale
