"""What choosing the tokens of a pass costs the native target, by sampling parameters.

    python benchmarks/choose_cost.py [--vocabulary 151936] [--sessions 8] [--rounds 20]

CPU time of the thread in milliseconds for one row of each session, cases in turn: median (lowest to
highest), and how much of it is more than greedy. Rows: *peaked*, as models mostly have them;
*broad*, normal logits of standard deviation two; *flat*, the worst. Penalties look at 4,096 tokens
of prompt and output; their counts grow by a token a pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from itertools import product

import torch

from edgespec.benchmark.report import machine, versions
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.targets.loading import DTYPES
from edgespec.targets.sampler import SampleBlock, choose_tokens
from edgespec.targets.token_counts import TokenCounts

CASES = {
    "greedy": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7, seed=5),
    "top-k 50": SamplingParams(temperature=0.7, top_k=50, seed=5),
    "top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9, seed=5),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.7, top_k=50, top_p=0.9, seed=5),
    "min-p 0.05": SamplingParams(temperature=0.7, min_p=0.05, seed=5),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.1, seed=5
    ),
    "top-p 0.9, penalties": SamplingParams(
        temperature=0.7, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, seed=5
    ),
}
TEXT_LENGTH = 4096


def tables(sessions: int, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn((sessions, size), generator=generator)
    peaked = normal * 2.5
    peaked[:, torch.randperm(size, generator=generator)[:20]] += 12
    kinds = {"peaked": peaked, "broad": normal * 2, "flat": normal * 1e-3}
    return {name: table.to(dtype) for name, table in kinds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of the logits")
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(args.vocabulary, (TEXT_LENGTH + args.rounds + 1,), generator=generator)
    tokens = text.tolist()
    counts = [TokenCounts(TEXT_LENGTH // 2) for _ in range(args.sessions)]
    made = tables(args.sessions, args.vocabulary, DTYPES[args.dtype])
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn, (case, kind) in product(range(args.rounds + 1), product(CASES, made)):
        length, params = TEXT_LENGTH + turn, CASES[case]
        began = time.thread_time()
        blocks = []
        for session, one in enumerate(counts):
            before = None
            if params.penalised:
                one.follow(tokens[:length], length - 1)
                before = one.before((), ())
            blocks.append(SampleBlock(f"s{session}", params, (length,), before))
        with torch.inference_mode():
            choose_tokens(made[kind], blocks)
        if turn:  # the first round makes the counts
            took[case, kind].append((time.thread_time() - began) * 1e3)
    print(f"{machine()}\n{versions()}")
    print(f"{args.sessions} rows of {args.vocabulary}, {args.dtype}, {args.rounds} rounds\n")
    print(f"{'':22}" + "".join(f"{kind:>30}" for kind in made))
    for case in CASES:
        cells = []
        for kind in made:
            ms, greedy = took[case, kind], statistics.median(took["greedy", kind])
            middle = statistics.median(ms)
            cells.append(f"{middle:.2f} ({min(ms):.2f}-{max(ms):.2f}) {middle - greedy:+.2f}")
        print(f"{case:22}" + "".join(f"{cell:>30}" for cell in cells))


if __name__ == "__main__":
    main()
