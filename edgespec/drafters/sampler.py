"""The draft's own law: one row of logits to the ``width`` best guesses.

Follows ``core/protocol/sampling.warp`` in order (bias, penalties, temperature, top-k, top-p, min-p)
and adds the shared noise. The ``width`` best perturbed scores are that many siblings drawn without
replacement (Kool, van Hoof, Welling 2019), best first; the first one is the token the scalar
``choose`` picks, up to float32 rounding of near-ties, which costs speed and never correctness.

Truncation may leave fewer tokens than ``width``. A sibling outside the draft's own support can
still be the target's token, because the target truncates its own distribution, so missing places
are filled from outside, after all inside tokens, by untruncated score plus noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.drafters.noise import LARGEST_NOISE, gumbel_noise
from edgespec.ports import Candidate

MAX_WIDTH = 64
_FIRST_NUCLEUS = 256
# Tokens sampled to bound the others, for each guess wanted.
_BOUNDING = 8

Row = NDArray[np.float32]
Ids = NDArray[np.intp]


def best_candidates(
    logits: Row,
    params: SamplingParams,
    position: int,
    width: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> tuple[Candidate, ...]:
    """The ``width`` best guesses for ``position``, best first, ties to the lowest id.

    ``logits`` is float32 [V] and is not changed; ``prompt`` and ``output`` are all the tokens
    before ``position`` (looked at only when penalties are set). Fewer come back only when fewer
    tokens have a finite logit. ``logprob`` is under the warped distribution (greedy: softmax of
    the biased and penalised logits); for a token that truncation took out it is under the
    untruncated one, which keeps it finite and not above that of any token inside.

    Raises ``ValueError`` for a width outside 1..64 and for logits whose maximum is not finite.
    """
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"width is {width}, but must be in [1, {MAX_WIDTH}]")
    scores = _biased(logits, params, prompt, output)
    best = scores.max()
    if not np.isfinite(best):
        raise ValueError(f"largest draft logit at position {position} is {best}, not finite")
    scores -= best
    if params.greedy:
        return _candidates(scores, _best(scores, width), _log_total(scores))
    with np.errstate(over="ignore"):  # to -inf, where the token belongs
        scores /= np.float32(params.temperature)
    support = _support(scores, params)
    if support is None:
        contenders = _contenders(scores, params.seed, position, width)
        tokens = _sampled(scores, contenders, params.seed, position, width)
        return _candidates(scores, tokens, _log_total(scores))
    inside = _sampled(scores, support, params.seed, position, width)
    found = _candidates(scores, inside, _log_total(scores[support]))
    missing = width - len(found)
    if missing <= 0:
        return found
    outside = scores.copy()
    outside[support] = -np.inf
    contenders = _contenders(outside, params.seed, position, missing)
    fill = _sampled(scores, contenders, params.seed, position, missing)
    return found + _candidates(scores, fill, _log_total(scores))


def _biased(
    logits: Row, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Row:
    """A copy of ``logits`` with bias and penalties, as the first lines of ``warp``."""
    scores = np.array(logits, dtype=np.float32, copy=True).reshape(-1)
    for token, bias in params.logit_bias.items():
        if 0 <= token < scores.size:
            scores[token] += np.float32(bias)
    if not params.penalised:
        return scores
    seen = _known({*prompt, *output}, scores.size)
    factor = np.float32(params.repetition_penalty)
    values = scores[seen]
    scores[seen] = np.where(values > 0, values / factor, values * factor)
    for token, count in Counter(output).items():
        if 0 <= token < scores.size:
            scores[token] -= np.float32(params.presence_penalty + params.frequency_penalty * count)
    return scores


def _known(tokens: set[int], size: int) -> Ids:
    return np.array(sorted(token for token in tokens if 0 <= token < size), dtype=np.intp)


def _support(scores: Row, params: SamplingParams) -> Ids | None:
    """Ids that truncation keeps, ascending; None when there is no truncation.

    ``scores`` are after temperature, with maximum 0.
    """
    if params.top_k == 0 and params.top_p >= 1.0 and params.min_p == 0.0:
        return None
    if 0 < params.top_k < scores.size:
        threshold = np.partition(scores, scores.size - params.top_k)[scores.size - params.top_k]
        kept = np.flatnonzero(scores >= threshold)
    else:
        kept = np.arange(scores.size)
    if params.top_p < 1.0:
        kept = kept[_nucleus(scores[kept], params.top_p)]
    if params.min_p > 0.0:
        kept = kept[scores[kept] >= np.float32(math.log(params.min_p))]
    return kept


def _nucleus(scores: Row, top_p: float) -> Ids:
    """Indices of the smallest set of best scores whose probability reaches ``top_p``, ascending.

    The token that crosses the line is kept. Sorts the best few hundred only, more if needed.
    """
    total = float(np.exp(scores).sum(dtype=np.float64))
    count = _FIRST_NUCLEUS
    while True:
        order = _best(scores, count)
        mass = np.cumsum(np.exp(scores[order]), dtype=np.float64)
        if count >= scores.size or mass[-1] >= top_p * total:
            break
        count *= 8
    length = int(np.searchsorted(mass, top_p * total, side="left")) + 1
    return np.sort(order[:length])


def _contenders(scores: Row, seed: int, position: int, width: int) -> Ids:
    """Ids that can be among the ``width`` best after the noise, ascending; exact.

    The noise is bounded above, so a token further than that bound below the ``width``-th best of
    some perturbed scores cannot rank. For a peaked row most of a large vocabulary drops out.
    """
    some = _best(scores, _BOUNDING * width)
    if some.size <= width:
        return np.flatnonzero(scores > -np.inf)
    perturbed = scores[some] + gumbel_noise(seed, position, some)
    floor = np.partition(perturbed, some.size - width)[some.size - width]
    return np.flatnonzero(scores >= floor - np.float32(LARGEST_NOISE))


def _sampled(scores: Row, tokens: Ids, seed: int, position: int, width: int) -> Ids:
    """The ``width`` best of ``tokens`` (ascending) by score plus noise, best first."""
    perturbed = scores[tokens] + gumbel_noise(seed, position, tokens)
    return tokens[_best(perturbed, width)]


def _best(scores: Row, count: int) -> Ids:
    """Indices of the ``count`` best finite scores, best first, ties to the lowest index."""
    if count == 1 and scores.size:
        top = np.array([scores.argmax()])
    elif count < scores.size:
        cut = scores.size - count
        top = np.flatnonzero(scores >= np.partition(scores, cut)[cut])
    else:
        top = np.arange(scores.size)
    ranked: Ids = top[np.argsort(-scores[top], kind="stable")][:count]
    return ranked[scores[ranked] > -np.inf]


def _log_total(scores: Row) -> float:
    return float(np.log(np.exp(scores).sum(dtype=np.float64)))


def _candidates(scores: Row, tokens: Ids, log_total: float) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(int(token), float(score) - log_total)
        for token, score in zip(tokens, scores[tokens], strict=True)
    )
