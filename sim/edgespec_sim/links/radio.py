"""Radio gains between devices and base stations: 3GPP TR 38.901, urban micro street canyon.

A gain is path loss, shadowing and small-scale fading multiplied:

    path loss    Table 7.4.1-1, with or without line of sight; the state by Table 7.4.2-1
    shadowing    log-normal, 4 dB with and 7.82 dB without line of sight; along a device's way it
                 is an autoregression over the distance gone (7.5-6: 10 m and 13 m), and half of its
                 variance is common to all stations (what stands round the device)
    fading       Rician, K of 9 dB with a spread of 5 dB (7.5-6); Rayleigh without line of sight;
                 new in every slot

The state of line of sight is redrawn as the device moves, 50 m apart (7.6.3.1-2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

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


CARRIER_GHZ: Final = 3.5
STATION_HEIGHT_M, DEVICE_HEIGHT_M = 10.0, 1.5
BREAKPOINT_M: Final = (
    4.0 * (STATION_HEIGHT_M - 1.0) * (DEVICE_HEIGHT_M - 1.0) * CARRIER_GHZ * 1e9 / LIGHT_M_S
)
"""Where the slope changes: 4 h'BS h'UT f / c, with 1 m of effective environment height."""


def los_probability(distance_m: Floats) -> Floats:
    """Table 7.4.2-1, over the ground distance."""
    distance = np.maximum(distance_m, 18.0)
    chance: Floats = 18.0 / distance + np.exp(-distance / 36.0) * (1.0 - 18.0 / distance)
    return chance


def path_loss_db(distance_m: Floats, line_of_sight: Flags) -> Floats:
    """Table 7.4.1-1, over the ground distance (nearer than 10 m counts as 10 m)."""
    ground = np.maximum(distance_m, DISTANCE_MIN_M)
    rise = STATION_HEIGHT_M - DEVICE_HEIGHT_M
    log_distance = np.log10(np.hypot(ground, rise))
    log_carrier = np.log10(CARRIER_GHZ)
    near = 32.4 + 21.0 * log_distance + 20.0 * log_carrier
    corner = 9.5 * np.log10(BREAKPOINT_M**2 + rise**2)
    far = 32.4 + 40.0 * log_distance + 20.0 * log_carrier - corner
    sight = np.where(ground <= BREAKPOINT_M, near, far)
    height = 0.3 * (DEVICE_HEIGHT_M - 1.5)
    blocked = 35.3 * log_distance + 22.4 + 21.3 * log_carrier - height
    loss: Floats = np.where(line_of_sight, sight, np.maximum(sight, blocked))
    return loss


class UmiGains:
    """Linear power gains of shape (devices, stations), slot after slot. One object follows one set
    of devices through time."""

    def __init__(self, rng: np.random.Generator, devices: int, stations: int) -> None:
        self._rng = rng
        self._shape = (devices, stations)
        self._luck: Floats = rng.random(self._shape)
        self._own: Floats = rng.standard_normal(self._shape)
        self._common: Floats = rng.standard_normal((devices, 1))
        self._k_db: Floats = rng.normal(*RICIAN_K_DB, self._shape)

    def next(self, devices_m: Floats, stations_m: Floats, gone_m: Floats) -> Floats:
        """Positions of shape (n, 2); ``gone_m`` is how far each device moved since last time."""
        gaps = devices_m[:, None, :] - stations_m[None, :, :]
        distance_m = np.hypot(gaps[..., 0], gaps[..., 1])
        self._redraw_luck(gone_m)
        sight = self._luck < los_probability(distance_m)
        shadowing_db = self._shadowing_db(sight, gone_m)
        loss_db = path_loss_db(distance_m, sight) + shadowing_db
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


# --- random-waypoint mobility ------------------------------------------------------------------
# where devices are, slot after slot.
# Each device walks straight to a point drawn uniformly in a square, at a speed drawn for that
# leg, then draws the next one; there is no pause (Johnson and Maltz, 1996, with pause time 0).
# Speeds stay above zero, without which the model's mean speed decays for ever (Yoon, Liu and
# Noble, 2003).


class RandomWaypoint:
    """``positions_m`` of shape (devices, 2), inside a square with a corner at the origin."""

    def __init__(
        self,
        rng: np.random.Generator,
        devices: int,
        *,
        side_m: float,
        speed_m_s: tuple[float, float],
    ) -> None:
        low, high = speed_m_s
        if not 0 < low <= high:
            raise ValueError(f"speeds {speed_m_s} m/s: wanted 0 < lowest <= highest")
        self._rng = rng
        self._side_m = side_m
        self._speeds = speed_m_s
        self.positions_m: Floats = rng.uniform(0.0, side_m, (devices, 2))
        self._goals_m: Floats = rng.uniform(0.0, side_m, (devices, 2))
        self._speed_m_s: Floats = rng.uniform(low, high, devices)

    def advance(self, seconds: float) -> Floats:
        """Move everyone; returns the way each has gone, in metres, shape (devices,)."""
        left_s = np.full(len(self.positions_m), seconds)
        gone_m = np.zeros(len(self.positions_m))
        while True:
            gap = self._goals_m - self.positions_m
            distance_m = np.hypot(gap[:, 0], gap[:, 1])
            step_m = np.minimum(distance_m, self._speed_m_s * left_s)
            share = np.divide(step_m, distance_m, out=np.ones_like(step_m), where=distance_m > 0)
            self.positions_m = self.positions_m + gap * share[:, None]
            gone_m += step_m
            left_s = left_s - step_m / self._speed_m_s
            arrived = np.flatnonzero(left_s > 1e-9)
            if not arrived.size:
                return gone_m
            self._goals_m[arrived] = self._rng.uniform(0.0, self._side_m, (arrived.size, 2))
            self._speed_m_s[arrived] = self._rng.uniform(*self._speeds, arrived.size)


# --- which cell a phone is attached to ---------------------------------------------------------
# the one it hears best, once that is clear.
# Measured is the received power of each station (not its interference), averaged in dB by the
# layer 3 filter of 3GPP TS 38.331, 5.5.3.2: F = (1 - a) F + a M with a = 1 / 2^(k/4). A phone
# changes when another station is stronger by a margin (event A3, 5.5.4.4, without time to
# trigger: a step of the radio is longer than any).


class Change(NamedTuple):
    """A phone goes from one cell to another, by number."""

    device: int
    old: int
    new: int


class Attachment:
    """``gains``: linear, of shape (devices, stations); each device begins where it hears best."""

    def __init__(self, gains: Floats, margin_db: float, filter_k: int) -> None:
        self._margin_db, self._weight = margin_db, 2.0 ** (-filter_k / 4.0)
        self._heard_db = _db(gains)
        self.cells = self._heard_db.argmax(axis=1)

    def measure(self, gains: Floats) -> list[Change]:
        """The changes that these gains, a step later, bring about; ``cells`` are the new ones."""
        self._heard_db += self._weight * (_db(gains) - self._heard_db)
        best = self._heard_db.argmax(axis=1)
        devices = np.arange(len(best))
        lead_db = self._heard_db[devices, best] - self._heard_db[devices, self.cells]
        changes = [
            Change(int(device), int(self.cells[device]), int(best[device]))
            for device in np.flatnonzero((best != self.cells) & (lead_db > self._margin_db))
        ]
        for change in changes:
            self.cells[change.device] = change.new
        return changes


def _db(gains: Floats) -> Floats:
    heard: Floats = 10.0 * np.log10(np.maximum(gains, 1e-30))
    return heard


# --- with what power a phone sends -------------------------------------------------------------
# open-loop fractional power control, as 3GPP does it.
# TS 38.213, 7.1.1, without closed-loop corrections, in dBm:
# P = min(Pmax, P0 + 10 log10(M) + alpha PL)
# M counts resource blocks of 180 kHz (12 subcarriers of 15 kHz; the formula's factor of 2^mu
# makes wider ones count as several). PL is the path loss to the station that is sent to, from
# received powers averaged by the layer 3 filter of TS 38.331, 5.5.3.2, as for handovers. alpha
# below 1 lets a phone at the edge of a cell arrive weaker than one near by, and disturb the next
# cell less.


RESOURCE_BLOCK_HZ: Final = 180e3
LEAST_DBM: Final = -40.0
"""What a phone sends at least: TS 38.101-1, table 6.3.1-1, channels of up to 20 MHz."""


@dataclass(frozen=True, slots=True)
class PowerControl:
    """``filter_k``: the newest measurement has weight 1 / 2^(k/4)."""

    p0_dbm: float
    alpha: float
    filter_k: int

    def dbm(self, path_loss_db: Floats, band_hz: float, most_dbm: float) -> Floats:
        """Of shape (devices, stations)."""
        blocks_db = 10.0 * math.log10(band_hz / RESOURCE_BLOCK_HZ)
        wanted = self.p0_dbm + blocks_db + self.alpha * path_loss_db
        sent: Floats = np.clip(wanted, LEAST_DBM, most_dbm)
        return sent


class UplinkPower:
    """Follows the path losses of devices."""

    def __init__(self, control: PowerControl | None, most_dbm: float, band_hz: float) -> None:
        self._control, self._most_dbm, self._band_hz = control, most_dbm, band_hz
        self._loss_db: Floats | None = None

    def measure(self, gains: Floats) -> Floats:
        """How dense in power each device's signal to each station is, over what full power on the
        whole band would be; 1 everywhere without power control. Shape of ``gains``."""
        if self._control is None:
            return np.ones_like(gains)
        loss_db = -10.0 * np.log10(np.maximum(gains, 1e-30))
        if self._loss_db is None:
            self._loss_db = loss_db
        else:
            weight = 2.0 ** (-self._control.filter_k / 4.0)
            self._loss_db += weight * (loss_db - self._loss_db)
        dbm = self._control.dbm(self._loss_db, self._band_hz, self._most_dbm)
        density: Floats = 10.0 ** ((dbm - self._most_dbm) / 10.0)
        return density
