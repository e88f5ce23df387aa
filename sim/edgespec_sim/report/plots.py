"""The plots of a run, as plain data for plotly.js.

Each arm keeps one colour throughout a page: grey for target-only, orange for edgespec's own, and
the others in order from a palette that colour-blind readers can distinguish (Okabe and Ito 2008).
Names are escaped and shortened, because plotly interprets tags in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Final

from edgespec.bench.arms import Arm
from edgespec_sim.report.document import Figure
from edgespec_sim.report.tables import duration, is_ours
from edgespec_sim.report.timeline import Lane, Mark, Span, Timeline, assign_rows
from edgespec_sim.run_summary import ArmSummary, Pace, RunSummary

BASE_COLOR: Final = "#8a929c"
OURS_COLOR: Final = "#d55e00"
_OTHERS: Final = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5cc2")


def choose_colors(arms: Sequence[str]) -> dict[str, str]:
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


def make_label(name: str) -> str:
    """Escape and shorten a name for plotly; axes and legends cannot break a line."""
    return escape(name if len(name) <= 28 else name[:27] + "…")


def make_layout(height: int, **more: Any) -> dict[str, Any]:
    """Return the layout that all plots share, updated by ``more``; the axes are ``xaxis`` and
    ``yaxis``."""
    return {
        "height": height,
        # The top margin holds the legend, and above it the buttons.
        "margin": {"l": 12, "r": 16, "t": 54, "b": 22},
        "font": {"size": 13},
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        **more,
    }


def make_axis(title: str = "", **more: Any) -> dict[str, Any]:
    shown = {"text": title, "font": {"size": 13}}  # at most as wide as the plot on a phone
    return {"title": shown, "automargin": True, "zeroline": False, **more}


def make_band(xs: Sequence[Any], low: Sequence[float], high: Sequence[float], color: str) -> Any:
    """Return a filled area between two lines, without an entry in the legend."""
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


# --- the time per token over the run, with a band for each arm ---------------------------------

_TALLEST: Final = 3.0
"""Upper end of the scale, as a multiple of the slowest arm's mean. An outage would flatten the
rest."""


def pace_plot(run: RunSummary) -> Figure | None:
    """Plot the time per token over the run. None unless an arm has that series with several
    points."""
    lines = [(arm, found) for arm in run.arms if (found := _pace_series(arm)) is not None]
    if not lines:
        return None
    paint = choose_colors([arm.arm for arm in run.arms])
    data: list[dict[str, Any]] = []
    for arm, series in lines:
        if series.low:
            data += _make_area(series, paint[arm.arm])
    data += [_pace_line(arm, series, paint[arm.arm], run.duration_s) for arm, series in lines]
    means_ms = [1e3 * arm.all.tpot_s.mean for arm, _ in lines if arm.all.tpot_s is not None]
    known = [v for _, one in lines for v in (*one.values, *one.high) if v is not None]
    top, cut = 1.05 * max(known), False
    if means_ms and top > _TALLEST * max(means_ms):
        top, cut = _TALLEST * max(means_ms), True
    shape = make_layout(
        380,
        xaxis=make_axis("seconds into the run", range=[0, run.duration_s]),
        yaxis=make_axis("time per token, ms", range=[0, top]),
        showlegend=True,
    )
    means = ", ".join(
        f"{arm.name} {1e3 * arm.all.tpot_s.mean:.3g} ms on average"
        for arm, _ in lines
        if arm.all.tpot_s is not None
    )
    label_ = f"Time per token over the run by arm: {means}"
    return Figure(data, shape, _caption(run, cut=cut), label_)


def _caption(run: RunSummary, *, cut: bool) -> str:
    text = (
        "Mean time per token over the run, over the tokens that arrived in each step; the tokens of"
        " one delivery share the time since the previous one; target-only streaming in grey."
    )
    if run.seeds > 1:
        text += f" Bands: 95 % intervals over {run.seeds:,} seeds."
    return f"{text} Higher peaks are cut off." if cut else text


def _pace_series(arm: ArmSummary) -> Pace | None:
    """Return the arm's series, or None if it has fewer than two points."""
    found = arm.pace
    return None if found is None or sum(v is not None for v in found.values) < 2 else found


def _make_area(series: Pace, color: str) -> list[dict[str, Any]]:
    points = [
        (_find_middle(series, step), low, high)
        for step, (low, high) in enumerate(zip(series.low, series.high, strict=True))
        if low is not None and high is not None
    ]
    if len(points) < 2:
        return []
    xs, lows, highs = (list(column) for column in zip(*points, strict=True))
    return [make_band(xs, lows, highs, color)]


def _find_middle(series: Pace, step: int) -> float:
    return round((step + 0.5) * series.step_s, 6)


def _pace_line(arm: ArmSummary, series: Pace, color: str, duration_s: float) -> dict[str, Any]:
    base = arm.arm == Arm.TARGET_ONLY.value
    return {
        "type": "scatter",
        "mode": "lines+markers",  # A step between two empty steps shows only as a marker.
        "marker": {"size": 4},
        "name": make_label(arm.name),
        "x": [_find_middle(series, step) for step in range(len(series.values))],
        "y": [None if value is None else round(value, 4) for value in series.values],
        "line": {"color": color, "width": 3 if is_ours(arm.arm) or base else 1.5},
        "hovertemplate": f"{make_label(arm.name)}: %{{y:.3g}} ms at %{{x:.3g}} s<extra></extra>",
    }


# --- lanes below each other: the same generation by each arm, or the sessions of a trace --------

SESSIONS_DRAWN: Final = 3
_SPANS_MAX: Final = 500
"""Most spans drawn of an arm or a session."""
_WINDOW_S: Final = 1.2
_LANE: Final = 17
_NAME: Final = 22
_ROWS_MAX: Final = 6
_EDGE: Final = "rgba(255,255,255,0.7)"
_LANE_COLORS: Final = {
    Lane.DRAFT: "#d55e00",
    Lane.UPLINK: "#56b4e9",
    Lane.QUEUE: "#e69f00",
    Lane.PASS: "#009e73",
    Lane.DOWNLINK: "#0072b2",
    Lane.STALL: "#9aa2ac",
}
_MARK_COLOR: Final = "#cc3377"


@dataclass(frozen=True, slots=True)
class Lanes:
    """One session's spans with their rows, and its marks. Times start at 0."""

    spans: list[tuple[int, Span]]
    marks: list[Mark]


def first_sessions(timeline: Timeline) -> dict[str, Lanes]:
    """Return the first sessions whose device is in the trace, or the first of all if none is."""
    known = {s.session for s in timeline.spans if s.lane in (Lane.DRAFT, Lane.STALL)}
    names = [name for name in timeline.sessions if name in known or not known][:SESSIONS_DRAWN]
    placed = list(assign_rows(timeline.spans))
    found = {}
    for name in names:
        own = [(row, span) for row, span in placed if span.session == name]
        marks = [mark for mark in timeline.marks if mark.session == name]
        if own:
            zero_s = min([s.start_s for _, s in own] + [mark.at_s for mark in marks])
            found[name] = Lanes(
                [
                    (row, replace(s, start_s=s.start_s - zero_s, end_s=s.end_s - zero_s))
                    for row, s in own[:_SPANS_MAX]
                ],
                [replace(mark, at_s=mark.at_s - zero_s) for mark in marks],
            )
    return found


def lanes_plot(lanes_by_name: Mapping[str, Lanes], what: str) -> Figure | None:
    """Plot lanes by arm or session; ``what`` begins the caption. None if there is nothing to
    plot."""
    if not lanes_by_name:
        return None
    data: list[dict[str, Any]] = []
    ticks: list[tuple[float, str]] = []
    names: list[tuple[float, str]] = []
    y = 0.0
    for name, one in lanes_by_name.items():
        names.append((y, name))
        data += _make_marks(one, y + _NAME / 2)
        y += _NAME
        for lane in Lane:
            own = [(row, span) for row, span in one.spans if span.lane is lane]
            if own:
                ticks.append((y + _LANE / 2, lane.value))
                data.append(_lane_bars(name, lane, own, y))
                y += _LANE
    ends = {name: max(span.end_s for _, span in one.spans) for name, one in lanes_by_name.items()}
    shape = make_layout(
        round(y) + 110,
        xaxis=make_axis(
            "seconds since the request was sent", range=[0, min(_WINDOW_S, max(ends.values()))]
        ),
        yaxis=make_axis(
            range=[y, 0],
            tickvals=[at for at, _ in ticks],
            ticktext=[name for _, name in ticks],
            fixedrange=True,
            showgrid=False,
            tickfont={"size": 11},
        ),
        barmode="overlay",
        bargap=0,
        showlegend=False,
        annotations=[_name_annotation(at, name) for at, name in names],
        margin={"l": 12, "r": 16, "t": 34, "b": 22},
    )
    took = ", ".join(f"{name} {duration(end_s)}" for name, end_s in ends.items())
    caption = (
        f"{what}: draft steps, drafts on the uplink, their wait for a pass, passes, commits on the"
        " downlink, and stalls; marks are corrections, lost links and ends. Drag across the plot to"
        f" zoom, double-click to reset. Drawn: {took}."
    )
    return Figure(data, shape, caption, f"{what}; drawn: {took}")


def _make_marks(one: Lanes, y: float) -> list[dict[str, Any]]:
    end_s = max(span.end_s for _, span in one.spans)
    marks = [mark for mark in one.marks if mark.at_s <= end_s]
    if not marks:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [round(mark.at_s, 6) for mark in marks],
            "y": [y] * len(marks),
            "text": [make_label(mark.name) for mark in marks],
            "marker": {"symbol": "x", "size": 7, "color": _MARK_COLOR},
            "hovertemplate": "%{text}<extra></extra>",
        }
    ]


def _lane_bars(name: str, lane: Lane, own: list[tuple[int, Span]], top: float) -> dict[str, Any]:
    placed = [(min(row, _ROWS_MAX - 1), span) for row, span in own]
    height = 0.86 * _LANE / (max(row for row, _ in placed) + 1)
    return {
        "type": "bar",
        "orientation": "h",
        "name": make_label(f"{name}: {lane.value}"),
        "base": [round(span.start_s, 5) for _, span in placed],
        "x": [round(span.end_s - span.start_s, 5) for _, span in placed],
        "y": [round(top + height * (row + 0.5), 2) for row, _ in placed],
        "width": height * 0.94,
        "marker": {"color": _LANE_COLORS[lane], "line": {"width": 0.4, "color": _EDGE}},
        "text": [_describe_span(span) for _, span in placed],
        "textposition": "none",
        "hovertemplate": f"{make_label(name)}, {lane.value}: %{{text}}<extra></extra>",
    }


def _describe_span(span: Span) -> str:
    args = "".join(
        f"<br>{make_label(key)}: {make_label(str(value))}" for key, value in span.args.items()
    )
    took = f"{1e3 * (span.end_s - span.start_s):.3g} ms at {span.start_s:.4g} s"
    return f"{make_label(span.name)}, {took}{args}"


def _name_annotation(at: float, name: str) -> dict[str, Any]:
    return {
        "text": f"<b>{make_label(name)}</b>",
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "y": at + _NAME / 2,
        "showarrow": False,
        "font": {"size": 13},
    }
