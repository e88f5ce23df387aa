"""Drafts walk along the bundled target's texts by themselves: what each guesses, and how fast.

For benches that compare drafts (``smaller_drafts.py``, ``memory_acceptance.py``). The target goes
on with each prompt once, so its texts are the same for all; then the drafts take turns text by
text, so that a busy machine is busy for all of them. First guesses count, and either of two; times
are those of steps of one token.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from edgespec.benchmark.prompts import read_prompts
from edgespec.benchmark.report import machine, versions
from edgespec.compose import load_target, load_tokenizer
from edgespec.config import VerifierConfig
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.drafters.onnx_drafter import OnnxDrafter
from edgespec.ports import TargetModel

WIDTH = 2
_CHUNK = 256
_Key = TypeVar("_Key", bound=Hashable)


@dataclass
class Tally:
    """What one draft did along all texts."""

    hits: int = 0
    """First guesses that were right."""
    either: int = 0
    tried: int = 0
    step_s: list[float] = field(default_factory=list)

    @property
    def first_share(self) -> float:
        return self.hits / self.tried

    @property
    def either_share(self) -> float:
        return self.either / self.tried

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def parse(description: str | None, *, prompt: int, temperature: float) -> argparse.Namespace:
    """``texts``, ``prompt`` and ``tokens`` (lengths), ``temperature``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=prompt)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=temperature)
    return parser.parse_args()


def sampling_of(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature, max_tokens=options.tokens, ignore_eos=True
    )


def long_prompts(length: int) -> list[str]:
    """Those of Spec-Bench with so many tokens at least, in its order."""
    path = Path(os.environ["EDGESPEC_DATA"]) / "prompts" / "spec_bench.jsonl"
    encode = load_tokenizer("bundled").encode
    texts = (prompt.text for prompt in read_prompts(path))
    return [text for text in texts if len(encode(text)) >= length]


def walked(
    drafters: Mapping[_Key, OnnxDrafter],
    texts: Sequence[str],
    options: argparse.Namespace,
) -> dict[_Key, Tally]:
    """Each drafter along the target's continuation of the first tokens of each text; prints what
    was compared, and on what."""
    sampling, encode = sampling_of(options), load_tokenizer("bundled").encode
    prompts = [encode(text)[: options.prompt] for text in texts]
    wanted = _target_texts(prompts, sampling)
    tallies = {key: Tally() for key in drafters}
    for prompt, text in zip(prompts, wanted, strict=True):
        for key, drafter in drafters.items():
            _walk(drafter, prompt, text, sampling, tallies[key])
    print(machine(), versions())
    print(f"{len(prompts)} texts, {options.prompt} + {options.tokens} tokens, {sampling}")
    return tallies


def _target_texts(prompts: Sequence[list[int]], sampling: SamplingParams) -> list[list[int]]:
    target = load_target(VerifierConfig(model="bundled", canonical=False, threads=1))
    return [_target_text(target, str(i), prompt, sampling) for i, prompt in enumerate(prompts)]


def _target_text(
    target: TargetModel, key: str, prompt: list[int], sampling: SamplingParams
) -> list[int]:
    target.open(key, len(prompt), sampling)
    text, feed, cached = [], list(prompt), 0
    while len(text) < sampling.max_tokens:
        while len(feed) > _CHUNK:
            target.forward([PassRequest(key, cached, tuple(feed[:_CHUNK]), sample=False)])
            cached, feed = cached + _CHUNK, feed[_CHUNK:]
        token = target.forward([PassRequest(key, cached, tuple(feed))])[0].targets[0]
        cached, feed = cached + len(feed), [token]
        text.append(token)
    target.close(key)
    return text


def _walk(
    drafter: OnnxDrafter, prompt: list[int], text: list[int], sampling: SamplingParams, tally: Tally
) -> None:
    drafter.begin(len(prompt), sampling)
    done, feed = 0, list(prompt)
    for token in text:
        started_at = time.perf_counter()
        guesses = [guess.token for guess in drafter.step(done, feed, WIDTH)]
        if len(feed) == 1:
            tally.step_s.append(time.perf_counter() - started_at)
        tally.tried += 1
        tally.hits += guesses[0] == token
        tally.either += token in guesses
        done, feed = done + len(feed), [token]
