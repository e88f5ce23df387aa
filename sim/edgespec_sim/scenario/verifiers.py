"""What a scenario says of its verifiers: how long their passes take, on what, at which power."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Final

from edgespec.core.protocol.checks import Section, among, check_limits, limited
from edgespec_sim.cost_profile import TimeLaw, read_profile
from edgespec_sim.links.network_trace import file_named

# --- watts -------------------------------------------------------------------------------------
# What a verifier's GPU draws while a pass runs and while it waits, each figure with its source.
#
# Busy is the data sheet's most, and so an upper bound: a pass that is bound by memory draws less
# (517 of 700 W were published for an H200 that decodes a batch of 128). Data sheets say nothing of
# idle boards; where no measurement was found that could be cited there is none here, and idle
# energy is not reported. Host, fans and power supply are in none of them.


@dataclass(frozen=True, slots=True)
class GpuPower:
    """In watts, of one board."""

    busy_w: float
    idle_w: float | None
    """Powered, its memory refreshed, no kernel running."""


GPU_POWERS: Final = {
    # Busy: NVIDIA H200 data sheet, SXM, "up to 700 W". Idle: 80.3 W measured on an H200 SXM by
    # nvidia-smi ("ghost power" of the ALICE GPU energy benchmark, June 2026); a second published
    # figure is 73.7 W, over boards of one provider (ConserveMode, 2026).
    "h200": GpuPower(700.0, 80.3),
    # NVIDIA H100 data sheet, SXM.
    "h100": GpuPower(700.0, None),
    # NVIDIA A100 data sheet, 80 GB SXM.
    "a100-80g": GpuPower(400.0, None),
    # NVIDIA L4 data sheet.
    "l4": GpuPower(72.0, None),
}
_NOT_KNOWN: Final = GpuPower(0.0, None)


@dataclass(frozen=True, slots=True)
class RadioPower:
    """Powers in watts, above a radio that is off."""

    connected_w: float
    connected_s: float
    """After a packet."""
    tail_w: float
    tail_s: float
    """After ``connected_s``."""
    idle_w: float
    promotion_s: float = 0.0
    promotion_w: float = 0.0
    up_j_per_bit: float = 0.0
    down_j_per_bit: float = 0.0
    """Beyond ``connected_w``."""

    def gap_j(self, gap_s: float) -> float:
        """Between two packets, or after the last one."""
        connected_s = min(gap_s, self.connected_s)
        tail_s = min(gap_s - connected_s, self.tail_s)
        idle_s = gap_s - connected_s - tail_s
        return self.connected_w * connected_s + self.tail_w * tail_s + self.idle_w * idle_s


RADIOS: Final = {
    # Promotion 0.26 s at 1.21 W; connected at 1.2 W (its "beta") until 0.1 s without a packet;
    # short and long DRX of 0.02 and 10 s at 1.06 W; idle: 43 ms of paging at 0.594 W every 1.28 s;
    # 438.39 mW a Mbit/s up, 51.97 down.
    "lte": RadioPower(1.2, 0.1, 1.06, 10.02, 0.594 * 0.043 / 1.28, 0.26, 1.21, 438.39e-9, 51.97e-9),
    # Active, and 0.25 s of tail, at 0.403 W; standby at 0.02 W.
    "wifi": RadioPower(0.403, 0.25, 0.403, 0.0, 0.02),
}


class RadioMeter:
    """Adds up what one radio took; idle at first. Times must not decrease."""

    def __init__(self, power: RadioPower) -> None:
        self._power = power
        self._packet_s: float | None = None
        self._settled_s = 0.0
        self._taken_j = 0.0

    def packet(self, now_s: float, up_bytes: int = 0, down_bytes: int = 0) -> None:
        self._settle(now_s)
        power, before_s = self._power, self._packet_s
        if before_s is None or now_s - before_s > power.connected_s + power.tail_s:
            self._taken_j += power.promotion_s * power.promotion_w
        self._taken_j += 8 * (power.up_j_per_bit * up_bytes + power.down_j_per_bit * down_bytes)
        self._packet_s = now_s

    def take(self, now_s: float) -> float:
        """Joules since the last call."""
        self._settle(now_s)
        taken_j, self._taken_j = self._taken_j, 0.0
        return taken_j

    def _settle(self, now_s: float) -> None:
        power, packet_s = self._power, self._packet_s
        if packet_s is None:
            self._taken_j += power.idle_w * (now_s - self._settled_s)
        else:
            since_s = self._settled_s - packet_s
            self._taken_j += power.gap_j(now_s - packet_s) - power.gap_j(since_s)
        self._settled_s = now_s


MAX_DEVICES = 1_000_000
_MINUTE_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class CostSection:
    """Time of a draft step or a pass: given, from a profile, or from a machine's data sheet."""

    ms: float | None = limited(None, 0.0, _MINUTE_MS)
    """A step or pass of one row."""
    row_ms: float = limited(0.0, 0.0, _MINUTE_MS)
    """More for each further row."""
    context_us: float = limited(0.0, 0.0, 1e6)
    """More for each cached token."""
    jitter: float = limited(0.0, 0.0, 2.0)
    """Relative standard deviation, log-normal."""
    profile: str = ""
    """A file of ``edgespec profile``."""
    roofline: str = ""
    """MODEL@MACHINE: computed from data sheets, not measured."""

    def __post_init__(self) -> None:
        check_limits(self)
        given = {"ms": self.ms is not None, "profile": self.profile, "roofline": self.roofline}
        chosen = [name for name, value in given.items() if value]
        if len(chosen) != 1:
            said = " and ".join(chosen) if chosen else "none of them"
            raise ValueError(f"a cost needs exactly one of {', '.join(given)}, but names {said}")


@dataclass(frozen=True, slots=True)
class StagesSection:
    """A target whose layers lie on several nodes, one behind another (decentralized)."""

    nodes: int = limited(4, 1, 128)
    link_ms: float = limited(10.0, 0.0, _MINUTE_MS)
    """One way, between two neighbouring nodes; the last answers to the first for free, as the
    last one samples and the first one only needs the tokens (they travel with the next pass)."""
    slots: int = limited(1, 1, 128)
    """Passes under way at once; sessions are divided among them."""
    link_mbps: float = limited(math.inf, 1e-3, 1e6)
    """Of each link between two neighbours; passes go through it one after another."""
    hidden_bytes: int = limited(8192, 1, 1 << 24)
    """What a row takes there: 4096 activations of two bytes in an 8 B model."""
    lost_at_s: tuple[float, ...] = limited((), 0.0, 1e6)
    """A node is gone then: passes under way fail, its layers' part of every cache is lost, and
    devices resume with what they hold."""
    spares: int = limited(0, 0, 128)
    """Nodes that wait with the weights; without one left, the others take over the layers."""
    reroute_s: float = limited(2.0, 0.0, 1e6)
    """Until the way around a lost node stands. The others keep their weights meanwhile."""
    jitter_ms: float = limited(0.0, 0.0, _MINUTE_MS)
    """Mean of an exponential extra delay of each pass on each link."""

    def __post_init__(self) -> None:
        check_limits(self)
        if len(self.lost_at_s) >= self.nodes + self.spares:
            raise ValueError(
                f"lost_at_s names {len(self.lost_at_s)} losses,"
                f" but {self.nodes} nodes and {self.spares} spares survive fewer"
            )

    def hop_s(self, rows: int) -> float:
        """What a link adds at least to a pass that has it alone."""
        return self.link_ms / 1e3 + rows * self.hidden_bytes * 8 / (self.link_mbps * 1e6)


@dataclass(frozen=True, slots=True)
class ServerDraftSection(Section):
    """The verifier's own draft model, packed over its sessions, on the machine of its passes."""

    ms: float = limited(2.5, 0.0, _MINUTE_MS)
    """A step of one row."""
    row_ms: float = limited(0.0, 0.0, _MINUTE_MS)
    """More for each further row."""
    acceptance: float | None = limited(None, 0.01, 0.99)
    """process: mean share of its guesses that are right, at places of its own; null: it is the
    devices' draft, and errs where they do."""

    def step_s(self, rows: int) -> float:
        return (self.ms + self.row_ms * (rows - 1)) / 1e3


@dataclass(frozen=True, slots=True)
class VerifierSection(Section):
    count: int = limited(1, 1, 10_000)
    pass_time: CostSection = field(default_factory=lambda: CostSection(ms=25.0))
    path: tuple[str, ...] = ()
    """Links behind the devices' own: the way to this verifier's site."""
    stages: StagesSection | None = None
    server_draft: ServerDraftSection | None = None
    """null: it does not draft, and the arms ``server-draft`` and ``both`` are not played."""
    machine: str = ""
    """MODEL@MACHINE: whose memory it has; without it that of ``pass_time.roofline``, if any."""
    max_sessions: int | None = limited(None, 1, MAX_DEVICES)
    """At most so many sessions at a time; null: as many as its memory holds, and 64 where a
    scenario does not say what machine it is."""
    max_rows_per_pass: int = limited(1024, 1, 1 << 20)
    gpu_power: str = among("", ("", *GPU_POWERS))
    """h200, h100, a100-80g or l4: published powers of each machine."""
    busy_w: float = limited(0.0, 0.0, 1e6)
    """Of each machine while a pass runs, in place of that; the data sheet's most is an upper bound.
    Fans and the host are not in it. 0: not known, and not reported."""
    idle_w: float | None = limited(None, 0.0, 1e6)
    """While it is powered and no pass runs. null: as ``gpu_power`` has it, else not known."""

    @property
    def power_busy_w(self) -> float:
        """Of a machine while a pass runs; 0: not known."""
        return self.busy_w or GPU_POWERS.get(self.gpu_power, _NOT_KNOWN).busy_w

    @property
    def power_idle_w(self) -> float | None:
        """Of a machine between passes; None: not known."""
        known_w = GPU_POWERS.get(self.gpu_power, _NOT_KNOWN).idle_w
        return known_w if self.idle_w is None else self.idle_w


_EFFICIENCY: Final = 0.7
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float
    flops: float
    """Dense, in the precision of the model's products."""
    overhead_s: float
    """Launches, sampling, scheduling: a pass takes at least this beyond the work itself."""
    memory_bytes: float | None
    """Of the data sheet; None: it is not a fixed one."""


@dataclass(frozen=True, slots=True)
class Model:
    parameters: float
    weight_bytes: float
    """Of one parameter."""
    context_bytes: float
    """Keys and values of one cached token, over all layers."""


# Vendors' data sheets: memory bandwidth, dense throughput (bf16 where weights are 16 or 8 bit).
MACHINES: Final = {
    "h200": Machine(4.8e12, 989e12, 2e-3, 141e9),
    "h100": Machine(3.35e12, 989e12, 2e-3, 80e9),
    "a100-80g": Machine(2.04e12, 312e12, 2e-3, 80e9),
    "rtx-4090": Machine(1.01e12, 165e12, 2e-3, 24e9),
    "jetson-orin-nano": Machine(102e9, 20e12, 3e-3, 8e9),
    "laptop-cpu": Machine(60e9, 1e12, 1e-3, None),
}

# Published configurations: 2 (K and V) * layers * KV heads * head dimension * 2 bytes.
MODELS: Final = {
    "llama-3.1-70b-fp8": Model(70.6e9, 1.0, 2 * 80 * 8 * 128 * 2),
    "llama-3.1-8b-bf16": Model(8.03e9, 2.0, 2 * 32 * 8 * 128 * 2),
    "qwen3-32b-fp8": Model(32.8e9, 1.0, 2 * 64 * 8 * 128 * 2),
    "llama-3.2-1b-int4": Model(1.24e9, 0.56, 2 * 16 * 8 * 64 * 2),
    "qwen3-0.6b-int4": Model(0.6e9, 0.56, 2 * 28 * 8 * 128 * 2),
}


def model_and_machine(key: str, name: str) -> tuple[Model, Machine]:
    """Return what MODEL@MACHINE names, the value of ``key``. Raises ``ValueError``."""
    model_name, _, machine_name = name.partition("@")
    if model_name not in MODELS or machine_name not in MACHINES:
        raise ValueError(
            f"{key} is {name!r}, but must be MODEL@MACHINE with a model of "
            f"{', '.join(MODELS)} and a machine of {', '.join(MACHINES)}"
        )
    return MODELS[model_name], MACHINES[machine_name]


def roofline_law(name: str, share: float = 1.0) -> TimeLaw:
    """The law of MODEL@MACHINE, ``share`` of whose layers lie on this machine. Raises
    ``ValueError`` that names what is known."""
    model, machine = model_and_machine("roofline", name)
    read_s = share * model.parameters * model.weight_bytes / machine.bytes_per_s
    row_s = share * 2.0 * model.parameters / machine.flops
    table = tuple(
        (float(rows), machine.overhead_s + max(read_s, rows * row_s) / _EFFICIENCY)
        for rows in _ROWS
    )
    return TimeLaw(table, share * model.context_bytes / machine.bytes_per_s / _EFFICIENCY)


# --- how many sessions a machine's memory holds -------------------------------------------------

_USABLE: Final = 0.9
"""Share of the memory for weights and caches. The rest is for activations, the runtime and
fragmentation (vLLM's default for the same share, ``gpu_memory_utilization``, is 0.9 as well)."""
SESSIONS_UNKNOWN: Final = 64
"""Sessions of a verifier of which nothing says what it holds; that of the daemon's default."""


@dataclass(frozen=True, slots=True)
class MemorySum:
    """How many sessions the memory of a verifier holds beside the weights."""

    model: str
    machine: str
    machines: int
    """Over which the layers are spread."""
    memory_bytes: float
    """Of all machines together."""
    weights_bytes: float
    session_tokens: float
    session_bytes: float

    @property
    def sessions(self) -> int:
        """Sessions that fit; 0 or less: not even one does."""
        return int((_USABLE * self.memory_bytes - self.weights_bytes) / self.session_bytes)

    @property
    def about(self) -> str:
        """The whole sum, for a reader."""
        many = f"{self.machines} x {self.machine}" if self.machines > 1 else self.machine
        return (
            f"of the {self.memory_bytes / 1e9:.0f} GB of {many} at most {_USABLE:.0%} are used, the"
            f" weights of {self.model} take {self.weights_bytes / 1e9:.0f} GB, and a session of"
            f" {self.session_tokens:.0f} tokens {self.session_bytes / 1e9:.2f} GB"
        )


def memory_sum(section: VerifierSection, session_tokens: float) -> MemorySum | None:
    """Return the sum for sessions of so many cached tokens; None where nothing says what machine it
    is, or the machine's memory is not known. Raises ``ValueError`` for an unknown machine, and if
    not a single session fits."""
    key, name = "machine", section.machine
    if not name:
        key, name = "pass_time.roofline", section.pass_time.roofline
    if not name:
        return None
    model, machine = model_and_machine(key, name)
    if machine.memory_bytes is None:
        return None
    model_name, _, machine_name = name.partition("@")
    machines = 1 if section.stages is None else section.stages.nodes
    found = MemorySum(
        model=model_name,
        machine=machine_name,
        machines=machines,
        memory_bytes=machines * machine.memory_bytes,
        weights_bytes=model.parameters * model.weight_bytes,
        session_tokens=session_tokens,
        session_bytes=model.context_bytes * session_tokens,
    )
    if found.sessions < 1:
        raise ValueError(f"{machine_name} has no room for a session of {model_name}: {found.about}")
    return found


_SPREAD_POINTS = 21


class Operation(Enum):
    DRAFT_STEP = "draft_step"
    TARGET_PASS = "target_pass"


def law_of(section: CostSection, operation: Operation, folder: Path, share: float = 1.0) -> TimeLaw:
    """``folder`` is where relative file names start, ``share`` that of the layers a node holds.
    Raises ``ProfileError`` or ``ValueError``."""
    if section.profile:
        profile = read_profile(file_named(section.profile, folder))
        law = profile.draft_step if operation is Operation.DRAFT_STEP else profile.target_pass
        law = _scaled(law, share)
    elif section.roofline:
        law = roofline_law(section.roofline, share)
    else:
        assert section.ms is not None
        first_s, row_s = share * section.ms / 1e3, share * section.row_ms / 1e3
        table = ((1.0, first_s), (2.0, first_s + row_s)) if row_s else ((1.0, first_s),)
        law = TimeLaw(table, share * section.context_us / 1e6)
    return replace(law, spread=_log_normal(section.jitter)) if section.jitter else law


def measured(section: CostSection) -> str:
    """What a report has to say of where these times come from."""
    if section.profile:
        return f"measured (profile {section.profile})"
    if section.roofline:
        return f"computed from data sheets, not measured ({section.roofline})"
    return f"assumed ({section.ms:g} ms)"


def _scaled(law: TimeLaw, share: float) -> TimeLaw:
    if share == 1.0:
        return law
    table = tuple((rows, share * seconds) for rows, seconds in law.table)
    return TimeLaw(table, share * law.context_s, law.spread, share * law.session_s)


def _log_normal(deviation: float) -> tuple[float, ...]:
    """Quantiles of a log-normal ratio of mean 1 with this relative standard deviation."""
    sigma = math.sqrt(math.log1p(deviation * deviation))
    normal = statistics.NormalDist(-sigma * sigma / 2.0, sigma)
    shares = ((index + 0.5) / _SPREAD_POINTS for index in range(_SPREAD_POINTS))
    return tuple(math.exp(normal.inv_cdf(share)) for share in shares)
