"""How busy verifiers and links were, arms beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from edgespec.telemetry.run_summary import RunSummary
from edgespec_sim.report.document import Figure
from edgespec_sim.report.plots import axis, colors, label, layout

_BARS_MAX: Final = 40
_ACROSS_MAX: Final = 5
"""Of more than so many, names stand beside the bars."""


def verifier_load_plot(run: RunSummary) -> Figure | None:
    """None unless there is something to compare."""
    if sum(len(arm.verifiers) for arm in run.arms) < 2:
        return None
    loads = {arm.arm: {one.name: one.utilisation for one in arm.verifiers} for arm in run.arms}
    caption = "Share of the run in which a pass ran, by verifier and arm."
    return _bars(loads, caption, "Load of the verifiers by arm")


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
    return _bars(loads, caption, "Load of the links by arm")


def _bars(loads: Mapping[str, Mapping[str, float]], caption: str, what: str) -> Figure:
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
