"""A language model of a few lines: the law that the toy target and the toy drafter share.

Theory of operation. The logits of the next token are ``sharpness`` times a standard Gumbel variate
hashed from (seed, the last ``order`` tokens, token). So every context has its own fixed
distribution, whose best token leads the second by ``sharpness`` nats on average. The chance that
two independent draws agree, averaged over the contexts of 32 tokens, is 0.22, 0.52 and 0.75 for a
sharpness of 1, 2 and 4 (in the limit of many tokens 1 - 1 / sharpness: Poisson-Dirichlet law).

``perturbed`` adds independent noise to the logits: a draft-like variant that is right most of the
time. ``eos_probability`` is the share of contexts in which the end token leads by far. In all other
contexts it is far behind, so that greedy and sampled outputs end alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from edgespec.core.protocol.checks import check_limits, check_range, range_field
from edgespec.core.protocol.sampling import GOLDEN, MASK_32, gumbel, mix_bits

MAX_TOY_VOCABULARY = 4096
MAX_TOY_ORDER = 16
# Rows of logits cached per process: a simulation uses the same few contexts again and again.
_CACHED_ROWS = 1 << 14
_FAR = 40.0


@dataclass(frozen=True, slots=True)
class ToyModel:
    """A deterministic next-token law; equal fields mean equal logits in any process.

    Raises ``ValueError`` naming the field, the value and the limit."""

    vocabulary_size: int = range_field(32, 2, MAX_TOY_VOCABULARY)
    order: int = range_field(2, 0, MAX_TOY_ORDER)
    """Number of preceding tokens that the law depends on."""
    seed: int = 0
    sharpness: float = range_field(2.0, 0.0, 1e3)
    eos_token: int | None = None
    eos_probability: float = range_field(0.0, 0.0, 1.0)
    """Share of contexts in which the end token follows."""
    noise_strength: float = range_field(0.0, 0.0, 1e3)
    """Scale of the perturbation, in units of ``sharpness``."""
    noise_seed: int = 0

    def __post_init__(self) -> None:
        check_limits(self)
        if self.eos_token is not None:
            check_range("eos_token", self.eos_token, 0, self.vocabulary_size - 1)

    def logits(self, context: Sequence[int]) -> list[float]:
        """Return the ``vocabulary_size`` logits of the token after ``context``, which may be
        empty."""
        return list(_compute_row(self, tuple(context[max(0, len(context) - self.order) :])))

    def perturbed(self, strength: float, seed: int = 1) -> ToyModel:
        """Return a variant that agrees with this model most of the time when ``strength`` is small.

        The most likely token is the same in 94, 87, 79, 63 and 37 % of the contexts for a strength
        of 0.1, 0.2, 0.3, 0.5 and 1 (32 tokens, any sharpness); chance agreement is 3 %. The end
        token's logit is not perturbed."""
        return replace(self, noise_strength=strength, noise_seed=seed)


@lru_cache(maxsize=_CACHED_ROWS)
def _compute_row(model: ToyModel, tail: tuple[int, ...]) -> tuple[float, ...]:
    key = _context_key(model.seed, tail)
    size = model.vocabulary_size
    row = [model.sharpness * _draw_variate(key, token) for token in range(size)]
    if model.noise_strength:
        other = _context_key(model.noise_seed ^ GOLDEN, tail)
        scale = model.noise_strength * model.sharpness
        row = [logit + scale * _draw_variate(other, token) for token, logit in enumerate(row)]
    if model.eos_token is not None:
        ends = mix_bits(key ^ GOLDEN) < model.eos_probability * (MASK_32 + 1)
        row[model.eos_token] = max(row) + _FAR if ends else min(row) - _FAR
    return tuple(row)


def _context_key(seed: int, tail: tuple[int, ...]) -> int:
    key = mix_bits(mix_bits(seed & MASK_32) + (seed >> 32))
    for token in tail:
        key = mix_bits((key ^ mix_bits(token + 1)) + GOLDEN)
    return key


def _draw_variate(key: int, token: int) -> float:
    return gumbel(mix_bits(mix_bits(token * GOLDEN + key) ^ key))
