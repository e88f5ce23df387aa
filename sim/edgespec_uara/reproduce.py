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
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from edgespec_uara.cost import PaperCost
from edgespec_uara.methods import (
    METHODS,
    PAPER_BASELINES,
    PAPERS_MATCHING,
    Actor,
    Method,
    best_gain,
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
from edgespec_uara.world import Floats

CAPACITY, WARM_UP, UPDATES_PER_EPISODE = 400, 10, 10


def train(seed: int, updates: int) -> dict[str, Floats]:
    """The actor's arrays after so many updates: the last, not the best, as nothing of the sweep may
    choose it."""
    from edgespec_uara.masac import Learner, LearnerSettings, PaperRollout, Replay, one_thread

    one_thread()
    settings = LearnerSettings()
    learner, rollout = Learner(settings, seed), PaperRollout(PaperCost(), seed)
    replay = Replay(CAPACITY, np.random.default_rng(seed))
    for _ in range(WARM_UP):
        for transition in rollout.episode(learner.actor):
            replay.add(transition)
    done = 0
    while done < updates:
        for transition in rollout.episode(learner.actor):
            replay.add(transition)
        for _ in range(min(UPDATES_PER_EPISODE, updates - done)):
            learner.update(replay.draw(settings.batch))
            done += 1
        learner.slow_down(max(0.05, 1.0 - done / updates))
    return learner.arrays()


def papers_method(actor: Actor) -> Method:
    return lambda s: tma_masac(actor, s.terms, best_gain(s.snapshot.gains))


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
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    actors: dict[str, Actor] = {}
    for seed in range(seeds):
        file, began = out / f"paper-{seed}-{updates}.npz", time.monotonic()
        if not file.is_file():
            np.savez_compressed(file, **train(seed, updates))  # type: ignore[arg-type]
            console.print(f"seed {seed}: {updates} updates in {time.monotonic() - began:.0f} s")
        actors[f"trained, seed {seed}"] = Actor.load(file)
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
