"""What a smaller cache costs in acceptance, and in time a step: KV types and windows.

    EDGESPEC_DATA=... python benchmarks/memory_acceptance.py [--texts 8] [--tokens 160]

The bundled target goes on with long prompts (Spec-Bench's summaries); its texts are the same for
all. Then the bundled draft, exported with each KV type, walks along each text by itself, with the
whole context and with windows that slide. Acceptance counts first guesses and either of two; times
are medians of the steps, the drafts taking turns text by text.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from edgespec.benchmark.prompts import read_prompts
from edgespec.benchmark.report import machine, versions
from edgespec.compose import load_target, load_tokenizer
from edgespec.config import VerifierConfig
from edgespec.core.device.kv_type import KvType
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.drafters.export import export_draft
from edgespec.drafters.onnx_drafter import OnnxDrafter
from edgespec.models.folders import Role, model_info, resolve_model
from edgespec.ports import TargetModel

WINDOWS = (0, 256, 128, 64)
WIDTH = 2


@dataclass
class Tally:
    first: int = 0
    either: int = 0
    tried: int = 0
    step_s: list[float] = field(default_factory=list)


def target_text(
    target: TargetModel, key: str, prompt: list[int], sampling: SamplingParams
) -> list[int]:
    target.open(key, len(prompt), sampling)
    text, feed, cached = [], list(prompt), 0
    while len(text) < sampling.max_tokens:
        while len(feed) > 256:
            target.forward([PassRequest(key, cached, tuple(feed[:256]), sample=False)])
            cached, feed = cached + 256, feed[256:]
        token = target.forward([PassRequest(key, cached, tuple(feed))])[0].targets[0]
        cached, feed = cached + len(feed), [token]
        text.append(token)
    target.close(key)
    return text


def walk(
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
        tally.first += guesses[0] == token
        tally.either += token in guesses
        done, feed = done + len(feed), [token]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=480)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.7)
    options = parser.parse_args()
    sampling = SamplingParams(
        temperature=options.temperature, max_tokens=options.tokens, ignore_eos=True
    )
    path = Path(os.environ["EDGESPEC_DATA"]) / "prompts" / "spec_bench.jsonl"
    encode = load_tokenizer("bundled").encode
    prompts = []
    for prompt in read_prompts(path):
        tokens = encode(prompt.text)
        if len(tokens) >= options.prompt:
            prompts.append(tokens[: options.prompt])
        if len(prompts) == options.texts:
            break
    target = load_target(VerifierConfig(model="bundled", canonical=False, threads=1))
    texts = [target_text(target, str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    del target
    source = resolve_model("bundled", Role.DRAFT)
    tallies: dict[tuple[str, int], Tally] = {}
    with tempfile.TemporaryDirectory() as name:
        drafters = {}
        for kv_type in KvType:
            folder = Path(name) / kv_type.value
            export_draft(source, folder, model_info(source), bits=4, kv_type=kv_type)
            for window in WINDOWS:
                key = kv_type.value, window
                drafters[key] = OnnxDrafter(folder, threads=1, window=window)
                tallies[key] = Tally()
        for prompt, text in zip(prompts, texts, strict=True):
            for key, drafter in drafters.items():
                walk(drafter, prompt, text, sampling, tallies[key])
    print(machine(), versions())
    print(f"{len(texts)} texts, {options.prompt} + {options.tokens} tokens, {sampling}")
    print("| KV type | window | first guess | one of two | ms a step |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for (kv, window), tally in tallies.items():
        print(
            f"| {kv} | {window or 'whole'} | {tally.first / tally.tried:.3f} |"
            f" {tally.either / tally.tried:.3f} | {statistics.median(tally.step_s) * 1e3:.2f} |"
        )


if __name__ == "__main__":
    main()
