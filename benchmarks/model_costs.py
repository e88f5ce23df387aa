"""What a pass of the target and a step of the draft cost on this CPU, interleaved, medians.

    python benchmarks/model_costs.py [--target bundled] [--rounds 40]
    python benchmarks/model_costs.py --draft-shape 0.6B

Target: float32, ``canonical`` against ``plain`` mode (one thread each), by rows a session and
sessions a pass. Draft: 4 and 8 bits and float32, exported from the bundled checkpoint; with
``--draft-shape`` a draft alone, of random weights in a real model's shape (``memory.py``).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from memory import SHAPES as DRAFT_SHAPES
from memory import make_draft

from edgespec.bench.report import machine, versions
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.export import export_draft
from edgespec.models.folders import Role, model_info, resolve_model
from edgespec.verifier.targets.torch_target import TorchTarget

CONTEXT, GREEDY = 300, SamplingParams(max_tokens=64)
SHAPES = ((1, 0), (1, 7), (1, 15), (1, 31), (4, 7), (8, 7))
"""Sessions, nodes of each (a chain with a second choice at every depth)."""


def spread(samples_s: list[float]) -> str:
    low, high = statistics.quantiles(samples_s, n=10)[0], statistics.quantiles(samples_s, n=10)[-1]
    return f"{statistics.median(samples_s) * 1e3:7.2f} ms  ({low * 1e3:.2f} to {high * 1e3:.2f})"


def tree(nodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    parents = tuple(-1 if i < 2 else i - 2 - (i % 2) for i in range(nodes))
    return tuple(5 + i for i in range(nodes)), parents


def pass_of(target: TorchTarget, sessions: int, nodes: int) -> Callable[[], object]:
    tokens, parents = tree(nodes)
    keys = [f"{sessions}-{nodes}-{index}" for index in range(sessions)]
    for key in keys:
        target.open(key, CONTEXT, GREEDY)
        target.forward([PassRequest(key, 0, tuple(range(3, 3 + CONTEXT)), sample=False)])
    batch = [PassRequest(key, CONTEXT - 1, (3 + CONTEXT,), tokens, parents) for key in keys]
    return lambda: target.forward(batch)


def timed(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def target_costs(reference: str, rounds: int) -> None:
    folder = resolve_model(reference, Role.TARGET)
    info = model_info(folder)
    work: dict[str, Callable[[], object]] = {}
    for mode in (True, False):
        target = TorchTarget(
            str(folder), name=info.name, vocabulary=info.vocabulary, canonical=mode, model_threads=1
        )
        for sessions, nodes in SHAPES:
            name = f"{'canonical' if mode else 'plain':9s} {sessions} session(s) of 1 + {nodes:2d}"
            work[name] = pass_of(target, sessions, nodes)
    report(work, rounds)


def draft_costs(rounds: int, shape: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        work: dict[str, Callable[[], object]] = {}
        for bits in (4,) if shape else (4, 8, 32):
            out = Path(scratch) / str(bits)
            if shape:
                make_draft(out, shape, bits=bits)
            else:
                source = resolve_model("bundled", Role.DRAFT)
                export_draft(source, out, model_info(source), bits=bits)
            drafter = OnnxDrafter(out)
            drafter.begin(CONTEXT, GREEDY)
            drafter.step(0, list(range(3, 3 + CONTEXT)), 2)
            size_mb = (out / "model.onnx").stat().st_size / 1e6
            work[f"draft {bits:2d} bits ({size_mb:.1f} MB), one step"] = step_of(drafter)
        report(work, rounds * 10)


def step_of(drafter: OnnxDrafter) -> Callable[[], object]:
    return lambda: drafter.step(CONTEXT - 1, [7], 2)


def report(work: dict[str, Callable[[], object]], rounds: int) -> None:
    samples: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 2):
        for name, run in work.items():
            seconds = timed(run)
            if number >= 2:  # the first rounds warm up
                samples[name].append(seconds)
    for name, found in samples.items():
        print(f"{name:40s} {spread(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--draft-shape", default="", choices=("", *DRAFT_SHAPES))
    args = parser.parse_args()
    print(machine(), versions(), sep="\n")
    if not args.draft_shape:
        target_costs(args.target, args.rounds)
    draft_costs(args.rounds, args.draft_shape)


if __name__ == "__main__":
    main()
