"""``python -m edgespec_uara.sweep --out DIR``: every method over the paper's sweeps.

Writes ``NAME.json`` and ``NAME.html`` for each cost model, and shows what the paper's method saves,
as the paper has it and with our moves, beside the paper's own figures.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from edgespec_uara.association import shipped_association
from edgespec_uara.comparison import (
    PAPER_MAX_GAIN,
    PAPER_MEAN_GAIN,
    Effort,
    Gain,
    Result,
    cells,
    compare,
    gains,
    over_the_papers,
    over_the_strongest,
    write_page,
)
from edgespec_uara.cost import CorrectedCost, PaperCost, uniform
from edgespec_uara.methods import (
    PAPER_BASELINES,
    TMA_MASAC,
    TMA_MASAC_MOVES,
    Actor,
    follow,
    methods,
)

LEARNED = "learned association + optimal shares"
ON_A_DEVICE = "learned association + uniform shares"
"""What a device can run: it chooses by what it knows, and nobody has to hand out shares."""
BEST = "greedy + search + optimal shares"


def table(ours: str, found: list[Gain], title: str) -> Table:
    """What ``ours`` saves over every other method, with the paper's figures beneath."""
    shown = Table(title=title, box=box.SIMPLE)
    shown.add_column(f"{ours} against")
    for column in ("mean cost", "max cost", "mean delay", "max delay"):
        shown.add_column(column, justify="right")
    for gain in found:
        values = (gain.mean_cost, gain.max_cost, gain.mean_delay, gain.max_delay)
        marked = f"{gain.baseline} *" if gain.baseline in PAPER_BASELINES else gain.baseline
        shown.add_row(marked, *(f"{value:+.1%}" for value in values))
    mean, most = over_the_papers(found)
    shown.caption = (
        f"* the paper's baselines. Delay saved over all three: mean {mean:.1%}, "
        f"at most {most:.1%}; the paper's: {PAPER_MEAN_GAIN:.1%} and {PAPER_MAX_GAIN:.1%}. "
        "Negative: the other one is better."
    )
    return shown


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results")],
    quick: Annotated[bool, typer.Option("--quick", help="Few cells, one slot")] = False,
    seed: int = 0,
) -> None:
    """Run the sweep under the paper's cost and under the corrected one."""
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    effort = Effort(1, 1) if quick else Effort()
    actor = Actor.shipped()
    every = {**methods(actor), LEARNED: follow(shipped_association())}
    every[ON_A_DEVICE] = follow(shipped_association(), uniform)
    for cost in (PaperCost(), CorrectedCost()):
        results: list[Result] = []
        for cell in track(cells(quick), f"{cost.name} cost", console=console):
            results += compare(cell, cost, every, effort, seed)
        strongest = {
            ours: over_the_strongest(results, ours)
            for ours in (TMA_MASAC, TMA_MASAC_MOVES, ON_A_DEVICE, BEST)
        }
        found = {ours: gains(results, ours) for ours in (TMA_MASAC, TMA_MASAC_MOVES)}
        text = {
            "cost_model": cost.name,
            "seed": seed,
            "effort": asdict(effort),
            "paper": {"mean_gain": PAPER_MEAN_GAIN, "max_gain": PAPER_MAX_GAIN},
            "delay_saved_over_the_papers_baselines": {
                ours: over_the_papers(saved) for ours, saved in found.items()
            },
            "delay_saved_over_the_strongest": {
                ours: asdict(saved) for ours, saved in strongest.items()
            },
            "gains": {ours: [asdict(gain) for gain in saved] for ours, saved in found.items()},
            "results": [asdict(result) for result in results],
        }
        file = out / f"{cost.name}.json"
        file.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
        title = f"User association and resource allocation, {cost.name} cost"
        write_page(file.with_suffix(".html"), results, found, title)
        for ours, saved in found.items():
            console.print(table(ours, saved, title))
        console.print("Delay saved over the strongest of the paper's baselines in each cell:")
        for ours, over in strongest.items():
            spread = f"from {over.least:+.1%} to {over.most:+.1%}"
            console.print(f"  {ours}: {over.mean:+.1%} in the mean, {spread}")
    console.print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
