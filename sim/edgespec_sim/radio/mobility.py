"""Random-waypoint mobility: where devices are, slot after slot.

Each device walks straight to a point drawn uniformly in a square, at a speed drawn for that leg,
then draws the next one; there is no pause (Johnson and Maltz, 1996, with pause time 0). Speeds stay
above zero, without which the model's mean speed decays for ever (Yoon, Liu and Noble, 2003).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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
