"""The energy, battery and temperature of one device, from the times of its draft steps.

Theory of operation. Between two changes the power is constant, so the temperature follows an
exponential exactly, and energy is power times time. The state is brought up to date when a step
begins and when somebody reads it. Throttling is decided where a step begins, since steps are short
against the time constant. The radio's energy comes in lumps from its own meter: it counts for the
battery, and not for the temperature.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from edgespec_sim.scenario.device_power import BatterySection, ThermalSection, load_profile
from edgespec_sim.scenario.sections import DeviceSection, Scenario


class Battery:
    """The charge of a battery as a function of the energy that was taken from it.

    With V = full - k q, the energy of a charge q is the integral of V dq: full q - k q^2 / 2. So
    the charge of an energy is the smaller root of a quadratic."""

    def __init__(self, section: BatterySection) -> None:
        self.section = section
        coulombs = section.capacity_coulombs
        self._slope = (section.full_v - section.empty_v) / coulombs
        used = (1.0 - section.start) * coulombs
        self._used_j = section.full_v * used - self._slope * used * used / 2.0
        """Energy that was missing at the begin."""
        cut = coulombs
        if section.cutoff_v > section.empty_v:
            cut = (section.full_v - section.cutoff_v) / self._slope
        self._cut = cut
        """Charge in coulombs whose use brings the voltage down to the cut-off."""

    def share(self, taken_j: float) -> float:
        """Return the share of the charge that is left after ``taken_j`` were taken."""
        return max(0.0, 1.0 - self._used(taken_j) / self.section.capacity_coulombs)

    def volts(self, taken_j: float) -> float:
        return self.section.full_v - self._slope * self._used(taken_j)

    def is_empty(self, taken_j: float) -> bool:
        """Whether the voltage has fallen to the cut-off."""
        return self._used(taken_j) >= self._cut * (1.0 - 1e-12)

    def _used(self, taken_j: float) -> float:
        """Return the used charge in coulombs, at most all of it."""
        section, energy_j = self.section, self._used_j + taken_j
        if energy_j >= section.full_j:
            return section.capacity_coulombs
        if not self._slope:
            return energy_j / section.full_v
        root = math.sqrt(section.full_v**2 - 2.0 * self._slope * energy_j)
        return (section.full_v - root) / self._slope


class DevicePower:
    """The power of one device over time. ``begin_step`` must be called for every draft step, and
    times must not decrease."""

    def __init__(
        self,
        idle_w: float,
        draft_w: float,
        battery: BatterySection | None = None,
        thermal: ThermalSection | None = None,
    ) -> None:
        """``draft_w`` is the power of a draft step above ``idle_w``."""
        self.battery = None if battery is None else Battery(battery)
        self.thermal = thermal
        self.drawn_j = 0.0
        """Energy without the radio, up to the time of the last call."""
        self.throttled_s = 0.0
        """Seconds of draft steps that were throttled."""
        self._is_throttled = False
        self.temperature_c: float | None = None
        if thermal is not None:
            idle_c = thermal.ambient_c + idle_w * thermal.k_per_w
            self.temperature_c = idle_c if thermal.start_c is None else thermal.start_c
        self._idle_w, self._draft_w = idle_w, draft_w
        self._throttled_w = 0.0
        if thermal is not None:
            slower_w = draft_w / thermal.slowdown
            self._throttled_w = slower_w if thermal.throttled_w is None else thermal.throttled_w
        self._at_s = 0.0
        self._step_ends_s = 0.0
        self._step_w = 0.0
        """Power above idle of the step that runs until ``_step_ends_s``."""

    @property
    def is_throttled(self) -> bool:
        """Whether a step that began now would be throttled, as of the last call."""
        thermal, temperature_c = self.thermal, self.temperature_c
        if thermal is None or temperature_c is None:
            return False
        if self._is_throttled:
            return temperature_c > thermal.cooled_c
        return temperature_c >= thermal.limit_c

    def begin_step(self, now_s: float, seconds: float) -> float:
        """Begin a draft step that takes ``seconds`` on a cool device. Returns what it takes."""
        # A step of a request that has ended may still run; its rest is accounted first.
        self.advance(max(now_s, self._step_ends_s))
        self._step_w = self._draft_w
        self._is_throttled = self.is_throttled
        if self.thermal is not None and self._is_throttled:
            seconds *= self.thermal.slowdown
            self.throttled_s += seconds
            self._step_w = self._throttled_w
        self._step_ends_s = self._at_s + seconds
        return seconds

    def advance(self, now_s: float) -> None:
        """Bring energy and temperature up to date."""
        if self._step_ends_s > self._at_s:
            self._pass(min(now_s, self._step_ends_s), self._idle_w + self._step_w)
        self._pass(now_s, self._idle_w)

    def _pass(self, until_s: float, power_w: float) -> None:
        seconds = until_s - self._at_s
        if seconds <= 0.0:
            return
        self._at_s = until_s
        self.drawn_j += power_w * seconds
        if (thermal := self.thermal) is not None and self.temperature_c is not None:
            final_c = thermal.ambient_c + power_w * thermal.k_per_w
            left = math.exp(-seconds / thermal.time_constant_s)
            self.temperature_c = final_c + (self.temperature_c - final_c) * left


# --- profiles -----------------------------------------------------------------------------------


def apply_profiles(scenario: Scenario, folder: Path) -> Scenario:
    """Return the scenario with what the devices' profiles say. Raises as ``apply_profile``."""
    devices = {
        name: apply_profile(name, section, folder) for name, section in scenario.devices.items()
    }
    if all(devices[name] is section for name, section in scenario.devices.items()):
        return scenario
    return replace(scenario, devices=devices)


def apply_profile(name: str, section: DeviceSection, folder: Path) -> DeviceSection:
    """Return the section of the group ``name`` with what its profile says where the section says
    nothing.

    Raises ``ConfigError`` if there is no such profile, and ``ValueError`` if the battery or the
    heat lacks a power."""
    if section.profile:
        profile = load_profile(section.profile, folder)
        found = replace(section, profile="")
        if not section.draft_w and profile.draft_w is not None:
            found = replace(found, draft_w=profile.draft_w.value)
        if section.idle_w is None and profile.idle_w is not None:
            found = replace(found, idle_w=profile.idle_w.value)
        if section.battery is None and found.idle_w is not None:
            found = replace(found, battery=profile.battery)
        if section.thermal is None and found.idle_w is not None:
            found = replace(found, thermal=profile.thermal)
        section = found
    for key in ("battery", "thermal"):
        given = section.battery if key == "battery" else section.thermal
        if given is None:
            continue
        if section.idle_w is None:
            raise ValueError(f"devices.{name}.{key} is given, but its law needs idle_w as well")
        if key == "thermal" and not section.draft_w:
            raise ValueError(f"devices.{name}.thermal is given, but its law needs draft_w as well")
    return section
