"""The sweep as one self-contained page: cost over devices and servers, delay saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from edgespec_uara.comparison import FIXED_DEVICES, FIXED_SERVERS, PAPER_MEAN_GAIN, Gain, Result
from edgespec_uara.methods import NO_SPECULATION, TMA_MASAC, TMA_MASAC_MOVES

_COLOURS = (
    "#1f77b4 #ff7f0e #2ca02c #9467bd #8c564b #e377c2 #7f7f7f #d62728 #bcbd22 #17becf #393b79 "
    "#637939 #843c39 #e7969c"
).split()


def write_page(
    path: Path, results: list[Result], gains: Mapping[str, list[Gain]], title: str
) -> None:
    """The page loads nothing from elsewhere. ``gains`` are those of each method in it."""
    figure = make_subplots(
        rows=3,
        cols=1,
        vertical_spacing=0.09,
        subplot_titles=(
            f"Cost a device against devices, {FIXED_SERVERS} servers",
            "Cost a device against servers",
            "Delay saved over each other method (mean over the sweep; dashed: the paper's mean)",
        ),
    )
    names = list(dict.fromkeys(result.method for result in results))
    for name, colour in zip(names, _COLOURS, strict=False):
        mine = [result for result in results if result.method == name]
        for row in (1, 2):
            figure.add_trace(_line(mine, name, colour, row), row=row, col=1)
    # Decoding without speculation plays another game: its bar would hide all others.
    for ours, saved in gains.items():
        shown = [gain for gain in saved if gain.baseline != NO_SPECULATION]
        labels = [gain.baseline for gain in shown]
        shares = [100.0 * gain.mean_delay for gain in shown]
        figure.add_trace(go.Bar(x=labels, y=shares, name=f"saved by {ours}"), row=3, col=1)
    figure.add_hline(y=100.0 * PAPER_MEAN_GAIN, line_dash="dash", row=3, col=1)
    figure.update_yaxes(title_text="ms", type="log", row=1, col=1)
    figure.update_yaxes(title_text="ms", type="log", row=2, col=1)
    figure.update_yaxes(title_text="%", row=3, col=1)
    figure.update_xaxes(title_text="devices", row=1, col=1)
    figure.update_xaxes(title_text="servers", row=2, col=1)
    figure.update_layout(title=title, height=1300, template="plotly_white")
    figure.write_html(path, include_plotlyjs=True, full_html=True)


def _line(results: list[Result], name: str, colour: str, row: int) -> go.Scatter:
    if row == 1:
        chosen = [result for result in results if result.cell.servers == FIXED_SERVERS]
        points = sorted((result.cell.devices, result.cost_ms) for result in chosen)
    else:
        fixed = {result.cell.devices for result in results if result.cell.servers != FIXED_SERVERS}
        fixed = fixed or {FIXED_DEVICES}
        chosen = [result for result in results if result.cell.devices in fixed]
        points = sorted((result.cell.servers, result.cost_ms) for result in chosen)
    return go.Scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        name=name,
        legendgroup=name,
        showlegend=row == 1,
        line={"color": colour, "width": 3 if name in (TMA_MASAC, TMA_MASAC_MOVES) else 1.5},
    )
