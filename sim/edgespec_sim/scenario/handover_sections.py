"""Phones that go from cell to cell, and what becomes of their running sessions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from edgespec.core.protocol.checks import bounded

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
