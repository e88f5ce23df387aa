"""The default draft policy beside fixed ones, over pass, step and round-trip times.

    PYTHONPATH=.:sim python benchmarks/policy_grid.py [--jobs 2] [--ends both] [--out grid.json]

Plays the grid of ``tests/sim/policy_grid.py`` in virtual time. Prints the worst ratio by pass and
round-trip time, and each cell that is not within the limit. The exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing import Pool
from multiprocessing.pool import Pool as PoolType

from tests.sim.policy_grid import (
    LIMIT,
    MAX_SEEDS,
    Played,
    Verdict,
    World,
    play_grid,
    play_world,
    whole_grid,
)


def make_table(verdicts: Sequence[Verdict]) -> str:
    """Return the worst ratio by drafting end, pass time and round-trip time, in Markdown."""
    rtts = sorted({one.cell.rtt_ms for one in verdicts})
    rows = sorted({(one.cell.both_ends, one.cell.pass_ms) for one in verdicts})
    head = "| who drafts | pass ms | " + " | ".join(f"RTT {ms:g}" for ms in rtts) + " |"
    lines = [head, "| --- | ---: |" + " ---: |" * len(rtts)]
    for both_ends, pass_ms in rows:
        shown = ["both ends" if both_ends else "device alone", f"{pass_ms:g}"]
        for rtt_ms in rtts:
            here = [
                one
                for one in verdicts
                if (one.cell.both_ends, one.cell.pass_ms, one.cell.rtt_ms)
                == (both_ends, pass_ms, rtt_ms)
            ]
            worst = max(here, key=lambda one: one.ratio, default=None)
            shown.append(
                "" if worst is None else f"{worst.ratio:.3f} ({worst.low:.3f}–{worst.high:.3f})"
            )
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def describe(one: Verdict) -> str:
    """Return a line about a cell."""
    cell = one.cell
    ends = "both ends" if cell.both_ends else "device alone"
    shown = ", ".join(f"{arm} {ms:.2f}" for arm, ms in one.ms.items())
    return (
        f"temperature {cell.temperature:g}, {ends}, RTT {cell.rtt_ms:g} step {cell.step_ms:g}"
        f" pass {cell.pass_ms:g} acceptance {cell.acceptance:g}: {one.ratio:.3f}"
        f" ({one.low:.3f}-{one.high:.3f}) of {one.rival.value}, {one.seeds} seeds; ms a token:"
        f" {shown}"
    )


def _play_all(pool: PoolType, worlds: Sequence[World]) -> Iterator[Played]:
    """Play worlds in the pool's processes; print the progress on stderr."""
    for done, played in enumerate(pool.imap(play_world, worlds, 4), 1):
        if not done % 100 or done == len(worlds):
            print(f"{done} of {len(worlds)} worlds played", file=sys.stderr, flush=True)
        yield played


def main(argv: Sequence[str] | None = None) -> int:
    """Play the grid, print the table and the worst cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--most-seeds", type=int, default=MAX_SEEDS, help="most seeds of a cell")
    parser.add_argument("--ends", choices=("alone", "both"), help="one kind of cells only")
    every_help = "play every Nth cell only; N = 5 meets every value of each setting"
    parser.add_argument("--every", type=int, default=1, help=every_help)
    parser.add_argument("--out", help="a file for all verdicts, as JSON")
    args = parser.parse_args(argv)
    cells = [
        cell
        for cell in whole_grid()
        if args.ends is None or cell.both_ends == (args.ends == "both")
    ][:: args.every]
    begun = time.monotonic()
    with Pool(args.jobs) as pool:
        verdicts = play_grid(cells, partial(_play_all, pool), args.most_seeds)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump([asdict(one) | {"rival": one.rival.value} for one in verdicts], file)
    print(make_table(verdicts))
    failed = [one for one in verdicts if one.high > LIMIT]
    for one in sorted(failed, key=lambda one: -one.ratio):
        print(("above: " if one.low > LIMIT else "open: ") + describe(one))
    print("worst: " + describe(max(verdicts, key=lambda one: one.ratio)))
    print(f"{len(cells)} cells, {len(failed)} not within {LIMIT}, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
