"""All arms' requests of one device over the run, and beneath, on the same axis, what its network
did: round trip, wait for passes, outages and handovers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from edgespec_sim.report.document import Figure
from edgespec_sim.report.figures import shortened
from edgespec_sim.report.plots import axis, colors, label, layout
from edgespec_sim.run_summary import (
    ArmSummary,
    Interruption,
    RequestRow,
    RunSummary,
    Series,
    Station,
    Watched,
)

_ROW: Final = 30
_PANEL: Final = 90
_EVENTS: Final = 28
_EVENT_LINE: Final = 17
"""Letters; a longer name of an event has two lines, or little of a phone's width is left."""
_BELOW: Final = 90
_SHADES_MAX: Final = 80
_OUT: Final = "rgba(204,51,119,0.22)"
_SHAPES: Final = {"outage": "line-ns-open", "handover": "triangle-up"}
_EVENT_COLOR: Final = "#cc3377"


def arms_over_time(run: RunSummary) -> Figure | None:
    """None unless arms have a watched device."""
    watched = [(arm.arm, arm.watched) for arm in run.arms if arm.watched is not None]
    if not watched or not any(one.requests for _, one in watched):
        return None
    paint = colors([arm.arm for arm in run.arms])
    names = list(dict.fromkeys(series.name for _, one in watched for series in one.series))
    panels = [name for name in names if _points(watched, name)]
    kinds = list(dict.fromkeys(event.what for _, one in watched for event in one.interruptions))
    heights = [_ROW * len(watched), *(_PANEL for _ in panels)]
    heights += [_EVENTS * len(kinds)] if kinds else []
    tops = _domains(heights)
    axes: dict[str, Any] = {
        "yaxis": axis(
            domain=tops[0],
            range=[len(watched) - 0.5, -0.5],
            tickvals=list(range(len(watched))),
            ticktext=[label(arm) for arm, _ in watched],
            fixedrange=True,
            showgrid=False,
        )
    }
    data = [bars for row, (arm, one) in enumerate(watched) for bars in _bars(row, arm, one, paint)]
    for number, name in enumerate(panels, start=2):
        unit = next(one.unit for _, w in watched for one in w.series if one.name == name)
        axes[f"yaxis{number}"] = axis(
            unit, domain=tops[number - 1], rangemode="tozero", nticks=4, fixedrange=True
        )
        data += _lines(name, watched, paint, f"y{number}")
    if kinds:
        number = len(panels) + 2
        axes[f"yaxis{number}"] = _event_axis(kinds, tops[-1])
        data += _events(kinds, watched, f"y{number}")
    bottom = f"y{len(tops)}" if len(tops) > 1 else "y"
    shape = layout(
        sum(heights) + 16 * (len(heights) - 1) + _BELOW,
        xaxis=axis("seconds into the run", range=[0, run.duration_s], anchor=bottom),
        barmode="overlay",
        bargap=0,
        showlegend=False,
        shapes=_shades(watched),
        annotations=[_title(name, tops[number]) for number, name in enumerate(panels, start=1)],
        margin={"l": 12, "r": 16, "t": 34, "b": 22},
        **axes,
    )
    return Figure(data, shape, _caption(watched, panels, kinds), _told(watched, kinds))


def _points(watched: list[tuple[str, Watched]], name: str) -> int:
    found = [one for _, w in watched for one in w.series if one.name == name]
    return sum(value is not None for one in found for value in one.values)


def _domains(heights: list[int]) -> list[list[float]]:
    """From the top down, with the same gap between panels."""
    whole = sum(heights) + 26 * (len(heights) - 1)
    domains, top = [], float(whole)
    for height in heights:
        domains.append([round((top - height) / whole, 4), round(top / whole, 4)])
        top -= height + 26
    return domains


def _title(name: str, domain: list[float]) -> dict[str, Any]:
    return {
        "text": label(name),
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": domain[1],
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12},
    }


def _bars(row: int, arm: str, one: Watched, paint: dict[str, str]) -> list[dict[str, Any]]:
    """Waiting for the first token light, its stream full."""
    parts = (
        [(r, r.started_s, r.first_s if r.first_s is not None else r.ended_s) for r in one.requests],
        [(r, r.first_s, r.ended_s) for r in one.requests if r.first_s is not None],
    )
    bars = []
    for what, opacity, spans in zip(
        ("until the first token", "tokens come"), (0.35, 1.0), parts, strict=True
    ):
        bars.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": what,
                "base": [round(start_s, 4) for _, start_s, _ in spans],
                "x": [round(end_s - start_s, 4) for _, start_s, end_s in spans],
                "y": [row] * len(spans),
                "width": 0.62,
                "opacity": opacity,
                "marker": {"color": paint[arm]},
                "text": [f"{r.tokens} tokens from {label(r.verifier)}" for r, _, _ in spans],
                "textposition": "none",
                "hovertemplate": f"{label(arm)}, {what}: %{{x:.3g}} s, %{{text}}<extra></extra>",
            }
        )
    return bars


def _lines(
    name: str, watched: list[tuple[str, Watched]], paint: dict[str, str], yaxis: str
) -> list[dict[str, Any]]:
    found = [(arm, one) for arm, w in watched for one in w.series if one.name == name]
    if len({one.values for _, one in found}) == 1:  # the same for all arms
        found = [("all arms", found[0][1])]
    return [_line(arm, one, paint.get(arm, "#0072b2"), yaxis) for arm, one in found]


def _line(arm: str, one: Series, color: str, yaxis: str) -> dict[str, Any]:
    values = [None if value is None else round(value, 3) for value in one.values]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label(arm),
        "x": [round((step + 1) * one.step_s, 4) for step in range(len(values))],
        "y": values,
        "yaxis": yaxis,
        "line": {"color": color, "width": 1.5},
        "marker": {"size": 3},
        "hovertemplate": f"{label(arm)}: %{{y:.3g}} {label(one.unit)}, %{{x:.3g}} s<extra></extra>",
    }


def _event_axis(kinds: list[str], domain: list[float]) -> dict[str, Any]:
    return axis(
        domain=domain,
        range=[len(kinds) - 0.5, -0.5],
        tickvals=list(range(len(kinds))),
        ticktext=[_in_two_lines(label(kind)) for kind in kinds],
        tickfont={"size": 11},
        fixedrange=True,
        showgrid=False,
    )


def _in_two_lines(name: str) -> str:
    if len(name) <= _EVENT_LINE:
        return name
    spaces = [at for at, letter in enumerate(name) if letter == " "]
    if not spaces:
        return name
    middle = min(spaces, key=lambda at: abs(2 * at - len(name)))
    return f"{name[:middle]}<br>{name[middle + 1 :]}"


def _happened(watched: list[tuple[str, Watched]]) -> list[tuple[str, Interruption]]:
    """Each once, with the arms that it happened in (the network is the same for all)."""
    arms: dict[Interruption, list[str]] = {}
    for arm, one in watched:
        for event in one.interruptions:
            arms.setdefault(event, []).append(arm)
    return [
        ("" if len(found) == len(watched) else ", ".join(found), event)
        for event, found in arms.items()
    ]


def _events(
    kinds: list[str], watched: list[tuple[str, Watched]], yaxis: str
) -> list[dict[str, Any]]:
    happened = _happened(watched)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": label(kind),
            "x": [round(event.start_s, 4) for _, event in happened if event.what == kind],
            "y": [row for _, event in happened if event.what == kind],
            "text": [
                f"{event.end_s - event.start_s:.3g} s" + (f", in {label(arm)}" if arm else "")
                for arm, event in happened
                if event.what == kind
            ],
            "yaxis": yaxis,
            "marker": {
                "symbol": _SHAPES.get(kind, "diamond"),
                "size": 9,
                "color": _EVENT_COLOR,
                "line": {"width": 2, "color": _EVENT_COLOR},
            },
            "hovertemplate": f"{label(kind)} at %{{x:.3g}} s, %{{text}}<extra></extra>",
        }
        for row, kind in enumerate(kinds)
    ]


def _shades(watched: list[tuple[str, Watched]]) -> list[dict[str, Any]]:
    lasting = [e for _, e in _happened(watched) if e.end_s > e.start_s]
    return [
        {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": round(event.start_s, 4),
            "x1": round(event.end_s, 4),
            "y0": 0,
            "y1": 1,
            "fillcolor": _OUT,
            "line": {"width": 0},
            "layer": "below",
        }
        for event in lasting[:_SHADES_MAX]
    ]


def _caption(watched: list[tuple[str, Watched]], panels: list[str], kinds: list[str]) -> str:
    device = shortened(watched[0][1].device)
    text = (
        f"What {device} went through in the first world of each arm: light until the first token "
        "of an answer, full while its tokens come, nothing while its user reads."
    )
    if panels:
        text += f" Beneath on the same axis: {', '.join(panels)}"
        text += f", and {', '.join(kinds)} (shaded while they last)." if kinds else "."
    left = max(one.left_out for _, one in watched)
    return f"{text} {left:,} later ones are left out." if left else text


def _told(watched: list[tuple[str, Watched]], kinds: list[str]) -> str:
    counts = ", ".join(f"{arm} {len(one.requests)}" for arm, one in watched)
    events = _happened(watched)
    told = ", ".join(f"{sum(e.what == kind for _, e in events)} {kind}" for kind in kinds)
    return f"Requests of one device over the run by arm: {counts}" + (f"; {told}" if told else "")


# --- the map of a mobile edge ------------------------------------------------------------------
# base stations, their cells, and each request where it was asked, coloured by its time per token.
# A panel an arm, all on the same scale.


_DOTS_MAX: Final = 400
_GRID: Final = 96
_BORDERS_MAX: Final = 40

# Cividis: readable with any colour vision (Nunez, Anderton and Renslow 2018).
_SCALE: Final = "Cividis"
_INK: Final = "#8a929c"


def cell_maps(run: RunSummary) -> list[Figure]:
    """Empty without places."""
    placed = [(arm, rows) for arm in run.arms if (rows := _placed(arm))]
    if not run.stations or not placed:
        return []
    times_ms = sorted(1e3 * (row.tpot_s or 0.0) for _, rows in placed for row in rows)
    low, high = times_ms[0], times_ms[int(0.95 * (len(times_ms) - 1))]
    side_m = _side_m(run.stations, [row for _, rows in placed for row in rows])
    borders = _borders(run.stations, side_m)
    return [_map(arm, rows, run.stations, borders, side_m, (low, high)) for arm, rows in placed]


def _placed(arm: ArmSummary) -> list[RequestRow]:
    rows = [row for row in arm.rows if row.x_m is not None and row.tpot_s is not None]
    return rows[:_DOTS_MAX]


def _side_m(stations: Sequence[Station], rows: Sequence[RequestRow]) -> float:
    ends = [max(row.x_m or 0.0, row.y_m or 0.0) for row in rows]
    return max(ends + [max(one.x_m, one.y_m) for one in stations])


def _map(
    arm: ArmSummary,
    rows: Sequence[RequestRow],
    stations: Sequence[Station],
    borders: tuple[list[float | None], list[float | None]],
    side_m: float,
    scale_ms: tuple[float, float],
) -> Figure:
    data = [
        _way_lines(*borders, "border of a cell", {"color": _INK, "width": 1.5}),
        _way_lines(*_ways(rows, stations), "to its verifier", {"color": _INK, "width": 0.4}),
        _dots(rows, scale_ms),
        _stations(stations),
    ]
    edge: dict[str, Any] = {
        "range": [-0.02 * side_m, 1.02 * side_m],
        "showgrid": False,
        "constrain": "domain",
    }
    shape = layout(
        520,
        xaxis=axis("metres", **edge),
        yaxis=axis(scaleanchor="x", **edge),
        showlegend=False,
        title={"text": f"<b>{label(arm.arm)}</b>", "font": {"size": 14}, "x": 0.02},
        margin={"l": 12, "r": 8, "t": 40, "b": 22},
    )
    mean_ms = 1e3 * math.fsum(row.tpot_s or 0.0 for row in rows) / len(rows)
    caption = (
        f"{arm.arm}: {len(rows):,} requests where they were asked, by their time per token; "
        "squares are base stations with their verifiers, thick lines the borders between the "
        "nearest ones, thin ones lead to the verifier that was used."
    )
    told = f"Map of the cells for {arm.arm}: {len(rows)} requests, {mean_ms:.3g} ms a token"
    return Figure(data, shape, caption, told)


def _dots(rows: Sequence[RequestRow], scale_ms: tuple[float, float]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "requests",
        "x": [round(row.x_m or 0.0, 1) for row in rows],
        "y": [round(row.y_m or 0.0, 1) for row in rows],
        "text": [f"{label(row.device)} at {label(row.verifier)}" for row in rows],
        "marker": {
            "size": 9,
            "color": [round(1e3 * (row.tpot_s or 0.0), 2) for row in rows],
            "colorscale": _SCALE,
            "reversescale": True,
            "cmin": scale_ms[0],
            "cmax": scale_ms[1],
            "line": {"width": 0.6, "color": _INK},
            "colorbar": {
                "title": {"text": "ms a token", "side": "top"},
                "orientation": "h",
                "thickness": 10,
                "y": -0.16,
                "yanchor": "top",
            },
        },
        "hovertemplate": "%{text}: %{marker.color:.3g} ms a token<extra></extra>",
    }


def _stations(stations: Sequence[Station]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": "base stations",
        "x": [one.x_m for one in stations],
        "y": [one.y_m for one in stations],
        "text": [f"<b>{label(one.name)}</b>" for one in stations],
        "textposition": "top center",
        "marker": {"symbol": "square", "size": 13, "color": "#d55e00"},
        "hovertemplate": "%{text}<extra></extra>",
    }


def _way_lines(
    xs: list[float | None], ys: list[float | None], name: str, line: dict[str, Any]
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": xs,
        "y": ys,
        "line": line,
        "hoverinfo": "skip",
    }


def _ways(
    rows: Sequence[RequestRow], stations: Sequence[Station]
) -> tuple[list[float | None], list[float | None]]:
    places = {one.name: one for one in stations}
    xs: list[float | None] = []
    ys: list[float | None] = []
    for row in rows:
        station = places.get(row.verifier)
        if station is not None and row.x_m is not None and row.y_m is not None:
            xs += [round(row.x_m, 1), station.x_m, None]
            ys += [round(row.y_m, 1), station.y_m, None]
    return xs, ys


def _borders(
    stations: Sequence[Station], side_m: float
) -> tuple[list[float | None], list[float | None]]:
    """Where the nearest station changes, as the edges of a fine grid; of a city's, nothing."""
    step_m = side_m / _GRID
    if len(stations) > _BORDERS_MAX:
        return [], []

    def nearest(column: int, row: int) -> int:
        x_m, y_m = (column + 0.5) * step_m, (row + 0.5) * step_m
        return min(
            range(len(stations)),
            key=lambda index: math.hypot(stations[index].x_m - x_m, stations[index].y_m - y_m),
        )

    cells = [[nearest(column, row) for column in range(_GRID)] for row in range(_GRID)]
    xs: list[float | None] = []
    ys: list[float | None] = []
    for row in range(_GRID):
        for column in range(_GRID):
            x_m, y_m = (column + 1) * step_m, (row + 1) * step_m
            if column + 1 < _GRID and cells[row][column] != cells[row][column + 1]:
                xs += [round(x_m, 1), round(x_m, 1), None]
                ys += [round(row * step_m, 1), round(y_m, 1), None]
            if row + 1 < _GRID and cells[row][column] != cells[row + 1][column]:
                xs += [round(column * step_m, 1), round(x_m, 1), None]
                ys += [round(y_m, 1), round(y_m, 1), None]
    return xs, ys
