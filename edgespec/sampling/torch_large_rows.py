"""One token of one row over a large vocabulary, on a CPU: what ``sampler.py`` chooses, to the bit.

Theory of operation. The dense way gives every token its noise, warps every token and takes the
largest. But noise is bounded: of 23 bits it is at most -ln(-ln(1 - 2^-24)) = 16.64. So a token that
lies further behind the best one than the noise can make up for cannot be chosen, and in most rows
that is nearly every token; and where scores are so flat that it is not, nearly every token has too
little noise, which its hash tells without a logarithm. Top-k needs the k largest, found by
selection. Top-p needs the sum over all, but an order only for the tokens that may belong to the
nucleus: those of less than (1 - p) / 2n of the sum make up no more than half of what is cut off.

To the bit: what is left is computed by the same functions as in the dense way, in the same order.
Only the sum over all tokens is added in another order, so a nucleus whose edge is nearer to p than
such sums are sure of is left to the dense way.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from edgespec.core.protocol.sampling import (
    GOLDEN,
    MIX_A,
    MIX_B,
    SamplingParams,
    gumbel,
    noise_bits,
    position_keys,
)

Row = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint32]

_NOISE_MAX = gumbel(0xFFFFFFFF)
# What float32 may err by in a score, a noise and their sum: a bound with much to spare.
_SLACK, _SLACK_SHARE = 0.01, 1e-5
# float64 sums of 10^7 float32 numbers are surer than this share.
_SUM_ERROR = 1e-8
_VECTOR_ELEMENTS = 64
# Up to this share of a row, tokens are taken out of it.
_FEW = 1 / 8
# Of tokens at most so far behind the best one so many are tried for a bound.
_WELL, _SAMPLED_MAX = 6.0, 4096


def choose_in_row(row: Row, params: SamplingParams, position: int) -> int | None:
    """The token of a row [vocabulary] of finite logits or -inf, biased and penalised already; None
    where the dense way must tell."""
    best = int(row.argmax())
    if params.greedy:
        return best
    temperature = np.float32(params.temperature)
    with np.errstate(over="ignore"):
        top = row[best] / temperature
    if not math.isfinite(top):
        return None
    least = float(top) + gumbel(noise_bits(params.seed, position, best)) - _NOISE_MAX
    if params.min_p > 0.0:
        least = max(least, float(top) + math.log(params.min_p))
    slack = _SLACK + _SLACK_SHARE * abs(float(top))
    last: np.float32 | None = None
    room = 0
    if 0 < params.top_k < len(row) or params.top_p < 1.0:
        cut = _cut(row, top, temperature, params)
        if cut is None:
            return None
        last, room = cut
        least = max(least, float(last))
    # Whatever fails this cannot be chosen; those that pass may still be cut off.
    able = row >= np.float32((least - slack) * float(temperature))
    few = np.count_nonzero(able) <= _FEW * len(row)
    places = np.flatnonzero(able) if few else np.arange(0)
    scores = (row[places] if few else row) / temperature
    if last is not None:
        equal = scores == last
        if room < np.count_nonzero(equal):
            equal &= equal.cumsum() <= room
        scores[(scores <= last) & ~equal] = -np.inf
    if params.min_p > 0.0:
        scores[scores < top + np.float32(math.log(params.min_p))] = -np.inf
    base = _token_base(len(row))
    keys = position_keys(params.seed, position)
    chosen = _loudest(base[places] if few else base, scores, float(top), slack, keys)
    return int(places[chosen]) if few else chosen


def _cut(
    row: Row, top: np.float32, temperature: np.float32, params: SamplingParams
) -> tuple[np.float32, int] | None:
    """The lowest score that top-k and top-p leave, and how many of the tokens that have it; None
    where rounding would decide."""
    candidates, total = row, None
    if 0 < params.top_k < len(row):
        edge = np.partition(row, len(row) - params.top_k)[len(row) - params.top_k]
        least = -math.inf
        if edge > -math.inf:
            # Logits that differ may be equal scores: look a little further, then by score.
            least = float(edge) - 1e-5 * (abs(float(edge)) + float(temperature))
        candidates = row[row > np.float32(least)] / temperature
        candidates = candidates[candidates >= edge / temperature]
    elif params.top_p < 1.0:
        scores = row / temperature
        mass = _exp(scores - top)
        total = float(mass.sum(dtype=np.float64))
        candidates = scores[mass >= 0.5 * (1.0 - params.top_p) * total / len(row)]
    ordered = np.sort(candidates)[::-1]
    count = len(ordered)
    if params.top_p < 1.0:
        sums = _exp(ordered - top).cumsum(dtype=np.float64)
        error = 0.0 if total is None else _SUM_ERROR * total
        wanted = params.top_p * (float(sums[-1]) if total is None else total)
        # A token is in the nucleus while the mass before it is too small; the first always is.
        count = 1 + int((sums[:-1] < wanted - error).sum())
        if error and (
            float(sums[-1]) < wanted + error or 1 + int((sums[:-1] < wanted + error).sum()) != count
        ):
            return None
    last = ordered[count - 1]
    if not math.isfinite(last):
        return None
    return last, count - int((ordered > last).sum())


def _whole_vectors(count: int) -> int:
    return -(-count // _VECTOR_ELEMENTS) * _VECTOR_ELEMENTS


def _exp(values: Row) -> Row:
    """torch's exponential of each value as a row of whole vectors has it."""
    padded = np.zeros(_whole_vectors(len(values)), dtype=np.float32)
    padded[: len(values)] = values
    torch.from_numpy(padded).exp_()
    return padded[: len(values)]


def _loudest(base: Bits, scores: Row, top: float, slack: float, keys: tuple[int, int]) -> int:
    """The place of the largest score with its noise, the first of equals; ``top`` is the largest
    score, -inf cannot be chosen. ``base`` are the tokens' ``_token_base``."""
    places: Places | None = None
    if len(scores) > _SAMPLED_MAX:
        # The loudest of some tokens that score well is a bound that few others reach.
        some = np.flatnonzero(scores >= np.float32(top - _WELL))[:_SAMPLED_MAX]
        uniform = ((_hash(base[some], keys) >> np.uint32(9)) + 0.5) * 2.0**-23
        least = float((scores[some] - np.log(-np.log(uniform))).max()) - slack
        bits = _hash(base, keys)
        loud = bits >= np.uint32(_bits_below(least - top - slack))
        loud &= scores >= np.float32(least - _NOISE_MAX - slack)
        places = np.flatnonzero(loud)
        bits, scores = bits[places], scores[places]
    else:
        bits = _hash(base, keys)
    uniforms = np.full(_whole_vectors(len(bits)), 0.5, dtype=np.float32)
    noise = uniforms[: len(bits)]
    noise[:] = bits >> np.uint32(9)
    noise += np.float32(0.5)
    noise *= np.float32(2.0**-23)
    torch.from_numpy(uniforms).log_().neg_().log_().neg_()
    chosen = int((scores + noise).argmax())
    return chosen if places is None else int(places[chosen])


def _bits_below(noise: float) -> int:
    """A number that the bits of every token with so much noise reach."""
    if noise < -3.0:  # almost all have more
        return 0
    bits = math.exp(-math.exp(-noise)) * 2.0**32
    return max(0, min(0xFFFFFFFF, int(bits)) - (1 << 10))


def _hash(bits: Bits, keys: tuple[int, int]) -> Bits:
    """``core/protocol/noise.noise_bits`` of tokens given by their ``_token_base``."""
    bits = bits + np.uint32(keys[0])
    spare = np.empty_like(bits)
    _mix(bits, spare)
    bits ^= np.uint32(keys[1])
    _mix(bits, spare)
    return bits


def _mix(bits: Bits, spare: Bits) -> None:
    for shift, factor in ((16, MIX_A), (13, MIX_B)):
        np.right_shift(bits, np.uint32(shift), out=spare)
        np.bitwise_xor(bits, spare, out=bits)
        np.multiply(bits, np.uint32(factor), out=bits)
    np.right_shift(bits, np.uint32(16), out=spare)
    np.bitwise_xor(bits, spare, out=bits)


@lru_cache(maxsize=4)
def _token_base(vocabulary_size: int) -> Bits:
    return np.arange(vocabulary_size, dtype=np.uint32) * np.uint32(GOLDEN)
