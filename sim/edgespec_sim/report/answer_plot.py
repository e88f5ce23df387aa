"""The first picture of a run's page: each arm's speed-up, its interval, and its limit.

Target-only is the line at 1. The bar around a point is the 95 % interval; the open diamond is where
the arm would be at its own lower bound on the time per token.
"""

from __future__ import annotations

from typing import Any

from edgespec.bench.arms import Arm
from edgespec.telemetry.run_summary import ArmSummary, RunSummary
from edgespec_sim.report.document import Figure
from edgespec_sim.report.plots import BASE_COLOR, axis, colors, label, layout


def answer_plot(run: RunSummary) -> Figure | None:
    """None unless there is a target-only arm and another one with a speed-up."""
    base = next((arm for arm in run.arms if arm.arm == Arm.TARGET_ONLY.value), None)
    arms = [arm for arm in run.arms if arm is not base and arm.speedup is not None]
    if base is None or not arms:
        return None
    paint = colors([arm.arm for arm in run.arms])
    data = [_point(arm, paint[arm.arm]) for arm in arms]
    limits = [(arm, limit) for arm in arms if (limit := _limit(base, arm)) is not None]
    if limits:
        data.append(_limits(limits, paint))
    last = max([_right(arm) for arm in arms] + [limit for _, limit in limits] + [1.0])
    shape = layout(
        130 + 40 * len(arms),
        xaxis=axis("speed-up, ×", range=[0, 1.06 * last]),
        yaxis=axis(autorange="reversed", fixedrange=True, type="category"),
        showlegend=False,
        margin={"l": 12, "r": 16, "t": 34, "b": 22},
        shapes=[
            {
                "type": "line",
                "x0": 1,
                "x1": 1,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"color": BASE_COLOR, "width": 2, "dash": "dash"},
            }
        ],
    )
    caption = "Speed-up of the mean time per token; the dashed line is target-only streaming."
    if any(arm.speedup_interval for arm in arms):
        caption += f" Bars: 95 % intervals over {run.seeds:,} seeds."
    if limits:
        caption += " Diamonds: what the arm could reach at its lower bound."
    said = ", ".join(f"{arm.arm} {arm.speedup:.2f}" for arm in arms)
    return Figure(data, shape, caption, f"Speed-up over target-only by arm: {said}")


def _point(arm: ArmSummary, color: str) -> dict[str, Any]:
    assert arm.speedup is not None
    low, high = arm.speedup_interval or (arm.speedup, arm.speedup)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label(arm.arm),
        "x": [arm.speedup],
        "y": [label(arm.arm)],
        "marker": {"color": color, "size": 11},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - arm.speedup],
            "arrayminus": [arm.speedup - low],
            "color": color,
            "thickness": 5,
            "width": 9,
        },
        "hovertemplate": f"%{{x:.3g}}×, 95 % from {low:.3g} to {high:.3g}<extra></extra>",
    }


def _limit(base: ArmSummary, arm: ArmSummary) -> float | None:
    """The speed-up that the arm's largest lower bound allows."""
    if base.all.tpot_s is None or not arm.bounds:
        return None
    bound_s = max(arm.bounds.values())
    return base.all.tpot_s.mean / bound_s if bound_s > 0.0 else None


def _limits(limits: list[tuple[ArmSummary, float]], paint: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "limit",
        "x": [limit for _, limit in limits],
        "y": [label(arm.arm) for arm, _ in limits],
        "marker": {
            "symbol": "diamond-open",
            "size": 9,
            "line": {"width": 2},
            "color": [paint[arm.arm] for arm, _ in limits],
        },
        "hovertemplate": "at its lower bound %{x:.3g}×<extra></extra>",
    }


def _right(arm: ArmSummary) -> float:
    return arm.speedup_interval[1] if arm.speedup_interval else arm.speedup or 0.0
