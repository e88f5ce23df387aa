"""The network of a scenario: links, what shakes them, who shares them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from edgespec.core.protocol.checks import bounded

# --- phones that go from cell to cell, and what becomes of their running sessions --------------


_MINUTE_MS = 60_000.0


class Sessions(Enum):
    """What a handover does to the session that runs. ``RECOMPUTE`` and ``KV`` move it to the new
    cell's verifier, which computes the prefix again or gets its keys and values."""

    CHEAPEST = "cheapest"
    STAY = "stay"
    RECOMPUTE = "recompute"
    KV = "kv"


@dataclass(frozen=True, slots=True)
class BackhaulSection:
    """Between the base stations; each has one line to the others, for all that it sends."""

    rtt_ms: float = 4.0
    """Between any two of them."""
    mbps: float = 1000.0
    """Of each station's line, each way."""

    def __post_init__(self) -> None:
        bounded("rtt_ms", self.rtt_ms, 0.0, _MINUTE_MS)
        bounded("mbps", self.mbps, 0.1, 1e6)


@dataclass(frozen=True, slots=True)
class CellHandoverSection:
    """A phone is attached to the cell that it hears best, and may use any verifier; what is not
    its cell's own goes over the backhaul."""

    margin_db: float = 3.0
    """By which another cell must be stronger (event A3, 3GPP TS 38.331, 5.5.4.4)."""
    filter_k: int = 4
    """Measurements are averaged in dB, the newest with weight 1 / 2^(k/4) (ibid., 5.5.3.2)."""
    gap_ms: float = 60.0
    """Nothing passes on the air meanwhile."""
    sessions: Sessions = Sessions.CHEAPEST
    """cheapest, stay, recompute or kv."""
    kv_bytes_per_token: int = 131_072
    """Of a position's keys and values: 32 layers of 8 heads of 128, two of two bytes (Llama 3.1
    8B)."""
    backhaul: BackhaulSection = field(default_factory=BackhaulSection)

    def __post_init__(self) -> None:
        bounded("margin_db", self.margin_db, 0.0, 30.0)
        bounded("filter_k", self.filter_k, 0, 19)
        bounded("gap_ms", self.gap_ms, 0.0, _MINUTE_MS)
        bounded("kv_bytes_per_token", self.kv_bytes_per_token, 1, 1 << 30)


_HOUR_MS = 3_600_000.0
_MAX_MBPS = 1e6

# Ethernet 18, IPv4 20, TCP with timestamps 32, HTTP/2 frame 9, gRPC prefix 5: RFCs 894, 791,
# 9293, 7323, 9113. TLS would add 22.
FRAMING_BYTES = 84

# 3GPP TS 38.331: the values that Alpha can have.
ALPHAS = (0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class OutageSection:
    """Nothing passes for a while; messages wait."""

    at_s: float = 0.0
    for_s: float = 1.0

    def __post_init__(self) -> None:
        bounded("at_s", self.at_s, 0.0, 1e6)
        bounded("for_s", self.for_s, 0.001, 1e6)


@dataclass(frozen=True, slots=True)
class HandoverSection:
    """The device moves to another cell again and again."""

    every_s: float = 60.0
    """Mean time between two; the times scatter by a quarter."""
    gap_ms: float = 60.0
    """Nothing passes meanwhile. 3GPP TS 36.133 allows some 50 ms; measured tails reach seconds."""
    breaks: bool = False
    """The address changes, so streams break and devices reconnect."""

    def __post_init__(self) -> None:
        bounded("every_s", self.every_s, 0.1, 1e6)
        bounded("gap_ms", self.gap_ms, 0.0, _HOUR_MS)


@dataclass(frozen=True, slots=True)
class LinkSection:
    """One hop. Delay comes from ``rtt_ms`` or from a ``trace``, both ways together."""

    rtt_ms: float = 0.0
    """Propagation there and back; with a trace it comes on top (the path behind the trace)."""
    trace: str = ""
    """A trace file, or ``generate:KIND`` (wifi, lte, 5g, starlink, broadband, wan)."""
    up_share: float = 0.5
    """Share of the delay that is the way up; the rest is the way down."""
    trace_spread_s: float = 0.0
    """Device i enters the trace at i times this; 0: all see the same weather."""
    jitter_ms: float = 0.0
    """Mean of an exponential extra delay each way."""
    loss: float = 0.0
    """Share of packets lost; a lost one is sent again and holds up what follows. A device keeps one
    TCP connection for all its requests."""
    up_mbps: float = math.inf
    down_mbps: float = math.inf
    """Capacity; a trace's own capacity columns, where it has them, take their place."""
    shared: bool = False
    """All devices send through one queue, instead of one queue each."""
    cross_up: float = 0.0
    cross_down: float = 0.0
    """Share of the capacity that others use, in [0, 0.95]; needs a finite capacity."""
    framing_bytes: int = FRAMING_BYTES
    """What each message takes besides its payload."""
    outages: tuple[OutageSection, ...] = ()
    handover: HandoverSection | None = None

    def __post_init__(self) -> None:
        bounded("rtt_ms", self.rtt_ms, 0.0, _HOUR_MS)
        bounded("up_share", self.up_share, 0.0, 1.0)
        bounded("trace_spread_s", self.trace_spread_s, 0.0, 1e6)
        bounded("jitter_ms", self.jitter_ms, 0.0, _HOUR_MS)
        bounded("loss", self.loss, 0.0, 0.9)
        for name, value in (("up_mbps", self.up_mbps), ("down_mbps", self.down_mbps)):
            if value != math.inf:
                bounded(name, value, 1e-4, _MAX_MBPS)
        for name, share, capacity in (
            ("cross_up", self.cross_up, self.up_mbps),
            ("cross_down", self.cross_down, self.down_mbps),
        ):
            bounded(name, share, 0.0, 0.95)
            if share and capacity == math.inf:
                raise ValueError(f"{name} is {share:g}, but the link's capacity has no limit")
        bounded("framing_bytes", self.framing_bytes, 0, 1500)
        ends_s = 0.0
        for outage in self.outages:
            if outage.at_s < ends_s:
                raise ValueError(f"outages: the one at {outage.at_s:g} s begins before {ends_s:g}")
            ends_s = outage.at_s + outage.for_s


@dataclass(frozen=True, slots=True)
class PowerControlSection:
    """Phones send as strongly as their path loss asks for: open-loop fractional power control of
    3GPP TS 38.213, 7.1.1 (``radio/uplink_power.py``), up to ``device_dbm``."""

    p0_dbm: float = -80.0
    """What a station is to receive of a resource block of 180 kHz, were ``alpha`` 1. Operators set
    it, for a deployment; this value is ours."""
    alpha: float = 0.8
    """Share of the path loss that is made up for: one of those of TS 38.331 (``Alpha``)."""
    filter_k: int = 4
    """Of the layer 3 filter of received powers (TS 38.331, 5.5.3.2, whose default is 4)."""

    def __post_init__(self) -> None:
        bounded("p0_dbm", self.p0_dbm, -202.0, 24.0)  # TS 38.331: p0-NominalWithGrant
        if self.alpha not in ALPHAS:
            known = ", ".join(f"{one:g}" for one in ALPHAS)
            raise ValueError(f"alpha is {self.alpha:g}, but must be one of {known}")
        bounded("filter_k", self.filter_k, 0, 19)


@dataclass(frozen=True, slots=True)
class RadioSection:
    """Mobile edge: devices move among the verifiers' base stations (``radio.py``)."""

    area_m: float = 1000.0
    """Side of the square in which all is; the stations stand on a grid in it."""
    bandwidth_mhz: float = 10.0
    """Of each base station, each way; its devices share the airtime. All use the same band."""
    device_dbm: float = 20.0
    """What a device radiates while it sends; its amplifier draws more (``radio_network.py``)."""
    load: float = 0.0
    """Share of every cell's airtime that others use, each way, in [0, 0.95]."""
    speed_m_per_s: float = 1.5
    """Random waypoint, each leg at half to one and a half times this; 0: nobody moves."""
    handover: CellHandoverSection | None = None
    """None: a phone is in the cell of the verifier that it uses."""
    power_control: PowerControlSection | None = None
    """None: phones send at ``device_dbm``, near or far."""

    def __post_init__(self) -> None:
        bounded("area_m", self.area_m, 10.0, 1e5)
        bounded("bandwidth_mhz", self.bandwidth_mhz, 0.1, 1000.0)
        bounded("device_dbm", self.device_dbm, -20.0, 40.0)
        bounded("load", self.load, 0.0, 0.95)
        bounded("speed_m_per_s", self.speed_m_per_s, 0.0, 100.0)

    def check_ways(
        self, ways: Mapping[str, Sequence[str]], links: Mapping[str, LinkSection]
    ) -> None:
        """``ways``: the links behind each verifier's station. With handover a stream's paths are
        made anew at each change of cell, and what was under way on a TCP connection or a trace
        would be without one. Raises ``ValueError``."""
        if self.handover is None:
            return
        for name, way in ways.items():
            for link in way:
                if links[link].loss or links[link].trace:
                    raise ValueError(
                        f"radio.handover: verifiers.{name} lies behind {link!r}, but with handover"
                        " such a link has no loss and no trace"
                    )
