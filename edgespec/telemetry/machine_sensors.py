"""What a machine says of its battery, its heat and its cores: files of Linux, or what psutil knows.

Every figure is optional, as machines have none, one or ten of each sensor. What cannot be read or
is no number says nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from edgespec.core.device.draft_ladder import MachineReading

_SYS: Final = Path("/sys")
_PROC: Final = Path("/proc")
# Sensors that are not connected report values of this kind.
_COLDEST, _HOTTEST = 1.0, 150.0
_MOST_SENSORS: Final = 64


class MachineSensors:
    """Reads a machine whose files lie under ``sys`` and ``proc``; with none there, as on other
    systems, psutil is asked for the battery."""

    def __init__(self, sys: Path = _SYS, proc: Path = _PROC) -> None:
        self._sys, self._proc = sys, proc
        self._cores_before: tuple[float, float, float] | None = None
        """All time of the cores, their busy time and this process's, at the last reading."""

    def read(self) -> MachineReading:
        """Takes a few milliseconds; the load is that since the reading before."""
        return MachineReading(self._battery(), self._celsius(), self._others_load())

    def _battery(self) -> float | None:
        """Of several the emptiest."""
        folder = self._sys / "class" / "power_supply"
        supplies = list(_children(folder))
        if not supplies:
            return _asked_psutil() if self._sys == _SYS else None
        batteries = [one for one in supplies if _text(one / "type") == "Battery"]
        # What a mouse or a headset has is a battery too, with the scope "Device".
        charges = [
            _number(one / "capacity")
            for one in batteries
            if _text(one / "scope") != "Device" and _text(one / "status") == "Discharging"
        ]
        known = [charge / 100.0 for charge in charges if charge is not None]
        return min(known, default=None)

    def _celsius(self) -> float | None:
        zones = [one / "temp" for one in _children(self._sys / "class" / "thermal")]
        monitors = [
            path
            for one in _children(self._sys / "class" / "hwmon")
            for path in _children(one)
            if path.name.startswith("temp") and path.name.endswith("_input")
        ]
        read = (_number(path) for path in [*zones, *monitors][:_MOST_SENSORS])
        degrees = [value / 1000.0 for value in read if value is not None]
        return max((one for one in degrees if _COLDEST < one < _HOTTEST), default=None)

    def _others_load(self) -> float | None:
        before, now = self._cores_before, self._cores()
        self._cores_before = now
        if before is None or now is None or now[0] <= before[0]:
            return None
        all_time, busy, own = (new - old for new, old in zip(now, before, strict=True))
        return min(1.0, max(0.0, (busy - own) / all_time))

    def _cores(self) -> tuple[float, float, float] | None:
        """From ``stat`` (user, nice, system, idle, iowait, irq, softirq, steal) and the process's
        own, all in ticks. proc(5)."""
        for line in _text(self._proc / "stat").splitlines()[:1]:
            fields = line.split()
            # Behind the name in brackets, which may hold anything: utime and stime.
            own = _text(self._proc / "self" / "stat").rpartition(")")[2].split()
            try:
                ticks = [float(field) for field in fields[1:9]]
                mine = float(own[11]) + float(own[12])
            except (IndexError, ValueError):
                return None
            if len(ticks) == 8:
                return sum(ticks), sum(ticks) - ticks[3] - ticks[4], mine
        return None


def _asked_psutil() -> float | None:
    ask = getattr(psutil, "sensors_battery", None)
    found = None if ask is None else ask()
    if found is None or found.power_plugged is not False:
        return None
    return float(found.percent) / 100.0


def _children(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names[:_MOST_SENSORS]:
        yield folder / name


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    try:
        return float(_text(path))
    except ValueError:
        return None
