"""Greedy start, then local search over associations whose shares are always optimal.

A server's optimal cost is (sum sqrt(work))^2, constants, and the least bandwidth cost, which takes
a search for its price. Trying all moves and swaps that way would be slow, so they are first ranked
by what they would cost at present prices (``shares.priced_cost``: to first order exact, and the
compute part is exact), and only the best ranked are worked out. Of those that truly lower the cost
and touch different servers, all are applied at once.
"""

from __future__ import annotations

import numpy as np

from edgespec_uara.cost import Decision, Terms, objective
from edgespec_uara.shares import (
    bandwidth_costs,
    bandwidth_shares,
    optimal,
    priced_cost,
)
from edgespec_uara.world import Floats, Ints

TRIED = 12
"""Changes worked out in full, a round."""
ROUNDS_MAX = 400
TOLERANCE = 1e-7


def greedy(terms: Terms) -> Decision:
    """Devices one by one, those with the most work first, each to where it raises the cost least
    with a bandwidth share as if even among those already there; then optimal shares."""
    order = np.argsort(-terms.work.mean(axis=1), kind="stable")
    association = np.zeros(terms.devices, dtype=np.int64)
    count, root = np.zeros(terms.servers), np.zeros(terms.servers)
    for device in order:
        own = np.sqrt(terms.work[device])
        held = 1.0 / (count + 1.0)
        reach = terms.draft[device] - terms.uplink[device] / held
        added = (
            terms.constant[device]
            + terms.power[device] * held
            + terms.balance * reach**2
            + own * (own + 2.0 * root)
        )
        server = int(added.argmin())
        association[device] = server
        count[server] += 1.0
        root[server] += own[server]
    return optimal(terms, association)


def local_search(terms: Terms, start: Ints) -> Decision:
    """Never worse than the optimal shares for ``start``."""
    search = _Search(terms, start)
    for _ in range(ROUNDS_MAX):
        if not search.improve():
            break
    found, before = optimal(terms, search.association), optimal(terms, start)
    return found if objective(terms, found) <= objective(terms, before) else before


def greedy_with_search(terms: Terms) -> Decision:
    return local_search(terms, greedy(terms).association)


_Change = dict[int, int]
"""Device to its new server; one entry is a move, two a swap."""


class _Search:
    def __init__(self, terms: Terms, start: Ints) -> None:
        self._terms = terms
        self.association = start.copy()
        self._devices = np.arange(terms.devices)
        self._roots = np.sqrt(np.maximum(terms.work, 0.0))
        self._costs, self._prices, self._shares = self._priced(self._devices, start, start)

    def _priced(self, devices: Ints, servers: Ints, groups: Ints) -> tuple[Floats, Floats, Floats]:
        """Least cost and price of each group of pairs, and the pairs' shares."""
        terms, count = self._terms, max(self._terms.servers, int(groups.max()) + 1)
        shares, prices = bandwidth_shares(terms, devices, servers, groups, count)
        each = bandwidth_costs(terms, devices, servers, shares) + terms.constant[devices, servers]
        roots = np.bincount(groups, self._roots[devices, servers], count)
        costs = (np.bincount(groups, each, count) + roots**2).astype(np.float64)
        return costs, prices, shares

    def improve(self) -> bool:
        ranked = self._ranked()
        if not ranked:
            return False
        deltas = self._worked_out(ranked)
        threshold = -TOLERANCE * float(self._costs.sum())
        touched: set[int] = set()
        for index in np.argsort(deltas):
            servers = self._touched(ranked[index])
            if deltas[index] >= threshold or touched & servers:
                continue
            touched |= servers
            for device, server in ranked[index].items():
                self.association[device] = server
        if touched:
            at = self.association
            self._costs, self._prices, self._shares = self._priced(self._devices, at, at)
        return bool(touched)

    def _touched(self, change: _Change) -> set[int]:
        return set(change.values()) | {int(self.association[device]) for device in change}

    def _ranked(self) -> list[_Change]:
        """The most promising moves and swaps at present prices."""
        at, terms, everyone = self.association, self._terms, self._devices
        rent = priced_cost(terms, self._prices) + terms.constant
        own_root = self._roots[everyone, at]
        sums = np.bincount(at, own_root, terms.servers)
        leaving = rent[everyone, at] + sums[at] ** 2 - (sums[at] - own_root) ** 2
        joining = rent + (sums + self._roots) ** 2 - sums**2
        move = joining - leaving[:, None]
        move[everyone, at] = np.inf
        # Row i, column k: k takes i's place.
        after = (sums[at] - own_root)[:, None] + self._roots[:, at].T
        half = rent[:, at].T - rent[everyone, at][:, None] + after**2 - (sums[at] ** 2)[:, None]
        swap = half + half.T
        swap[at[:, None] == at[None, :]] = np.inf
        changes: list[tuple[float, _Change]] = []
        for flat in _least(move, TRIED):
            device, server = divmod(int(flat), terms.servers)
            changes.append((float(move[device, server]), {device: server}))
        for flat in _least(np.where(np.tri(len(at), k=-1, dtype=bool), swap, np.inf), TRIED):
            first, second = divmod(int(flat), len(at))
            exchange = {first: int(at[second]), second: int(at[first])}
            changes.append((float(swap[first, second]), exchange))
        # The estimate for a move may err to either side; a hopeless one is not tried.
        slack = 0.02 * float(self._costs.sum()) / terms.servers
        hopeful = [change for change in changes if change[0] < slack]
        return [change for _, change in sorted(hopeful, key=lambda pair: pair[0])[:TRIED]]

    def _worked_out(self, changes: list[_Change]) -> Floats:
        """What each change truly adds to the cost."""
        devices, servers, groups, before = [], [], [], np.zeros(len(changes))
        for index, change in enumerate(changes):
            changed = self.association.copy()
            for device, server in change.items():
                changed[device] = server
            touched = self._touched(change)
            before[index] = self._costs[list(touched)].sum()
            for place, server in enumerate(sorted(touched)):
                members = np.flatnonzero(changed == server)
                devices.append(members)
                servers.append(np.full(len(members), server))
                groups.append(np.full(len(members), 2 * index + place))
        group = np.concatenate(groups)
        costs, _, _ = self._priced(np.concatenate(devices), np.concatenate(servers), group)
        padded = np.zeros(2 * len(changes))
        padded[: min(len(costs), len(padded))] = costs[: len(padded)]
        after: Floats = padded.reshape(-1, 2).sum(axis=1)
        return after - before


def _least(table: Floats, count: int) -> Ints:
    """Flat indices of the ``count`` least entries, in no order."""
    flat = table.ravel()
    return np.argpartition(flat, min(count, flat.size - 1))[:count]
