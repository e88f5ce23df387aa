"""A timeline drawn: one plot a session, a row a lane, spans as bars.

Only the first sessions and so many spans of each are drawn; the Perfetto file holds them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from edgespec_sim.report.document import Figure
from edgespec_sim.report.figures import duration, shortened
from edgespec_sim.report.plots import axis, label, layout
from edgespec_sim.report.timeline import Lane, Mark, Span, Timeline, rows_apart

SESSIONS_DRAWN: Final = 3
SPANS_DRAWN: Final = 1000
WINDOW_S: Final = 1.5
_ROWS_DRAWN: Final = 8
OF_DEVICES: Final = (Lane.DRAFT, Lane.STALL)
LANE_COLORS: Final = {
    Lane.DRAFT: "#d55e00",
    Lane.UPLINK: "#56b4e9",
    Lane.QUEUE: "#e69f00",
    Lane.PASS: "#009e73",
    Lane.DOWNLINK: "#0072b2",
    Lane.STALL: "#9aa2ac",
}
EDGE: Final = "rgba(255,255,255,0.7)"
_MARKS: Final = {
    "correction": ("x", "#cc3377"),
    "connected": ("triangle-up", "#009e73"),
    "finished": ("square", "#8a929c"),
}
_OTHER_MARK: Final = ("triangle-down", "#cc3377")


def timeline_plots(timeline: Timeline) -> list[Figure]:
    """Of the first sessions whose device is in the trace, or of the first ones without any."""
    known = {span.session for span in timeline.spans if span.lane in OF_DEVICES}
    drawn = [name for name in timeline.sessions if name in known or not known][:SESSIONS_DRAWN]
    spans: dict[str, list[tuple[int, Span]]] = {name: [] for name in drawn}
    marks: dict[str, list[Mark]] = {name: [] for name in drawn}
    for row, span in rows_apart(timeline.spans):
        if span.session in spans and len(spans[span.session]) < SPANS_DRAWN:
            spans[span.session].append((row, span))
    for mark in timeline.marks:
        if mark.session in marks:
            marks[mark.session].append(mark)
    return [_plot(name, spans[name], marks[name]) for name in drawn if spans[name]]


def _plot(session: str, placed: list[tuple[int, Span]], marks: list[Mark]) -> Figure:
    start_s = min(span.start_s for _, span in placed)
    end_s = max(span.end_s for _, span in placed)
    data = [bars for number, lane in enumerate(Lane) if (bars := _bars(number, lane, placed))]
    data += _mark_traces([mark for mark in marks if mark.at_s <= end_s])
    window = [start_s - 0.01, min(end_s, start_s + WINDOW_S) + 0.01]
    shape = layout(
        400,
        xaxis=axis(
            ticksuffix=" s",
            range=window,
            rangeslider={"visible": True, "thickness": 0.12},
            type="linear",
        ),
        yaxis=axis(
            range=[len(Lane) + 0.1, -1.0],
            tickvals=[number + 0.5 for number in range(len(Lane))],
            ticktext=[lane.value for lane in Lane],
            fixedrange=True,
            showgrid=False,
        ),
        barmode="overlay",
        bargap=0,
    )
    totals = ", ".join(
        f"{lane.value} {duration(total_s)}"
        for lane in Lane
        if (total_s := sum(s.end_s - s.start_s for _, s in placed if s.lane is lane)) > 0
    )
    name = shortened(session, 80) or "(no name)"
    whole = end_s - start_s
    shown = f"{duration(min(whole, WINDOW_S))} of {duration(whole)}"
    caption = (
        f"Session {name}: the first {shown}; drag the strip below the plot to see others. Messages "
        f"in flight at the same time lie side by side in a lane. In all: {totals}."
    )
    return Figure(data, shape, caption, f"Timeline of session {name}: {totals}")


def _bars(number: int, lane: Lane, placed: list[tuple[int, Span]]) -> dict[str, Any] | None:
    own = [(min(row, _ROWS_DRAWN - 1), span) for row, span in placed if span.lane is lane]
    if not own:
        return None
    height = 0.8 / (max(row for row, _ in own) + 1)
    return {
        "type": "bar",
        "orientation": "h",
        "name": lane.value,
        "base": [round(span.start_s, 6) for _, span in own],
        "x": [round(span.end_s - span.start_s, 6) for _, span in own],
        "y": [number + 0.1 + height * (row + 0.5) for row, _ in own],
        "width": height * 0.92,
        "marker": {"color": LANE_COLORS[lane], "line": {"width": 0.5, "color": EDGE}},
        "text": [_told(span) for _, span in own],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    }


def _told(span: Span) -> str:
    args = "".join(f"<br>{label(key)}: {label(str(value))}" for key, value in span.args.items())
    return f"{label(span.name)}, {1e3 * (span.end_s - span.start_s):.3g} ms{args}"


def _mark_traces(marks: list[Mark]) -> list[dict[str, Any]]:
    traces = []
    for name in dict.fromkeys(mark.name for mark in marks):
        symbol, color = _MARKS.get(name, _OTHER_MARK)
        own = [mark for mark in marks if mark.name == name][:SPANS_DRAWN]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label(name),
                "x": [round(mark.at_s, 6) for mark in own],
                "y": [-0.4] * len(own),
                "text": [
                    "".join(f"<br>{label(k)}: {label(str(v))}" for k, v in mark.args.items())
                    for mark in own
                ],
                "marker": {"symbol": symbol, "size": 9, "color": color},
                "hovertemplate": label(name) + "%{text}<extra></extra>",
            }
        )
    return traces


# --- the same question, answered by each arm ---------------------------------------------------
# their lanes beneath each other on one axis.


_SPANS_MAX: Final = 500
"""Of an arm."""
_WINDOW_S: Final = 1.2
_LANE: Final = 17
_NAME: Final = 22
_ROWS_MAX: Final = 6


def question_plot(firsts: Mapping[str, Timeline]) -> Figure | None:
    """``firsts``: by arm a timeline whose first session is the question's. None of fewer than two
    arms that have one."""
    asked = {arm: spans for arm, one in firsts.items() if (spans := _first(one))}
    if len(asked) < 2:
        return None
    data: list[dict[str, Any]] = []
    ticks: list[tuple[float, str]] = []
    names: list[tuple[float, str]] = []
    y = 0.0
    for arm, spans in asked.items():
        names.append((y, arm))
        y += _NAME
        for lane in Lane:
            own = [(row, span) for row, span in spans if span.lane is lane]
            if own:
                ticks.append((y + _LANE / 2, lane.value))
                data.append(_question_bars(arm, lane, own, y))
                y += _LANE
    ends = {arm: max(span.end_s for _, span in spans) for arm, spans in asked.items()}
    shape = layout(
        round(y) + 110,
        xaxis=axis(
            "seconds since the question was asked", range=[0, min(_WINDOW_S, max(ends.values()))]
        ),
        yaxis=axis(
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
        annotations=[_name(at, arm) for at, arm in names],
        margin={"l": 12, "r": 16, "t": 34, "b": 22},
    )
    took = ", ".join(f"{arm} {duration(end_s)}" for arm, end_s in ends.items())
    caption = (
        "The first question of the first device, arm by arm: draft steps, drafts on their way, "
        "their wait for a pass, passes, commits on their way back, and stalls. Drag across the "
        f"plot to see a part, double-click to see it whole. Drawn: {took}."
    )
    return Figure(data, shape, caption, f"The same question by arm; drawn: {took}")


def _first(timeline: Timeline) -> list[tuple[int, Span]]:
    """The spans of its first session that has a device, from 0, with their rows."""
    known = {span.session for span in timeline.spans if span.lane in OF_DEVICES}
    session = next((name for name in timeline.sessions if name in known), None)
    if session is None:
        return []
    own = [(row, span) for row, span in rows_apart(timeline.spans) if span.session == session]
    zero_s = min(span.start_s for _, span in own)
    zero_s = min([zero_s, *(mark.at_s for mark in timeline.marks if mark.session == session)])
    return [
        (row, Span(session, s.lane, s.start_s - zero_s, s.end_s - zero_s, s.name, s.args))
        for row, s in own[:_SPANS_MAX]
    ]


def _question_bars(arm: str, lane: Lane, own: list[tuple[int, Span]], top: float) -> dict[str, Any]:
    placed = [(min(row, _ROWS_MAX - 1), span) for row, span in own]
    height = 0.86 * _LANE / (max(row for row, _ in placed) + 1)
    return {
        "type": "bar",
        "orientation": "h",
        "name": label(f"{arm}: {lane.value}"),
        "base": [round(span.start_s, 5) for _, span in placed],
        "x": [round(span.end_s - span.start_s, 5) for _, span in placed],
        "y": [round(top + height * (row + 0.5), 2) for row, _ in placed],
        "width": height * 0.94,
        "marker": {"color": LANE_COLORS[lane], "line": {"width": 0.4, "color": EDGE}},
        "text": [label(span.name) for _, span in placed],
        "textposition": "none",
        "hovertemplate": f"{label(arm)}, {lane.value}: %{{text}}, %{{x:.3g}} s at %{{base:.4g}} s"
        "<extra></extra>",
    }


def _name(at: float, arm: str) -> dict[str, Any]:
    return {
        "text": f"<b>{label(arm)}</b>",
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "y": at + _NAME / 2,
        "showarrow": False,
        "font": {"size": 13},
    }
