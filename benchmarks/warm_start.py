"""How long a device takes to load a draft: the first start, which measures threads, and later ones.

    python benchmarks/warm_start.py [--shape 135M] [--rounds 5]

Each start is a fresh process with the draft's files in the system's cache; it loads a random draft
of a real model's shape (``random_draft.py``) as the device's model is loaded, and tells the seconds
from there to a drafter that is ready, apart from the imports. Three kinds take turns:
``first`` with an empty cache, ``later`` with what ``first`` kept, and ``given``, whose settings say
the number of threads. Medians, lowest and highest, and ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from random_draft import SHAPES, make_draft

from edgespec.benchmark.report import machine, versions
from edgespec.core.device.kv_type import KvType

CHILD = """
import json, sys, time
from pathlib import Path
import edgespec.cli.main
from edgespec.drafters.manifest import MODEL_FILE
from edgespec.drafters.onnx_drafter import OnnxDrafter
from edgespec import thread_choice
from edgespec.thread_choice import load_with_best_threads
thread_choice._LEAST_SHARE = 0.0  # a crowded machine is measured here as well
folder, threads, said = Path(sys.argv[1]), int(sys.argv[2]), []
load = lambda count: OnnxDrafter(folder, threads=count)
before, cpu = time.perf_counter(), time.process_time()
if threads:
    load(threads)
else:
    load_with_best_threads(load, folder / MODEL_FILE, said.append, tried=True)
print(json.dumps([time.perf_counter() - before, time.process_time() - cpu, said]))
"""


def start(folder: Path, cache: Path, threads: int = 0) -> tuple[float, float, list[str]]:
    """(seconds, CPU seconds, what was said) of one start."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(threads)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    took_s, cpu_s, said = json.loads(done.stdout)
    return took_s, cpu_s, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(machine(), versions())
    kinds: dict[str, list[tuple[float, float]]] = {"first": [], "later": [], "given": []}
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name) / "draft", Path(name) / "cache"
        make_draft(folder, options.shape, bits=4, context_length=4096, kv_type=KvType.FLOAT32)
        for _ in range(options.rounds):
            shutil.rmtree(cache, ignore_errors=True)
            for kind in kinds:
                took_s, cpu_s, said = start(folder, cache, 2 if kind == "given" else 0)
                kinds[kind].append((took_s, cpu_s))
                assert bool(said) == (kind == "first"), said
                if said:
                    print(said[-1], flush=True)
    first_s = statistics.median(took_s for took_s, _ in kinds["first"])
    print("| start | ms | least | most | CPU ms | of the first |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for kind, starts in kinds.items():
        times = [1e3 * took_s for took_s, _ in starts]
        cpu_ms = 1e3 * statistics.median(cpu_s for _, cpu_s in starts)
        middle = statistics.median(times)
        print(
            f"| {kind} | {middle:.0f} | {min(times):.0f} | {max(times):.0f} | {cpu_ms:.0f} |"
            f" {middle / (1e3 * first_s):.2f} |"
        )


if __name__ == "__main__":
    main()
