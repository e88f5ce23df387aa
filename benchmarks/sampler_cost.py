"""What choosing a draft's guesses from one row of logits costs, by sampling parameters.

    python benchmarks/sampler_cost.py [--vocabulary 151936] [--rounds 20]

CPU time of the thread in milliseconds, median (lowest to highest), cases in turn. Rows: *peaked*,
as models mostly have them; *broad*, normal logits of standard deviation two; *flat*, the worst.
Penalties look at 8,192 tokens of prompt and output.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from itertools import product

import numpy as np
from numpy.typing import NDArray

from edgespec.benchmark.report import machine, versions
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.drafters.sampler import best_candidates
from edgespec.drafters.token_counts import TokenCounts
from edgespec.drafters.workspace import Workspace

CASES = {
    "greedy": SamplingParams(),
    "temperature 1": SamplingParams(temperature=1.0, seed=5),
    "top-k 50": SamplingParams(temperature=1.0, top_k=50, seed=5),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9, seed=5),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05, seed=5),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.1, seed=5
    ),
    "top-p, penalties": SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=5),
}


def rows(size: int) -> dict[str, NDArray[np.float32]]:
    dice = np.random.default_rng(1)
    normal = dice.standard_normal(size).astype(np.float32)
    peaked = normal * np.float32(2.5)
    peaked[dice.integers(0, size, 20)] += 12
    return {"peaked": peaked, "broad": normal * 2, "flat": normal * np.float32(1e-3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    dice = np.random.default_rng(2)
    prompt, output = (dice.integers(0, args.vocabulary, 4096).tolist() for _ in range(2))
    counts, work = TokenCounts.of(args.vocabulary, prompt, output), Workspace()
    took: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    made = rows(args.vocabulary)
    for position in range(args.rounds + 1):
        for case, width, row in product(CASES, (1, 4), made):
            began = time.thread_time()
            best_candidates(made[row], CASES[case], position, width, counts, work)
            if position:  # the first round makes the arrays
                took[case, width, row].append((time.thread_time() - began) * 1e3)
    print(f"{machine()}\n{versions()}")
    print(f"{args.vocabulary} ids, {args.rounds} rounds\n")
    print(f"{'':18}{'width':>6}" + "".join(f"{row:>24}" for row in made))
    for case, width in product(CASES, (1, 4)):
        cells = (took[case, width, row] for row in made)
        print(
            f"{case:18}{width:>6}"
            + "".join(
                f"{f'{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})':>24}" for c in cells
            )
        )


if __name__ == "__main__":
    main()
