"""``python -m edgespec_uara.sweep --out DIR``: tests the paper's claim under each choice that the
paper leaves open.

A row varies one choice; the others stay as in ``Choices``, or as set by ``--set``. At each point
every method plays its own copy of the same worlds. Gains, tasks and walks are the same for all
methods, since their random numbers do not depend on decisions; the queues result from the method's
own decisions. Each point is printed when it is done. At the end come a table with a line per row,
and the files ``choices.json`` and ``choices.html``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from edgespec.core.protocol.checks import choice_field, range_field
from edgespec_sim.replication import Interval, quantile_interval, student_t
from edgespec_sim.report.document import Document, Figure, write_page
from edgespec_sim.report.plots import make_axis, make_layout
from edgespec_sim.report.tables import table as html_table
from edgespec_uara import cost as costs
from edgespec_uara import methods
from edgespec_uara.methods import MAX_COMPUTE, PAPER_BASELINES, Method, Situation
from edgespec_uara.world import Floats, UaraSettings, UaraWorld

PAPER_GAIN = 0.237
"""Mean saving of end-to-end latency over its three baselines (abstract); the greatest is 28.0 %."""
_SEED_STEP = 7919
COSTS = {cost.name: cost for cost in (costs.PaperCost(), costs.CorrectedCost())}
MEASURES: Mapping[str, Callable[[costs.Terms, costs.Decision], Floats]] = {
    "delay": costs.delays,
    "printed": costs.printed_delays,
    "cost": costs.device_costs,
}


# --- savings, with their intervals -------------------------------------------------------------


def mean_of_worlds(ours: Floats, theirs: Floats) -> Interval:
    """Return the share saved as the mean over worlds of each world's own saving, with a 95 %
    interval by Student's t. Both arrays have shape (pairs, worlds), or ``ours`` (1, worlds); a
    world's saving is the mean over the pairs."""
    saved = (1.0 - ours / theirs).mean(axis=0)
    return student_interval(float(saved.mean()), saved)


def ratio_of_means(ours: Floats, theirs: Floats) -> Interval:
    """Return the share saved of the mean delays over all worlds, by the delta method and Student's
    t."""
    mean = theirs.mean(axis=1, keepdims=True)
    ratio = ours.mean(axis=1, keepdims=True) / mean
    return student_interval(
        float(np.mean(1.0 - ratio)), ((ours - ratio * theirs) / mean).mean(axis=0)
    )


def median_of_worlds(ours: Floats, theirs: Floats) -> Interval:
    """Return the median of the worlds' savings, with a 95 % interval by order statistics (Woodruff,
    JASA 1952)."""
    saved = (1.0 - ours / theirs).mean(axis=0)
    found = quantile_interval([[float(one)] for one in saved], 0.5)
    assert found is not None, "no world"
    return Interval(*found)


def student_interval(value: float, parts: Floats) -> Interval:
    half = student_t(len(parts) - 1) * float(parts.std(ddof=1)) / math.sqrt(len(parts))
    return Interval(value, value - half, value + half)


ESTIMATORS = {"mean": mean_of_worlds, "ratio": ratio_of_means, "median": median_of_worlds}


# --- choices, and comparisons ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choices(UaraSettings):
    """The world's settings, and how the methods are compared in it."""

    cost: str = choice_field("paper", tuple(COSTS))
    max_compute: str = choice_field("spread", tuple(MAX_COMPUTE))
    """Reading of the baseline of that name."""
    measured: str = choice_field("delay", tuple(MEASURES))
    """The measured quantity: the delay with sending, the printed delay (only drafting, queue and
    verification), or the objective."""
    estimator: str = choice_field("mean", tuple(ESTIMATORS))
    slots: int = range_field(3, 1, 1000)
    """Slots played in a world, beginning with empty queues."""


SIZES = ("devices=30,60,90,120,150,180", "servers=4,8,12,16,20")
"""The paper's own ranges."""
ROWS = (
    "side_m=100,200,300,350,400,450,500,700,1000",
    "max_compute=" + ",".join(MAX_COMPUTE),
    "measured=" + ",".join(MEASURES),
    "estimator=" + ",".join(ESTIMATORS),
    "slot_s=0.5,1,2,4,8",
    "slots=1,3,10",
    "balance_weight=1e-5,1e-3,1e-2,0.1",
    "energy_weight=0.06,20,60,100,6000",
    "servers_at=random,grid",
    "message_bits=0,512,5120",
    "probability_bits=0,16,1024",
    "acceptance_shift=-0.2,0,0.1",
    "noise_dbm_hz=-184,-174,-164",
    "speed_m_s=0.5..1.5,1..15,10..30",
    "battery_percent=20..100,5..20",
    "cost=paper,corrected",
    *SIZES,
)
"""Our choices, then the sizes. The two weights also stand for the units of the objective: seconds
in place of milliseconds divide the first by 1000, joules in place of millijoules the second. Noise
also stands for path loss, which the paper takes from traced rays."""
CLAIM = "paper's matching over its three baselines"
OURS = "ours (moves too) over the three"
_BEST = ("best",)
_PAPERS, _OURS = methods.PAPERS_MATCHING, methods.WITH_MOVES
COMPARED: Mapping[str, tuple[str, Sequence[str]]] = {
    CLAIM: (_PAPERS, PAPER_BASELINES),
    "paper's matching over the best of the three": (_PAPERS, _BEST),
    "convex over even shares, paper's matching": (methods.WITH_OPTIMAL, (_PAPERS,)),
    OURS: (_OURS, PAPER_BASELINES),
    "ours over the best of the three": (_OURS, _BEST),
    "ours over the paper's matching": (_OURS, (_PAPERS,)),
    "convex over even shares, ours": (methods.WITH_MOVES_OPTIMAL, (_OURS,)),
    "no speculation over the paper's matching": (methods.NO_SPECULATION, (_PAPERS,)),
}
Played = Mapping[str, Floats]
"""For each method, the mean delay or cost of a device in each world (worlds,), in milliseconds."""


def row_name(row: str) -> str:
    return row.partition("=")[0]


def parse_choices(text: str, base: Choices) -> list[Choices]:
    """Parse ``NAME=VALUE,VALUE...`` into the base with each of the values; a range is
    ``LOW..HIGH``. Raises ``typer.BadParameter``."""
    name, _, values = text.partition("=")
    known = [field.name for field in fields(Choices)]
    if name not in known or not values:
        raise typer.BadParameter(f"{text!r}: must be NAME=VALUE,..., a NAME of {', '.join(known)}")
    return [_replace_choice(base, name, value) for value in values.split(",")]


def parse_base(given: Sequence[str]) -> Choices:
    """Return the defaults, changed by each text ``NAME=VALUE``."""
    base = Choices()
    for text in given:
        base = parse_choices(text, base)[-1]
    return base


def _replace_choice(base: Choices, name: str, value: str) -> Choices:
    now = getattr(base, name)
    new: Any
    try:
        if isinstance(now, tuple):
            new = tuple(float(end) for end in value.split(".."))
            if len(new) != 2:
                raise ValueError("must be a range, LOW..HIGH")
        else:
            new = type(now)(value)
        return replace(base, **{name: new})
    except ValueError as error:
        raise typer.BadParameter(f"{name}={value!r}: {error}") from None


def play(
    choices: Choices, every: Mapping[str, Method], worlds: int, seed: int
) -> dict[str, Floats]:
    """Play every method in every world, and return the result as ``Played``."""
    found = {name: np.empty((worlds, choices.slots)) for name in every}
    # Methods with the same association share a world, because only associations change the queues.
    alike: dict[object, dict[str, Method]] = {}
    for name, method in every.items():
        alike.setdefault((method.associate, method.speculates), {})[name] = method
    for together in alike.values():
        for index in range(worlds):
            world = UaraWorld(choices, seed + _SEED_STEP * index)
            dice = np.random.default_rng([seed, index])
            for slot in range(choices.slots):
                for name, ms in _play_slot(world, choices, together, dice):
                    found[name][index, slot] = ms
    return {name: ms.mean(axis=1) for name, ms in found.items()}


def _play_slot(
    world: UaraWorld, choices: Choices, together: Mapping[str, Method], dice: np.random.Generator
) -> Iterator[tuple[str, float]]:
    """Yield the mean delay or cost of a device for each method, and then advance the world."""
    cost, first = COSTS[choices.cost], next(iter(together.values()))
    terms = (cost.terms if first.speculates else cost.plain_terms)(world.snapshot)
    association = first.associate(Situation(world.snapshot, terms, dice))
    for name, method in together.items():
        decision = method.share(terms, association)
        decision.check(terms.servers)
        yield name, float(MEASURES[choices.measured](terms, decision).mean())
    world.advance(association, speculates=first.speculates)


def measure_saving(
    played: Sequence[Played], ours: str, baselines: Sequence[str], estimator: str
) -> Interval:
    """Return how much ``ours`` saves over each method of ``baselines``, as the mean over these and
    over the points."""
    pairs = []
    for one in played:
        best = min(PAPER_BASELINES, key=lambda name: float(one[name].mean()))
        pairs += [(one[ours], one[best if name == "best" else name]) for name in baselines]
    mine, theirs = (np.stack(side) for side in zip(*pairs, strict=True))
    return ESTIMATORS[estimator](mine, theirs)


def compare_with_paper(saved: Interval) -> str:
    """Compare a saving with the paper's mean saving."""
    return "short" if saved.high < PAPER_GAIN else "more" if saved.low > PAPER_GAIN else "met"


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The result for one value of one choice."""

    value: str
    saved: Mapping[str, Interval]
    """Savings by the names of ``COMPARED``."""
    median: Interval
    """Median saving of the claim."""
    played: Played


def play_point(
    name: str, choices: Choices, worlds: int, seed: int, known: dict[Choices, dict[str, Floats]]
) -> SweepPoint:
    """Play a point. ``known`` caches what was played, for rows that share a point."""
    # The estimator does not affect what is played.
    same = replace(choices, estimator="mean")
    if same not in known:
        known[same] = play(choices, methods.make_methods(choices.max_compute), worlds, seed)
    saved = {
        what: measure_saving([known[same]], *pair, choices.estimator)
        for what, pair in COMPARED.items()
    }
    median = measure_saving([known[same]], *COMPARED[CLAIM], "median")
    return SweepPoint(format_value(choices, name), saved, median, known[same])


# --- tables and plots --------------------------------------------------------------------------


def percent(saved: Interval) -> str:
    return f"{100 * saved.value:.1f} % ({100 * saved.low:.1f} to {100 * saved.high:.1f})"


HEADER = ("choice", "ours", "tried", "least", "most", "mean of the row", "23.7 % met at")


def cells(name: str, points: Sequence[SweepPoint], base: Choices) -> tuple[str, ...]:
    """Return a choice's cells under ``HEADER``: how much the paper's matching saves over its
    baselines."""
    least, most = (end(points, key=lambda one: one.saved[CLAIM].value) for end in (min, max))
    whole = measure_saving([one.played for one in points], *COMPARED[CLAIM], base.estimator)
    met = [one.value for one in points if compare_with_paper(one.saved[CLAIM]) == "met"]
    ends = (f"{percent(one.saved[CLAIM])} at {one.value}" for one in (least, most))
    tried = ", ".join(one.value for one in points)
    return name, format_value(base, name), tried, *ends, percent(whole), ", ".join(met)


def summarise_comparisons(rows: Mapping[str, Sequence[SweepPoint]]) -> Iterator[str]:
    """Yield a summary of each comparison over all points of all rows."""
    points = [(name, one) for name, row in rows.items() for one in row]
    for what in COMPARED:
        found = sorted(points, key=lambda pair: pair[1].saved[what].value)
        ends = [
            f"{percent(one.saved[what])} at {name}={one.value}"
            for name, one in (found[0], found[-1])
        ]
        sure = sum(one.saved[what].low > 0.0 for _, one in points)
        yield f"{what}: {ends[0]}, up to {ends[1]}; certain at {sure} of {len(points)} points"


# --- the answer, which comes first on the page -----------------------------------------------


def rank_methods(played: Played) -> list[tuple[str, float]]:
    """Return the methods that speculate with their means over the worlds, the least first."""
    means = {name: float(values.mean()) for name, values in played.items()}
    names = [name for name in means if name != methods.NO_SPECULATION]
    return sorted(((name, means[name]) for name in names), key=lambda pair: pair[1])


def headline(point: SweepPoint, base: Choices, worlds: int) -> str:
    """Name the best method at the choices of ``base``, with its lead and interval, and whether the
    paper's claim holds there."""
    played, what = point.played, "costs" if base.measured == "cost" else "waits"
    (winner, best), (second, other), *_ = rank_methods(played)
    over_second = measure_saving([played], winner, (second,), base.estimator)
    over_three = measure_saving([played], winner, PAPER_BASELINES, base.estimator)
    claim = point.saved[CLAIM]
    unit = "" if what == "costs" else " ms"
    chance = "" if over_second.low > 0.0 else ", which may be chance,"
    reached = {"short": "falls short of", "met": "agrees with", "more": "is more than"}
    text = (
        f"{winner} won: a device {what} {best:.3g}{unit} on average, {percent(over_second)} less"
        f"{chance} than with {second} ({other:.3g}{unit}), and {percent(over_three)} less than with"
        f" {', '.join(PAPER_BASELINES[:-1])} and {PAPER_BASELINES[-1]} on average. The paper's"
        f" matching ({_PAPERS}) saves {percent(claim)} over these three, which"
        f" {reached[compare_with_paper(claim)]} the paper's {100 * PAPER_GAIN:.1f} %."
    )
    plain = float(played[methods.NO_SPECULATION].mean())
    if plain < best:
        less = measure_saving([played], methods.NO_SPECULATION, (winner,), base.estimator)
        text += f" No speculation at all takes {percent(less)} less than the winner."
    size = f"{base.devices} devices, {base.servers} servers, a side of {base.side_m:g} m"
    return (
        f"{text} That is for {size} and the other defaults, over {worlds} worlds; 95 % intervals."
    )


def describe_question(base: Choices) -> str:
    """Return the question that the sweep answers."""
    return (
        f"Question: which way of assigning {base.devices} devices to {base.servers} servers has the"
        f" least {'cost' if base.measured == 'cost' else 'delay'}, and does the paper's save"
        f" {100 * PAPER_GAIN:.1f} % over random, max-SINR and max-compute under every choice that"
        " the paper leaves open?"
    )


def summarise_claim(rows: Mapping[str, Sequence[SweepPoint]]) -> str:
    """Summarise in a sentence how the claim fares over all points."""
    found = [(name, one) for name, row in rows.items() for one in row]
    if not found:
        return ""
    least, most = (end(found, key=lambda pair: pair[1].saved[CLAIM].value) for end in (min, max))
    met = sum(compare_with_paper(one.saved[CLAIM]) == "met" for _, one in found)
    more = sum(compare_with_paper(one.saved[CLAIM]) == "more" for _, one in found)
    return (
        f"Over the {len(found)} points that were tried, the paper's matching saves from"
        f" {percent(least[1].saved[CLAIM])} at {least[0]}={least[1].value} to"
        f" {percent(most[1].saved[CLAIM])} at {most[0]}={most[1].value}; the paper's figure is met"
        f" at {met} of these points and exceeded at {more}."
    )


METHODS_HEADER = ("method", "mean", "saved over the three, 95 %")


def method_rows(played: Played, base: Choices) -> list[tuple[str, str, str]]:
    """Return a row for each method, the best first."""
    unit = "" if base.measured == "cost" else " ms"
    names = [*rank_methods(played)]
    names.append((methods.NO_SPECULATION, float(played[methods.NO_SPECULATION].mean())))
    return [
        (
            name,
            f"{mean:.3g}{unit}",
            "–"
            if name in PAPER_BASELINES
            else percent(measure_saving([played], name, PAPER_BASELINES, base.estimator)),
        )
        for name, mean in names
    ]


_SHOWN = {CLAIM: "#0072b2", OURS: "#d55e00"}


def plot(name: str, points: Sequence[SweepPoint]) -> Figure:
    """Plot savings with their intervals. The scale is fixed, so that outliers do not set it."""
    xs = [one.value for one in points]
    lines = [(what, color, [one.saved[what] for one in points]) for what, color in _SHOWN.items()]
    lines.append((f"median over the worlds: {CLAIM}", "#56b4e9", [one.median for one in points]))
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": what,
            "x": xs,
            "y": [100 * one.value for one in saved],
            "error_y": {
                "type": "data",
                "array": [100 * (one.high - one.value) for one in saved],
                "arrayminus": [100 * (one.value - one.low) for one in saved],
            },
            "marker": {"color": color, "size": 8},
        }
        for what, color, saved in lines
    ]
    claimed = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"dash": "dot"}}
    shape = make_layout(
        380,
        xaxis=make_axis(name, type="category"),
        yaxis=make_axis("saved, %", range=[-100, 100]),
        scattermode="group",  # Side by side; otherwise bars would hide bars.
        shapes=[{**claimed, "y0": 100 * PAPER_GAIN, "y1": 100 * PAPER_GAIN}],
    )
    caption = "Bars: 95 % intervals. Dotted: the paper's mean. Points below -100 % are cut off."
    return Figure(data, shape, caption, f"Share saved against {name}")


def format_value(choices: Choices, name: str) -> str:
    """Return a choice's value in the syntax of ``--vary``."""
    value = getattr(choices, name)
    ends = value if isinstance(value, tuple) else (value,)
    return "..".join(f"{end:g}" if isinstance(end, float) else str(end) for end in ends)


def write(
    out: Path,
    rows: Mapping[str, Sequence[SweepPoint]],
    base: Choices,
    usual: SweepPoint,
    worlds: int,
    seed: int,
) -> None:
    """Write ``choices.json`` and the page; ``usual`` is the point of ``base``. Raises
    ``OSError``."""
    points = {name: [asdict(one) for one in row] for name, row in rows.items()}
    data = {"base": asdict(base), "worlds": worlds, "seed": seed}
    data |= {"headline": headline(usual, base, worlds), "usual": asdict(usual), "rows": points}
    text = json.dumps(data, indent=1, default=list)
    (out / "choices.json").write_text(text + "\n", encoding="utf-8")
    page = Document("User association and resource allocation: what the paper's claim depends on")
    page.paragraph(describe_question(base), "asked")
    page.paragraph(headline(usual, base, worlds), "headline")
    page.paragraph(summarise_claim(rows), "facts")
    caption = "Methods at these choices, the best first."
    page.add(html_table(caption, METHODS_HEADER, method_rows(usual.played, base)))
    lines = [cells(name, row, base) for name, row in rows.items()]
    page.add(html_table(f"{CLAIM}: share saved, 95 % intervals", HEADER, lines, texts=(1, 2, 6)))
    page.items(list(summarise_comparisons(rows)))
    for name, row in rows.items():
        page.figure(plot(name, row))
    write_page(out / "choices.html", page.html())


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results")],
    vary: Annotated[
        list[str] | None, typer.Option(help="A row, NAME=VALUE,...; default: all but what is set")
    ] = None,
    given: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE for all rows")
    ] = None,
    worlds: Annotated[int, typer.Option(min=2, max=10_000, help="At each point")] = 30,
    quick: Annotated[bool, typer.Option("--quick", help="Two worlds, one slot")] = False,
    seed: int = 0,
) -> None:
    """Compute how much the paper's matching saves, under each choice that the paper leaves open."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    base = parse_base(given or [])
    if quick:
        worlds, base = 2, replace(base, slots=1)
    fixed = {row_name(text) for text in given or []}
    every = vary or [row for row in ROWS if row_name(row) not in fixed]
    asked = [(row_name(row), one) for row in every for one in parse_choices(row, base)]
    known: dict[Choices, dict[str, Floats]] = {}
    rows: dict[str, list[SweepPoint]] = {}
    out.mkdir(parents=True, exist_ok=True)
    for done, (name, choices) in enumerate(asked, 1):
        one = play_point(name, choices, worlds, seed, known)
        rows.setdefault(name, []).append(one)
        console.print(
            f"{done}/{len(asked)} {name}={one.value}: {percent(one.saved[CLAIM])}, "
            f"median {percent(one.median)}: {compare_with_paper(one.saved[CLAIM])}"
        )
    usual = play_point(row_name(ROWS[0]), base, worlds, seed, known)
    shown = Table(*HEADER, title=f"{CLAIM}: share saved, 95 % intervals", box=box.SIMPLE)
    for name, points in rows.items():
        shown.add_row(*cells(name, points, base))
    console.print(shown)
    for line in summarise_comparisons(rows):
        console.print(line)
    write(out, rows, base, usual, worlds, seed)
    console.print(f"{summarise_claim(rows)}\n{headline(usual, base, worlds)}")
    console.print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
