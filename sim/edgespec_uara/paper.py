"""The paper's objective, as printed and corrected (Koh and Yang, arXiv 2511.01695).

As printed, with x the association, minimise

    sum x_ij (D_MD + D_ES + lambda (D_MD - d_i / R_i)^2) + w sum (E_CP + E_CM) / B_i
    D_MD = f_MD / F_MD      D_ES = k_j slot + f_ES / (z_ij F_ES)
    R_i = y_ij W_j log2(1 + SNR_ij)
    E_CP = f_MD / delta_CP  E_CM = delta_CM y_ij P_i

Its errors and omissions, and what is done about each:

1.  The swap test accepts a swap that raises the objective, while the problem minimises. Here swaps
    lower it; ``matching.SwapTest.AS_PRINTED`` exists so that a test can show what the slip does.
2.  The bandwidth constraint sums a device's shares over servers. Shares are of a server's band, so
    ``Decision.check`` sums over the devices of a server, as the compute constraint does.
3.  No round trip. ``CorrectedCost`` adds one a pass: a rejected draft waits for its correction.
4.  No downlink. Added: commits are tens of bytes and sent one at a time over the whole band.
5.  No interference, although max-SINR is a baseline. The bands of the servers are disjoint, so what
    is left is leakage from the neighbouring ones: 30 dB down (3GPP TS 38.101-1, 6.5.2.4), from two
    neighbours that are each filled by an average device of another server. Added to the noise.
6.  The residual distribution is dropped: a token is accepted with p/q, else the target's own is
    taken, which is the target's distribution for greedy decoding only. This runtime never has that
    choice to make: a draft is accepted when it *is* the token that the target drew with the seed's
    noise, so acceptance enters here as a number of passes and can change no text.
7.  The reward is called the objective over that of random association with uniform shares, which
    rewards a high cost. Here it is random over ours: higher is better (``environment``).
8.  Transmit energy is a power. ``CorrectedCost`` multiplies by the time on air: y P d / R, in which
    y cancels, so it moves the association and not the shares.
9.  Latency is operations over peak speed, so a pass of 25 tokens costs as much as 25 passes of one
    and speculation cannot win. ``CorrectedCost`` adds the time to read the weights once a pass.

Under-specified, chosen here: milliseconds, millijoules and percent of battery, the units in which
lambda 1e-2, w 20-100, delta_CP 1e9 (operations per millijoule) and delta_CM 2.6 all matter; noise
over one server's whole band; k_j in slots of unfinished work; what ``world`` marks "ours".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edgespec_uara.cost import Terms
from edgespec_uara.world import TARGET_BYTES, Floats, Snapshot

OPERATIONS_PER_MJ = 1e9
"""delta_CP: 1 TFLOP/s a watt, about what a phone's GPU does."""
TRANSMIT_FACTOR = 2.6
"""delta_CM: watts drawn a watt sent."""
LEAKAGE = 2 * 10 ** (-30 / 10)
SERVER_W = 1.0
"""30 dBm, a small cell's downlink."""
AIR_RTT_S = 0.008
"""Scheduling request, grant and slot on the air, up and down: 4 ms each way (TR 38.913, eMBB)."""
_MS = 1e3


@dataclass(frozen=True, slots=True)
class PaperCost:
    """The objective as printed, errors 3-5, 8 and 9 left in."""

    name: str = "paper"

    def terms(self, snapshot: Snapshot) -> Terms:
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
        return _without_speculation(snapshot, _queue_ms(snapshot))


@dataclass(frozen=True, slots=True)
class CorrectedCost:
    """The same objective with round trips, downlink, leakage, energy as power times time, and the
    weights read once a pass."""

    name: str = "corrected"

    def terms(self, snapshot: Snapshot) -> Terms:
        printed = PaperCost().terms(snapshot)
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
        """One round trip for the first token; then the stream flows, a pass a token."""
        once = _MS * rtt_s(snapshot) + snapshot.tokens[:, None] * _weights_ms(snapshot)
        down = _MS * snapshot.download_bits[:, None] / downlink_bits_per_s(snapshot)
        return _without_speculation(snapshot, _queue_ms(snapshot) + once + down)


def _without_speculation(snapshot: Snapshot, delay: Floats) -> Terms:
    """The device neither computes nor sends; the server's share is all that is left to choose."""
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
    """(M, E), linear: noise plus what leaks from the neighbouring servers' bands. A neighbour's
    average device is one that does not hear this server best."""
    received = snapshot.gains * snapshot.transmit_w[:, None]
    best = snapshot.gains.argmax(axis=1)[:, None] == np.arange(snapshot.settings.servers)
    strangers = np.maximum((~best).sum(axis=0), 1)
    leaked = LEAKAGE * np.where(best, 0.0, received).sum(axis=0) / strangers
    signal_to_noise: Floats = received / (snapshot.noise_w + leaked)
    return signal_to_noise


def rtt_s(snapshot: Snapshot) -> Floats:
    """(M, E): air and backhaul."""
    return np.broadcast_to(AIR_RTT_S + snapshot.backhaul_rtt_s, snapshot.gains.shape)


def downlink_bits_per_s(snapshot: Snapshot) -> Floats:
    """(M, E): with a server's whole band."""
    rates: Floats = snapshot.band_hz * np.log2(1.0 + SERVER_W * snapshot.gains / snapshot.noise_w)
    return rates


def uplink_bits_per_s(snapshot: Snapshot) -> Floats:
    """(M, E): with a server's whole band."""
    rates: Floats = snapshot.band_hz * np.log2(1.0 + sinr(snapshot))
    return rates
