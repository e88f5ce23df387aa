"""Sampling parameters, and the law that turns one row of logits into one token.

Theory of operation. The token at ``position`` is a pure function of the target's logits, the tokens
before it, the parameters and the seed:

    mask of constraint and min_tokens -> bias -> repetition -> presence/frequency -> temperature
    -> top-k -> top-p -> min-p -> argmax of (logits + Gumbel noise)

A temperature below ``MIN_TEMPERATURE`` is the greedy case: no truncation, no noise, ties to the
lowest id. ``choose`` is the scalar specification, against which the numpy and torch versions are
tested. Repetition counts prompt and output (Keskar et al. 2019), presence and frequency count the
output only, as in the OpenAI API. Truncation never removes the most likely token.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from edgespec.core.protocol.checks import check_limits, check_range, range_field
from edgespec.core.protocol.constraint import Constraint, ConstraintKind, allows

# Shared noise: Gumbel(seed, position, token id) as a pure function. argmax(logits + Gumbel noise)
# samples from softmax(logits), and a device that adds the same noise to its own logits often picks
# the same token (arXiv 2408.07978: with probability at least (1-TV)/(1+TV)). ``sampling/`` computes
# it on arrays and tensors; the integers agree bit for bit. All are 32 bits wide, and every step is
# a bijection or a xor with a key. There are two keyed rounds, because with one the noise of two
# positions would be shifted copies of each other.

MASK_32 = 0xFFFFFFFF
# Finaliser constants of MurmurHash3 (public domain, Austin Appleby) and the golden ratio.
MIX_A = 0x85EBCA6B
MIX_B = 0xC2B2AE35
GOLDEN = 0x9E3779B9
SECOND_KEY = 0x7F4A7C15


def mix_bits(value: int) -> int:
    """Return ``value`` mixed by a bijection of 32-bit integers in which every input bit changes
    about half of the output bits."""
    value &= MASK_32
    value = ((value ^ value >> 16) * MIX_A) & MASK_32
    value = ((value ^ value >> 13) * MIX_B) & MASK_32
    return value ^ value >> 16


def seed_key(seed: int) -> int:
    """Return the part of the noise key that all positions of a seed share. ``seed`` is taken modulo
    2**64."""
    low, high = seed & MASK_32, (seed >> 32) & MASK_32
    return mix_bits(mix_bits(low ^ GOLDEN) + high)


def position_keys(seed: int, position: int) -> tuple[int, int]:
    """Return the two round keys of a position. ``seed`` is taken modulo 2**64."""
    first = mix_bits(seed_key(seed) ^ (position * GOLDEN & MASK_32))
    return first, mix_bits(first + SECOND_KEY)


def noise_bits(seed: int, position: int, token: int) -> int:
    return keyed_bits(seed_key(seed), position, token)


def keyed_bits(key: int, position: int, token: int) -> int:
    """Return ``noise_bits`` for a seed given by its ``seed_key``.

    It saves computing the key again for a seed that is used often. ``mix`` is written out four
    times, because a simulated link draws a number for every message."""
    first = (key ^ position * GOLDEN) & MASK_32
    first = ((first ^ first >> 16) * MIX_A) & MASK_32
    first = ((first ^ first >> 13) * MIX_B) & MASK_32
    first ^= first >> 16
    bits = (token * GOLDEN + first) & MASK_32
    bits = ((bits ^ bits >> 16) * MIX_A) & MASK_32
    bits = ((bits ^ bits >> 13) * MIX_B) & MASK_32
    second = (first + SECOND_KEY) & MASK_32
    second = ((second ^ second >> 16) * MIX_A) & MASK_32
    second = ((second ^ second >> 13) * MIX_B) & MASK_32
    bits ^= bits >> 16 ^ second ^ second >> 16
    bits = ((bits ^ bits >> 16) * MIX_A) & MASK_32
    bits = ((bits ^ bits >> 13) * MIX_B) & MASK_32
    return bits ^ bits >> 16


def gumbel(bits: int) -> float:
    """Return a standard Gumbel variate from 32 bits, of which the upper 23 are used.

    They are 23 and not 24 because (k + 0.5) * 2**-24 rounds to 1.0 in float32 for the largest k,
    and the noise of that token would be infinite."""
    uniform = ((bits >> 9) + 0.5) * 2.0**-23
    return -math.log(-math.log(uniform))


MAX_STOP_IDS = 64
MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 1 << 16
MAX_BIASES = 1024
MAX_TOKENS = 1 << 20
# Divided by a smaller temperature, any two float32 logits that differ are further apart than the
# noise can bridge, and soon exceed the range of float32.
MIN_TEMPERATURE = 1e-6
# A logit divided by a smaller penalty may leave the range of float32.
MIN_REPETITION_PENALTY = 0.01
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the sampling law. Frozen: a session's output is a function of this object.

    Raises ``ValueError`` with the field, the value and the limit."""

    temperature: float = range_field(0.0, 0.0, 100.0)
    """Divide the logits by this. 0 takes the likeliest token; higher values make the output more
    varied."""
    top_k: int = range_field(0, 0, 1 << 24)
    """Keep the k likeliest tokens. 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this share."""
    min_p: float = range_field(0.0, 0.0, 1.0)
    """Drop tokens whose probability is below this share of the likeliest token's."""
    repetition_penalty: float = range_field(1.0, MIN_REPETITION_PENALTY, 100.0)
    """Above 1, tokens that occur in the prompt or the output become less likely."""
    presence_penalty: float = range_field(0.0, -100.0, 100.0)
    """Subtract this from the logit of each token that occurs in the output."""
    frequency_penalty: float = range_field(0.0, -100.0, 100.0)
    """Subtract this from a token's logit once for each time that it occurs in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    """Amounts that are added to the logits of single token ids, such as ``{42: -1.5}``."""
    seed: int = range_field(0, 0, (1 << 64) - 1)
    """Seed of the sampling noise. The same seed gives the same output."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output."""
    stop: tuple[str, ...] = ()
    """End the output before any given string. The device searches for the strings; they are never
    sent and never shown."""
    max_tokens: int = range_field(256, 1, MAX_TOKENS)
    """Generate at most this many tokens."""
    min_tokens: int = range_field(0, 0, MAX_TOKENS)
    """Generate at least this many tokens: before that no end token, stop token or stop string ends
    the output. It still ends where its constraint allows nothing else."""
    ignore_eos: bool = False
    """Go on past the model's own end token. Use this for measurements."""
    constraint: Constraint | None = None
    """Constrain the output to a schema, grammar or regular expression: ``{kind: json_schema, text:
    ...}``."""

    def __post_init__(self) -> None:
        check_limits(self)
        check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_range("number of stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_IDS)
        check_range("number of stop strings", len(self.stop), 0, MAX_STOP_STRINGS)
        check_range("number of logit_bias entries", len(self.logit_bias), 0, MAX_BIASES)
        given: object = self.stop
        if isinstance(given, str):  # iterating over a str would give its letters
            raise ValueError(f"stop is {given!r}, but must be a tuple of strings")
        if any(not text for text in self.stop):
            raise ValueError("stop must not hold an empty string")
        if self.min_tokens > self.max_tokens:
            more = f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}"
            raise ValueError(f"{more}: the minimum must not exceed the maximum")
        for token, bias in self.logit_bias.items():
            check_range(f"logit_bias[{token}]", bias, -1e4, 1e4)
        is_grammar = (
            self.constraint is not None and self.constraint.kind is not ConstraintKind.TOKENS
        )
        if is_grammar and self.ignore_eos:
            raise ValueError("ignore_eos is true, but must be false with a constraint")

    def end_tokens(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end the output of a model with these end tokens."""
        return frozenset((*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def is_penalised(self) -> bool:
        """Whether a token's score depends on the tokens before it beyond what the model
        computed."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class MinTokensMask:
    """Forbids the tokens that end an output until ``min_tokens`` were generated.

    It is a mask like that of a constraint (``core/protocol/constraint.py``), so it is a part of the
    law: both ends apply it before everything else. Where nothing but an end token is allowed, as
    behind the last brace of a JSON schema, the end token stays allowed."""

    def __init__(
        self, params: SamplingParams, vocabulary_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._min_tokens = params.min_tokens
        everything = (1 << vocabulary_size) - 1
        ends = params.end_tokens(eos_token_ids)
        held = sum(1 << token for token in ends if 0 <= token < vocabulary_size)
        self._others = everything & ~held
        self._others_mask = _as_mask(self._others)

    def mask(self, mask: bytes | None, generated: int) -> bytes | None:
        """Return ``mask`` without the end tokens, for the position behind ``generated`` tokens of
        output. A mask of None allows everything."""
        if generated >= self._min_tokens or not self._others:
            return mask
        if mask is None:
            return self._others_mask
        remaining = int.from_bytes(mask, "little") & self._others
        return _as_mask(remaining) if remaining else mask


def _as_mask(bits: int) -> bytes:
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


def choose(
    logits: Sequence[float],
    params: SamplingParams,
    position: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    mask: bytes | None = None,
) -> int:
    """Return the token at ``position``.

    It depends on the logits of that position, the tokens before it and ``mask``, the mask of the
    constraint and of ``MinTokensMask``."""
    scores = warp(mask_logits(logits, mask), params, prompt, output)
    if not params.is_greedy:
        scores = [
            s + gumbel(noise_bits(params.seed, position, token)) if s > -math.inf else s
            for token, s in enumerate(scores)
        ]
    return max(range(len(scores)), key=lambda token: (scores[token], -token))


def mask_logits(logits: Sequence[float], mask: bytes | None) -> Sequence[float]:
    """Return ``logits`` with -inf for each token that ``mask`` forbids. None forbids nothing."""
    if mask is None:
        return logits
    return [x if allows(mask, token) else -math.inf for token, x in enumerate(logits)]


def warp(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> list[float]:
    """Return the logits after bias, penalties, temperature and truncation. A token that truncation
    removes gets -inf."""
    scores = [float(x) for x in logits]
    for token, bias in params.logit_bias.items():
        if 0 <= token < len(scores):
            scores[token] += bias
    if params.is_penalised:
        for token in {*prompt, *output}:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        for token, count in Counter(output).items():
            scores[token] -= params.presence_penalty + params.frequency_penalty * count
    if params.is_greedy:
        return scores
    scores = [s / params.temperature for s in scores]
    scores = _top_k(scores, params.top_k)
    return _min_p(_top_p(scores, params.top_p), params.min_p)


def _top_k(scores: list[float], k: int) -> list[float]:
    if k == 0 or k >= len(scores):
        return scores
    threshold = sorted(scores, reverse=True)[k - 1]
    return [s if s >= threshold else -math.inf for s in scores]


def _top_p(scores: list[float], p: float) -> list[float]:
    if p >= 1.0:
        return scores
    best = max(scores)
    weights = [math.exp(s - best) for s in scores]
    total = math.fsum(weights)
    kept, mass = [-math.inf] * len(scores), 0.0
    for token in sorted(range(len(scores)), key=lambda t: (-scores[t], t)):
        if mass >= p * total:
            break
        kept[token] = scores[token]
        mass += weights[token]
    return kept


def _min_p(scores: list[float], p: float) -> list[float]:
    if p == 0.0:
        return scores
    threshold = max(scores) + math.log(p)
    return [s if s >= threshold else -math.inf for s in scores]


class TokenCounts:
    """Number of occurrences of each token in a prompt and in the output behind it, by id, for
    penalties.

    An update costs time for the tokens that came and went, not for the whole length. Ids outside
    ``[0, vocabulary_size)`` are ignored: no penalty can reach them."""

    def __init__(self, vocabulary_size: int) -> None:
        self.occurs = bytearray(vocabulary_size)
        """1 for each id that occurs at all, in the prompt or the output."""
        self.in_output = array("i", bytes(array("i").itemsize * vocabulary_size))
        self._everywhere = array("i", self.in_output)

    @staticmethod
    def of(vocabulary_size: int, prompt: Sequence[int], output: Sequence[int]) -> TokenCounts:
        counts = TokenCounts(vocabulary_size)
        counts.add(prompt, in_output=False)
        counts.add(output, in_output=True)
        return counts

    def add(self, tokens: Iterable[int], *, in_output: bool) -> None:
        self._change(tokens, 1, in_output)

    def remove(self, tokens: Iterable[int], *, in_output: bool) -> None:
        """Remove tokens that were added with the same ``in_output``."""
        self._change(tokens, -1, in_output)

    def _change(self, tokens: Iterable[int], by: int, in_output: bool) -> None:
        size = len(self.occurs)
        for token in tokens:
            if 0 <= token < size:
                self._everywhere[token] += by
                self.occurs[token] = self._everywhere[token] > 0
                if in_output:
                    self.in_output[token] += by
