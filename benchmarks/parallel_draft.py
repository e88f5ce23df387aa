"""Measures the cost of a draft that fills several positions in one run, and when it pays.

    python -m benchmarks.parallel_draft cost DRAFT --threads 1 2
    python -m benchmarks.parallel_draft speed

``cost`` times the steps of an exported parallel draft (``edgespec distill --parallel K`` or a
folder with ``pard_token``), with the choice of candidates, behind a cache of 256 tokens. One run
feeds the tokens that are new, and a mask for each further position. All ways are timed in turns, so
that other programs disturb them alike.

``speed`` plays sessions in virtual time, by the product's own sessions, with the agreement of the
bundled pair moved to an acceptance rate, and with stated accuracies of the further places. The
verifier makes a token every T milliseconds, which stands for a server alone or with drafts of its
own. Each line compares one step for several positions with one position a step.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles

from edgespec.core.device.estimates import KeptEstimates
from edgespec.core.device.goodput_policy import make_policy
from edgespec.core.protocol.messages import Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec_sim.token_sources.acceptance_process import fit
from edgespec_sim.token_sources.source import ProcessSource, load_tape
from tests.sim.one_session import play_alone

CACHED = 256
WAYS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (4, 4), (8, 8))
"""Tokens that are fed, and positions that are drafted for. In the last three, the step before
drafted for as many."""
ACCEPTANCE = 0.85
PLACES = {
    "as good": (1.0,) * 7,
    "slowly worse": (0.95, 0.9, 0.85, 0.8, 0.78, 0.75, 0.72),
    "worse": (0.85, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3),
}
"""Accuracy of each further place, as a share of what one step for it alone would have right."""
GRID = (
    *((8.0, share, 25.0) for share in (0.2, 0.05)),
    *((24.0, share, 25.0) for share in (0.2, 0.05)),
    *((8.0, share, 6.8) for share in (0.2, 0.05)),
)
"""Milliseconds of a step, share of it that a further row takes, and milliseconds of a token."""
RTTS_MS = (2.0, 20.0, 50.0)


def time_steps(folder: Path, threads: int, rounds: int) -> None:
    """Print the cost of each way with a draft folder."""
    drafter = OnnxDrafter(folder, threads=threads)
    dice = random.Random(1)
    cached = min(CACHED, drafter.info.context_length - 32)
    words = [dice.randrange(5, drafter.manifest.proposable_count) for _ in range(cached + 8)]
    drafter.begin(1, SamplingParams())
    drafter.step(0, words[:cached], 2)

    def run(fed: int, places: int) -> float:
        began_s = time.perf_counter()
        drafter.step_places(cached, words[cached : cached + fed], 2, places)
        return time.perf_counter() - began_s

    ways = [way for way in WAYS if way[1] <= drafter.max_places]
    times_s: dict[tuple[int, int], list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in ways:
            took_s = run(*way)
            if number:  # the first round warms up
                times_s[way].append(took_s)
    single_s = median(times_s[1, 1])
    print(f"{folder.name}, {threads} threads, {cached} tokens cached")
    for (fed, places), taken_s in times_s.items():
        low, *_, high = quantiles(taken_s, n=10)
        middle_s = median(taken_s)
        print(
            f"  {fed} fed, {places} positions: {1e3 * middle_s:.2f} ms"
            f" [{1e3 * low:.2f}, {1e3 * high:.2f}], {middle_s / single_s:.2f} steps"
        )
    drafter.close()


def token_ms(
    source: ProcessSource,
    further: Sequence[float],
    step_ms: float,
    row_share: float,
    pass_ms: float,
    rtt_ms: float,
    *,
    texts: int,
    tokens: int,
) -> float:
    """Return the mean milliseconds per token, behind the first one, of ``texts`` outputs. The
    estimates of one output are kept for the next, and the first output is not counted."""
    kept, taken_s, count = KeptEstimates(), 0.0, 0
    for number in range(texts + 1):
        asked = source.request(number, 32, tokens)
        opened = Open(f"s{number}", "", "", asked.prompt, sampling=asked.sampling)
        played = play_alone(
            source.target(),
            source.drafter(further),
            opened,
            make_policy(),
            rtt_ms / 1e3,
            step_ms / 1e3,
            pass_ms / 1e3,
            kept,
            row_s=row_share * step_ms / 1e3,
        )
        times_s = played.delivery.times_s
        assert list(played.delivery.tokens) == list(source.expected(asked, tokens))
        if number:
            taken_s += times_s[-1] - times_s[0]
            count += len(times_s) - 1
    return 1e3 * taken_s / count


def compare_speeds(texts: int, tokens: int) -> None:
    """Print the speed with several positions a step over one position a step."""
    source = ProcessSource(fit(load_tape("bundled-greedy")).at(ACCEPTANCE), 3)
    for step_ms, share, own_ms in GRID:
        for rtt_ms in RTTS_MS:
            how = (step_ms, share, own_ms, rtt_ms)
            one_ms = token_ms(source, (), *how, texts=texts, tokens=tokens)
            speeds = []
            for name, further in PLACES.items():
                found_ms = token_ms(source, further, *how, texts=texts, tokens=tokens)
                speeds.append(f"{name} {one_ms / found_ms:.2f}")
            print(
                f"step {step_ms:g} ms, row {share:g}, T {own_ms:g} ms, RTT {rtt_ms:g} ms:"
                f" one {one_ms:.2f} ms a token ({own_ms / one_ms:.2f}); {', '.join(speeds)}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(required=True)
    cost = parts.add_parser("cost")
    cost.add_argument("folder", type=Path)
    cost.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    cost.add_argument("--rounds", type=int, default=40)
    speed = parts.add_parser("speed")
    speed.add_argument("--texts", type=int, default=12)
    speed.add_argument("--tokens", type=int, default=160)
    run: Callable[[argparse.Namespace], None] = _run_cost
    cost.set_defaults(run=run)
    speed.set_defaults(run=lambda asked: compare_speeds(asked.texts, asked.tokens))
    asked = parser.parse_args()
    asked.run(asked)


def _run_cost(asked: argparse.Namespace) -> None:
    for threads in asked.threads:
        time_steps(asked.folder, threads, asked.rounds)


if __name__ == "__main__":
    main()
