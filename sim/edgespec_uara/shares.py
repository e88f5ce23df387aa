"""Shares of a server's bandwidth and compute, for a fixed association.

``uniform``   every device of a server gets the same
``weighted``  in proportion to weights per pair, as a learned policy gives them
``optimal``   the least possible cost

Optimal compute is the square-root rule: sum work_i / z_i over sum z_i = 1 is least at z_i
proportional to sqrt(work_i), with value (sum sqrt(work_i))^2. Optimal bandwidth minimises

    power y + balance (draft - uplink / y)^2      over y > 0, sum y <= 1 at a server

No optimum has y above uplink / draft (both terms rise there), and below it the cost is convex (its
second derivative is 2 balance uplink (3 uplink / y - 2 draft) / y^3). So with u = uplink / y and a
price m of bandwidth each device solves u^2 (u - draft) = uplink (power + m) / (2 balance) by
itself, by Newton's method from above, and m is found by bisection for all servers at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec_uara.cost import Decision, Terms
from edgespec_uara.world import Floats, Ints

NEWTON_STEPS = 7
BISECTION_STEPS = 44
PRICE_DOUBLINGS = 80


@dataclass(frozen=True, slots=True)
class Weights:
    """A server j gives device i ``used_j v_ij / sum v`` of its band and ``q_ij / sum q`` of its
    compute, the sums over its own devices."""

    bandwidth: Floats
    """(M, E), above 0."""
    compute: Floats
    """(M, E), above 0."""
    used: Floats
    """(E,), at most 1: holding less bandwidth draws less power."""

    @classmethod
    def even(cls, terms: Terms) -> Weights:
        ones = np.ones_like(terms.constant)
        return cls(ones, ones, np.ones(terms.servers))


def weighted(weights: Weights, association: Ints) -> Decision:
    devices, servers = np.arange(len(association)), len(weights.used)
    v, q = weights.bandwidth[devices, association], weights.compute[devices, association]
    bandwidth = weights.used[association] * v / np.bincount(association, v, servers)[association]
    return Decision(association, bandwidth, q / np.bincount(association, q, servers)[association])


def uniform(terms: Terms, association: Ints) -> Decision:
    return weighted(Weights.even(terms), association)


def optimal(terms: Terms, association: Ints) -> Decision:
    devices = np.arange(terms.devices)
    root = np.sqrt(np.maximum(terms.work[devices, association], 1e-300))
    compute = root / np.bincount(association, root, terms.servers)[association]
    bandwidth, _ = bandwidth_shares(terms, devices, association, association, terms.servers)
    return Decision(association, bandwidth, compute)


def bandwidth_shares(
    terms: Terms, devices: Ints, servers: Ints, groups: Ints, count: int
) -> tuple[Floats, Floats]:
    """Optimal shares of the listed pairs, where those of one group (0 to count - 1) share one band.

    Flat lists let a search price many what-ifs in one call. Returns the shares, one a pair, and
    the price of bandwidth in each group.
    """
    pairs = _Pairs(
        terms.power[devices], terms.draft[devices], terms.uplink[devices, servers], terms.balance
    )
    if terms.balance <= 0 or not pairs.uplink.any():
        # Nothing to send: the band is free, and an even share harms nobody.
        return 1.0 / np.bincount(groups, minlength=count)[groups], np.zeros(count)

    def given(price: Floats) -> Floats:
        return np.bincount(groups, pairs.shares(price[groups]), count).astype(np.float64)

    low = np.zeros(count)
    short = given(low) > 1.0
    # The price at which the band would suffice if every device paid alone is a fair start.
    high = np.where(short, 1e-3, 0.0)
    for _ in range(PRICE_DOUBLINGS):
        over = given(high) > 1.0
        if not over.any():
            break
        low, high = np.where(over, high, low), np.where(over, 4.0 * high, high)
    for _ in range(BISECTION_STEPS):
        middle = 0.5 * (low + high)
        over = given(middle) > 1.0
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    return pairs.shares(high[groups]), high


@dataclass(frozen=True, slots=True)
class _Pairs:
    power: Floats
    draft: Floats
    uplink: Floats
    balance: float

    def shares(self, price: Floats) -> Floats:
        target = self.uplink * (self.power + price) / (2.0 * self.balance)
        u = self.draft + np.cbrt(target)
        for _ in range(NEWTON_STEPS):
            slope = u * (3.0 * u - 2.0 * self.draft)
            u = u - (u * u * (u - self.draft) - target) / slope
        return self.uplink / u


def priced_cost(terms: Terms, price: Floats) -> Floats:
    """(M, E): the least of bandwidth cost plus rent at each server's price: what one more device
    would add there, to first order and never more than it truly adds."""
    uplink = terms.uplink
    if terms.balance <= 0:
        return np.zeros_like(uplink)
    draft, power = terms.draft[:, None], terms.power[:, None]
    pairs = _Pairs(power, draft, uplink, terms.balance)
    share = pairs.shares(np.broadcast_to(price, uplink.shape))
    cost: Floats = (power + price) * share + terms.balance * (draft - uplink / share) ** 2
    return cost


def bandwidth_costs(terms: Terms, devices: Ints, servers: Ints, shares: Floats) -> Floats:
    """One a pair: the part of the cost that the bandwidth share decides."""
    gap = terms.draft[devices] - terms.uplink[devices, servers] / shares
    costs: Floats = terms.power[devices] * shares + terms.balance * gap**2
    return costs
