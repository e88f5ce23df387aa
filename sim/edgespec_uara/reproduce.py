"""``python -m edgespec_uara.reproduce --out DIR``: the paper's method, trained as the paper says.

On the paper's reward in the PettingZoo environment (``masac.py``), once for each of
several seeds, then all of them over the paper's sweep under its cost as printed: what each saves of
the delay of random, max-SINR and max-compute, and the spread over the training seeds. A policy that
is in DIR already is not trained again.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from edgespec_uara.cost import Decision, PaperCost
from edgespec_uara.methods import (
    METHODS,
    PAPER_BASELINES,
    PAPERS_MATCHING,
    Method,
    Situation,
    best_gain,
    pair_features,
    tma_masac,
)
from edgespec_uara.sweep import (
    PAPER_MEAN_GAIN,
    Effort,
    Result,
    cells,
    compare,
    gains,
    over_the_papers,
)

if TYPE_CHECKING:
    from edgespec_uara.masac import Actor


def papers_method(actor: Actor) -> Method:
    def decide(s: Situation) -> Decision:
        weights = actor.weights(pair_features(s.terms))
        return tma_masac(weights, s.terms, best_gain(s.snapshot.gains))

    return decide


def saved_of_delay(results: list[Result], name: str) -> dict[str, float]:
    """By baseline, and over all three; shares of the baseline's delay, means over the cells."""
    found = gains([one for one in results if one.method in (*PAPER_BASELINES, name)], name)
    shares = {gain.baseline: gain.mean_delay for gain in found}
    return {**shares, "all three": over_the_papers(found)[0]}


def main(
    out: Annotated[Path, typer.Option(help="Folder for policies and results")],
    seeds: Annotated[int, typer.Option(min=1, help="Trainings")] = 5,
    updates: Annotated[int, typer.Option(min=1, help="Of each")] = 1000,
    quick: Annotated[bool, typer.Option("--quick", help="Few cells, one slot")] = False,
) -> None:
    """Train the paper's method on the paper's reward, and show what it saves."""
    from edgespec_uara.masac import trained

    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    actors: dict[str, Actor] = {}
    for seed in range(seeds):
        began = time.monotonic()
        actor = trained(out / f"paper-{seed}-{updates}.pt", seed, updates)
        actors[f"trained, seed {seed}"] = actor
        console.print(f"seed {seed}: {updates} updates in {time.monotonic() - began:.0f} s")
    named = {name: METHODS[name] for name in (*PAPER_BASELINES, PAPERS_MATCHING)}
    named |= {name: papers_method(actor) for name, actor in actors.items()}
    results: list[Result] = []
    effort = Effort(1, 1) if quick else Effort()
    for cell in track(cells(quick), "sweep", console=console):
        results += compare(cell, PaperCost(), named, effort, 0)
    saved = {name: saved_of_delay(results, name) for name in (*actors, PAPERS_MATCHING)}
    for name, shares in saved.items():
        console.print(f"{name}: " + ", ".join(f"{k} {v:+.1%}" for k, v in shares.items()))
    means = [saved[name]["all three"] for name in actors]
    spread = f", standard deviation {statistics.stdev(means):.1%}" if seeds > 1 else ""
    console.print(
        f"delay saved over all three, mean of {seeds} trainings: {statistics.fmean(means):+.1%}"
        f"{spread}; the paper: {PAPER_MEAN_GAIN:+.1%}"
    )
    text = json.dumps({"updates": updates, "saved_of_delay": saved}, indent=1) + "\n"
    (out / "reproduce.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
