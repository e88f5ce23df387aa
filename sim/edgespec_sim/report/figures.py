"""Numbers and names as a reader wants them: few digits, a dash for what was not measured."""

from __future__ import annotations

import math
from typing import Final

from edgespec_sim.run_summary import ArmSummary, RunSummary

MISSING: Final = "–"
_NAME_MAX: Final = 28


def number(value: float | None) -> str:
    """Three significant digits, thousands apart."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(decimals, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text and abs(value) < 1 else text


def milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else 1e3 * seconds)


def percent(share: float | None) -> str:
    """A share as percent, the unit included."""
    if share is None or not math.isfinite(share):
        return MISSING
    shown = 100 * share
    return f"{shown:.1f} %" if abs(shown) < 10 and shown else f"{shown:.0f} %"


def times(factor: float | None) -> str:
    """A speed-up: 2.31×."""
    if factor is None or not math.isfinite(factor):
        return MISSING
    return f"{factor:.2f}×" if factor < 100 else f"{factor:,.0f}×"


def speedup(arm: ArmSummary) -> str:
    """With its interval, if that is known: 1.45× (1.38–1.53)."""
    if arm.speedup_interval is None:
        return times(arm.speedup)
    low, high = arm.speedup_interval
    return f"{times(arm.speedup)} ({low:.2f}–{high:.2f})"


def seeds(run: RunSummary) -> str:
    """Which were played: "seed 3", "seeds 1 to 24"; empty where there is none."""
    if run.seed is None:
        return ""
    return (
        f"seed {run.seed}" if run.seeds == 1 else f"seeds {run.seed} to {run.seed + run.seeds - 1}"
    )


def count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def duration(seconds: float) -> str:
    """For prose: ms below a second, s below two minutes, else minutes or hours."""
    if seconds < 1:
        return f"{milliseconds(seconds)} ms"
    if seconds < 120:
        return f"{number(seconds)} s"
    return f"{number(seconds / 60)} min" if seconds < 7200 else f"{number(seconds / 3600)} h"


def shortened(name: str, limit: int = _NAME_MAX) -> str:
    """For axes and legends, which cannot break a line; tables hold the whole name."""
    return name if len(name) <= limit else name[: limit - 1] + "…"
