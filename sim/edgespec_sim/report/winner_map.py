"""Which arm wins where: the points of a sweep as a map, and in a sentence.

An arm wins a point with the lowest mean time per token. The win is sure if the 95 % interval of its
speed-up lies above 1 and above those of all others, or for target-only if those of all others lie
below 1. All arms have the same dice, so intervals that overlap may still hide a sure win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgespec.bench.arms import Arm
from edgespec.telemetry.run_summary import ArmSummary, RunSummary
from edgespec_sim.report import figures
from edgespec_sim.report.document import Figure
from edgespec_sim.report.plots import axis, colors, label, layout
from edgespec_sim.report.tables import is_ours

_PANELS_MAX: Final = 12
_BASE: Final = Arm.TARGET_ONLY.value
_UNITS: Final = {
    "_ms": "ms",
    "_us": "µs",
    "_s": "s",
    "_mbps": "Mbit/s",
    "_mhz": "MHz",
    "_ghz": "GHz",
    "_dbm": "dBm",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_w": "W",
    "_j": "J",
    "_m": "m",
    "acceptance": "share",
    "loss": "share",
    "load": "share",
    "count": "number",
}
Points = Sequence[tuple[Mapping[str, Any], RunSummary]]


@dataclass(frozen=True, slots=True)
class Win:
    """Of one point."""

    arm: ArmSummary
    sure: bool


def winner(run: RunSummary) -> Win | None:
    """None where no arm has a time per token, or there is but one arm."""
    timed = [(arm.all.tpot_s.mean, arm) for arm in run.arms if arm.all.tpot_s is not None]
    if len(timed) < 2:
        return None
    best = min(timed, key=lambda pair: pair[0])[1]
    others = [arm.speedup_interval for _, arm in timed if arm is not best and arm.arm != _BASE]
    least = 1.0
    if best.arm != _BASE:
        if best.speedup_interval is None or best.speedup_interval[0] <= 1.0:
            return Win(best, sure=False)
        least = best.speedup_interval[0]
    return Win(best, all(ends is not None and ends[1] < least for ends in others))


def with_unit(key: str) -> str:
    """A setting's name as the title of an axis: ``links.wan.rtt_ms, ms``."""
    unit = next((unit for end, unit in _UNITS.items() if key.endswith(end)), "")
    return f"{key}, {unit}" if unit else key


def answer(points: Points) -> str:
    """Who wins how often, and from where to where our speed-up goes; in plain text."""
    wins = [(varied, win) for varied, run in points if (win := winner(run)) is not None]
    if not wins:
        return "No point has two arms with a time per token, so nothing is compared."
    counts: dict[str, list[bool]] = {}
    for _, win in wins:
        counts.setdefault(win.arm.arm, []).append(win.sure)
    parts = [
        f"{arm}{' (ours)' if is_ours(arm) else ''} is fastest at {len(sures)} of {len(wins)} points"
        f" ({sum(sures)} of them surely)"
        for arm, sures in sorted(counts.items(), key=lambda pair: -len(pair[1]))
    ]
    ours = [
        (arm.speedup, varied, arm)
        for varied, run in points
        for arm in run.arms
        if is_ours(arm.arm) and arm.speedup is not None
    ]
    told = "; ".join(parts) + "."
    if not ours:
        return told
    least, most = min(ours, key=lambda one: one[0]), max(ours, key=lambda one: one[0])
    ends = [f"{figures.speedup(arm)} at {_where(varied)}" for _, varied, arm in (least, most)]
    known = least[2].speedup_interval is not None and most[2].speedup_interval is not None
    sure = "95 % intervals" if known else "nobody knows how sure that is: play more seeds"
    return f"{told} Against target-only ours goes from {ends[0]} to {ends[1]} ({sure})."


def _where(varied: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in varied.items()) or "its one point"


def winner_maps(points: Points, keys: Sequence[str]) -> list[Figure]:
    """A panel for each combination of the settings behind the first two of ``keys``; empty unless
    something is compared."""
    arms = list(dict.fromkeys(arm.arm for _, run in points for arm in run.arms))
    panels: dict[str, list[tuple[Mapping[str, Any], Win]]] = {}
    for varied, run in points:
        win = winner(run)
        if keys and win is not None:
            rest = ", ".join(f"{key} = {varied[key]}" for key in keys[2:])
            panels.setdefault(rest, []).append((varied, win))
    return [_map(wins, keys, rest, arms) for rest, wins in list(panels.items())[:_PANELS_MAX]]


def _map(
    wins: Sequence[tuple[Mapping[str, Any], Win]], keys: Sequence[str], rest: str, arms: list[str]
) -> Figure:
    x_key, y_key = keys[0], keys[1] if len(keys) > 1 else ""
    place = {(str(varied[x_key]), str(varied[y_key]) if y_key else ""): win for varied, win in wins}
    xs, ys = (list(dict.fromkeys(at[part] for at in place)) for part in (0, 1))
    paint = colors(arms)
    cells = [[place.get((x, y)) for x in xs] for y in ys]
    heat = {
        "type": "heatmap",
        "x": [label(x) for x in xs],
        "y": [label(y) for y in ys],
        "z": [[None if w is None else arms.index(w.arm.arm) for w in row] for row in cells],
        "text": [["" if w is None else _told(w) for w in row] for row in cells],
        "texttemplate": "%{text}",
        "textfont": {"size": 12},
        "hovertemplate": "%{text}<extra></extra>",
        "zmin": -0.5,
        "zmax": len(arms) - 0.5,
        "colorscale": _steps([paint[arm] for arm in arms]),
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }
    won = [arm for arm in arms if any(win.arm.arm == arm for win in place.values())]
    shape = layout(
        max(250, 140 + 50 * len(ys)),
        xaxis=axis(label(with_unit(x_key)), type="category", showgrid=False),
        yaxis=axis(
            label(with_unit(y_key.rpartition(".")[2])) if y_key else "",
            type="category",
            showgrid=False,
            showticklabels=bool(y_key),
        ),
        showlegend=True,
    )
    where = f" ({rest})" if rest else ""
    caption = (
        f"The fastest arm at each point{where} and its speed-up over target-only; a question mark: "
        "the 95 % intervals do not say so surely."
    )
    told = "; ".join(f"{x} {y}: {_told(w)}".replace("<br>", " ") for (x, y), w in place.items())
    return Figure([heat, *(_key(arm, paint[arm]) for arm in won)], shape, caption, told)


def _told(win: Win) -> str:
    speedup = "" if win.arm.speedup is None else f"<br>{figures.times(win.arm.speedup)}"
    return f"{label(win.arm.arm)}{speedup}{'' if win.sure else ' ?'}"


def _steps(paint: list[str]) -> list[list[Any]]:
    """A colour scale that jumps from one arm to the next."""
    share = 1.0 / len(paint)
    return [
        [round(end, 6), color]
        for index, color in enumerate(paint)
        for end in (index * share, (index + 1) * share)
    ]


def _key(arm: str, color: str) -> dict[str, Any]:
    """An entry of the legend, without a point."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label(arm),
        "x": [None],
        "y": [None],
        "marker": {"symbol": "square", "size": 12, "color": color},
    }
