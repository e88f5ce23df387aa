"""With what power a phone sends: open-loop fractional power control, as 3GPP does it.

TS 38.213, 7.1.1, without closed-loop corrections, in dBm:

    P = min(Pmax, P0 + 10 log10(M) + alpha PL)

M counts resource blocks of 180 kHz (12 subcarriers of 15 kHz; the formula's factor of 2^mu makes
wider ones count as several). PL is the path loss to the station that is sent to, from received
powers averaged by the layer 3 filter of TS 38.331, 5.5.3.2, as for handovers. alpha below 1 lets a
phone at the edge of a cell arrive weaker than one near by, and disturb the next cell less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from edgespec_sim.radio.gains import Floats

RESOURCE_BLOCK_HZ: Final = 180e3
LEAST_DBM: Final = -40.0
"""What a phone sends at least: TS 38.101-1, table 6.3.1-1, channels of up to 20 MHz."""


@dataclass(frozen=True, slots=True)
class PowerControl:
    """``filter_k``: the newest measurement has weight 1 / 2^(k/4)."""

    p0_dbm: float
    alpha: float
    filter_k: int

    def dbm(self, path_loss_db: Floats, band_hz: Floats, most_dbm: float) -> Floats:
        """Of shape (devices, stations); ``band_hz`` of shape (devices, 1)."""
        blocks_db = 10.0 * np.log10(band_hz / RESOURCE_BLOCK_HZ)
        wanted = self.p0_dbm + blocks_db + self.alpha * path_loss_db
        sent: Floats = np.clip(wanted, LEAST_DBM, most_dbm)
        return sent


class UplinkPower:
    """Follows the path losses of devices. ``shares``: of the band that each device has, of shape
    (devices,)."""

    def __init__(
        self, control: PowerControl | None, most_dbm: float, band_hz: float, shares: Floats
    ) -> None:
        self._control, self._most_dbm = control, most_dbm
        self._shares = shares[:, None]
        self._band_hz = band_hz * self._shares
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
        density: Floats = 10.0 ** ((dbm - self._most_dbm) / 10.0) / self._shares
        return density
