"""What a scenario says of its verifiers: how long their passes take, on what, at which power."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from edgespec.core.protocol.checks import bounded
from edgespec_sim.scenario.gpu_power import GPU_POWERS

MAX_DEVICES = 1_000_000
_MINUTE_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class CostSection:
    """Time of a draft step or a pass: given, from a profile, or from a machine's data sheet."""

    ms: float | None = None
    """A step or pass of one row."""
    row_ms: float = 0.0
    """More for each further row."""
    context_us: float = 0.0
    """More for each cached token."""
    jitter: float = 0.0
    """Relative standard deviation, log-normal."""
    profile: str = ""
    """A file of ``edgespec profile``, or the name of a bundled one."""
    roofline: str = ""
    """MODEL@MACHINE of ``rooflines.py``: computed from data sheets, not measured."""

    def __post_init__(self) -> None:
        given = {
            "ms": self.ms is not None,
            "profile": bool(self.profile),
            "roofline": bool(self.roofline),
        }
        _exactly_one("a cost", given)
        if self.ms is not None:
            bounded("ms", self.ms, 0.0, _MINUTE_MS)
        bounded("row_ms", self.row_ms, 0.0, _MINUTE_MS)
        bounded("context_us", self.context_us, 0.0, 1e6)
        bounded("jitter", self.jitter, 0.0, 2.0)


@dataclass(frozen=True, slots=True)
class StagesSection:
    """A target whose layers lie on several nodes, one behind another (decentralized)."""

    nodes: int = 4
    link_ms: float = 10.0
    """One way, between two neighbouring nodes; the last answers to the first for free, as the
    last one samples and the first one only needs the tokens (they travel with the next pass)."""
    slots: int = 1
    """Passes under way at once; sessions are divided among them."""
    link_mbps: float = math.inf
    """Of each link between two neighbours; passes go through it one after another."""
    hidden_bytes: int = 8192
    """What a row takes there: 4096 activations of two bytes in an 8 B model."""
    lost_at_s: tuple[float, ...] = ()
    """A node is gone then: passes under way fail, its layers' part of every cache is lost, and
    devices resume with what they hold."""
    spares: int = 0
    """Nodes that wait with the weights; without one left, the others take over the layers."""
    reroute_s: float = 2.0
    """Until the way around a lost node stands. The others keep their weights meanwhile."""
    jitter_ms: float = 0.0
    """Mean of an exponential extra delay of each pass on each link."""
    stragglers: float = 0.0
    """Share of the passes of each node that take ``straggle_factor`` times as long."""
    straggle_factor: float = 4.0
    rtt_matrix: str = ""
    """An archive of RTT matrices: its first slice takes the place of ``link_ms``, half each way."""
    nodes_at: tuple[int, ...] = ()
    """Which rows of the matrix the nodes are (from 0), in order; empty: the first ones."""

    def __post_init__(self) -> None:
        bounded("jitter_ms", self.jitter_ms, 0.0, _MINUTE_MS)
        bounded("stragglers", self.stragglers, 0.0, 0.5)
        bounded("straggle_factor", self.straggle_factor, 1.0, 1000.0)
        if self.nodes_at and (not self.rtt_matrix or len(self.nodes_at) != self.nodes):
            raise ValueError(
                f"nodes_at names {len(self.nodes_at)} rows of the matrix {self.rtt_matrix!r},"
                f" but it takes a matrix, and as many rows as nodes, {self.nodes}"
            )
        bounded("nodes", self.nodes, 1, 128)
        bounded("link_ms", self.link_ms, 0.0, _MINUTE_MS)
        bounded("slots", self.slots, 1, 128)
        if self.link_mbps != math.inf:
            bounded("link_mbps", self.link_mbps, 1e-3, 1e6)
        bounded("hidden_bytes", self.hidden_bytes, 1, 1 << 24)
        for at_s in self.lost_at_s:
            bounded("lost_at_s", at_s, 0.0, 1e6)
        bounded("spares", self.spares, 0, 128)
        bounded("reroute_s", self.reroute_s, 0.0, 1e6)
        if len(self.lost_at_s) >= self.nodes + self.spares:
            raise ValueError(
                f"lost_at_s names {len(self.lost_at_s)} losses,"
                f" but {self.nodes} nodes and {self.spares} spares survive fewer"
            )

    def hop_s(self, rows: int, link_s: float | None = None) -> float:
        """What one link (of ``link_ms``, or of that delay) adds at least to a pass that has it
        alone."""
        delay_s = self.link_ms / 1e3 if link_s is None else link_s
        return delay_s + rows * self.hidden_bytes * 8 / (self.link_mbps * 1e6)

    @property
    def links_s(self) -> float:
        """All links together, for a pass of one row, when the fewest nodes are left."""
        return self.least_links_s((self.link_ms / 1e3,) * (self.nodes - 1))

    def least_links_s(self, delays_s: tuple[float, ...]) -> float:
        """The same for links of these delays, one way, first to last."""
        left = min(self.nodes, self.nodes + self.spares - len(self.lost_at_s))
        return sum(self.hop_s(1, delay_s) for delay_s in delays_s[: left - 1])


@dataclass(frozen=True, slots=True)
class VerifierSection:
    count: int = 1
    pass_time: CostSection = field(default_factory=lambda: CostSection(ms=25.0))
    path: tuple[str, ...] = ()
    """Links behind the devices' own: the way to this verifier's site."""
    stages: StagesSection | None = None
    max_sessions: int = 64
    max_rows_per_pass: int = 1024
    max_rows_per_session: int = 512
    restarts_at_s: tuple[float, ...] = ()
    """The process dies there, and every session with it; lost nodes are in ``stages``."""
    restart_s: float = 5.0
    """Until it can be reached again."""
    gpu_power: str = ""
    """h200, h100, a100-80g or l4: published powers of each machine (``gpu_power.py``)."""
    busy_w: float = 0.0
    """Of each machine while a pass runs, in place of that; the data sheet's most is an upper bound.
    Fans and the host are not in it. 0: not known, and not reported."""
    idle_w: float | None = None
    """While it is powered and no pass runs. null: as ``gpu_power`` has it, else not known."""

    def __post_init__(self) -> None:
        bounded("count", self.count, 1, 10_000)
        bounded("max_sessions", self.max_sessions, 1, MAX_DEVICES)
        bounded("max_rows_per_pass", self.max_rows_per_pass, 1, 1 << 20)
        bounded("max_rows_per_session", self.max_rows_per_session, 1, 1 << 20)
        for at_s in self.restarts_at_s:
            bounded("restarts_at_s", at_s, 0.0, 1e6)
        bounded("restart_s", self.restart_s, 0.0, 1e6)
        bounded("busy_w", self.busy_w, 0.0, 1e6)
        if self.gpu_power and self.gpu_power not in GPU_POWERS:
            known = ", ".join(GPU_POWERS)
            raise ValueError(f"gpu_power is {self.gpu_power!r}, but must be one of {known}")
        if self.idle_w is not None:
            bounded("idle_w", self.idle_w, 0.0, 1e6)

    @property
    def power_busy_w(self) -> float:
        """Of a machine while a pass runs; 0: not known."""
        if self.busy_w or not self.gpu_power:
            return self.busy_w
        return GPU_POWERS[self.gpu_power].busy_w

    @property
    def power_idle_w(self) -> float | None:
        """Of a machine between passes; None: not known."""
        if self.idle_w is not None or not self.gpu_power:
            return self.idle_w
        return GPU_POWERS[self.gpu_power].idle_w


def _exactly_one(what: str, given: dict[str, bool]) -> None:
    chosen = [name for name, is_given in given.items() if is_given]
    if len(chosen) != 1:
        said = " and ".join(chosen) if chosen else "none of them"
        raise ValueError(f"{what} needs exactly one of {', '.join(given)}, but names {said}")
