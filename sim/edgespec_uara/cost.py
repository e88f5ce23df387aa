"""The cost of a decision, in one form that all cost models here share.

A decision gives each device a server, a share y of that server's bandwidth and a share z of that
server's compute. The shares at a server sum to at most 1 (each). The cost of device i at server j
is, in milliseconds,

    constant_ij + power_i y + balance (draft_i - uplink_ij / y)^2 + work_ij / z

so a cost model is a function from a snapshot to the arrays of ``Terms``, and every method works
with every cost model. A term that a model does not have is zero. Everything that does not depend on
the shares is in the constant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgespec_uara.world import TARGET_BYTES, Floats, Ints, Snapshot

SHARE_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of the cost for M devices and E servers, in milliseconds; ``balance`` is per
    millisecond."""

    constant: Floats
    """Shape (M, E)."""
    power: Floats
    """Shape (M,): cost of the power for the whole band."""
    draft: Floats
    """Shape (M,): time of drafting."""
    uplink: Floats
    """Shape (M, E): time of sending with the whole band."""
    work: Floats
    """Shape (M, E): time of verification with the whole server."""
    balance: float
    delay: Floats
    """Shape (M, E): the part of ``constant`` that is time and not energy."""

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
        """Raise ``ValueError`` unless every device has one server and no server gives more than it
        has."""
        if self.association.min() < 0 or self.association.max() >= servers:
            raise ValueError(f"the association has a server outside 0 to {servers - 1}")
        for name, shares in (("bandwidth", self.bandwidth), ("compute", self.compute)):
            if not np.all(shares > 0):
                raise ValueError(f"a {name} share is {shares.min()}, but must be above 0")
            given = np.bincount(self.association, shares, servers)
            if given.max() > 1 + SHARE_TOLERANCE:
                full = int(given.argmax())
                raise ValueError(f"server {full} gives {given[full]} of its {name}, but may give 1")


def device_costs(terms: Terms, decision: Decision) -> Floats:
    """Return the cost of each device (M,) in milliseconds. Their sum is the objective."""
    devices, chosen = np.arange(terms.devices), decision.association
    gap = terms.draft - terms.uplink[devices, chosen] / decision.bandwidth
    costs: Floats = (
        terms.constant[devices, chosen]
        + terms.power * decision.bandwidth
        + terms.balance * gap**2
        + terms.work[devices, chosen] / decision.compute
    )
    return costs


def sum_objective(terms: Terms, decision: Decision) -> float:
    return float(device_costs(terms, decision).sum())


def delays(terms: Terms, decision: Decision) -> Floats:
    """Return the time of each device (M,) from request to last token, in milliseconds. Drafting and
    sending overlap, so the longer of the two counts; queue and verification follow. Energy and
    penalty are not included."""
    sending = terms.uplink[np.arange(terms.devices), decision.association] / decision.bandwidth
    late: Floats = np.maximum(sending - terms.draft, 0.0)
    return late + printed_delays(terms, decision)


def printed_delays(terms: Terms, decision: Decision) -> Floats:
    """Return the delays (M,) as the paper prints them, D_MD + D_ES in milliseconds, without the
    uplink."""
    devices, chosen = np.arange(terms.devices), decision.association
    return np.asarray(terms.delay[devices, chosen] + terms.work[devices, chosen] / decision.compute)


# --- the paper's objective, as printed and corrected (Koh and Yang, arXiv 2511.01695) ----------
# As printed, with x the association, minimise
#     sum x_ij (D_MD + D_ES + lambda (D_MD - d_i / R_i)^2) + w sum (E_CP + E_CM) / B_i
#     D_MD = f_MD / F_MD      D_ES = k_j slot + f_ES / (z_ij F_ES)
#     R_i = y_ij W_j log2(1 + SNR_ij)
#     E_CP = f_MD / delta_CP  E_CM = delta_CM y_ij P_i
# Its nine errors and omissions, and how each is handled here, are in docs/uara.md. The bands of the
# servers are disjoint, so interference is leakage from the neighbouring bands: 30 dB down (3GPP TS
# 38.101-1, 6.5.2.4), each filled by an average device of another server.
# The paper leaves the following open, and it is chosen here: milliseconds, millijoules and percent
# of battery, the units in which lambda 1e-2, w 20-100, delta_CP 1e9 (operations per millijoule) and
# delta_CM 2.6 all matter; noise over one server's whole band; k_j in slots of unfinished work; and
# everything that ``world`` marks "ours".

OPERATIONS_PER_MJ = 1e9
"""delta_CP: 1 TFLOP/s per watt, about the efficiency of a phone's GPU."""
TRANSMIT_FACTOR = 2.6
"""delta_CM: watts drawn per watt transmitted."""
LEAKAGE = 2 * 10 ** (-30 / 10)
SERVER_W = 1.0
"""30 dBm, the downlink of a small cell."""
AIR_RTT_S = 0.008
"""Scheduling request, grant and slot on the air, up and down: 4 ms each way (TR 38.913, eMBB)."""
_MS = 1e3


class PaperCost:
    """The objective as printed, with errors 3-5, 8 and 9 left in."""

    name = "paper"

    def terms(self, snapshot: Snapshot) -> Terms:
        """Return the terms with speculative decoding: the device drafts, the server verifies."""
        compute_mj = snapshot.draft_flop / OPERATIONS_PER_MJ
        price = snapshot.settings.energy_weight / snapshot.battery_percent
        draft = _MS * snapshot.draft_flop / snapshot.device_flops
        delay = draft[:, None] + _queue_ms(snapshot)
        return Terms(
            constant=delay + (price * compute_mj)[:, None],
            power=price * TRANSMIT_FACTOR * _MS * snapshot.transmit_w,
            draft=draft,
            uplink=_uplink_ms(snapshot, snapshot.snr),
            work=_MS * snapshot.verify_flop[:, None] / snapshot.server_flops,
            balance=snapshot.settings.balance_weight,
            delay=delay,
        )

    def plain_terms(self, snapshot: Snapshot) -> Terms:
        """Return the terms without speculation: the server decodes alone, in the same units."""
        return _without_speculation(snapshot, _queue_ms(snapshot))


class CorrectedCost(PaperCost):
    """The same objective with round trips, downlink, leakage, energy as power times time, and
    weights that are read once per pass."""

    name = "corrected"

    def terms(self, snapshot: Snapshot) -> Terms:
        printed = super().terms(snapshot)
        uplink = _uplink_ms(snapshot, sinr(snapshot))
        price = snapshot.settings.energy_weight / snapshot.battery_percent
        # Watts times milliseconds are millijoules.
        transmit_mj = TRANSMIT_FACTOR * snapshot.transmit_w[:, None] * uplink
        added = (
            snapshot.passes[:, None] * (_MS * rtt_s(snapshot) + _weights_ms(snapshot))
            + _MS * snapshot.download_bits[:, None] / downlink_bits_per_s(snapshot)
        )  # fmt: skip
        return replace(
            printed,
            constant=printed.constant + added + price[:, None] * transmit_mj,
            power=np.zeros(printed.devices),
            uplink=uplink,
            delay=printed.delay + added,
        )

    def plain_terms(self, snapshot: Snapshot) -> Terms:
        """Return the terms of one round trip for the first token, and then a stream with one pass
        per token."""
        once = _MS * rtt_s(snapshot) + snapshot.tokens[:, None] * _weights_ms(snapshot)
        down = _MS * snapshot.download_bits[:, None] / downlink_bits_per_s(snapshot)
        return _without_speculation(snapshot, _queue_ms(snapshot) + once + down)


def _without_speculation(snapshot: Snapshot, delay: Floats) -> Terms:
    """Return the terms of a device that neither computes nor sends, so that only the server's share
    matters."""
    devices = len(snapshot.tokens)
    delay = np.broadcast_to(delay, snapshot.gains.shape)
    return Terms(
        constant=delay,
        power=np.zeros(devices),
        draft=np.zeros(devices),
        uplink=np.zeros_like(delay),
        work=_MS * snapshot.plain_flop[:, None] / snapshot.server_flops,
        balance=0.0,
        delay=delay,
    )


def _queue_ms(snapshot: Snapshot) -> Floats:
    return _MS * snapshot.settings.slot_s * snapshot.queue_slots


def _weights_ms(snapshot: Snapshot) -> Floats:
    return _MS * TARGET_BYTES / snapshot.server_bytes_per_s


def _uplink_ms(snapshot: Snapshot, snr: Floats) -> Floats:
    return _MS * snapshot.upload_bits[:, None] / (snapshot.band_hz * np.log2(1.0 + snr))


def sinr(snapshot: Snapshot) -> Floats:
    """Return the SINR (M, E), linear: noise plus the leakage from the neighbouring servers' bands.
    The leakage of a neighbour is that of an average device with a better signal from another
    server."""
    received = snapshot.gains * snapshot.transmit_w[:, None]
    best = snapshot.gains.argmax(axis=1)[:, None] == np.arange(snapshot.settings.servers)
    strangers = np.maximum((~best).sum(axis=0), 1)
    leaked = LEAKAGE * np.where(best, 0.0, received).sum(axis=0) / strangers
    return np.asarray(received / (snapshot.noise_w + leaked))


def rtt_s(snapshot: Snapshot) -> Floats:
    """Return the round-trip times (M, E) of air and backhaul."""
    return np.broadcast_to(AIR_RTT_S + snapshot.backhaul_rtt_s, snapshot.gains.shape)


def downlink_bits_per_s(snapshot: Snapshot) -> Floats:
    """Return the downlink rates (M, E) with a server's whole band."""
    rates: Floats = snapshot.band_hz * np.log2(1.0 + SERVER_W * snapshot.gains / snapshot.noise_w)
    return rates


# --- shares of a server's bandwidth and compute, for a fixed association -----------------------
# ``decide_evenly``: all devices of a server get the same; ``decide_by_weights``: shares in
# proportion to a weight per pair, as a learned policy gives them; ``decide_optimally``: the shares
# of least cost.
# Optimal compute is the square-root rule: sum work_i / z_i subject to sum z_i = 1 is least at z_i
# proportional to sqrt(work_i), with value (sum sqrt(work_i))^2. Optimal bandwidth minimises power y
# + balance (draft - uplink / y)^2 subject to y > 0 and sum y <= 1 at a server. No optimum has y
# above uplink / draft (both terms rise there), and below it the cost is convex (its second
# derivative is 2 balance uplink (3 uplink / y - 2 draft) / y^3). So with u = uplink / y and a price
# m of bandwidth, each device solves u^2 (u - draft) = uplink (power + m) / (2 balance)
# independently, by Newton's method from above, and m is found by bisection for all servers at once.

NEWTON_STEPS = 7
BISECTION_STEPS = 44
PRICE_DOUBLINGS = 80


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that determine shares: server j gives device i ``used_j v_ij / sum v`` of its band
    and ``q_ij / sum q`` of its compute, where the sums are over its own devices."""

    bandwidth: Floats
    """Shape (M, E), above 0."""
    compute: Floats
    """Shape (M, E), above 0."""
    used: Floats
    """Shape (E,), at most 1: holding less bandwidth draws less power."""

    @classmethod
    def even(cls, terms: Terms) -> Weights:
        ones = np.ones_like(terms.constant)
        return cls(ones, ones, np.ones(terms.servers))


def decide_by_weights(weights: Weights, association: Ints) -> Decision:
    devices, servers = np.arange(len(association)), len(weights.used)
    v, q = weights.bandwidth[devices, association], weights.compute[devices, association]
    bandwidth = weights.used[association] * v / np.bincount(association, v, servers)[association]
    return Decision(association, bandwidth, q / np.bincount(association, q, servers)[association])


def decide_evenly(terms: Terms, association: Ints) -> Decision:
    return decide_by_weights(Weights.even(terms), association)


def decide_optimally(terms: Terms, association: Ints) -> Decision:
    devices = np.arange(terms.devices)
    root = np.sqrt(np.maximum(terms.work[devices, association], 1e-300))
    compute = root / np.bincount(association, root, terms.servers)[association]
    return Decision(association, optimal_bandwidth(terms, association), compute)


def optimal_bandwidth(terms: Terms, association: Ints) -> Floats:
    """Return the shares (M,) of the servers' bands with the least cost."""
    draft, uplink = terms.draft, terms.uplink[np.arange(terms.devices), association]
    count = terms.servers
    if terms.balance <= 0 or not uplink.any():
        # Nothing is sent, so the band has no cost and even shares are optimal.
        return np.asarray(1.0 / np.bincount(association, minlength=count)[association])

    def shares(price: Floats) -> Floats:
        """Return the shares at the price of each server's band."""
        target = uplink * (terms.power + price[association]) / (2.0 * terms.balance)
        u = draft + np.cbrt(target)
        for _ in range(NEWTON_STEPS):
            slope = u * (3.0 * u - 2.0 * draft)
            u = u - (u * u * (u - draft) - target) / slope
        return np.asarray(uplink / u)

    def too_much(price: Floats) -> NDArray[np.bool_]:
        return np.bincount(association, shares(price), count) > 1.0

    low = np.zeros(count)
    # The search starts at a price at which the band would suffice if every device paid it alone.
    high = np.where(too_much(low), 1e-3, 0.0)
    for _ in range(PRICE_DOUBLINGS):
        over = too_much(high)
        if not over.any():
            break
        low, high = np.where(over, high, low), np.where(over, 4.0 * high, high)
    for _ in range(BISECTION_STEPS):
        middle = 0.5 * (low + high)
        over = too_much(middle)
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    return shares(high)
