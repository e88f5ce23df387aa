"""The map of a mobile edge: base stations, their cells, and each request where it was asked,
coloured by its time per token. A panel an arm, all on the same scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from edgespec.telemetry.run_summary import ArmSummary, RequestRow, RunSummary, Station
from edgespec_sim.report.document import Figure
from edgespec_sim.report.plots import axis, label, layout

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
        _lines(*borders, "border of a cell", {"color": _INK, "width": 1.5}),
        _lines(*_ways(rows, stations), "to its verifier", {"color": _INK, "width": 0.4}),
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


def _lines(
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
