"""The plots of a run, as plain data for plotly.js.

Arms keep one colour throughout a page: grey for target-only, orange for ours, the others in turn
from a palette that colour-blind readers can tell apart (Okabe and Ito 2008). Names are escaped and
shortened, because plotly reads tags in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final

from edgespec.bench.arms import Arm
from edgespec.telemetry.run_summary import PACE, ArmSummary, RunSummary, Series, Spread
from edgespec_sim.report.document import Figure
from edgespec_sim.report.figures import shortened
from edgespec_sim.report.tables import is_ours

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
