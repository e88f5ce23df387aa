"""The same question, answered by each arm: their lanes beneath each other on one axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from edgespec_sim.report.document import Figure
from edgespec_sim.report.figures import duration
from edgespec_sim.report.plots import axis, label, layout
from edgespec_sim.report.spans import Lane, Span, rows_apart
from edgespec_sim.report.timeline import Timeline
from edgespec_sim.report.timeline_plot import EDGE, LANE_COLORS, OF_DEVICES

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
                data.append(_bars(arm, lane, own, y))
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


def _bars(arm: str, lane: Lane, own: list[tuple[int, Span]], top: float) -> dict[str, Any]:
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
