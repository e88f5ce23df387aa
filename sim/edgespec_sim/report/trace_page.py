"""The page of a network trace, drawn from the plain data that ``trace inspect`` computes.

A table of statistics, then each column over time: the band from the least to the greatest value of
each stretch, its median, and the outages behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgespec_sim.report import figures
from edgespec_sim.report.document import Document, Figure
from edgespec_sim.report.plots import axis, layout
from edgespec_sim.report.tables import table

_BAND: Final = "rgba(0,114,178,0.28)"
_MEDIAN: Final = "#0072b2"
_OUT: Final = "rgba(213,94,0,0.35)"
# Column: (heading, unit of the axis, factor from the unit of the data).
_COLUMNS: Final[Mapping[str, tuple[str, str, float]]] = {
    "rtt_s": ("Round-trip time", "ms", 1e3),
    "up_bits_per_s": ("Uplink capacity", "Mbit/s", 1e-6),
    "down_bits_per_s": ("Downlink capacity", "Mbit/s", 1e-6),
    "loss": ("Packets lost", "%", 100.0),
}
# Labels at its ends must not move it: the labels would change with its width, and it with them.
_MS: Final = axis("ms", type="log", automargin="height")


def render_trace(trace: Mapping[str, Any]) -> str:
    """One HTML file. ``trace``: ``name``, ``source``, ``duration_s``, ``row_count``,
    ``statistics``, ``series`` (by column: ``start_s``, ``min``, ``median``, ``max``),
    ``outages_s`` ([start, end]), ``outages_left_out``, ``rtt_cdf`` ([seconds, share]) and
    ``rtt_histogram`` (``edges_s``, ``share``)."""
    page = Document(f"{trace['name']}: network trace")
    page.paragraph(_facts(trace), "facts")
    page.add(_statistics(trace["statistics"]))
    outages = trace["outages_s"]
    for column, series in trace["series"].items():
        heading, unit, factor = _COLUMNS[column]
        page.heading(heading)
        page.figure(_over_time(heading, unit, factor, series, trace["duration_s"], outages))
    if trace["outages_left_out"]:
        page.paragraph(f"{trace['outages_left_out']:,} further outages are not drawn.", "facts")
    page.heading("Distribution of the round-trip time")
    page.add('<div class="grid">')
    page.figure(_histogram(trace["rtt_histogram"]))
    page.figure(_cdf(trace["rtt_cdf"]))
    page.add("</div>")
    return page.html()


def _facts(trace: Mapping[str, Any]) -> str:
    facts = (
        figures.duration(trace["duration_s"]),
        f"{trace['row_count']:,} rows",
        str(trace["source"]),
    )
    return " · ".join(facts)


def _statistics(statistics: Mapping[str, float]) -> str:
    rows = []
    for name, value in statistics.items():
        words = name.removesuffix("_s").replace("_", " ").replace("rtt", "RTT")
        if name.endswith("_s"):
            rows.append((words, figures.duration(value)))
        elif name.endswith(("share", "loss")):
            rows.append((words, figures.percent(value)))
        elif name.endswith("count"):
            rows.append((words, figures.count(int(value))))
        else:
            rows.append((words, figures.number(value)))
    return table("Statistics of the trace.", ("quantity", "value"), rows)


def _over_time(
    heading: str,
    unit: str,
    factor: float,
    series: Mapping[str, Sequence[float]],
    duration_s: float,
    outages: Sequence[Sequence[float]],
) -> Figure:
    start_s = list(series["start_s"])

    def line(which: str, name: str, **more: Any) -> dict[str, Any]:
        values = [value * factor for value in series[which]]
        return {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [*start_s, duration_s],
            "y": [*values, values[-1]],
            "hovertemplate": f"%{{x:.4g}} s: {which} %{{y:.4g}} {unit}<extra></extra>",
            **more,
        }

    nothing = {"width": 0, "shape": "hv", "color": _MEDIAN}
    data = [
        line("min", "least", line=nothing, showlegend=False),
        line("max", "least to greatest", line=nothing, fill="tonexty", fillcolor=_BAND),
        line("median", "median", line={"width": 1.5, "shape": "hv", "color": _MEDIAN}),
    ]
    if outages:
        # One trace of bars, since a thousand shapes would be slow to move.
        top = max(value * factor for value in series["max"]) * 1.05 or 1.0
        data.append(
            {
                "type": "bar",
                "name": "outage",
                "x": [(start + end) / 2 for start, end in outages],
                "width": [end - start for start, end in outages],
                "y": [top] * len(outages),
                "marker": {"color": _OUT, "line": {"width": 1, "color": _OUT}},
                "hovertemplate": "outage at %{x:.4g} s<extra></extra>",
            }
        )
    shape = layout(
        340,
        xaxis=axis("seconds", range=[0, duration_s]),
        yaxis=axis(unit, rangemode="tozero"),
        showlegend=True,
    )
    caption = f"{heading} over time" + (
        f"; {len(outages):,} outages are shaded." if outages else "."
    )
    return Figure(data, shape, caption, caption)


def _histogram(histogram: Mapping[str, Sequence[float]]) -> Figure:
    edges_ms = [1e3 * edge for edge in histogram["edges_s"]]
    data = [
        {
            "type": "bar",
            "x": edges_ms[:-1],
            "width": [high - low for low, high in itertools.pairwise(edges_ms)],
            "offset": 0,
            "y": [100 * share for share in histogram["share"]],
            "marker": {"color": _MEDIAN},
            "hovertemplate": "from %{x:.4g} ms: %{y:.3g} %<extra></extra>",
        }
    ]
    shape = layout(
        320,
        xaxis=_MS,
        yaxis=axis("% of the time"),
        showlegend=False,
    )
    caption = "Share of the time by round-trip time, outages left out."
    return Figure(data, shape, caption, caption)


def _cdf(points: Sequence[Sequence[float]]) -> Figure:
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [1e3 * value for value, _ in points],
            "y": [100 * share for _, share in points],
            "line": {"color": _MEDIAN, "width": 2},
            "hovertemplate": "%{y:.4g} % within %{x:.4g} ms<extra></extra>",
        }
    ]
    shape = layout(
        320,
        xaxis=_MS,
        yaxis=axis("% at most", range=[0, 101]),
        showlegend=False,
    )
    caption = "Cumulative distribution of the round-trip time."
    return Figure(data, shape, caption, caption)
