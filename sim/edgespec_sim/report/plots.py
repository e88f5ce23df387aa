"""The plots of a run, as plain data for plotly.js.

Arms keep one colour throughout a page: grey for target-only, orange for ours, the others in turn
from a palette that colour-blind readers can tell apart (Okabe and Ito 2008). Names are escaped and
shortened, because plotly reads tags in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from edgespec.bench.arms import Arm
from edgespec_sim.report.document import Figure
from edgespec_sim.report.figures import shortened
from edgespec_sim.report.tables import device_j, is_ours, verifiers_idle_j, verifiers_j
from edgespec_sim.run_summary import PACE, ArmSummary, RunSummary, Series, Spread

BASE_COLOR: Final = "#8a929c"
OURS_COLOR: Final = "#d55e00"
_OTHERS: Final = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5cc2")
_SERIES_MAX: Final = 6
_REQUESTS_MIN: Final = 3


def colors(arms: Sequence[str]) -> dict[str, str]:
    """A colour for every arm, by name."""
    chosen: dict[str, str] = {}
    others = 0
    for arm in arms:
        if arm == Arm.TARGET_ONLY.value:
            chosen[arm] = BASE_COLOR
        elif is_ours(arm) and OURS_COLOR not in chosen.values():
            chosen[arm] = OURS_COLOR
        else:
            chosen[arm] = _OTHERS[others % len(_OTHERS)]
            others += 1
    return chosen


def label(name: str) -> str:
    """A name as plotly may be given it."""
    return escape(shortened(name))


def layout(height: int, **more: Any) -> dict[str, Any]:
    """What all plots share, unless ``more`` says otherwise; axes are ``xaxis`` and ``yaxis``."""
    return {
        "height": height,
        # Above: the legend, and over it the buttons.
        "margin": {"l": 12, "r": 16, "t": 54, "b": 22},
        "font": {"size": 13},
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        **more,
    }


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    shown = {"text": title, "font": {"size": 13}}  # as wide as a phone's plot is, at most
    return {"title": shown, "automargin": True, "zeroline": False, **more}


def tpot_plot(run: RunSummary) -> Figure | None:
    """Time per token across arms, with their bounds; None without any."""
    spreads = [(arm, arm.all.tpot_s) for arm in run.arms if arm.all.tpot_s is not None]
    bounds = [(arm, name, bound) for arm, _ in spreads for name, bound in arm.bounds.items()]
    caption = (
        "Time per output token (TPOT) over requests: box from the 25th to the 75th percentile with "
        "the median, whiskers from the 5th to the 95th, a dot at the 99th."
    )
    if bounds:
        caption += " Diamonds: the arm's lower bounds on the mean."
    return _boxes(spreads, "ms a token", "Time per output token by arm", caption, bounds)


def ttft_plot(run: RunSummary) -> Figure | None:
    spreads = [(arm, arm.all.ttft_s) for arm in run.arms if arm.all.ttft_s is not None]
    caption = "Time to first token (TTFT) over requests, drawn in the same way."
    return _boxes(spreads, "ms to the first token", "Time to first token by arm", caption, [])


def itl_plot(run: RunSummary) -> Figure | None:
    """For runs of so few requests that distributions over them say nothing."""
    spreads = [(arm, arm.all.itl_s) for arm in run.arms if arm.all.itl_s is not None]
    caption = (
        "Gaps between deliveries (ITL), tokens that come together being one delivery: box from the "
        "25th to the 75th percentile with the median, whiskers from the 5th to the 95th, a dot at "
        "the 99th."
    )
    return _boxes(spreads, "ms between deliveries", "Gaps between deliveries by arm", caption, [])


def few_requests(run: RunSummary) -> bool:
    """Whether no arm has enough of them for a distribution."""
    return all(arm.all.requests < _REQUESTS_MIN for arm in run.arms)


def _boxes(
    spreads: Sequence[tuple[ArmSummary, Spread | None]],
    unit: str,
    what: str,
    caption: str,
    bounds: Sequence[tuple[ArmSummary, str, float]],
) -> Figure | None:
    known = [(arm, spread) for arm, spread in spreads if spread is not None]
    if not known:
        return None
    paint = colors([arm.arm for arm, _ in known])
    data = [_box(arm, spread, paint[arm.arm]) for arm, spread in known]
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "99th percentile",
            "x": [1e3 * spread.p99 for _, spread in known],
            "y": [label(arm.arm) for arm, _ in known],
            "marker": {"symbol": "circle", "size": 7, "color": [paint[a.arm] for a, _ in known]},
            "hovertemplate": "p99 %{x:.4g} ms<extra></extra>",
        }
    )
    if bounds:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "lower bound",
                "x": [1e3 * bound for _, _, bound in bounds],
                "y": [label(arm.arm) for arm, _, _ in bounds],
                "text": [label(name) for _, name, _ in bounds],
                "marker": {
                    "symbol": "diamond-open",
                    "size": 9,
                    "color": [paint[arm.arm] for arm, _, _ in bounds],
                    "line": {"width": 2},
                },
                "hovertemplate": "%{text}: %{x:.4g} ms<extra></extra>",
            }
        )
    shape = layout(
        150 + 46 * len(known),
        xaxis=axis(unit, rangemode="tozero"),
        yaxis=axis(autorange="reversed", fixedrange=True, type="category"),
    )
    medians = ", ".join(f"{arm.arm} {1e3 * spread.median:.4g} ms" for arm, spread in known)
    return Figure(data, shape, caption, f"{what}; medians: {medians}")


def _box(arm: ArmSummary, spread: Spread, color: str) -> dict[str, Any]:
    low, first, middle, third, high, _ = (1e3 * value for value in spread.quantiles)
    return {
        "type": "box",
        "orientation": "h",
        "name": label(arm.arm),
        "y": [label(arm.arm)],
        "lowerfence": [low],
        "q1": [first],
        "median": [middle],
        "q3": [third],
        "upperfence": [high],
        "mean": [1e3 * spread.mean],
        "marker": {"color": color},
        "line": {"width": 2},
        "showlegend": False,
        "width": 0.6,
    }


def series_plots(run: RunSummary) -> list[Figure]:
    """One a quantity, one line an arm; the time per token is ``pace_plot``'s."""
    names = list(dict.fromkeys(one.name for arm in run.arms for one in arm.series))
    names = [name for name in names if name != PACE]
    paint = colors([arm.arm for arm in run.arms])
    plots = []
    for name in names[:_SERIES_MAX]:
        lines = [(arm.arm, one) for arm in run.arms for one in arm.series if one.name == name]
        data = [trace for arm, one in lines for trace in _band(one, paint[arm])]
        data += [_line(arm, one, paint[arm]) for arm, one in lines]
        unit = lines[0][1].unit
        shape = layout(
            300,
            xaxis=axis("seconds into the run"),
            yaxis=axis(label(f"{name}, {unit}" if unit else name), rangemode="tozero"),
            showlegend=len(lines) > 1,
        )
        who = ", ".join(arm for arm, _ in lines)
        caption = f"{name[:1].upper()}{name[1:]} over time"
        bands = " Bands: 95 % intervals of the mean over seeds." if lines[0][1].low else ""
        plots.append(Figure(data, shape, f"{caption}.{bands}", f"{caption}, for {who}"))
    return plots


def band(xs: Sequence[Any], low: Sequence[float], high: Sequence[float], color: str) -> Any:
    """A filled area between two lines, without an entry in the legend."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*xs, *reversed(xs)],
        "y": [*high, *reversed(low)],
        "fill": "toself",
        "fillcolor": f"{color}33",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _band(series: Series, color: str) -> list[dict[str, Any]]:
    if len(series.low) != len(series.values):
        return []
    points = [
        (round(index * series.step_s, 6), low, high)
        for index, (low, high) in enumerate(zip(series.low, series.high, strict=True))
        if low is not None and high is not None
    ]
    if len(points) < 2:
        return []
    xs, lows, highs = (list(column) for column in zip(*points, strict=True))
    return [band(xs, lows, highs, color)]


def _line(arm: str, series: Series, color: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines" if len(series.values) > 1 else "markers",
        "name": label(arm),
        "x": [round(index * series.step_s, 6) for index in range(len(series.values))],
        "y": list(series.values),
        "line": {"color": color, "width": 2.5 if is_ours(arm) else 1.5},
    }


# --- what an arm pays for its speed ------------------------------------------------------------
# drafts that came to nothing, and energy.


_FADED, _FAINT = 0.5, 0.25


def wasted_plot(run: RunSummary) -> Figure | None:
    """None unless an arm wasted something."""
    if not any(arm.all.wasted_per_token for arm in run.arms):
        return None
    paint = colors([arm.arm for arm in run.arms])
    values = [arm.all.wasted_per_token for arm in run.arms]
    names = [arm.arm for arm in run.arms]
    data = [_energy_bars("wasted", names, values, [paint[name] for name in names], "nodes")]
    shape = _shape(len(names), "drafted tokens wasted per token delivered")
    caption = "Drafted tokens that were sent and not committed by being verified, for each token."
    said = ", ".join(f"{name} {value:.2g}" for name, value in zip(names, values, strict=True))
    return Figure(data, shape, caption, f"Wasted work a token by arm: {said}")


def energy_plot(run: RunSummary) -> Figure | None:
    """None where nothing is known."""
    parts = (
        ("device", device_j, 1.0),
        ("verifiers, at most", verifiers_j, _FADED),
        ("verifiers, idle", verifiers_idle_j, _FAINT),
    )
    paint = colors([arm.arm for arm in run.arms])
    data, said = [], []
    for name, of, opacity in parts:
        known = [(arm.arm, joules) for arm in run.arms if (joules := of(arm)) is not None]
        if known:
            arms = [arm for arm, _ in known]
            values = [joules for _, joules in known]
            bars = _energy_bars(name, arms, values, [paint[arm] for arm in arms], "J")
            data.append({**bars, "opacity": opacity})
            said.append(name + ": " + ", ".join(f"{arm} {joules:.2g} J" for arm, joules in known))
    if not data:
        return None
    shape = _shape(len(run.arms), "energy per token, J") | {"barmode": "stack"}
    caption = (
        "Energy of each delivered token: of the device (drafting, and its radio in every state) in "
        "full colour, of the verifiers' passes at their data sheet's most in light, of verifiers "
        "that were powered and ran no pass in faint; what is not known is not drawn."
    )
    return Figure(data, shape, caption, f"Energy a token by arm; {'; '.join(said)}")


def _energy_bars(
    name: str, arms: list[str], values: list[float], paint: list[str], unit: str
) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [label(arm) for arm in arms],
        "x": values,
        "marker": {"color": paint},
        "hovertemplate": f"%{{y}}, {name}: %{{x:.3g}} {unit}<extra></extra>",
    }


def _shape(count: int, title: str) -> dict[str, Any]:
    return layout(
        110 + 34 * count,
        xaxis=axis(title, rangemode="tozero"),
        yaxis=axis(autorange="reversed", fixedrange=True, type="category"),
        showlegend=False,
        margin={"l": 12, "r": 16, "t": 34, "b": 22},
    )


# --- how busy verifiers and links were, arms beside each other ---------------------------------


_BARS_MAX: Final = 40
_ACROSS_MAX: Final = 5
"""Of more than so many, names stand beside the bars."""


def verifier_load_plot(run: RunSummary) -> Figure | None:
    """None unless there is something to compare."""
    if sum(len(arm.verifiers) for arm in run.arms) < 2:
        return None
    loads = {arm.arm: {one.name: one.utilisation for one in arm.verifiers} for arm in run.arms}
    caption = "Share of the run in which a pass ran, by verifier and arm."
    return _load_bars(loads, caption, "Load of the verifiers by arm")


def link_load_plot(run: RunSummary) -> Figure | None:
    """None where no link's capacity is known."""
    loads = {
        arm.arm: {
            f"{one.name}, {way}": share
            for one in arm.links
            for way, share in (("up", one.up), ("down", one.down))
        }
        for arm in run.arms
    }
    if not any(loads.values()):
        return None
    caption = (
        "Share of the run for which messages occupied each link (its airtime, with radio), by "
        "direction and arm, with the share that others take; links without a limit are left out."
    )
    return _load_bars(loads, caption, "Load of the links by arm")


def _load_bars(loads: Mapping[str, Mapping[str, float]], caption: str, what: str) -> Figure:
    most: dict[str, float] = {}
    for mine in loads.values():
        for name, share in mine.items():
            most[name] = max(most.get(name, 0.0), share)
    shown = sorted(most, key=lambda name: (-most[name], name))[:_BARS_MAX]
    paint = colors(list(loads))
    across = len(shown) > _ACROSS_MAX
    data: list[dict[str, Any]] = []
    for arm, mine in loads.items():
        names = [name for name in shown if name in mine]
        if names:
            ends = [label(name) for name in names], [round(100 * mine[name], 3) for name in names]
            xs, ys = reversed(ends) if across else ends
            told = ("%{y}", "%{x:.3g}") if across else ("%{x}", "%{y:.3g}")
            data.append(
                {
                    "type": "bar",
                    "orientation": "h" if across else "v",
                    "name": label(arm),
                    "x": xs,
                    "y": ys,
                    "marker": {"color": paint[arm]},
                    "hovertemplate": f"{label(arm)}, {told[0]}: busy {told[1]} %<extra></extra>",
                }
            )
    busy = axis("busy, %", range=[0, max(5.0, 108 * max(most[name] for name in shown))])
    shape = layout(
        130 + (6 + 9 * len(loads)) * len(shown) if across else 320,
        xaxis=busy if across else axis(type="category"),
        yaxis=axis(type="category", autorange="reversed") if across else busy,
        barmode="group",
        showlegend=True,
    )
    left = len(most) - len(shown)
    caption += f" The {left:,} least busy ones are left out." if left > 0 else ""
    busiest = shown[0]
    return Figure(data, shape, caption, f"{what}; the busiest is {busiest}, {most[busiest]:.0%}")


# --- the first picture of a simulated run ------------------------------------------------------
# the time per token over the run, a band an arm.


_TALLEST: Final = 3.0
"""Times the slowest arm's mean; an outage would make all else flat."""


def pace_plot(run: RunSummary) -> Figure | None:
    """None unless the arms have that series, at several points."""
    lines = [(arm, found) for arm in run.arms if (found := _pace(arm)) is not None]
    if not lines:
        return None
    paint = colors([arm.arm for arm in run.arms])
    data: list[dict[str, Any]] = []
    for arm, series in lines:
        if series.low:
            data += _area(series, paint[arm.arm])
    data += [_pace_line(arm, series, paint[arm.arm], run.duration_s) for arm, series in lines]
    bound = _bound(run)
    if bound is not None:
        data.append(_pace_limit(*bound, paint[bound[0].arm], run.duration_s))
    means_ms = [1e3 * arm.all.tpot_s.mean for arm, _ in lines if arm.all.tpot_s is not None]
    known = [v for _, one in lines for v in (*one.values, *one.high) if v is not None]
    top, cut = 1.05 * max(known), False
    if means_ms and top > _TALLEST * max(means_ms):
        top, cut = _TALLEST * max(means_ms), True
    shape = layout(
        380,
        xaxis=axis("seconds into the run", range=[0, run.duration_s]),
        yaxis=axis("time per token, ms", range=[0, top]),
        showlegend=True,
    )
    said = ", ".join(
        f"{arm.arm} {1e3 * arm.all.tpot_s.mean:.3g} ms in the mean"
        for arm, _ in lines
        if arm.all.tpot_s is not None
    )
    label_ = f"Time per token over the run by arm: {said}"
    return Figure(data, shape, _caption(run, bound, cut=cut), label_)


def _caption(run: RunSummary, bound: tuple[ArmSummary, float] | None, *, cut: bool) -> str:
    text = (
        "Mean time per token over the run, of the tokens that came in each step, tokens of one "
        "delivery sharing the time since the one before; target-only streaming in grey."
    )
    if run.seeds > 1:
        text += f" Bands: 95 % intervals over {run.seeds:,} seeds."
    if bound is not None:
        text += f" Dotted: what {bound[0].arm} cannot go below."
    return f"{text} Higher peaks are cut off." if cut else text


def _pace(arm: ArmSummary) -> Series | None:
    """The series, unless it has fewer than two points."""
    found = next((one for one in arm.series if one.name == PACE), None)
    if found is None or sum(value is not None for value in found.values) < 2:
        return None
    return found


def _area(series: Series, color: str) -> list[dict[str, Any]]:
    points = [
        (_middle(series, step), low, high)
        for step, (low, high) in enumerate(zip(series.low, series.high, strict=True))
        if low is not None and high is not None
    ]
    if len(points) < 2:
        return []
    xs, lows, highs = (list(column) for column in zip(*points, strict=True))
    return [band(xs, lows, highs, color)]


def _middle(series: Series, step: int) -> float:
    return round((step + 0.5) * series.step_s, 6)


def _pace_line(arm: ArmSummary, series: Series, color: str, duration_s: float) -> dict[str, Any]:
    base = arm.arm == Arm.TARGET_ONLY.value
    return {
        "type": "scatter",
        "mode": "lines+markers",  # or a step with tokens between two without would not show
        "marker": {"size": 4},
        "name": label(arm.arm),
        "x": [_middle(series, step) for step in range(len(series.values))],
        "y": [None if value is None else round(value, 4) for value in series.values],
        "line": {"color": color, "width": 3 if is_ours(arm.arm) or base else 1.5},
        "hovertemplate": f"{label(arm.arm)}: %{{y:.3g}} ms at %{{x:.3g}} s<extra></extra>",
    }


def _bound(run: RunSummary) -> tuple[ArmSummary, float] | None:
    """Of ours, or else of the arm with the lowest one."""
    known = [(arm, max(arm.bounds.values())) for arm in run.arms if arm.bounds]
    ours = [pair for pair in known if is_ours(pair[0].arm)]
    chosen = ours or sorted(known, key=lambda pair: pair[1])
    return chosen[0] if chosen else None


def _pace_limit(arm: ArmSummary, bound_s: float, color: str, duration_s: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label(f"bound of {arm.arm}"),
        "x": [0.0, duration_s],
        "y": [1e3 * bound_s, 1e3 * bound_s],
        "line": {"color": color, "width": 2, "dash": "dot"},
        "hovertemplate": f"cannot go below {1e3 * bound_s:.3g} ms<extra></extra>",
    }


# --- the first picture of a run's page ---------------------------------------------------------
# each arm's speed-up, its interval, and its limit.
# Target-only is the line at 1. The bar around a point is the 95 % interval; the open diamond is
# where the arm would be at its own lower bound on the time per token.


def answer_plot(run: RunSummary) -> Figure | None:
    """None unless there is a target-only arm and another one with a speed-up."""
    base = next((arm for arm in run.arms if arm.arm == Arm.TARGET_ONLY.value), None)
    arms = [arm for arm in run.arms if arm is not base and arm.speedup is not None]
    if base is None or not arms:
        return None
    paint = colors([arm.arm for arm in run.arms])
    data = [_point(arm, paint[arm.arm]) for arm in arms]
    limits = [(arm, limit) for arm in arms if (limit := _limit(base, arm)) is not None]
    if limits:
        data.append(_limits(limits, paint))
    last = max([_right(arm) for arm in arms] + [limit for _, limit in limits] + [1.0])
    shape = layout(
        130 + 40 * len(arms),
        xaxis=axis("speed-up, ×", range=[0, 1.06 * last]),
        yaxis=axis(autorange="reversed", fixedrange=True, type="category"),
        showlegend=False,
        margin={"l": 12, "r": 16, "t": 34, "b": 22},
        shapes=[
            {
                "type": "line",
                "x0": 1,
                "x1": 1,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"color": BASE_COLOR, "width": 2, "dash": "dash"},
            }
        ],
    )
    caption = "Speed-up of the mean time per token; the dashed line is target-only streaming."
    if any(arm.speedup_interval for arm in arms):
        caption += f" Bars: 95 % intervals over {run.seeds:,} seeds."
    if limits:
        caption += " Diamonds: what the arm could reach at its lower bound."
    said = ", ".join(f"{arm.arm} {arm.speedup:.2f}" for arm in arms)
    return Figure(data, shape, caption, f"Speed-up over target-only by arm: {said}")


def _point(arm: ArmSummary, color: str) -> dict[str, Any]:
    assert arm.speedup is not None
    low, high = arm.speedup_interval or (arm.speedup, arm.speedup)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label(arm.arm),
        "x": [arm.speedup],
        "y": [label(arm.arm)],
        "marker": {"color": color, "size": 11},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - arm.speedup],
            "arrayminus": [arm.speedup - low],
            "color": color,
            "thickness": 5,
            "width": 9,
        },
        "hovertemplate": f"%{{x:.3g}}×, 95 % from {low:.3g} to {high:.3g}<extra></extra>",
    }


def _limit(base: ArmSummary, arm: ArmSummary) -> float | None:
    """The speed-up that the arm's largest lower bound allows."""
    if base.all.tpot_s is None or not arm.bounds:
        return None
    bound_s = max(arm.bounds.values())
    return base.all.tpot_s.mean / bound_s if bound_s > 0.0 else None


def _limits(limits: list[tuple[ArmSummary, float]], paint: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "limit",
        "x": [limit for _, limit in limits],
        "y": [label(arm.arm) for arm, _ in limits],
        "marker": {
            "symbol": "diamond-open",
            "size": 9,
            "line": {"width": 2},
            "color": [paint[arm.arm] for arm, _ in limits],
        },
        "hovertemplate": "at its lower bound %{x:.3g}×<extra></extra>",
    }


def _right(arm: ArmSummary) -> float:
    return arm.speedup_interval[1] if arm.speedup_interval else arm.speedup or 0.0
