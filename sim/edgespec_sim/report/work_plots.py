"""What an arm pays for its speed: drafts that came to nothing, and energy."""

from __future__ import annotations

from typing import Any

from edgespec.telemetry.run_summary import RunSummary
from edgespec_sim.report.document import Figure
from edgespec_sim.report.plots import axis, colors, label, layout
from edgespec_sim.report.tables import device_j, verifiers_idle_j, verifiers_j

_FADED, _FAINT = 0.5, 0.25


def wasted_plot(run: RunSummary) -> Figure | None:
    """None unless an arm wasted something."""
    if not any(arm.all.wasted_per_token for arm in run.arms):
        return None
    paint = colors([arm.arm for arm in run.arms])
    values = [arm.all.wasted_per_token for arm in run.arms]
    names = [arm.arm for arm in run.arms]
    data = [_bars("wasted", names, values, [paint[name] for name in names], "nodes")]
    shape = _shape(len(names), "drafted tokens wasted per token delivered")
    caption = "Drafted tokens that were sent and not committed by being verified, for each token."
    said = ", ".join(f"{name} {value:.2g}" for name, value in zip(names, values, strict=True))
    return Figure(data, shape, caption, f"Wasted work a token by arm: {said}")


def energy_plot(run: RunSummary) -> Figure | None:
    """None where nothing is known."""
    parts = (
        ("device", device_j, 1.0),
        ("verifiers, at most", verifiers_j, _FADED),
        ("verifiers, idle", verifiers_idle_j, _FAINT),
    )
    paint = colors([arm.arm for arm in run.arms])
    data, said = [], []
    for name, of, opacity in parts:
        known = [(arm.arm, joules) for arm in run.arms if (joules := of(arm)) is not None]
        if known:
            arms = [arm for arm, _ in known]
            values = [joules for _, joules in known]
            bars = _bars(name, arms, values, [paint[arm] for arm in arms], "J")
            data.append({**bars, "opacity": opacity})
            said.append(name + ": " + ", ".join(f"{arm} {joules:.2g} J" for arm, joules in known))
    if not data:
        return None
    shape = _shape(len(run.arms), "energy per token, J") | {"barmode": "stack"}
    caption = (
        "Energy of each delivered token: of the device (drafting, and its radio in every state) in "
        "full colour, of the verifiers' passes at their data sheet's most in light, of verifiers "
        "that were powered and ran no pass in faint; what is not known is not drawn."
    )
    return Figure(data, shape, caption, f"Energy a token by arm; {'; '.join(said)}")


def _bars(
    name: str, arms: list[str], values: list[float], paint: list[str], unit: str
) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [label(arm) for arm in arms],
        "x": values,
        "marker": {"color": paint},
        "hovertemplate": f"%{{y}}, {name}: %{{x:.3g}} {unit}<extra></extra>",
    }


def _shape(count: int, title: str) -> dict[str, Any]:
    return layout(
        110 + 34 * count,
        xaxis=axis(title, rangemode="tozero"),
        yaxis=axis(autorange="reversed", fixedrange=True, type="category"),
        showlegend=False,
        margin={"l": 12, "r": 16, "t": 34, "b": 22},
    )
