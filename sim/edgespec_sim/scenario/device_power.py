"""The keys of a device's battery and heat, and the published profiles of devices.

A profile is a YAML file in ``data/devices`` (or of the caller's own) whose every number has its
kind, source and date. ``docs/energy.md`` shows them. A number without a published source
is left out, and ``missing`` names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Final

from edgespec.config.loading import ConfigError, load_config
from edgespec.core.protocol.checks import Section, check_limits, range_field
from edgespec_sim.links.network_trace import find_file

_PROFILES: Final = Path(__file__).parents[1] / "data" / "devices"
_COULOMBS_PER_MAH: Final = 3.6


@dataclass(frozen=True, slots=True)
class BatterySection(Section):
    """A battery. Its voltage falls linearly with its charge from ``full_v`` to ``empty_v``. At
    ``cutoff_v`` the device switches off: the running request ends, and no other begins."""

    capacity_mah: float = range_field(MISSING, 1.0, 1e6)
    """Charge of the full battery in milliampere hours."""
    full_v: float = range_field(4.2, 0.5, 1000.0)
    empty_v: float = range_field(3.0, 0.1, 1000.0)
    """Voltage without charge. By default both voltages fit one lithium-ion cell."""
    cutoff_v: float = range_field(3.0, 0.0, 1000.0)
    """Voltage at which the device switches off."""
    start: float = range_field(1.0, 0.0, 1.0)
    """Share of the charge at the begin of the world."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.empty_v > self.full_v:
            raise ValueError(
                f"empty_v is {self.empty_v:g}, but must not exceed full_v, {self.full_v:g}"
            )
        if self.cutoff_v >= self.full_v:
            raise ValueError(
                f"cutoff_v is {self.cutoff_v:g}, but must be less than full_v, {self.full_v:g}"
            )

    @property
    def capacity_coulombs(self) -> float:
        return self.capacity_mah * _COULOMBS_PER_MAH

    @property
    def full_j(self) -> float:
        """Energy between the full and the empty battery."""
        return self.capacity_coulombs * (self.full_v + self.empty_v) / 2.0


@dataclass(frozen=True, slots=True)
class ThermalSection(Section):
    """The heat of a device as one body: dT/dt = (P R - (T - ambient)) / (R C).

    P is the power of the device without its radio, R ``k_per_w``, and R C ``time_constant_s``. From
    ``limit_c`` on, draft steps take ``slowdown`` times as long, until the device has cooled down to
    ``resume_c``."""

    k_per_w: float = range_field(MISSING, 0.01, 1000.0)
    """Thermal resistance from the device to the air, in kelvin per watt."""
    time_constant_s: float = range_field(MISSING, 0.01, 1e6)
    """Time in which a difference of temperature falls to 1 / e."""
    limit_c: float = range_field(MISSING, -50.0, 200.0)
    """Temperature in degrees Celsius from which the device throttles."""
    resume_c: float | None = range_field(None, -50.0, 200.0)
    """Temperature down to which it throttles. null: 3 below ``limit_c``."""
    slowdown: float = range_field(2.0, 1.0, 100.0)
    """Factor on the duration of draft steps while the device throttles."""
    throttled_w: float | None = range_field(None, 0.0, 1000.0)
    """Power of a draft step above idle while the device throttles. null: ``draft_w`` divided by
    ``slowdown``, so that a step takes the same energy."""
    ambient_c: float = range_field(25.0, -50.0, 100.0)
    start_c: float | None = range_field(None, -50.0, 200.0)
    """Temperature at the begin of the world. null: that of an idle device."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.resume_c is not None and self.resume_c >= self.limit_c:
            raise ValueError(
                f"resume_c is {self.resume_c:g}, but must be below limit_c, {self.limit_c:g}"
            )
        if self.limit_c <= self.ambient_c:
            raise ValueError(
                f"limit_c is {self.limit_c:g}, but must be above ambient_c, {self.ambient_c:g}"
            )

    @property
    def cooled_c(self) -> float:
        """Temperature down to which the device throttles."""
        return self.limit_c - 3.0 if self.resume_c is None else self.resume_c


# --- profiles of devices -----------------------------------------------------------------------


class FigureKind(Enum):
    MEASURED = "measured"
    """Published as measured."""
    DERIVED = "derived"
    """Computed from published measurements; ``source`` says how."""
    MAKER = "maker"
    """From the maker's specification."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A published number. ``date`` is that of its source, year-month-day or what is known of it."""

    value: float
    kind: FigureKind
    source: str
    date: str

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"value is {self.value}, but must be finite")
        if not self.source or not self.date:
            raise ValueError("source and date must not be empty: they are the point of a profile")


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Published energy figures of one device. The fields are named after the scenario's keys."""

    name: str
    about: str
    """The device, its mode, and the load of its ``draft_w``."""
    idle_w: Figure | None = None
    draft_w: Figure | None = None
    """Power of a running draft above ``idle_w``."""
    step_ms: Figure | None = None
    """Duration of one token of the model that ``about`` names, for comparison. A scenario's steps
    follow its key ``draft`` alone, since they depend on the model."""
    capacity_mah: Figure | None = None
    full_v: Figure | None = None
    k_per_w: Figure | None = None
    time_constant_s: Figure | None = None
    limit_c: Figure | None = None
    slowdown: Figure | None = None
    missing: tuple[str, ...] = ()
    """Numbers that are left out, since no published one was found."""

    @property
    def figures(self) -> Iterator[tuple[str, Figure]]:
        """The names of the numbers that the profile has, and the numbers."""
        for key in FIGURE_UNITS:
            figure: Figure | None = {
                "idle_w": self.idle_w,
                "draft_w": self.draft_w,
                "step_ms": self.step_ms,
                "capacity_mah": self.capacity_mah,
                "full_v": self.full_v,
                "k_per_w": self.k_per_w,
                "time_constant_s": self.time_constant_s,
                "limit_c": self.limit_c,
                "slowdown": self.slowdown,
            }[key]
            if figure is not None:
                yield key, figure

    @property
    def battery(self) -> BatterySection | None:
        """The battery, if its capacity is published."""
        if self.capacity_mah is None:
            return None
        battery = BatterySection(capacity_mah=self.capacity_mah.value)
        return battery if self.full_v is None else replace(battery, full_v=self.full_v.value)

    @property
    def thermal(self) -> ThermalSection | None:
        """The heat, if all of it is published."""
        if self.k_per_w is None or self.time_constant_s is None or self.limit_c is None:
            return None
        thermal = ThermalSection(
            k_per_w=self.k_per_w.value,
            time_constant_s=self.time_constant_s.value,
            limit_c=self.limit_c.value,
        )
        return thermal if self.slowdown is None else replace(thermal, slowdown=self.slowdown.value)


FIGURE_UNITS: Final = {
    "idle_w": "W",
    "draft_w": "W",
    "step_ms": "ms",
    "capacity_mah": "mAh",
    "full_v": "V",
    "k_per_w": "K/W",
    "time_constant_s": "s",
    "limit_c": "°C",
    "slowdown": "times",
}
"""Units of the numbers of a profile."""


def bundled_profiles() -> dict[str, Path]:
    """Return the files of the profiles that come with the simulator, by name."""
    return {path.stem: path for path in sorted(_PROFILES.glob("*.yaml"))}


def load_profile(name: str, folder: Path) -> DeviceProfile:
    """Return a profile, given by a bundled name or as a YAML file; ``folder`` is the base of a
    relative file name. Raises ``ConfigError`` that lists the bundled names."""
    bundled = bundled_profiles()
    if name in bundled:
        path = bundled[name]
    else:
        path = find_file(name, folder)
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(
                f"no device profile {name!r}: not a YAML file, nor one of {', '.join(bundled)}"
            )
    try:
        state = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    return _read_profile(path, (state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=16)
def _read_profile(path: Path, state: tuple[int, int]) -> DeviceProfile:
    """Read a profile. Every arm needs it, so it is cached; ``state`` changes with the file."""
    return load_config(DeviceProfile, path)
