"""What the full simulator needs from a decision: rates, round trips, shares, association.

``plan`` decides one snapshot and puts it into the units of the rest of the product: links are
``LinkView``, devices and verifiers are views of ``edgespec.core.association.policies``, so the same
object answers here, in the simulator and in an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.core.association.policies import (
    AssociationPolicy,
    DeviceView,
    LinkView,
    VerifierView,
)
from edgespec_uara.cost import CostModel, Decision, Terms
from edgespec_uara.methods import Method, Situation
from edgespec_uara.paper import downlink_bits_per_s, rtt_s, sinr, uplink_bits_per_s
from edgespec_uara.shares import optimal
from edgespec_uara.world import (
    DRAFT_PARAMETERS,
    TARGET_BYTES,
    TARGET_PARAMETERS,
    Floats,
    Ints,
    Snapshot,
)

SESSIONS_MAX = 512
"""Of one server; far above what the paper's sizes bring."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One slot, decided. M devices, E servers."""

    decision: Decision
    up_bits_per_s: Floats
    """(M, E): of a server's whole band; times a device's share is its rate."""
    down_bits_per_s: Floats
    """(M, E): likewise, at the server's power."""
    rtt_s: Floats
    """(M, E): propagation, air interface and backhaul; no serialisation, no queue."""

    def link(self, device: int) -> LinkView:
        """The link this device gets, with its share of the uplink."""
        server = int(self.decision.association[device])
        share = float(self.decision.bandwidth[device])
        return LinkView(
            rtt_s=float(self.rtt_s[device, server]),
            up_bits_per_s=share * float(self.up_bits_per_s[device, server]),
            down_bits_per_s=float(self.down_bits_per_s[device, server]),
        )


def plan(snapshot: Snapshot, cost: CostModel, method: Method, seed: int) -> Plan:
    situation = Situation(snapshot, cost.terms(snapshot), np.random.default_rng(seed))
    return Plan(
        method(situation),
        uplink_bits_per_s(snapshot),
        downlink_bits_per_s(snapshot),
        rtt_s(snapshot),
    )


@dataclass(frozen=True, slots=True)
class Views:
    """A snapshot as an ``AssociationPolicy`` sees it."""

    devices: tuple[DeviceView, ...]
    verifiers: tuple[VerifierView, ...]
    links: tuple[tuple[LinkView, ...], ...]


def views(snapshot: Snapshot) -> Views:
    """Links at the band of a server that nobody shares; passes of one mean draft."""
    up, down = uplink_bits_per_s(snapshot), downlink_bits_per_s(snapshot)
    delay_s, snr_db = rtt_s(snapshot), 10.0 * np.log10(np.maximum(sinr(snapshot), 1e-9))
    length = snapshot.drafted / snapshot.passes
    rates = np.minimum(snapshot.tokens / snapshot.drafted, 1.0)
    devices = tuple(
        DeviceView(f"device-{index}", 2 * DRAFT_PARAMETERS / flops, float(rate), charge / 100.0)
        for index, (flops, rate, charge) in enumerate(
            zip(
                snapshot.device_flops.tolist(),
                rates.tolist(),
                snapshot.battery_percent.tolist(),
                strict=True,
            )
        )
    )
    compute_s = 2 * TARGET_PARAMETERS * float(length.mean()) / snapshot.server_flops
    weights_s = TARGET_BYTES / snapshot.server_bytes_per_s
    verifiers = tuple(
        VerifierView(f"server-{index}", more + once, 0, SESSIONS_MAX, session_s=more)
        for index, (more, once) in enumerate(
            zip(compute_s.tolist(), weights_s.tolist(), strict=True)
        )
    )
    return Views(devices, verifiers, _links(delay_s, up, down, snr_db))


def _links(
    delay_s: Floats, up: Floats, down: Floats, snr_db: Floats
) -> tuple[tuple[LinkView, ...], ...]:
    tables = (delay_s.tolist(), up.tolist(), down.tolist(), snr_db.tolist())
    return tuple(
        tuple(LinkView(*pair) for pair in zip(*rows, strict=True))
        for rows in zip(*tables, strict=True)
    )


def follow(
    policy: AssociationPolicy, shares: Callable[[Terms, Ints], Decision] = optimal
) -> Method:
    """A policy of the product as a method here, with optimal shares or those of ``shares``."""

    def decide(situation: Situation) -> Decision:
        seen = views(situation.snapshot)
        chosen: Sequence[int] = policy.assign(seen.devices, seen.verifiers, seen.links)
        association: Ints = np.array(chosen, dtype=np.int64)
        return shares(situation.terms, association)

    return decide
