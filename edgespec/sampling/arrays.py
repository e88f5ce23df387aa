"""The sampling law on arrays: from one row of logits to the ``width`` best candidates, or one
token.

It follows ``core/protocol/sampling.warp`` in order (bias, penalties, temperature, top-k, top-p,
min-p) and adds the noise that both ends share. The ``width`` best perturbed scores are that many
siblings drawn without replacement (Kool, van Hoof, Welling 2019), best first; the first one is the
token that the scalar ``choose`` picks, up to float32 rounding of near-ties. A near-tie that a draft
resolves differently costs speed and never correctness.

Truncation may leave fewer tokens than ``width``. A sibling outside the draft's own support can
still be the target's token, because the target truncates its own distribution. So missing places
are filled from outside, after all inside tokens, by untruncated score plus noise.

A row of 151,936 scores passes through a few array operations of 0.02 to 0.4 ms each. Nothing is
sorted as a whole: the edge of a nucleus (Holtzman et al. 2020: the smallest set of best scores that
holds a share of the probability) is found by histogram. Noise is bounded and grows with its bits,
so bits become numbers only for tokens that can still win. Arrays are kept between rows, because the
pages of a fresh one cost more than the work on it.

The integers of the noise agree with the scalar specification bit for bit: arithmetic on uint32
arrays wraps silently, which is the ``& MASK_32`` of the scalar form. Scalars would warn, so keys
are folded by the scalar code and enter as array operands.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.core.ports import Candidate
from edgespec.core.protocol.sampling import (
    GOLDEN,
    MIX_A,
    MIX_B,
    SamplingParams,
    TokenCounts,
    position_keys,
)


class Workspace:
    """Scratch arrays of one thread, by name, each as large as the largest row so far."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[Any]] = {}

    def array(self, name: str, size: int, dtype: Any = np.float32) -> NDArray[Any]:
        """Return an array [size] with arbitrary contents. The same name, always with the same
        ``dtype``, returns the same memory."""
        held = self._held.get(name)
        if held is None or held.size < size:
            held = self._held[name] = np.empty(size, dtype=dtype)
        return held[:size]

    def flags(self, size: int) -> NDArray[np.bool_]:
        return self.array("flags", size, np.bool_)


# Largest value that ``gumbel`` can return: -log(-log(1 - 2**-24)) = 16.636, rounded up.
LARGEST_NOISE = 16.7


def noise_bits(seed: int, position: int, tokens: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Return 32 hash bits for each of ``tokens`` (any shape, ids >= 0) at ``position``."""
    return _hash_in_place(tokens.astype(np.uint32) * np.uint32(GOLDEN), seed, position)


def gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return standard Gumbel variates, float32. Only the upper 23 bits are used, as in the scalar
    form."""
    uniform = (bits >> np.uint32(9)).astype(np.float32)
    uniform += np.float32(0.5)  # at most 24 significant bits: still exact
    uniform *= np.float32(2.0**-23)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    return uniform


def gumbel_noise(seed: int, position: int, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return the noise of each of ``tokens`` at ``position``."""
    return gumbel(noise_bits(seed, position, tokens))


def min_bits(noise: float) -> np.uint32:
    """Return the bits below which the noise is less than ``noise``. The noise grows with its bits.

    It is the inverse of ``gumbel``, exp(-exp(-noise)), with a margin for float32 rounding: a few
    more bits pass than must. For example, 4.9 % of all tokens have a noise of 3.0 or more."""
    reached = noise - 1e-3 - 1e-6 * abs(noise)
    uniform = math.exp(-math.exp(-reached)) if reached > -5 else 0.0
    return np.uint32(max(0, math.floor(uniform * 2.0**23 - 0.5)) << 9)


@lru_cache(maxsize=4)
def _hashed_ids(vocabulary_size: int) -> NDArray[np.uint32]:
    spread = np.arange(vocabulary_size, dtype=np.uint32) * np.uint32(GOLDEN)
    spread.setflags(write=False)
    return spread


def _hash_in_place(
    values: NDArray[np.uint32], seed: int, position: int, shifted: NDArray[np.uint32] | None = None
) -> NDArray[np.uint32]:
    """Apply both rounds of the hash in place. ``shifted`` is scratch of the same shape.

    The first round ends and the second begins with x ^ x >> 16, which undoes itself. Of everything
    between the rounds one xor is left."""
    first, second = position_keys(seed, position)
    shifted = np.empty_like(values) if shifted is None else shifted
    values += np.uint32(first)
    values ^= np.right_shift(values, np.uint32(16), out=shifted)
    _multiply(values, shifted)
    values ^= np.uint32(second ^ second >> 16)
    _multiply(values, shifted)
    values ^= np.right_shift(values, np.uint32(16), out=shifted)
    return values


def _multiply(values: NDArray[np.uint32], shifted: NDArray[np.uint32]) -> None:
    """Apply the middle of ``mix`` in place."""
    values *= np.uint32(MIX_A)
    values ^= np.right_shift(values, np.uint32(13), out=shifted)
    values *= np.uint32(MIX_B)


class NoiseIds(NamedTuple):
    """The ids whose noise the tokens of a row get. They are the ids of a target with another
    vocabulary."""

    ids: NDArray[np.uint32]
    """The id of each token, [V]."""
    hashed: NDArray[np.uint32]
    """``ids`` as the hash begins with them, [V]."""

    @classmethod
    def of(cls, ids: NDArray[np.uint32]) -> NoiseIds:
        """Return the table for ``ids`` [V]. An id of 2**32 - 1 stands for one that the target
        lacks."""
        return cls(ids, ids * np.uint32(GOLDEN))


_BUCKETS = 2048

# Up to this many scores are sorted.
_MAX_SORTED = 1024

# Number of probed scores of a row from which the edge of a nucleus is guessed.
_MAX_PROBES = 8192

# Scores this far below the best share one bucket at first: together they weigh next to nothing.
_BUCKET_SPAN = 32.0


class Support(NamedTuple):
    """The tokens that truncation keeps: all scores above ``floor``, and among equal ones at
    ``floor`` the ids up to ``last``. ``mass`` is the sum of exp(score) over the kept tokens, or
    None if it is not known."""

    floor: float = -math.inf
    last: int | None = None
    mass: float | None = None

    def only(self, scores: Row, ids: Ids) -> Ids:
        """Return the kept ones of ``ids``, in their order."""
        values = scores[ids]
        if self.last is None:
            kept = values >= self.floor
        else:
            kept = (values > self.floor) | ((values == self.floor) & (ids <= self.last))
        inside: Ids = ids[kept]
        return inside

    def ids(self, scores: Row) -> Ids:
        """Return all kept ids, ascending."""
        return self.only(scores, np.flatnonzero(scores >= self.floor))

    def log_total(self, scores: Row, work: Workspace) -> float:
        """Return the logarithm of ``mass``, which is summed here if it is not known."""
        if self.mass is not None:
            return math.log(self.mass)
        weights = work.array("weights", scores.size)
        if self.floor == -math.inf:
            return math.log(np.exp(scores, out=weights).sum(dtype=np.float64))
        kept = np.greater_equal(scores, self.floor, out=work.flags(scores.size))
        if np.count_nonzero(kept) * 8 < kept.size:
            return math.log(np.exp(scores[self.ids(scores)]).sum(dtype=np.float64))
        # Gathering this many scores costs more than weighing all. ``last`` excludes no score here:
        # it is set only beside a known mass.
        np.exp(scores, out=weights)
        weights *= kept
        return math.log(weights.sum(dtype=np.float64))


EVERYTHING = Support()


def find_nucleus(scores: Row, top_p: float, work: Workspace) -> Support:
    """Return the smallest set of best ``scores`` whose probability reaches ``top_p``, at least one
    token.

    Of equal scores the lowest ids are kept first. ``scores`` are float32 [V] with a maximum of
    0."""
    masses = np.exp(scores, out=work.array("weights", scores.size))
    total = float(masses.sum(dtype=np.float64))
    needed, above = top_p * total, 0.0
    # Tokens with less mass make up no more than half of what is cut off.
    least = 0.5 * (1.0 - top_p) * total / scores.size
    able = np.greater_equal(masses, least, out=work.flags(scores.size))
    if np.count_nonzero(able) * 8 < scores.size:
        values, weights = scores[able], masses[able].astype(np.float64)
    else:
        values, weights, above = _scores_near_edge(scores, masses, total - needed, needed, work)
    while values.size > _MAX_SORTED:
        best = values.max()
        span = min(float(best - values.min()), _BUCKET_SPAN)
        if not span > 1e-30:
            break
        keys = _bucket_numbers(values, best, span, work)
        reached = np.cumsum(np.bincount(keys, weights, minlength=_BUCKETS + 1)) + above
        bucket = int(np.searchsorted(reached, needed))
        if bucket > _BUCKETS:  # only by rounding
            return EVERYTHING
        above = float(reached[bucket - 1]) if bucket else above
        inside = np.flatnonzero(np.equal(keys, bucket, out=work.flags(keys.size)))
        values, weights = values[inside], weights[inside]
    order = np.argsort(-values, kind="stable")
    reached = np.cumsum(weights[order]) + above
    last = int(np.searchsorted(reached, needed))
    if last >= values.size:
        return EVERYTHING
    floor = values[order[last]]
    ties = int(np.count_nonzero(values[order[: last + 1]] == floor))
    at_floor = np.flatnonzero(np.equal(scores, floor, out=work.flags(scores.size)))
    return Support(float(floor), int(at_floor[ties - 1]), float(reached[last]))


def _scores_near_edge(
    scores: Row, masses: Row, tail: float, needed: float, work: Workspace
) -> tuple[Row, NDArray[np.float64], float]:
    """Return the scores near the edge above which the masses make up ``needed``, the mass of each,
    and the mass of all scores above them.

    The edge is guessed from every n-th score, among which ``tail`` lies below it. If the guess is
    wrong, all scores are returned."""
    if stride := scores.size // _MAX_PROBES:
        probes = np.sort(scores[::stride])
        at = int(np.searchsorted(np.cumsum(np.exp(probes), dtype=np.float64) * stride, tail))
        off = 16 + 3 * math.isqrt(at)  # three standard deviations of this count
        low = probes[at - off] if at >= off else -np.inf
        high = probes[at + off] if at + off < probes.size else np.inf
        beyond = np.greater(scores, high, out=work.array("beyond", scores.size, np.bool_))
        above = np.multiply(masses, beyond, out=work.array("spare", scores.size))
        mass = float(above.sum(dtype=np.float64))
        near = np.greater(scores, low, out=work.flags(scores.size))
        ids = np.flatnonzero(np.logical_xor(near, beyond, out=near))
        weights = masses[ids].astype(np.float64)
        if mass < needed <= mass + float(weights.sum()):
            return scores[ids], weights, mass
    weights = work.array("masses", scores.size, np.float64)
    weights[:] = masses
    return scores, weights, 0.0


def _bucket_numbers(values: Row, best: np.float32, span: float, work: Workspace) -> Ids:
    """Return the bucket of each value: 0 for the best, ``_BUCKETS`` from ``span`` below it on."""
    depth = np.subtract(best, values, out=work.array("spare", values.size))
    depth *= np.float32(_BUCKETS / span)
    np.minimum(depth, _BUCKETS, out=depth)
    keys = work.array("keys", values.size, np.intp)
    keys[:] = depth
    return keys


MAX_WIDTH = 64

# Tokens that are sampled to bound the others, for each wanted candidate; more if many are nearly
# the best.
_BOUNDING_PER_CANDIDATE = 8

# A token far below the ranking ones needs at least the first amount of noise, and a token that is
# further below needs more by the second amounts.
_MIN_NOISE, _FURTHER_NOISE = 2.0, (4.0, 8.0)

# Tokens whose noise is hashed in one part.
_TOKENS_PER_PART = 1 << 16

_NEAR_BEST, _MAX_BOUNDING = 2.0, 512

# If more than one token in this many contends, hashing the noise of the whole row costs less than
# hashing theirs alone.
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
    noise: NoiseIds | None = None,
) -> tuple[Candidate, ...]:
    """Return the ``width`` best candidates for ``position``, best first, ties to the lowest id.

    ``logits`` is float32 [V] and is not changed. ``counts`` are those of all tokens before
    ``position``; they are needed only with penalties. ``work`` is scratch memory, about 40 bytes
    for each token of the vocabulary; a frequent caller keeps one. ``noise`` names the ids whose
    noise the tokens get, by default their own. Fewer candidates come back only if fewer tokens have
    a finite logit. ``logprob`` is under the warped distribution (greedy: softmax of the biased and
    penalised logits). For a token that truncation removed it is under the untruncated one, which
    keeps it finite and not above that of any token inside.

    Raises ``ValueError`` for a width outside 1..64 and for logits whose maximum is not finite."""
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"width is {width}, but must be in [1, {MAX_WIDTH}]")
    work = work or Workspace()
    scores = _add_bias(logits, params, counts, work)
    return best_of_scores(scores, params, position, width, work, noise)


def best_of_scores(
    scores: Row,
    params: SamplingParams,
    position: int,
    width: int,
    work: Workspace,
    noise: NoiseIds | None = None,
) -> tuple[Candidate, ...]:
    """Return ``best_candidates`` for scores that are already biased and penalised. ``scores`` is
    changed."""
    best = scores.max()
    if not np.isfinite(best):
        # The message is logged once for each reason; it does not vary with the position.
        raise ValueError(f"the draft computes no finite scores: the largest is {best}")
    scores -= best
    if params.is_greedy:
        ids = _best_ids(scores, width, work)
        return _make_candidates(scores, ids, EVERYTHING.log_total(scores, work))
    support = _truncate(scores, params, work)
    place = params.seed, position
    inside = _sample(scores, support, place, width, work, noise)
    found = _make_candidates(scores, inside, support.log_total(scores, work))
    missing = width - len(found)
    if support is EVERYTHING or missing <= 0:
        return found
    outside = work.array("outside", scores.size)
    outside[:] = scores
    outside[support.ids(scores)] = -np.inf
    fill = _sample(outside, EVERYTHING, place, missing, work, noise)
    return found + _make_candidates(scores, fill, EVERYTHING.log_total(scores, work))


def probabilities(logits: Row, params: SamplingParams) -> NDArray[np.float64]:
    """Return the probability of each token, [V], by the law that ``best_candidates`` draws from,
    without penalties."""
    work = Workspace()
    scores = _add_bias(logits, params, None, work)
    scores -= scores.max()
    if params.is_greedy:
        ids = _best_ids(scores, 1, work)
    else:
        ids = _truncate(scores, params, work).ids(scores)
    masses: NDArray[np.float64] = np.zeros(scores.size)
    masses[ids] = np.exp(scores[ids].astype(np.float64))
    masses /= masses.sum()
    return masses


def best_token(row: Row, params: SamplingParams, position: int, work: Workspace) -> int:
    """Return the first of ``best_candidates`` for logits [V] that are already biased and penalised,
    with a finite maximum. ``row`` is not changed."""
    best = int(row.argmax())
    if params.is_greedy:
        return best
    scores = np.subtract(row, row[best], out=work.array("scores", row.size))
    support = _truncate(scores, params, work)
    return int(_sample(scores, support, (params.seed, position), 1, work)[0])


def _truncate(scores: Row, params: SamplingParams, work: Workspace) -> Support:
    """Divide ``scores``, whose maximum is 0, by the temperature, and return what truncation
    keeps."""
    with np.errstate(over="ignore"):  # an overflow to -inf is correct
        scores /= np.float32(params.temperature)
    support = EVERYTHING
    if 0 < params.top_k < scores.size:
        support = Support(float(_nth_best(scores, params.top_k, work)))
    if params.top_p < 1.0 and support is EVERYTHING:
        support = find_nucleus(scores, params.top_p, work)
    elif params.top_p < 1.0:
        ids = support.ids(scores)
        inner = find_nucleus(scores[ids], params.top_p, work)
        if inner.last is not None:
            support = inner._replace(last=int(ids[inner.last]))
    if params.min_p > 0.0 and support.floor < (least := np.float32(math.log(params.min_p))):
        support = Support(float(least))
    return support


def _add_bias(
    logits: Row, params: SamplingParams, counts: TokenCounts | None, work: Workspace
) -> Row:
    """Return a copy of ``logits`` with bias and penalties, as in the first lines of ``warp``."""
    scores = work.array("scores", logits.size)
    scores[:] = logits.reshape(-1)
    for token, bias in params.logit_bias.items():
        if 0 <= token < scores.size:
            scores[token] += np.float32(bias)
    if counts is None or not params.is_penalised:
        return scores
    seen = np.flatnonzero(np.frombuffer(counts.occurs, dtype=np.bool_))
    in_output = np.frombuffer(counts.in_output, dtype=np.intc)[seen]
    factor = np.float32(params.repetition_penalty)
    values = scores[seen]
    values = np.where(values > 0, values / factor, values * factor)
    taken = params.presence_penalty + params.frequency_penalty * in_output.astype(np.float64)
    scores[seen] = values - np.where(in_output > 0, taken, 0.0).astype(np.float32)
    return scores


def _sample(
    scores: Row,
    support: Support,
    place: tuple[int, int],
    width: int,
    work: Workspace,
    noise_ids: NoiseIds | None = None,
) -> Ids:
    """Return the ``width`` best ids of the support by score plus the noise of the ``place`` (seed,
    position), best first. The result is exact.

    A token must reach the ``width``-th best of some perturbed scores to rank. The noise is bounded
    above, so most tokens of a peaked row drop out by their scores. In a flat row most drop out by
    the bits of their noise, which grow as it does."""

    def bits_of(tokens: Ids) -> NDArray[np.uint32]:
        return noise_bits(*place, tokens if noise_ids is None else noise_ids.ids[tokens])

    flags = work.array("contending", scores.size, np.bool_)
    if support.floor > -math.inf:
        kept = np.greater_equal(scores, support.floor, out=flags)
        if np.count_nonzero(kept) <= _MAX_SORTED:
            few = support.only(scores, np.flatnonzero(kept))
            return few[_best_ids(scores[few] + gumbel(bits_of(few)), width, work)]
    tried = _first_ids_above(float(scores.max()) - _NEAR_BEST, scores, support, work)
    if tried.size < width:
        count = min(_BOUNDING_PER_CANDIDATE * width, scores.size)
        tried = np.sort(support.only(scores, _best_ids(scores, count, work)))
        if tried.size < count:  # the whole support
            perturbed = scores[tried] + gumbel(bits_of(tried))
            return tried[_best_ids(perturbed, width, work)]
        more = _first_ids_above(float(scores[tried].min()) - _NEAR_BEST, scores, support, work)
        tried = more if more.size > tried.size else tried
    floor = float(_nth_best(scores[tried] + gumbel(bits_of(tried)), width, work))
    least = max(floor - LARGEST_NOISE, support.floor)
    if np.count_nonzero(np.greater_equal(scores, least, out=flags)) * _MANY < scores.size:
        ids = np.flatnonzero(flags)
        bits = bits_of(ids)
    else:
        noise = max(floor, _MIN_NOISE)
        hashed_ids = _hashed_ids(scores.size) if noise_ids is None else noise_ids.hashed
        ids, bits = _find_contenders(
            scores, flags, floor - noise, min_bits(noise), place, hashed_ids, work
        )
        for further in _FURTHER_NOISE:  # a token further below needs more
            may = (bits >= min_bits(noise + further)) | (scores[ids] > floor - noise - further)
            ids, bits = ids[may], bits[may]
    perturbed = scores[ids] + gumbel(bits)
    if support.last is not None:
        perturbed[(scores[ids] == support.floor) & (ids > support.last)] = -np.inf
    return ids[_best_ids(perturbed, width, work)]


def _find_contenders(
    scores: Row,
    flags: NDArray[np.bool_],
    above: float,
    bits: np.uint32,
    place: tuple[int, int],
    hashed_ids: NDArray[np.uint32],
    work: Workspace,
) -> tuple[Ids, NDArray[np.uint32]]:
    """Return the flagged ids whose noise at ``place`` has ``bits`` or more, or whose score is above
    ``above``, with the bits of each.

    The row is processed part by part, so that a part stays in the processor's cache."""
    found, found_bits = [], []
    shifted = work.array("shifted", _TOKENS_PER_PART, np.uint32)
    for start in range(0, scores.size, _TOKENS_PER_PART):
        part = slice(start, start + _TOKENS_PER_PART)
        own = work.array("bits", hashed_ids[part].size, np.uint32)
        own[:] = hashed_ids[part]
        _hash_in_place(own, *place, shifted[: own.size])
        may = np.greater_equal(own, bits, out=work.array("may", own.size, np.bool_))
        may |= scores[part] > above
        may &= flags[part]
        ids = np.flatnonzero(may)
        found.append(ids + start)
        found_bits.append(own[ids])
    return np.concatenate(found), np.concatenate(found_bits)


def _first_ids_above(least: float, scores: Row, support: Support, work: Workspace) -> Ids:
    """Return ids of the support with a score of ``least`` or more: a few hundred at most, the
    lowest ids."""
    above = np.greater_equal(scores, max(support.floor, least), out=work.flags(scores.size))
    # If there are many, the first part of the row has enough.
    enough = scores.size * _MAX_BOUNDING * 2 // max(1, int(np.count_nonzero(above)))
    return support.only(scores, np.flatnonzero(above[:enough])[:_MAX_BOUNDING])


def _best_ids(scores: Row, count: int, work: Workspace) -> Ids:
    """Return the indices of the ``count`` best finite scores, best first, ties to the lowest
    index."""
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
    spare = work.array("spare", scores.size)
    spare[:] = scores
    cut = scores.size - n
    spare.partition(cut)
    best: np.float32 = spare[cut]
    return best


def _make_candidates(scores: Row, tokens: Ids, log_total: float) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(int(token), float(score) - log_total)
        for token, score in zip(tokens, scores[tokens], strict=True)
    )
