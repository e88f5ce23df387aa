"""What the machine's battery says, where it has one that the system knows."""

from __future__ import annotations

import math

import psutil

from edgespec.telemetry.agent_status import BatteryStatus


def battery_status() -> BatteryStatus | None:
    """None without a battery, and where the system does not tell."""
    ask = getattr(psutil, "sensors_battery", None)
    try:
        found = None if ask is None else ask()
    except Exception:  # whatever a system says about itself, or does not
        return None
    if found is None or not math.isfinite(found.percent):
        return None
    left = found.secsleft
    known = isinstance(left, int | float) and math.isfinite(left) and left >= 0
    return BatteryStatus(
        percent=min(100.0, max(0.0, float(found.percent))),
        plugged=found.power_plugged,
        left_s=float(left) if known else None,
    )
