"""Play random worlds by the hundred thousand: every device must receive its target's own text.

    PYTHONPATH=.:sim python benchmarks/many_worlds.py --worlds 200000
    PYTHONPATH=.:sim python benchmarks/many_worlds.py --worlds 100000 --predictions

With ``--predictions`` the worlds are small ones in which devices have predictions. A world that
fails is named with the line that plays it again.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import Pool

from tests.sim.random_worlds import REPLAY, play, play_with_prediction

BATCH = 50


def main(argv: Sequence[str] | None = None) -> int:
    """Play many worlds on several cores; print each failing one with the line that plays it
    again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first world")
    parser.add_argument("--worlds", type=int, default=2000, help="how many seeds from there on")
    parser.add_argument("--predictions", action="store_true", help="small worlds with predictions")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)  # the product logs thousands of the faults that worlds inject
    batches = range(args.first, args.first + args.worlds, BATCH)
    last = args.first + args.worlds
    begun, played, told = time.monotonic(), Counter[str](), 0
    failures = 0
    with Pool(args.jobs) as pool:
        jobs = [(first, min(first + BATCH, last), args.predictions) for first in batches]
        for counts, failed in pool.imap_unordered(_play_batch, jobs):
            played.update(counts)
            failures += len(failed)
            for line in failed:
                print(line, flush=True)
            if played["worlds"] * 20 // args.worlds > told or played["worlds"] == args.worlds:
                told = played["worlds"] * 20 // args.worlds
                seconds = time.monotonic() - begun
                print(f"{seconds:6.0f} s, {failures} failures in {dict(played)}", flush=True)
    return 1 if failures else 0


def _play_batch(batch: tuple[int, int, bool]) -> tuple[dict[str, int], list[str]]:
    counts, failed = Counter[str](), []
    first, end, predicts = batch
    play_one = play_with_prediction if predicts else play
    for seed in range(first, end):
        counts["worlds"] += 1
        try:
            result = play_one(seed)
        except Exception as error:
            again = REPLAY.format(name=play_one.__name__, seed=seed)
            failed.append(f"world {seed}: {error!r}; {again}")
            continue
        counts["devices"] += len(result.devices)
        counts["tokens"] += sum(len(device.expected.tokens) for device in result.devices)
        counts["passes"] += result.passes
        counts["rows"] += result.rows
        counts["faults"] += result.faults
        counts["evictions"] += result.evictions
        counts["tokens not computed again"] += result.hit_tokens
        counts["server's guesses"] += result.server_guesses
        counts["of these right"] += result.server_accepted
        counts["drafters off"] += result.drafters_off
        counts["ids not sent"] += result.named_tokens
        counts["beginnings missing"] += result.prefix_misses
    return counts, failed


if __name__ == "__main__":
    sys.exit(main())
