"""What drafting costs where it can bring little, in real time: time a token over target-only's.

    python benchmarks/break_even.py [--repeats 3] [--prefer speed]

Runs `edgespec bench` with the arms target-only and edgespec in turns, with the bundled pair and
passes of 25 ms: a draft slower than a pass, a draft that guesses at random, a round trip of 300 ms,
and other programs that keep every core busy. `draft_policies.py break-even` has the same in virtual
time, without the noise of a machine. Exits 1 where a case is more than 3 % slower.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

MOST_OVER = 1.03
CASES: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "a draft slower than a pass": (("--rtt-ms", "20", "--draft-ms", "250"), False),
    "a draft that guesses at random": (("--rtt-ms", "20", "--draft", "random"), False),
    "a round trip of 300 ms": (("--rtt-ms", "300"), False),
    "other programs on every core": (("--rtt-ms", "20", "--draft-ms", "0"), True),
}


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """So many processes that never rest."""
    spinners = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count)]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.terminate()
        for spinner in spinners:
            spinner.join()


def bench(arguments: Sequence[str], repeats: int, prefer: str) -> dict[str, dict[str, object]]:
    """The summary's rows by arm. Raises ``RuntimeError`` with what the bench said last."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "edgespec", "bench", "--arms", "target-only,edgespec"]
        command += ["--repeats", str(repeats), "--limit", "2", "-n", "48", "--prefer", prefer]
        command += ["--json", str(path), *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        content = json.loads(path.read_text(encoding="utf-8"))
    return {str(row["arm"]): row for row in content["summary"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prefer", default="speed")
    args = parser.parse_args()
    worst = 0.0
    cores = os.cpu_count() or 1
    print(f"load before: {os.getloadavg()[0]:.1f} on {cores} cores; prefer {args.prefer}")
    for what, (arguments, busy) in CASES.items():
        try:
            with busy_cores(cores if busy else 0):
                rows = bench(arguments, args.repeats, args.prefer)
        except RuntimeError as error:
            print(f"{what:32s} not measured: {error}", flush=True)
            worst = math.inf
            continue
        plain, ours = rows["target-only"], rows["edgespec"]
        before, now = float(str(plain["tpot_ms_p50"])), float(str(ours["tpot_ms_p50"]))
        worst = max(worst, now / before)
        spread = ours["spread"]
        assert isinstance(spread, dict)
        low, high = spread["tpot_ms_p50"]
        print(
            f"{what:32s} {now / before:.3f}: {now:.1f} ms ({low:.1f} to {high:.1f}) after"
            f" {before:.1f}; wasted {float(str(ours['wasted_nodes_per_token'])):.1f} nodes a token",
            flush=True,
        )
    return int(worst > MOST_OVER)


if __name__ == "__main__":
    sys.exit(main())
