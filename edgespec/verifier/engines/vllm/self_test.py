"""Does vLLM do what this package thinks it does? Some short texts, before anybody is served.

What is used of vLLM may change without notice, and a draft in the wrong place would change texts
silently. So texts are made without drafts, with right ones and with wrong ones, greedy and sampled;
all must agree, and right drafts must save vLLM's steps. A token that the parameters force shows
that they are obeyed at all.

In low precision a near tie may fall differently for a row that is computed beside others, which is
no fault. So of ``TEXTS`` texts of a kind one may differ; an error in the injection changes nearly
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams, noise_bits
from edgespec.verifier.engines.vllm.target import VllmTarget

TEXTS: Final = 3
_PROMPT: Final = 12
_LENGTH: Final = 20
_CHAIN: Final = 4
_FORCED: Final = 1e4


def self_test(target: VllmTarget) -> list[str]:
    """What is wrong, in words; empty: nothing."""
    kinds = {
        "greedy": SamplingParams(),
        "sampled": SamplingParams(
            temperature=0.9, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2
        ),
    }
    failures: list[str] = []
    for kind, params in kinds.items():
        failures += _compare(target, kind, params)
    return failures or _check_forced(target)


def _compare(target: VllmTarget, kind: str, params: SamplingParams) -> list[str]:
    size = target.info.vocabulary_size
    equal = {"right": 0, "wrong": 0}
    steps_saved = False
    for seed in range(TEXTS):
        prompt = [noise_bits(seed, position, 0) % size for position in range(_PROMPT)]
        seeded = SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=seed,
        )
        plain, steps = generate(target, prompt, seeded, _LENGTH, ())
        right, fewer = generate(target, prompt, seeded, _LENGTH, plain)
        shifted = [(token + 1) % size for token in plain]
        wrong, _ = generate(target, prompt, seeded, _LENGTH, shifted)
        equal["right"] += right == plain
        equal["wrong"] += wrong == plain
        steps_saved |= fewer <= steps // 2
    failures = [
        f"{TEXTS - count} of {TEXTS} {kind} texts differ with {drafts} drafts"
        for drafts, count in equal.items()
        if count < TEXTS - 1
    ]
    if not steps_saved:
        failures.append(f"right drafts of {kind} texts save no steps")
    return failures


def _check_forced(target: VllmTarget) -> list[str]:
    token = target.info.vocabulary_size // 2
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, logit_bias={token: _FORCED})
        text, _ = generate(target, [token], params, 3, ())
        if text != [token] * 3:
            return [f"a bias of {_FORCED:g} on token {token} gives the tokens {text}"]
    return []


def generate(
    target: VllmTarget,
    prompt: Sequence[int],
    params: SamplingParams,
    length: int,
    guess: Sequence[int],
) -> tuple[list[int], int]:
    """``length`` tokens behind ``prompt``, and how many steps they took. ``guess`` is drafted for
    the answer, a few tokens a pass."""
    key = "\0self-test"
    target.open(key, len(prompt), params, prompt)
    try:
        return _generate(target, key, prompt, length, guess)
    finally:
        target.close(key)


def _generate(
    target: VllmTarget, key: str, prompt: Sequence[int], length: int, guess: Sequence[int]
) -> tuple[list[int], int]:
    text, cached, before = list(prompt), 0, target.steps
    while (done := len(text) - len(prompt)) < length:
        chain = tuple(guess[done : done + _CHAIN]) if done else ()
        parents = tuple(range(-1, len(chain) - 1))
        request = PassRequest(key, cached, tuple(text[cached:]), chain, parents)
        (result,) = target.forward([request])
        right = 0
        while right < len(chain) and chain[right] == result.targets[right]:
            right += 1
        target.keep(key, range(right))
        cached = len(text) + right
        text += result.targets[: right + 1]
    return text[len(prompt) : len(prompt) + length], target.steps - before
