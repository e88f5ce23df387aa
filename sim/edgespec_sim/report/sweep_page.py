"""The page of a sweep: each metric against the varied settings, for runs of one scenario.

The first varied setting is the x axis, with one line per arm. Every combination of the other
settings has its own panel, and the panels of a metric share their scale. Bands are 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgespec.bench.arms import Arm
from edgespec_sim.report import tables
from edgespec_sim.report.document import Document, Figure, arm_cells, csv_text, group_cells
from edgespec_sim.report.plots import choose_colors, make_axis, make_band, make_label, make_layout
from edgespec_sim.run_summary import ArmSummary, RunSummary

# The arm with the lowest mean time per token wins a point. The win is certain if the 95 % interval
# of its speed-up lies above 1 and above the intervals of all others, or for target-only if all
# other intervals lie below 1. All arms have the same random numbers, so a win may be certain
# although intervals overlap.


_BASE: Final = Arm.TARGET_ONLY.value


@dataclass(frozen=True, slots=True)
class Win:
    """The winner of one point."""

    arm: ArmSummary
    is_certain: bool


def find_winner(run: RunSummary) -> Win | None:
    """Return the winner. None if fewer than two arms have a time per token."""
    timed = [(arm.all.tpot_s.mean, arm) for arm in run.arms if arm.all.tpot_s is not None]
    if len(timed) < 2:
        return None
    best = min(timed, key=lambda pair: pair[0])[1]
    others = [arm.speedup_interval for _, arm in timed if arm is not best and arm.arm != _BASE]
    least = 1.0
    if best.arm != _BASE:
        if best.speedup_interval is None or best.speedup_interval[0] <= 1.0:
            return Win(best, is_certain=False)
        least = best.speedup_interval[0]
    return Win(best, all(ends is not None and ends[1] < least for ends in others))


def summarise_wins(points: Points) -> str:
    """Summarise how often each arm wins, and the range of our speed-up, in plain text."""
    wins = [(varied, win) for varied, run in points if (win := find_winner(run)) is not None]
    if not wins:
        return "No point has two arms with a time per token, so there is no comparison."
    counts: dict[str, list[bool]] = {}
    for _, win in wins:
        counts.setdefault(win.arm.name, []).append(win.is_certain)
    parts = [
        f"{arm}{' (ours)' if tables.is_ours(arm) else ''} is fastest at {len(sures)} of"
        f" {len(wins)} points ({sum(sures)} with certainty)"
        for arm, sures in sorted(counts.items(), key=lambda pair: -len(pair[1]))
    ]
    over_plain = all(run.alone in ("", _BASE) for _, run in points)
    ours = [
        (value, ends, varied, arm)
        for varied, run in points
        for arm in run.arms
        for value, ends in [_find_speedup(arm, over_plain)]
        if tables.is_ours(arm.arm) and value is not None
    ]
    text = "; ".join(parts) + "."
    if not ours:
        return text
    least, most = min(ours, key=lambda one: one[0]), max(ours, key=lambda one: one[0])
    shown = [
        tables.times(value)
        + ("" if ends is None else f" ({ends[0]:.2f}–{ends[1]:.2f})")
        + " at "
        + (", ".join(f"{key} = {value}" for key, value in varied.items()) or "its one point")
        for value, ends, varied, _ in (least, most)
    ]
    known = least[1] is not None and most[1] is not None
    sure = "95 % intervals" if known else "the certainty is unknown: play more seeds"
    lossy = " (LOSSY)" if least[3].lossy or most[3].lossy else ""
    base = "target-only" if over_plain else "the fastest arm that needs no device"
    return f"{text} Relative to {base}, ours{lossy} ranges from {shown[0]} to {shown[1]} ({sure})."


def _find_speedup(
    arm: ArmSummary, over_plain: bool
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the arm's speed-up over its baseline, and the 95 % interval."""
    if over_plain:
        return arm.speedup, arm.speedup_interval
    return arm.gain, arm.gain_interval


Varied = Mapping[str, Any]
Points = Sequence[tuple[Varied, RunSummary]]
_LOGARITHMIC_FROM: Final = 50.0
_PANELS_MAX: Final = 12
_TICKS_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    unit: str
    value: Callable[[ArmSummary], float | None]
    ends: Callable[[ArmSummary], tuple[float, float] | None]
    """The 95 % interval of the value."""


_METRICS: Final = (
    _Metric(
        "Speed-up over target-only",
        "speed-up, ×",
        lambda arm: arm.speedup,
        lambda arm: arm.speedup_interval,
    ),
    _Metric(
        "Time per output token",
        "mean TPOT, ms",
        lambda arm: None if arm.all.tpot_s is None else 1e3 * arm.all.tpot_s.mean,
        lambda arm: None if (ends := arm.tpot_interval) is None else (1e3 * ends[0], 1e3 * ends[1]),
    ),
)


def render_sweep(points: Points, title: str = "sweep") -> str:
    """Return one HTML file. ``points``, at least one, pair the varied settings (the same keys in
    each) with the run."""
    keys = list(points[0][0])
    lossy = "LOSSY: " if any(arm.lossy for _, run in points for arm in run.arms) else ""
    page = Document(f"{lossy}{title}: sweep")
    over = " and ".join(keys) or "its one point"
    asked = f"Question: which way of decoding is fastest where, over {over}?"
    page.paragraph(f"{points[0][1].about} {asked}".strip(), "asked")
    page.paragraph(summarise_wins(points), "headline")
    page.paragraph(_describe_points(points, keys), "facts")
    for metric in _METRICS:
        if panels := _make_panels(points, keys, metric):
            page.heading(metric.name)
            page.add('<div class="grid">')
            for figure in panels:
                page.figure(figure)
            page.add("</div>")
    notes = list(dict.fromkeys(note for _, run in points for note in run.notes))
    if notes:
        page.heading("Notes")
        page.items(notes)
    page.heading("All points")
    page.add(_make_table(points, keys))
    return page.html()


def sweep_csv(points: Points) -> str:
    """Return one row per point and arm, as in ``arms_csv``; the varied settings come first."""
    rows = [
        {
            **{key: _make_cell(value) for key, value in varied.items()},
            "seeds": run.seeds,
            **arm_cells(arm),
            **group_cells(arm.all),
        }
        for varied, run in points
        for arm in run.arms
    ]
    return csv_text(rows)


def _make_cell(value: Any) -> str | int | float | bool | None:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _describe_points(points: Points, keys: Sequence[str]) -> str:
    parts = []
    for key in keys:
        values = list(dict.fromkeys(_make_cell(varied[key]) for varied, _ in points))
        shown = ", ".join(map(str, values[:12])) + (" ..." if len(values) > 12 else "")
        parts.append(f"{key}: {shown}")
    kind = "simulated in virtual time" if points[0][1].simulated else "measured"
    return " · ".join([f"{len(points):,} runs, {kind}", *parts])


def _make_panels(points: Points, keys: Sequence[str], metric: _Metric) -> list[Figure]:
    known = [v for _, run in points for arm in run.arms if (v := metric.value(arm)) is not None]
    by_panel: dict[str, list[tuple[Varied, RunSummary]]] = {}
    for varied, run in points if known else ():
        rest = ", ".join(f"{key} = {_make_cell(varied[key])}" for key in keys[1:])
        by_panel.setdefault(rest, []).append((varied, run))
    x_key = keys[0] if keys else ""
    return [
        _make_panel(metric, inside, x_key, rest, 1.06 * max(known))
        for rest, inside in list(by_panel.items())[:_PANELS_MAX]
    ]


def _make_panel(metric: _Metric, points: Points, x_key: str, rest: str, top: float) -> Figure:
    arms = list(dict.fromkeys(arm.name for _, run in points for arm in run.arms))
    paint = choose_colors(arms)
    xs: list[Any] = [_make_cell(varied[x_key]) if x_key else 0 for varied, _ in points]
    if _is_numeric(xs):
        places = sorted(range(len(xs)), key=xs.__getitem__)
        points, xs = [points[place] for place in places], [xs[place] for place in places]
    data = []
    for name in arms:
        mine = [
            (make_label(x) if isinstance(x, str) else x, value, metric.ends(arm))
            for x, (_, run) in zip(xs, points, strict=True)
            for arm in run.arms
            if arm.name == name and (value := metric.value(arm)) is not None
        ]
        if not mine:
            continue
        line_xs = [x for x, _, _ in mine]
        sure = [ends for _, _, ends in mine if ends is not None]
        if len(sure) == len(mine) > 1:
            lows, highs = [low for low, _ in sure], [high for _, high in sure]
            data.append(make_band(line_xs, lows, highs, paint[name]))
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": make_label(name),
                "x": line_xs,
                "y": [value for _, value, _ in mine],
                "line": {"color": paint[name], "width": 3 if tables.is_ours(name) else 1.5},
                "marker": {"size": 6},
            }
        )
    shape = make_layout(
        400,
        xaxis=make_axis(make_label(x_key), **_choose_scale(xs)),
        yaxis=make_axis(metric.unit, range=[0, top]),
        showlegend=True,
        # It stands below, because a narrow panel has no room for it beside the buttons.
        legend={"orientation": "h", "x": 0, "y": -0.25, "yanchor": "top"},
        margin={"l": 12, "r": 16, "t": 40, "b": 12},
    )
    where = f" ({rest})" if rest else ""
    bands = " Bands: 95 % intervals." if any("fill" in trace for trace in data) else ""
    what = f"{metric.name} against {x_key}{where}, one line per arm"
    return Figure(data, shape, f"{metric.name}{where}.{bands}", what)


def _is_numeric(xs: Sequence[object]) -> bool:
    return all(isinstance(x, int | float) and not isinstance(x, bool) for x in xs)


def _choose_scale(xs: Sequence[Any]) -> dict[str, Any]:
    if not _is_numeric(xs):
        return {"type": "category"}
    low, high = min(xs), max(xs)
    wide = low > 0 and high / low > _LOGARITHMIC_FROM
    if not wide:
        return {"type": "linear"}
    values = sorted(set(xs))
    return {"type": "log", **({"tickvals": values} if len(values) <= _TICKS_MAX else {"dtick": 1})}


def _make_table(points: Points, keys: Sequence[str]) -> str:
    first, *others = keys or [""]
    header = (first or "run", *others, "arm", "TPOT mean ms", "p95 ms", "TTFT p50 ms", "speed-up")
    rows = []
    for varied, run in points:
        values = [str(_make_cell(varied[key])) for key in keys] or [run.name]
        win = find_winner(run)
        for arm in run.arms:
            rows.append(
                (
                    *values,
                    arm.name,
                    tables.mean_ms(arm.all.tpot_s),
                    tables.quantile_ms(arm.all.tpot_s, 0.95),
                    tables.quantile_ms(arm.all.ttft_s, 0.5),
                    tables.speedup(arm),
                    "" if win is None or win.arm is not arm else "yes" if win.is_certain else "?",
                    tables.number(arm.all.tokens_per_pass),
                    tables.percent(arm.all.acceptance),
                    tables.count(arm.all.failed),
                )
            )
    more = ("fastest", "tokens / pass", "acceptance", "failed")
    caption = (
        "Every point of the sweep. Fastest: among the arms of the point; with a question mark if"
        " the 95 % intervals do not make it certain."
    )
    return tables.table(caption, (*header, *more), rows, 1 + len(others), range(1, 1 + len(others)))
