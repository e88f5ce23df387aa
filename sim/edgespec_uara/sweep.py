"""``python -m edgespec_uara.sweep --out DIR``: every method over the paper's sweeps.

Writes ``NAME.json`` for each cost model, and shows what the paper's matching saves, with optimal
shares, and with our moves, beside the paper's own figures. Every method plays its own copy of a
world: gains, tasks and walks are the same for all (their dice do not depend on decisions), the
queues are those that it makes for itself. A gain is 1 - ours / theirs of the mean in a cell; the
paper reports its mean and its maximum over cells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from edgespec_uara.cost import CorrectedCost, CostModel, PaperCost, delays, objective
from edgespec_uara.methods import (
    METHODS,
    NO_SPECULATION,
    PAPER_BASELINES,
    PAPERS_MATCHING,
    WITH_MOVES,
    WITH_OPTIMAL,
    Method,
    Situation,
    without_speculation,
)
from edgespec_uara.world import UaraSettings, UaraWorld

PAPER_MEAN_GAIN, PAPER_MAX_GAIN = 0.237, 0.280
"""In end-to-end latency, over its three baselines (abstract)."""
DEVICE_SWEEP, SERVER_SWEEP = (30, 60, 90, 120, 150, 180), (4, 8, 12, 16, 20)
FIXED_DEVICES, FIXED_SERVERS = 90, 12
_SEED_STEP = 7919
_SHOWN = (PAPERS_MATCHING, WITH_OPTIMAL, WITH_MOVES)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is averaged in a cell."""

    seeds: int = 3
    slots: int = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a sweep."""

    devices: int
    servers: int


@dataclass(frozen=True, slots=True)
class Result:
    """Mean over devices, slots and seeds of one method in one cell; milliseconds."""

    cost_model: str
    cell: Cell
    method: str
    cost_ms: float
    delay_ms: float


@dataclass(frozen=True, slots=True)
class Gain:
    """Over one baseline, over all cells; shares of the baseline's value."""

    baseline: str
    mean_cost: float
    max_cost: float
    mean_delay: float
    max_delay: float


def cells(quick: bool) -> tuple[Cell, ...]:
    devices = (30, 90) if quick else DEVICE_SWEEP
    servers = (4, 12) if quick else SERVER_SWEEP
    fixed = 30 if quick else FIXED_DEVICES
    every = [Cell(count, FIXED_SERVERS) for count in devices]
    every += [Cell(fixed, count) for count in servers]
    return tuple(dict.fromkeys(every))


def compare(
    cell: Cell, cost: CostModel, methods: Mapping[str, Method], effort: Effort, seed: int
) -> Iterator[Result]:
    """Results of all methods, and of no speculation, in one cell."""
    for name, method in methods.items():

        def play(world: UaraWorld, dice: np.random.Generator, use: Method = method) -> _Slot:
            terms = cost.terms(world.snapshot)
            decision = use(Situation(world.snapshot, terms, dice))
            decision.check(terms.servers)
            world.advance(decision.association)
            return objective(terms, decision), float(delays(terms, decision).sum())

        yield _result(cell, cost, name, play, effort, seed)

    def alone(world: UaraWorld, dice: np.random.Generator) -> _Slot:
        terms, decision = without_speculation(world.snapshot, cost)
        world.advance_plain(decision.association)
        return objective(terms, decision), float(delays(terms, decision).sum())

    yield _result(cell, cost, NO_SPECULATION, alone, effort, seed)


_Slot = tuple[float, float]
_Play = Callable[[UaraWorld, np.random.Generator], _Slot]


def _result(
    cell: Cell, cost: CostModel, name: str, play: _Play, effort: Effort, seed: int
) -> Result:
    settings = UaraSettings(devices=cell.devices, servers=cell.servers)
    found = []
    for index in range(effort.seeds):
        world = UaraWorld(settings, seed + _SEED_STEP * index)
        dice = np.random.default_rng([seed, index])
        found += [play(world, dice) for _ in range(effort.slots)]
    cost_ms, delay_ms = np.mean(found, axis=0) / cell.devices
    return Result(cost.name, cell, name, float(cost_ms), float(delay_ms))


def over_the_papers(found: list[Gain]) -> tuple[float, float]:
    """Mean and greatest gain in delay over the paper's three baselines, as in its abstract."""
    three = [gain for gain in found if gain.baseline in PAPER_BASELINES]
    mean = float(np.mean([gain.mean_delay for gain in three]))
    return mean, max(gain.max_delay for gain in three)


@dataclass(frozen=True, slots=True)
class OverStrongest:
    """Delay saved over the best of the paper's three baselines in each cell; over all cells."""

    mean: float
    most: float
    least: float


def over_the_strongest(results: list[Result], ours: str) -> OverStrongest:
    """The harder reading of the claim: each cell against the baseline that is best there."""
    delays: dict[Cell, dict[str, float]] = {}
    for result in results:
        delays.setdefault(result.cell, {})[result.method] = result.delay_ms
    saved = [
        1.0 - of[ours] / min(of[baseline] for baseline in PAPER_BASELINES) for of in delays.values()
    ]
    return OverStrongest(float(np.mean(saved)), max(saved), min(saved))


def gains(results: list[Result], ours: str) -> list[Gain]:
    """Of ``ours`` over every other method, in the order of the results."""
    mine = {result.cell: result for result in results if result.method == ours}
    names = dict.fromkeys(result.method for result in results if result.method != ours)
    found = []
    for name in names:
        theirs = [result for result in results if result.method == name]
        costs = [1.0 - mine[result.cell].cost_ms / result.cost_ms for result in theirs]
        waits = [1.0 - mine[result.cell].delay_ms / result.delay_ms for result in theirs]
        found.append(
            Gain(name, float(np.mean(costs)), max(costs), float(np.mean(waits)), max(waits))
        )
    return found


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
    for cost in (PaperCost(), CorrectedCost()):
        results: list[Result] = []
        for cell in track(cells(quick), f"{cost.name} cost", console=console):
            results += compare(cell, cost, METHODS, effort, seed)
        strongest = {ours: over_the_strongest(results, ours) for ours in _SHOWN}
        found = {ours: gains(results, ours) for ours in _SHOWN}
        text = {
            "cost_model": cost.name,
            "seed": seed,
            "effort": asdict(effort),
            "gains": {ours: [asdict(gain) for gain in saved] for ours, saved in found.items()},
            "results": [asdict(result) for result in results],
        }
        file = out / f"{cost.name}.json"
        file.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
        title = f"User association and resource allocation, {cost.name} cost"
        for ours, saved in found.items():
            console.print(table(ours, saved, title))
        console.print("Delay saved over the strongest of the paper's baselines in each cell:")
        for ours, over in strongest.items():
            spread = f"from {over.least:+.1%} to {over.most:+.1%}"
            console.print(f"  {ours}: {over.mean:+.1%} in the mean, {spread}")
    console.print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
