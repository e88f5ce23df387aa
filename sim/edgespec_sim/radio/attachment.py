"""Which cell a phone is attached to: the one it hears best, once that is clear.

Measured is the received power of each station (not its interference), averaged in dB by the layer 3
filter of 3GPP TS 38.331, 5.5.3.2: F = (1 - a) F + a M with a = 1 / 2^(k/4). A phone changes when
another station is stronger by a margin (event A3, 5.5.4.4, without time to trigger: a step of the
radio is longer than any).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgespec_sim.radio.gains import Floats


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
