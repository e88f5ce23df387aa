"""The draft's own law: one row of logits to the ``width`` best guesses.

Follows ``core/protocol/sampling.warp`` in order (bias, penalties, temperature, top-k, top-p, min-p)
and adds the shared noise. The ``width`` best perturbed scores are that many siblings drawn without
replacement (Kool, van Hoof, Welling 2019), best first; the first one is the token the scalar
``choose`` picks, up to float32 rounding of near-ties, which costs speed and never correctness.

Truncation may leave fewer tokens than ``width``. A sibling outside the draft's own support can
still be the target's token, because the target truncates its own distribution, so missing places
are filled from outside, after all inside tokens, by untruncated score plus noise.

A row of 151,936 scores passes through a few array operations of 0.02 to 0.4 ms each: nothing is
sorted as a whole, and noise bits become numbers only for tokens that can still win.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edgespec.core.ports import Candidate
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.sampling.array_noise import (
    LARGEST_NOISE,
    gumbel,
    gumbel_noise,
    least_bits,
    noise_bits,
    row_bits,
)
from edgespec.sampling.nucleus import EVERYTHING, Support, nucleus
from edgespec.sampling.token_counts import TokenCounts
from edgespec.sampling.workspace import Workspace

MAX_WIDTH = 64
# Tokens sampled to bound the others, for each guess wanted; more where many are nearly the best.
_BOUNDING = 8
_DEPTHS = (0.0, 4.0, 8.0)
_NEARLY, _MOST_BOUNDING = 2.0, 512
# For more contenders than one in so many, noise bits of the whole row cost less than theirs.
_MANY = 10

Row = NDArray[np.float32]
Ids = NDArray[np.intp]


def best_candidates(
    logits: Row,
    params: SamplingParams,
    position: int,
    width: int,
    counts: TokenCounts | None = None,
    work: Workspace | None = None,
) -> tuple[Candidate, ...]:
    """The ``width`` best guesses for ``position``, best first, ties to the lowest id.

    ``logits`` is float32 [V] and is not changed; ``counts`` are those of all tokens before
    ``position`` (needed only where penalties are set). ``work`` is scratch memory, about 40 bytes
    a token of the vocabulary; who samples often keeps one. Fewer come back only when fewer tokens
    have a finite logit. ``logprob`` is under the warped distribution (greedy: softmax of the
    biased and penalised logits); for a token that truncation took out it is under the untruncated
    one, which keeps it finite and not above that of any token inside.

    Raises ``ValueError`` for a width outside 1..64 and for logits whose maximum is not finite.
    """
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"width is {width}, but must be in [1, {MAX_WIDTH}]")
    work = work or Workspace()
    scores = _biased(logits, params, counts, work)
    best = scores.max()
    if not np.isfinite(best):
        # Told once for each reason: where it came is none.
        raise ValueError(f"the draft computes no finite scores: the largest is {best}")
    scores -= best
    if params.greedy:
        return _candidates(scores, _best(scores, width, work), EVERYTHING.log_total(scores, work))
    with np.errstate(over="ignore"):  # to -inf, where the token belongs
        scores /= np.float32(params.temperature)
    support = _support(scores, params, work)
    inside = _sampled(scores, support, params.seed, position, width, work)
    found = _candidates(scores, inside, support.log_total(scores, work))
    missing = width - len(found)
    if support is EVERYTHING or missing <= 0:
        return found
    outside = scores.copy()
    outside[support.ids(scores)] = -np.inf
    fill = _sampled(outside, EVERYTHING, params.seed, position, missing, work)
    return found + _candidates(scores, fill, EVERYTHING.log_total(scores, work))


def _biased(
    logits: Row, params: SamplingParams, counts: TokenCounts | None, work: Workspace
) -> Row:
    """A copy of ``logits`` with bias and penalties, as the first lines of ``warp``."""
    scores = work.floats("scores", logits.size)
    scores[:] = logits.reshape(-1)
    for token, bias in params.logit_bias.items():
        if 0 <= token < scores.size:
            scores[token] += np.float32(bias)
    if counts is None or not params.penalised:
        return scores
    seen = np.flatnonzero(np.frombuffer(counts.occurs, dtype=np.bool_))
    in_output = np.frombuffer(counts.in_output, dtype=np.intc)[seen]
    factor = np.float32(params.repetition_penalty)
    values = scores[seen]
    values = np.where(values > 0, values / factor, values * factor)
    taken = params.presence_penalty + params.frequency_penalty * in_output.astype(np.float64)
    scores[seen] = values - np.where(in_output > 0, taken, 0.0).astype(np.float32)
    return scores


def _support(scores: Row, params: SamplingParams, work: Workspace) -> Support:
    """What truncation keeps. ``scores`` are after temperature, with maximum 0."""
    support = EVERYTHING
    if 0 < params.top_k < scores.size:
        support = Support(float(_nth_best(scores, params.top_k, work)))
    if params.top_p < 1.0:
        support = _nucleus_within(scores, support, params.top_p, work)
    if params.min_p > 0.0 and support.floor < (least := np.float32(math.log(params.min_p))):
        support = Support(float(least))
    return support


def _nucleus_within(scores: Row, support: Support, top_p: float, work: Workspace) -> Support:
    if support is EVERYTHING:
        return nucleus(scores, top_p, work)
    ids = support.ids(scores)
    inner = nucleus(scores[ids], top_p, work)
    if inner.last is None:
        return support
    return inner._replace(last=int(ids[inner.last]))


def _sampled(
    scores: Row, support: Support, seed: int, position: int, width: int, work: Workspace
) -> Ids:
    """The ``width`` best of the support by score plus noise, best first; exact.

    A token must reach the ``width``-th best of some perturbed scores to rank. The noise is bounded
    above, so most tokens of a peaked row drop out by their scores; in a flat row most do by the
    bits of their noise, which grow as it does.
    """
    near = np.greater_equal(scores, max(support.floor, -_NEARLY), out=work.flags(scores.size))
    some = support.only(scores, np.flatnonzero(near)[:_MOST_BOUNDING])
    if some.size < _BOUNDING * width:
        count = min(_BOUNDING * width, scores.size)
        some = np.sort(support.only(scores, _best(scores, count, work)))
        if some.size < count:  # that is the whole support
            return some[_best(scores[some] + gumbel_noise(seed, position, some), width, work)]
    floor = float(_nth_best(scores[some] + gumbel_noise(seed, position, some), width, work))
    least = max(floor - LARGEST_NOISE, support.floor)
    contending = np.greater_equal(scores, least, out=work.flags(scores.size))
    if np.count_nonzero(contending) * _MANY < scores.size:
        ids = np.flatnonzero(contending)
        bits = noise_bits(seed, position, ids)
    else:
        bits = row_bits(seed, position, scores.size, work)
        best = float(scores[some].max())
        for depth in _DEPTHS:  # who is so far below the best needs so much more noise
            contending &= (bits >= least_bits(floor - best + depth)) | (scores > best - depth)
        ids = np.flatnonzero(contending)
        bits = bits[ids]
    perturbed = scores[ids] + gumbel(bits)
    if support.last is not None:
        perturbed[(scores[ids] == support.floor) & (ids > support.last)] = -np.inf
    return ids[_best(perturbed, width, work)]


def _best(scores: Row, count: int, work: Workspace) -> Ids:
    """Indices of the ``count`` best finite scores, best first, ties to the lowest index."""
    if count == 1 and scores.size:
        top = np.array([scores.argmax()])
    elif count < scores.size:
        least, flags = _nth_best(scores, count, work), work.flags(scores.size)
        above = np.flatnonzero(np.greater(scores, least, out=flags))
        ties = np.flatnonzero(np.equal(scores, least, out=flags))[: count - above.size]
        top = np.sort(np.concatenate((above, ties)))
    else:
        top = np.arange(scores.size)
    ranked: Ids = top[np.argsort(-scores[top], kind="stable")]
    return ranked[scores[ranked] > -np.inf]


def _nth_best(scores: Row, n: int, work: Workspace) -> np.float32:
    spare = work.floats("spare", scores.size)
    spare[:] = scores
    cut = scores.size - n
    spare.partition(cut)
    best: np.float32 = spare[cut]
    return best


def _candidates(scores: Row, tokens: Ids, log_total: float) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(int(token), float(score) - log_total)
        for token, score in zip(tokens, scores[tokens], strict=True)
    )
