"""All arms' requests of one device over the run, and beneath, on the same axis, what its network
did: round trip, wait for passes, outages and handovers."""

from __future__ import annotations

from typing import Any, Final

from edgespec.telemetry.run_summary import Interruption, RunSummary, Series, Watched
from edgespec_sim.report.document import Figure
from edgespec_sim.report.figures import shortened
from edgespec_sim.report.plots import axis, colors, label, layout

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
