"""All methods on the same worlds, over the paper's sweeps, and what one gains over another.

Every method plays its own copy of a world: gains, tasks and walks are the same for all (their dice
do not depend on decisions), the queues are the ones that it makes for itself. A gain is 1 - ours /
theirs of the mean cost in a cell; the paper reports its mean and its maximum over cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from edgespec_uara.cost import CostModel, delays, objective
from edgespec_uara.methods import (
    NO_SPECULATION,
    PAPER_BASELINES,
    TMA_MASAC,
    TMA_MASAC_MOVES,
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


# --- the sweep as one self-contained page ------------------------------------------------------
# cost over devices and servers, delay saved.


_COLOURS = (
    "#1f77b4 #ff7f0e #2ca02c #9467bd #8c564b #e377c2 #7f7f7f #d62728 #bcbd22 #17becf #393b79 "
    "#637939 #843c39 #e7969c"
).split()


def write_page(
    path: Path, results: list[Result], gains: Mapping[str, list[Gain]], title: str
) -> None:
    """The page loads nothing from elsewhere. ``gains`` are those of each method in it."""
    figure = make_subplots(
        rows=3,
        cols=1,
        vertical_spacing=0.09,
        subplot_titles=(
            f"Cost a device against devices, {FIXED_SERVERS} servers",
            "Cost a device against servers",
            "Delay saved over each other method (mean over the sweep; dashed: the paper's mean)",
        ),
    )
    names = list(dict.fromkeys(result.method for result in results))
    for name, colour in zip(names, _COLOURS, strict=False):
        mine = [result for result in results if result.method == name]
        for row in (1, 2):
            figure.add_trace(_line(mine, name, colour, row), row=row, col=1)
    # Decoding without speculation plays another game: its bar would hide all others.
    for ours, saved in gains.items():
        shown = [gain for gain in saved if gain.baseline != NO_SPECULATION]
        labels = [gain.baseline for gain in shown]
        shares = [100.0 * gain.mean_delay for gain in shown]
        figure.add_trace(go.Bar(x=labels, y=shares, name=f"saved by {ours}"), row=3, col=1)
    figure.add_hline(y=100.0 * PAPER_MEAN_GAIN, line_dash="dash", row=3, col=1)
    figure.update_yaxes(title_text="ms", type="log", row=1, col=1)
    figure.update_yaxes(title_text="ms", type="log", row=2, col=1)
    figure.update_yaxes(title_text="%", row=3, col=1)
    figure.update_xaxes(title_text="devices", row=1, col=1)
    figure.update_xaxes(title_text="servers", row=2, col=1)
    figure.update_layout(title=title, height=1300, template="plotly_white")
    figure.write_html(path, include_plotlyjs=True, full_html=True)


def _line(results: list[Result], name: str, colour: str, row: int) -> go.Scatter:
    if row == 1:
        chosen = [result for result in results if result.cell.servers == FIXED_SERVERS]
        points = sorted((result.cell.devices, result.cost_ms) for result in chosen)
    else:
        fixed = {result.cell.devices for result in results if result.cell.servers != FIXED_SERVERS}
        fixed = fixed or {FIXED_DEVICES}
        chosen = [result for result in results if result.cell.devices in fixed]
        points = sorted((result.cell.servers, result.cost_ms) for result in chosen)
    return go.Scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        name=name,
        legendgroup=name,
        showlegend=row == 1,
        line={"color": colour, "width": 3 if name in (TMA_MASAC, TMA_MASAC_MOVES) else 1.5},
    )
