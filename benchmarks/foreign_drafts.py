"""Time the same weights as our own export and as graphs that others exported.

    python benchmarks/foreign_drafts.py OWN FOREIGN... [--rounds N] [--cached N]

Each round prefills, takes steps of one token, and steps behind a rollback of four tokens; the arms
take turns at each of them. A row is one arm: medians over all rounds with the first and last tenth,
and the ratio to the first arm, median of pairs taken in turn, with quartiles. Times are the
process's CPU time with one thread, so other work on the machine counts only as far as it empties
caches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from edgespec.compose import load_drafter
from edgespec.config import AgentConfig, DraftSection
from edgespec.core.protocol.sampling import SamplingParams

PREFILL, STEPS, TAKEN_BACK = 64, 24, 4
KINDS = (f"prefill of {PREFILL}", "step", f"step behind a rollback of {TAKEN_BACK}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafts", nargs="+", help="as --draft takes them; the first is compared to")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cached", type=int, default=512, help="tokens before the steps")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}, but quartiles of pairs need at least 2")
    arms = [_load(reference) for reference in options.drafts]
    found: list[dict[str, list[float]]] = [{kind: [] for kind in KINDS} for _ in arms]
    for _ in range(options.rounds):
        _round(arms, options.cached, found)
    for reference, arm, times in zip(options.drafts, arms, found, strict=True):
        print(f"{Path(reference).name}: {_way(arm)}")
        for kind in KINDS:
            ms = sorted(one * 1e3 for one in times[kind])
            low, high = ms[len(ms) // 10], ms[-1 - len(ms) // 10]
            pairs = [own / first for own, first in zip(times[kind], found[0][kind], strict=True)]
            least, ratio, most = statistics.quantiles(pairs, n=4)
            print(
                f"  {kind}: x{ratio:.3f} ({least:.3f} to {most:.3f}),"
                f" {statistics.median(ms):.2f} ms ({low:.2f} to {high:.2f}), {len(pairs)} pairs"
            )
        print(f"  {1 / statistics.median(times['step']):.0f} tokens a second of CPU time")


def _load(reference: str) -> Any:
    drafter = load_drafter(AgentConfig(draft=DraftSection(reference, threads=1)), say=print)
    assert drafter is not None
    return drafter


def _round(arms: list[Any], cached: int, found: list[dict[str, list[float]]]) -> None:
    size = min(drafter.info.vocabulary_size for drafter in arms)
    tokens = [(7 * position) % size for position in range(cached)]

    def in_turns(kind: str, work: Callable[[Any], object]) -> None:
        for drafter, times in zip(arms, found, strict=True):
            times[kind].append(_timed(partial(work, drafter)))

    for drafter in arms:
        drafter.begin(1, SamplingParams())
    in_turns(KINDS[0], lambda one: one.step(0, tokens[:PREFILL], 3))
    for drafter in arms:
        drafter.step(PREFILL, tokens[PREFILL:], 3)
    for position in range(cached, cached + STEPS):
        in_turns(KINDS[1], methodcaller("step", position, [1], 3))
    end = cached + STEPS
    for _ in range(STEPS):
        in_turns(KINDS[2], lambda one: one.step(end - TAKEN_BACK, [1], 3))
        for drafter in arms:
            drafter.step(end - TAKEN_BACK + 1, [1] * (TAKEN_BACK - 1), 3)


def _timed(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _way(drafter: Any) -> str:
    behaviour = getattr(drafter, "behaviour", None)
    if behaviour is None:
        return "our own export"
    return "shared buffers" if behaviour.in_place else "cache copied by the graph"


if __name__ == "__main__":
    main()
