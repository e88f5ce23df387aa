"""The first picture of a simulated run: the time per token over the run, a band an arm."""

from __future__ import annotations

from typing import Any, Final

from edgespec.bench.arms import Arm
from edgespec.telemetry.run_summary import PACE, ArmSummary, RunSummary, Series
from edgespec_sim.report.document import Figure
from edgespec_sim.report.plots import axis, band, colors, label, layout
from edgespec_sim.report.tables import is_ours

_TALLEST: Final = 3.0
"""Times the slowest arm's mean; an outage would make all else flat."""


def pace_plot(run: RunSummary) -> Figure | None:
    """None unless the arms have that series, at several points."""
    lines = [(arm, found) for arm in run.arms if (found := _pace(arm)) is not None]
    if not lines:
        return None
    paint = colors([arm.arm for arm in run.arms])
    data: list[dict[str, Any]] = []
    for arm, series in lines:
        if series.low:
            data += _area(series, paint[arm.arm])
    data += [_line(arm, series, paint[arm.arm], run.duration_s) for arm, series in lines]
    bound = _bound(run)
    if bound is not None:
        data.append(_limit(*bound, paint[bound[0].arm], run.duration_s))
    means_ms = [1e3 * arm.all.tpot_s.mean for arm, _ in lines if arm.all.tpot_s is not None]
    known = [v for _, one in lines for v in (*one.values, *one.high) if v is not None]
    top, cut = 1.05 * max(known), False
    if means_ms and top > _TALLEST * max(means_ms):
        top, cut = _TALLEST * max(means_ms), True
    shape = layout(
        380,
        xaxis=axis("seconds into the run", range=[0, run.duration_s]),
        yaxis=axis("time per token, ms", range=[0, top]),
        showlegend=True,
    )
    said = ", ".join(
        f"{arm.arm} {1e3 * arm.all.tpot_s.mean:.3g} ms in the mean"
        for arm, _ in lines
        if arm.all.tpot_s is not None
    )
    label_ = f"Time per token over the run by arm: {said}"
    return Figure(data, shape, _caption(run, bound, cut=cut), label_)


def _caption(run: RunSummary, bound: tuple[ArmSummary, float] | None, *, cut: bool) -> str:
    text = (
        "Mean time per token over the run, of the tokens that came in each step, tokens of one "
        "delivery sharing the time since the one before; target-only streaming in grey."
    )
    if run.seeds > 1:
        text += f" Bands: 95 % intervals over {run.seeds:,} seeds."
    if bound is not None:
        text += f" Dotted: what {bound[0].arm} cannot go below."
    return f"{text} Higher peaks are cut off." if cut else text


def _pace(arm: ArmSummary) -> Series | None:
    """The series, unless it has fewer than two points."""
    found = next((one for one in arm.series if one.name == PACE), None)
    if found is None or sum(value is not None for value in found.values) < 2:
        return None
    return found


def _area(series: Series, color: str) -> list[dict[str, Any]]:
    points = [
        (_middle(series, step), low, high)
        for step, (low, high) in enumerate(zip(series.low, series.high, strict=True))
        if low is not None and high is not None
    ]
    if len(points) < 2:
        return []
    xs, lows, highs = (list(column) for column in zip(*points, strict=True))
    return [band(xs, lows, highs, color)]


def _middle(series: Series, step: int) -> float:
    return round((step + 0.5) * series.step_s, 6)


def _line(arm: ArmSummary, series: Series, color: str, duration_s: float) -> dict[str, Any]:
    base = arm.arm == Arm.TARGET_ONLY.value
    return {
        "type": "scatter",
        "mode": "lines+markers",  # or a step with tokens between two without would not show
        "marker": {"size": 4},
        "name": label(arm.arm),
        "x": [_middle(series, step) for step in range(len(series.values))],
        "y": [None if value is None else round(value, 4) for value in series.values],
        "line": {"color": color, "width": 3 if is_ours(arm.arm) or base else 1.5},
        "hovertemplate": f"{label(arm.arm)}: %{{y:.3g}} ms at %{{x:.3g}} s<extra></extra>",
    }


def _bound(run: RunSummary) -> tuple[ArmSummary, float] | None:
    """Of ours, or else of the arm with the lowest one."""
    known = [(arm, max(arm.bounds.values())) for arm in run.arms if arm.bounds]
    ours = [pair for pair in known if is_ours(pair[0].arm)]
    chosen = ours or sorted(known, key=lambda pair: pair[1])
    return chosen[0] if chosen else None


def _limit(arm: ArmSummary, bound_s: float, color: str, duration_s: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label(f"bound of {arm.arm}"),
        "x": [0.0, duration_s],
        "y": [1e3 * bound_s, 1e3 * bound_s],
        "line": {"color": color, "width": 2, "dash": "dot"},
        "hovertemplate": f"cannot go below {1e3 * bound_s:.3g} ms<extra></extra>",
    }
