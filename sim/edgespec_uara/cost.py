"""What a decision costs: one form that every cost model here shares.

A decision says, for each device, its server, its share y of that server's bandwidth and its share z
of that server's compute; the shares at a server sum to at most 1 (each). The cost of device i at
server j is, in milliseconds,

    constant_ij + power_i y + balance (draft_i - uplink_ij / y)^2 + work_ij / z

so a cost model is a function from a snapshot to the five arrays of ``Terms``, and every method
works with every cost model. What a model leaves out is a zero; what does not depend on the shares
is in the constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgespec_uara.world import Floats, Ints, Snapshot

SHARE_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Terms:
    """M devices, E servers; milliseconds throughout, ``balance`` per millisecond."""

    constant: Floats
    """(M, E)."""
    power: Floats
    """(M,): of holding the whole band."""
    draft: Floats
    """(M,)."""
    uplink: Floats
    """(M, E): with the whole band."""
    work: Floats
    """(M, E): with the whole server."""
    balance: float
    delay: Floats
    """(M, E): the part of ``constant`` that is time and not energy."""

    @property
    def devices(self) -> int:
        return len(self.draft)

    @property
    def servers(self) -> int:
        return int(self.constant.shape[1])


@dataclass(frozen=True, slots=True)
class Decision:
    """Association, bandwidth shares and compute shares, each of shape (M,)."""

    association: Ints
    bandwidth: Floats
    compute: Floats

    def check(self, servers: int) -> None:
        """Raise unless every device has one server and no server gives more than it has."""
        if self.association.min() < 0 or self.association.max() >= servers:
            raise ValueError(f"a server outside 0 to {servers - 1} in the association")
        for name, shares in (("bandwidth", self.bandwidth), ("compute", self.compute)):
            if not np.all(shares > 0):
                raise ValueError(f"a {name} share of {shares.min()}: it must be above 0")
            given = np.bincount(self.association, shares, servers)
            if given.max() > 1 + SHARE_TOLERANCE:
                full = int(given.argmax())
                raise ValueError(f"server {full} gives {given[full]} of its {name}, at most 1")


class CostModel(Protocol):
    @property
    def name(self) -> str: ...

    def terms(self, snapshot: Snapshot) -> Terms:
        """Speculative decoding: the device drafts, the server verifies."""

    def plain_terms(self, snapshot: Snapshot) -> Terms:
        """No speculation: the server decodes alone, in the same units."""


def device_costs(terms: Terms, decision: Decision) -> Floats:
    """(M,), milliseconds; their sum is the objective."""
    devices, chosen = np.arange(terms.devices), decision.association
    gap = terms.draft - terms.uplink[devices, chosen] / decision.bandwidth
    costs: Floats = (
        terms.constant[devices, chosen]
        + terms.power * decision.bandwidth
        + terms.balance * gap**2
        + terms.work[devices, chosen] / decision.compute
    )
    return costs


def objective(terms: Terms, decision: Decision) -> float:
    return float(device_costs(terms, decision).sum())


def delays(terms: Terms, decision: Decision) -> Floats:
    """(M,), milliseconds from request to last token: drafting and sending overlap, so the longer of
    the two counts; then queue and verification. No energy, no penalty."""
    devices, chosen = np.arange(terms.devices), decision.association
    sending = terms.uplink[devices, chosen] / decision.bandwidth
    verifying = terms.work[devices, chosen] / decision.compute
    late: Floats = np.maximum(sending - terms.draft, 0.0)
    return terms.delay[devices, chosen] + late + verifying
