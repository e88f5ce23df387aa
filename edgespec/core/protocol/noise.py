"""Shared noise: Gumbel(seed, position, token id) as a pure function, so both sides can evaluate it.

Theory of operation. Sampling from softmax(logits) is ``argmax(logits + Gumbel noise)`` (the
Gumbel-max trick). When the noise is a counter-based hash instead of a generator's state, a device
that knows the seed can add *the same* noise to its own logits and will often pick the same token
(Daliri, Musco, Suresh, arXiv 2408.07978: probability at least (1-TV)/(1+TV)), and nobody has to
send probabilities. This file is the scalar specification. ``drafters/noise.py`` (numpy) and
``targets/noise.py`` (torch) vectorise it over token ids; the integers agree bit for bit, which
tests check. Floating point may differ in the last bit: only the verifier's choice counts.

Law of the file: 32-bit unsigned integers throughout, every step a bijection or a xor with a key.
Two keyed rounds, because one round would make the noise of two positions shifted copies of each
other along the token axis.
"""

from __future__ import annotations

import math

MASK_32 = 0xFFFFFFFF
# Finaliser constants of MurmurHash3 (public domain, Austin Appleby) and the golden ratio.
MIX_A = 0x85EBCA6B
MIX_B = 0xC2B2AE35
GOLDEN = 0x9E3779B9
SECOND_KEY = 0x7F4A7C15


def mix(value: int) -> int:
    """A bijection of 32-bit integers in which every input bit moves half of the output bits."""
    value &= MASK_32
    value = ((value ^ value >> 16) * MIX_A) & MASK_32
    value = ((value ^ value >> 13) * MIX_B) & MASK_32
    return value ^ value >> 16


def seed_key(seed: int) -> int:
    """What all positions of a seed have in common; ``seed`` is taken modulo 2**64."""
    low, high = seed & MASK_32, (seed >> 32) & MASK_32
    return mix(mix(low ^ GOLDEN) + high)


def position_keys(seed: int, position: int) -> tuple[int, int]:
    """The two round keys of a position; ``seed`` is taken modulo 2**64."""
    first = mix(seed_key(seed) ^ (position * GOLDEN & MASK_32))
    return first, mix(first + SECOND_KEY)


def noise_bits(seed: int, position: int, token: int) -> int:
    """32 hash bits of (seed, position, token)."""
    return keyed_bits(seed_key(seed), position, token)


def keyed_bits(key: int, position: int, token: int) -> int:
    """``noise_bits`` for one who keeps the ``seed_key`` of a seed that is used often. ``mix`` is
    written out: a simulated link draws for every message."""
    first = (key ^ position * GOLDEN) & MASK_32
    first = ((first ^ first >> 16) * MIX_A) & MASK_32
    first = ((first ^ first >> 13) * MIX_B) & MASK_32
    first ^= first >> 16
    bits = (token * GOLDEN + first) & MASK_32
    bits = ((bits ^ bits >> 16) * MIX_A) & MASK_32
    bits = ((bits ^ bits >> 13) * MIX_B) & MASK_32
    bits ^= bits >> 16
    return mix(bits ^ mix(first + SECOND_KEY))


def gumbel(bits: int) -> float:
    """Standard Gumbel variate from 32 bits, of which the upper 23 count.

    23 and not 24: (k + 0.5) * 2**-24 rounds to 1.0 in float32 for the largest k, and the noise
    of that token would be infinite.
    """
    uniform = ((bits >> 9) + 0.5) * 2.0**-23
    return -math.log(-math.log(uniform))
