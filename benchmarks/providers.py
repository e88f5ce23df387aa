"""One draft on several of onnxruntime's execution providers, step by step in turns.

    python benchmarks/providers.py DRAFT --provider openvino [--text FILE] [--tokens N] [--rounds N]

DRAFT is an exported folder, or ``bundled``; FILE holds texts of token ids, a JSON list of lists,
such as a target's own; without it ids are drawn. Each provider drafts behind every token of a text.
A row tells how often its first guess is the text's next token, and one of its first two; how often
its first guess is the CPU's; the time of a step of one token and of a prefill of 64, medians with
the first and last tenth; loading, and what the process holds more after it. The CPU is first, and
every step is taken by all of them before the next one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgespec.benchmark.report import machine, versions
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.drafters.onnx_drafter import OnnxDrafter
from edgespec.drafters.providers import EXECUTION, execution_providers
from edgespec.models.folders import Role, resolve_model
from edgespec.telemetry.process_memory import resident_bytes

PREFILL = 64


@dataclass
class Arm:
    provider: str
    drafter: OnnxDrafter
    load_s: float
    held_mib: float
    first: int = 0
    of_two: int = 0
    alike: int = 0
    step_ms: list[float] = field(default_factory=list)
    prefill_ms: list[float] = field(default_factory=list)


def load(folder: Path, provider: str, threads: int) -> Arm:
    before, begun = resident_bytes(), time.perf_counter()
    drafter = OnnxDrafter(folder, threads=threads, providers=execution_providers(provider))
    took_s = time.perf_counter() - begun
    return Arm(provider, drafter, took_s, (resident_bytes() - before) / (1 << 20))


def follow(arms: list[Arm], text: list[int]) -> int:
    """Draft behind each token of ``text`` from ``PREFILL`` on; how many that were."""
    for arm in arms:
        arm.drafter.begin(1, SamplingParams())
        begun = time.perf_counter()
        arm.drafter.step(0, text[:PREFILL], 2)
        arm.prefill_ms.append((time.perf_counter() - begun) * 1e3)
    for at in range(PREFILL, len(text) - 1):
        cpu = -1
        for arm in arms:
            begun = time.perf_counter()
            found = [one.token for one in arm.drafter.step(at, [text[at]], 2)]
            arm.step_ms.append((time.perf_counter() - begun) * 1e3)
            cpu = found[0] if arm is arms[0] else cpu
            arm.first += found[0] == text[at + 1]
            arm.of_two += text[at + 1] in found
            arm.alike += found[0] == cpu
    return len(text) - 1 - PREFILL


def spread(times: list[float]) -> str:
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return f"{statistics.median(ordered):.2f} ({ordered[tenth]:.2f} to {ordered[-1 - tenth]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("draft")
    parser.add_argument("--provider", action="append", choices=[*EXECUTION], required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=256, help="of a text, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print(machine(), versions())
    folder = resolve_model(options.draft, Role.DRAFT)
    arms = [load(folder, name, options.threads) for name in ("cpu", *options.provider)]
    size = arms[0].drafter.info.vocabulary_size
    texts = np.random.default_rng(0).integers(0, size, (options.rounds, options.tokens)).tolist()
    if options.text:
        texts = json.loads(options.text.read_text()) * options.rounds
    steps = sum(follow(arms, text[: options.tokens]) for text in texts)
    print(f"{steps} steps, {options.threads} threads")
    print("| provider | first guess right | one of two | the CPU's guess | step ms | prefill ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for arm in arms:
        shares = " | ".join(f"{one / steps:.3f}" for one in (arm.first, arm.of_two, arm.alike))
        print(f"| {arm.provider} | {shares} | {spread(arm.step_ms)} | {spread(arm.prefill_ms)} |")
        runs = f"; {arm.drafter.placement}" if arm.drafter.placement else ""
        print(f"  loaded in {arm.load_s:.1f} s, holds {arm.held_mib:.0f} MiB more{runs}")


if __name__ == "__main__":
    main()
