"""What packed weights (``edgespec/targets/packed_linear.py``) bring: passes of one model with and
without them in turns, then what loading takes, each in a process of its own.

    python benchmarks/packed_weights.py edgespec/models/bundled/target
    python benchmarks/packed_weights.py --shape 0.6b --plain --threads 2 --cells 1x1,1x8
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from edgespec.benchmark.report import machine
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.ports import PassRequest
from edgespec.target_loading import prefer_huge_pages, prefer_reproducible_products

if TYPE_CHECKING:
    from edgespec.targets.torch_target import TorchTarget

GREEDY = SamplingParams(max_tokens=1 << 20)
ARMS = ("plain", "packed")
WARM_UP = 2


def load(folder: Path, arm: str, args: argparse.Namespace) -> TorchTarget:
    from edgespec.targets.torch_target import TorchTarget

    return TorchTarget(
        str(folder),
        name=arm,
        vocabulary="v",
        dtype=args.dtype,
        device="cpu",
        max_cached_tokens=(args.sessions_max + 1) * (args.context + 64),
        max_sessions=args.sessions_max,
        canonical=not args.plain,
        model_threads=args.threads,
        packed=arm == "packed",
    )


def measure(
    targets: dict[str, TorchTarget], sessions: int, rows: int, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of every pass, of one thread those of the processor: ``sessions`` with ``rows`` rows
    each, a fed token and a chain."""
    keys = [f"s{index}" for index in range(sessions)]
    prompt = tuple(5 + 7 * index % 300 for index in range(args.context))
    for target in targets.values():
        for key in keys:
            target.open(key, args.context, GREEDY)
            target.forward([PassRequest(key, 0, prompt, sample=False)])
    nodes, parents = tuple(range(7, 6 + rows)), tuple(range(-1, rows - 2))
    batch = [PassRequest(key, args.context, (6,), nodes, parents) for key in keys]
    samples: dict[str, list[float]] = {arm: [] for arm in targets}
    # Of the calling thread, if it computes alone: other programs may use the machine meanwhile.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    gc.collect()
    gc.disable()
    for number in range(args.passes + WARM_UP):
        for arm in list(targets)[:: 1 if number % 2 else -1]:
            began = clock()
            targets[arm].forward(batch)
            if number >= WARM_UP:
                samples[arm].append(clock() - began)
    gc.enable()
    for target in targets.values():
        for key in keys:
            target.close(key)
    return samples


def spread(samples_s: list[float]) -> str:
    low, _, high = statistics.quantiles(samples_s, n=4)
    return f"{1e3 * statistics.median(samples_s):.2f} ({1e3 * low:.2f}-{1e3 * high:.2f})"


def memory_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def tell_loading(folder: Path, arm: str, args: argparse.Namespace) -> None:
    before = memory_mib("VmRSS")
    began = time.perf_counter()
    target = load(folder, arm, args)
    taken = time.perf_counter() - began
    gc.collect()
    parts = (memory_mib(field) for field in ("VmRSS", "RssAnon", "VmHWM"))
    resident, anonymous, peak = parts
    print(
        f"{arm}: {target.mode}; loaded in {taken:.2f} s, {resident - before:.0f} MiB more, at its"
        f" peak {peak - before:.0f}; {anonymous:.0f} MiB of the process are not backed by files"
    )


def cells(text: str) -> list[tuple[int, int]]:
    pairs = [part.split("x") for part in text.split(",")]
    return [(int(sessions), int(rows)) for sessions, rows in pairs]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", help="a checkpoint's folder")
    parser.add_argument("--shape", default="small", help="a shape of verifier.py, without a model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--plain", action="store_true", help="plain mode, else canonical")
    parser.add_argument("--threads", type=int, default=1, help="canonical mode has one")
    parser.add_argument("--cells", type=cells, default="1x1,1x2,1x4,1x8,1x16,4x1,8x1,4x4")
    parser.add_argument("--context", type=int, default=256, help="cached rows of each session")
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--load", choices=ARMS, help="only load so, and tell time and memory")
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.sessions_max = max(sessions for sessions, _ in args.cells)
    prefer_huge_pages()
    if not args.plain:
        prefer_reproducible_products()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model
        if folder is None:
            from verifier import write_shape

            folder = write_shape(args.shape, Path(scratch))
        if args.load is not None:
            tell_loading(folder, args.load, args)
            return
        print(f"command: {shlex.join(sys.argv)}")
        print(f"machine: {machine()}, load {os.getloadavg()[0]:.1f}", flush=True)
        for arm in ARMS:
            options = [*sys.argv[1:], "--load", arm]
            if args.model is None:
                options = [str(folder), *options]
            subprocess.run([sys.executable, __file__, *options], check=True)
        targets = {arm: load(folder, arm, args) for arm in ARMS}
    print("sessions x rows: plain ms (quartiles), packed ms (quartiles), ratio of the medians")
    for sessions, rows in args.cells:
        samples = measure(targets, sessions, rows, args)
        plain, packed = (samples[arm] for arm in ARMS)
        ratio = statistics.median(packed) / statistics.median(plain)
        print(f"{sessions} x {rows}: {spread(plain)}, {spread(packed)}, {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
