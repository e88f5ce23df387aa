"""``python -m edgespec_uara.reproduce --out DIR``: trains the paper's method as the paper
describes.

The method is trained on the paper's reward (``masac.py``), once for each of several seeds. Then all
trained policies run over the paper's ten sizes. The output shows how much delay each saves compared
with random, max-SINR and max-compute, and the mean over the trainings. A policy that exists in DIR
is not trained again.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console

from edgespec_uara import methods, sweep
from edgespec_uara.cost import Terms, Weights, decide_by_weights
from edgespec_uara.methods import PAPER_BASELINES, PAPERS_MATCHING, Method, Situation
from edgespec_uara.world import Ints

if TYPE_CHECKING:
    from edgespec_uara.masac import Actor


def papers_method(actor: Actor) -> Method:
    """Return the paper's method with a trained actor: weights first, for all pairs, then swaps
    under them."""

    def weights(terms: Terms) -> Weights:
        return actor.weights(methods.pair_features(terms))

    def associate(s: Situation) -> Ints:
        start, swaps = methods.best_gain(s.snapshot.gains), methods.Steps.SWAPS
        return methods.two_phase_matching(s.terms, weights(s.terms), start, swaps)

    return Method(
        associate, lambda terms, association: decide_by_weights(weights(terms), association)
    )


def main(
    out: Annotated[Path, typer.Option(help="Folder for policies and results")],
    seeds: Annotated[int, typer.Option(min=1, help="Number of trainings")] = 5,
    updates: Annotated[int, typer.Option(min=1, help="Updates of each training")] = 1000,
    given: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, as in the sweep")
    ] = None,
    worlds: Annotated[int, typer.Option(min=2, max=10_000, help="Worlds at each size")] = 10,
    quick: Annotated[bool, typer.Option("--quick", help="Two sizes and worlds, one slot")] = False,
) -> None:
    """Train the paper's method on the paper's reward, and show how much delay it saves."""
    from edgespec_uara.masac import load_or_train

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    base = sweep.parse_base(given or [])
    if quick:
        worlds, base = 2, replace(base, slots=1)
    out.mkdir(parents=True, exist_ok=True)
    known = methods.make_methods(base.max_compute)
    every = {name: known[name] for name in (*PAPER_BASELINES, PAPERS_MATCHING)}
    mark = "".join(f"{text}-" for text in given or [])
    for seed in range(seeds):
        began = time.monotonic()
        actor = load_or_train(out / f"paper-{mark}{seed}-{updates}.pt", base, seed, updates)
        every[f"paper's TMA-MASAC, training {seed}"] = papers_method(actor)
        console.print(f"training {seed}: {updates} updates, {time.monotonic() - began:.0f} s")
    sizes = list(
        dict.fromkeys(one for row in sweep.SIZES for one in sweep.parse_choices(row, base))
    )
    sizes = sizes[:: 9 if quick else 1]
    played = []
    for size in sizes:
        played.append(sweep.play(size, every, worlds, 0))
        console.print(f"{len(played)}/{len(sizes)} {size.devices} devices, {size.servers} servers")
    ours = [name for name in every if name not in PAPER_BASELINES]
    saved = {
        name: sweep.measure_saving(played, name, PAPER_BASELINES, base.estimator) for name in ours
    }
    for name, one in saved.items():
        console.print(f"{name}: saves {sweep.percent(one)} over its three baselines")
    means = np.array([saved[name].value for name in ours if name != PAPERS_MATCHING])
    if seeds > 1:
        mean = sweep.student_interval(float(means.mean()), means)
        console.print(
            f"mean of {seeds} trainings: {sweep.percent(mean)}; paper: {100 * sweep.PAPER_GAIN} %"
        )
    found = {"base": asdict(base), "updates": updates, "worlds": worlds}
    found["saved"] = {name: asdict(one) for name, one in saved.items()}
    text = json.dumps(found, indent=1) + "\n"
    (out / "reproduce.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
