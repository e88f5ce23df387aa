"""Radio gains between devices and base stations: 3GPP TR 38.901, urban micro street canyon.

A gain is path loss, shadowing and small-scale fading multiplied:

    path loss    Table 7.4.1-1, with or without line of sight; the state by Table 7.4.2-1
    shadowing    log-normal, 4 dB with and 7.82 dB without line of sight; along a device's way it
                 is an autoregression over the distance gone (7.5-6: 10 m and 13 m), and half of its
                 variance is common to all stations (what stands round the device)
    fading       Rician, K of 9 dB with a spread of 5 dB (7.5-6); Rayleigh without line of sight;
                 new in every slot

The state of line of sight is redrawn as the device moves, 50 m apart (7.6.3.1-2). ``Gains`` is the
seam: ``RecordedGains`` plays a matrix that another tool made, a ray tracer for one (Sionna's
channel coefficients, squared and summed over paths), from an ``.npz`` with one array ``gains``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

LIGHT_M_S = 3.0e8
"""The report's own value (7.4.1)."""
LOS_SHADOWING_DB, NLOS_SHADOWING_DB = 4.0, 7.82
LOS_SHADOWING_M, NLOS_SHADOWING_M = 10.0, 13.0
LOS_STATE_M = 50.0
RICIAN_K_DB = (9.0, 5.0)
DISTANCE_MIN_M = 10.0
SHARED_VARIANCE = 0.5
"""Between sites, as ITU-R M.2135 and 3GPP TR 36.942 have it."""


@dataclass(frozen=True, slots=True)
class UmiSettings:
    """Heights of 7.4.1 and a carrier; valid from 0.5 to 100 GHz."""

    carrier_ghz: float = 3.5
    station_height_m: float = 10.0
    device_height_m: float = 1.5

    def __post_init__(self) -> None:
        if not 0.5 <= self.carrier_ghz <= 100:
            raise ValueError(f"carrier_ghz {self.carrier_ghz}: the model holds from 0.5 to 100")

    @property
    def breakpoint_m(self) -> float:
        """Where the slope changes: 4 h'BS h'UT f / c, with 1 m of effective environment height."""
        heights = (self.station_height_m - 1.0) * (self.device_height_m - 1.0)
        return 4.0 * heights * self.carrier_ghz * 1e9 / LIGHT_M_S


def los_probability(distance_m: Floats) -> Floats:
    """Table 7.4.2-1, over the ground distance."""
    distance = np.maximum(distance_m, 18.0)
    chance: Floats = 18.0 / distance + np.exp(-distance / 36.0) * (1.0 - 18.0 / distance)
    return chance


def path_loss_db(settings: UmiSettings, distance_m: Floats, line_of_sight: Flags) -> Floats:
    """Table 7.4.1-1, over the ground distance (nearer than 10 m counts as 10 m)."""
    ground = np.maximum(distance_m, DISTANCE_MIN_M)
    rise = settings.station_height_m - settings.device_height_m
    log_distance = np.log10(np.hypot(ground, rise))
    log_carrier = np.log10(settings.carrier_ghz)
    near = 32.4 + 21.0 * log_distance + 20.0 * log_carrier
    corner = 9.5 * np.log10(settings.breakpoint_m**2 + rise**2)
    far = 32.4 + 40.0 * log_distance + 20.0 * log_carrier - corner
    sight = np.where(ground <= settings.breakpoint_m, near, far)
    height = 0.3 * (settings.device_height_m - 1.5)
    blocked = 35.3 * log_distance + 22.4 + 21.3 * log_carrier - height
    loss: Floats = np.where(line_of_sight, sight, np.maximum(sight, blocked))
    return loss


class Gains(Protocol):
    """Linear power gains of shape (devices, stations), slot after slot."""

    def next(self, devices_m: Floats, stations_m: Floats, gone_m: Floats) -> Floats:
        """Positions of shape (n, 2); ``gone_m`` is how far each device moved since last time."""


class UmiGains:
    """The model above. One object follows one set of devices through time."""

    def __init__(
        self, rng: np.random.Generator, devices: int, stations: int, settings: UmiSettings
    ) -> None:
        self._rng = rng
        self._settings = settings
        self._shape = (devices, stations)
        self._luck: Floats = rng.random(self._shape)
        self._own: Floats = rng.standard_normal(self._shape)
        self._common: Floats = rng.standard_normal((devices, 1))
        self._k_db: Floats = rng.normal(*RICIAN_K_DB, self._shape)

    def next(self, devices_m: Floats, stations_m: Floats, gone_m: Floats) -> Floats:
        gaps = devices_m[:, None, :] - stations_m[None, :, :]
        distance_m = np.hypot(gaps[..., 0], gaps[..., 1])
        self._redraw_luck(gone_m)
        sight = self._luck < los_probability(distance_m)
        shadowing_db = self._shadowing_db(sight, gone_m)
        loss_db = path_loss_db(self._settings, distance_m, sight) + shadowing_db
        gains: Floats = 10.0 ** (-loss_db / 10.0) * self._fading(sight)
        return gains

    def _redraw_luck(self, gone_m: Floats) -> None:
        redrawn = self._rng.random(self._shape) > np.exp(-gone_m / LOS_STATE_M)[:, None]
        self._luck = np.where(redrawn, self._rng.random(self._shape), self._luck)

    def _shadowing_db(self, sight: Flags, gone_m: Floats) -> Floats:
        reach_m = np.where(sight, LOS_SHADOWING_M, NLOS_SHADOWING_M)
        self._own = self._moved(self._own, np.exp(-gone_m[:, None] / reach_m))
        common_reach = np.exp(-gone_m / NLOS_SHADOWING_M)[:, None]
        self._common = self._moved(self._common, common_reach)
        normal = np.sqrt(SHARED_VARIANCE) * self._common + np.sqrt(1 - SHARED_VARIANCE) * self._own
        shadowing: Floats = np.where(sight, LOS_SHADOWING_DB, NLOS_SHADOWING_DB) * normal
        return shadowing

    def _moved(self, normal: Floats, memory: Floats) -> Floats:
        """One step of a unit-variance autoregression (Gudmundson, 1991)."""
        moved: Floats = memory * normal + np.sqrt(1.0 - memory**2) * self._rng.standard_normal(
            normal.shape
        )
        return moved

    def _fading(self, sight: Flags) -> Floats:
        """Power of mean 1: a fixed ray of share K/(K+1) and many weak ones."""
        k = np.where(sight, 10.0 ** (self._k_db / 10.0), 0.0)
        real, imaginary = self._rng.standard_normal((2, *self._shape)) / np.sqrt(2.0 * (k + 1.0))
        fading: Floats = (np.sqrt(k / (k + 1.0)) + real) ** 2 + imaginary**2
        return fading


class RecordedGains:
    """Plays an array of shape (slots, devices, stations), from the start again after its end."""

    def __init__(self, gains: Floats) -> None:
        if gains.ndim != 3 or not gains.size:
            raise ValueError(f"gains of shape {gains.shape}: wanted (slots, devices, stations)")
        if not np.all(np.isfinite(gains)) or gains.min() < 0:
            raise ValueError("gains must be finite and not negative: they are linear, not in dB")
        self._gains = gains
        self._slot = -1

    @classmethod
    def load(cls, path: Path) -> RecordedGains:
        with np.load(path, allow_pickle=False) as arrays:
            if "gains" not in arrays:
                raise ValueError(f"{path}: no array 'gains'; it holds {sorted(arrays)}")
            return cls(np.asarray(arrays["gains"], dtype=np.float64))

    def next(self, devices_m: Floats, stations_m: Floats, gone_m: Floats) -> Floats:
        wanted = (len(devices_m), len(stations_m))
        if self._gains.shape[1:] != wanted:
            raise ValueError(f"recorded gains are of shape {self._gains.shape[1:]}, not {wanted}")
        self._slot = (self._slot + 1) % len(self._gains)
        gains: Floats = self._gains[self._slot]
        return gains
