"""A scenario's verifiers: the time of their passes, their machines, memory and power."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Final

from edgespec.core.protocol.checks import Section, check_limits, choice_field, range_field
from edgespec_sim.cost_profile import TimeLaw, read_profile
from edgespec_sim.links.network_trace import find_file
from edgespec_sim.scenario.ran import RanSection

# --- power -------------------------------------------------------------------------------------
# Power of a verifier's GPU while a pass runs and while it waits, each figure with its source.
#
# Busy power is the data sheet's maximum, and so an upper bound: a pass that is bound by memory
# draws less (517 of 700 W were published for an H200 that decodes a batch of 128). Data sheets do
# not give the power of idle boards. Without a citable measurement there is no value here, and idle
# energy is not reported. Host, fans and power supply are not included.


@dataclass(frozen=True, slots=True)
class GpuPower:
    """Power of one board, in watts."""

    busy_w: float
    idle_w: float | None
    """Power of a board that is on, its memory refreshed, with no kernel running."""


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
_UNKNOWN_POWER: Final = GpuPower(0.0, None)


@dataclass(frozen=True, slots=True)
class RadioPower:
    """Power of a radio in its states, in watts above a radio that is off."""

    connected_w: float
    connected_s: float
    """Seconds in the connected state after a packet."""
    tail_w: float
    tail_s: float
    """Seconds in the tail state after ``connected_s``."""
    idle_w: float
    promotion_s: float = 0.0
    promotion_w: float = 0.0
    up_j_per_bit: float = 0.0
    down_j_per_bit: float = 0.0
    """Energy per bit, beyond ``connected_w``, for each direction."""

    def gap_j(self, gap_s: float) -> float:
        """Return the joules of a gap between two packets, or after the last one."""
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
    """Adds up the energy of one radio, which is idle at first. Times must not decrease."""

    def __init__(self, power: RadioPower) -> None:
        self._power = power
        self._packet_s: float | None = None
        self._settled_s = 0.0
        self._taken_j = self._collected_j = 0.0

    def add_packet(self, now_s: float, up_bytes: int = 0, down_bytes: int = 0) -> None:
        self._settle(now_s)
        power, before_s = self._power, self._packet_s
        if before_s is None or now_s - before_s > power.connected_s + power.tail_s:
            self._taken_j += power.promotion_s * power.promotion_w
        self._taken_j += 8 * (power.up_j_per_bit * up_bytes + power.down_j_per_bit * down_bytes)
        self._packet_s = now_s

    def collect_j(self, now_s: float) -> float:
        """Return the joules since the last call."""
        self._settle(now_s)
        taken_j, self._taken_j = self._taken_j, 0.0
        self._collected_j += taken_j
        return taken_j

    def spent_j(self, now_s: float) -> float:
        """Return the joules since the beginning."""
        self._settle(now_s)
        return self._collected_j + self._taken_j

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
    """Time of a draft step or a pass: given, from a profile, or computed from a machine's data
    sheet."""

    ms: float | None = range_field(None, 0.0, _MINUTE_MS)
    """Milliseconds of a step or pass of one row."""
    row_ms: float = range_field(0.0, 0.0, _MINUTE_MS)
    """Milliseconds that each further row adds."""
    context_us: float = range_field(0.0, 0.0, 1e6)
    """Microseconds that each cached token adds."""
    jitter: float = range_field(0.0, 0.0, 2.0)
    """Relative standard deviation of the time, log-normal."""
    profile: str = ""
    """A file that ``edgespec profile`` wrote."""
    roofline: str = ""
    """MODEL@MACHINE: the times are computed from data sheets, not measured."""

    def __post_init__(self) -> None:
        check_limits(self)
        given = {"ms": self.ms is not None, "profile": self.profile, "roofline": self.roofline}
        chosen = [name for name, value in given.items() if value]
        if len(chosen) != 1:
            said = " and ".join(chosen) if chosen else "none of them"
            raise ValueError(f"{', '.join(given)}: one of these is needed, but it names {said}")


@dataclass(frozen=True, slots=True)
class StagesSection:
    """A target whose layers are spread over a chain of nodes (decentralized)."""

    nodes: int = range_field(4, 1, 128)
    link_ms: float = range_field(10.0, 0.0, _MINUTE_MS)
    """One-way delay between two neighbouring nodes. The way from the last node to the first costs
    nothing: the last one samples, and the first one only needs the tokens, which travel with the
    next pass."""
    slots: int = range_field(1, 1, 128)
    """Passes in progress at once; sessions are divided among them."""
    link_mbps: float = range_field(math.inf, 1e-3, 1e6)
    """Capacity of each link between two neighbours; passes go through it one after another."""
    hidden_bytes: int = range_field(8192, 1, 1 << 24)
    """Bytes of a row on such a link: 4096 activations of two bytes in an 8 B model."""
    lost_at_s: tuple[float, ...] = range_field((), 0.0, 1e6)
    """Times at which a node is lost. Passes in progress fail, its layers' part of every cache is
    gone, and devices resume with their committed tokens."""
    spares: int = range_field(0, 0, 128)
    """Idle nodes with the weights loaded. When none is left, the other nodes take over the
    layers."""
    reroute_s: float = range_field(2.0, 0.0, 1e6)
    """Seconds until a lost node is replaced. The other nodes keep their weights meanwhile."""
    jitter_ms: float = range_field(0.0, 0.0, _MINUTE_MS)
    """Mean of an exponential extra delay of each pass on each link."""

    def __post_init__(self) -> None:
        check_limits(self)
        if len(self.lost_at_s) >= self.nodes + self.spares:
            raise ValueError(
                f"lost_at_s names {len(self.lost_at_s)} losses,"
                f" but {self.nodes} nodes and {self.spares} spares survive fewer"
            )

    def hop_s(self, rows: int) -> float:
        """Return the least time that a link adds to a pass which has it to itself."""
        return self.link_ms / 1e3 + rows * self.hidden_bytes * 8 / (self.link_mbps * 1e6)


@dataclass(frozen=True, slots=True)
class ServerDraftSection(Section):
    """The verifier's own draft model, packed over its sessions, on the machine of its passes."""

    ms: float = range_field(2.5, 0.0, _MINUTE_MS)
    """Milliseconds of a step of one row."""
    row_ms: float = range_field(0.0, 0.0, _MINUTE_MS)
    """Milliseconds that each further row adds."""
    acceptance: float | None = range_field(None, 0.01, 0.99)
    """process: mean share of its candidates that are right, with errors independent of the
    devices'. null: it is the devices' draft model, with the same errors."""

    def step_s(self, rows: int) -> float:
        return (self.ms + self.row_ms * (rows - 1)) / 1e3


@dataclass(frozen=True, slots=True)
class VerifierSection(Section):
    count: int = range_field(1, 1, 10_000)
    pass_time: CostSection = field(default_factory=lambda: CostSection(ms=25.0))
    path: tuple[str, ...] = ()
    """Links behind the devices' own links, on the way to this verifier's site."""
    stages: StagesSection | None = None
    server_draft: ServerDraftSection | None = None
    """Draft model of the verifier. null: none, and the arms ``server-draft`` and ``both`` are
    skipped."""
    machine: str = ""
    """MODEL@MACHINE whose memory the verifier has. Empty: that of ``pass_time.roofline``, if
    any."""
    max_sessions: int | None = range_field(None, 1, MAX_DEVICES)
    """Most sessions at a time. null: as many as the memory holds, or 64 if the scenario does not
    name a machine."""
    cached_tokens: int | None = range_field(None, 16, 1 << 30)
    """Positions of the KV cache, for all sessions together. Prompts that begin alike then share
    what was computed, also for the next turn of a conversation, and sessions wait while the cache
    is full. null: sessions are limited by their number alone, and every prompt is computed
    whole."""
    max_rows_per_pass: int = range_field(1024, 1, 1 << 20)
    gpu_power: str = choice_field("", ("", *GPU_POWERS))
    """h200, h100, a100-80g or l4: published power of each of the verifier's machines."""
    busy_w: float = range_field(0.0, 0.0, 1e6)
    """Power of each machine while a pass runs, in place of ``gpu_power``'s. The data sheet's
    maximum is an upper bound, and fans and host are not included. 0: unknown, and not reported."""
    idle_w: float | None = range_field(None, 0.0, 1e6)
    """Power of each machine that is on while no pass runs. null: that of ``gpu_power``, else
    unknown."""
    ran: RanSection | None = None
    """A radio access network that shares each of the verifier's machines (AI-RAN). null: passes
    have them alone."""

    @property
    def power_busy_w(self) -> float:
        """Power of a machine while a pass runs; 0: unknown."""
        return self.busy_w or GPU_POWERS.get(self.gpu_power, _UNKNOWN_POWER).busy_w

    @property
    def power_idle_w(self) -> float | None:
        """Power of a machine between passes; None: unknown."""
        known_w = GPU_POWERS.get(self.gpu_power, _UNKNOWN_POWER).idle_w
        return known_w if self.idle_w is None else self.idle_w


_EFFICIENCY: Final = 0.7
_SESSION_S: Final = 38e-6
"""Seconds of the host that each further session adds to a pass: its messages, scheduling and
commits, as far as they do not run beside the pass. With passes of 25 ms a verifier's period was
25.6 ms with one session, 28.0 with 64 and 30.6 with 128 (docs/measurements/server.md). vLLM of
early 2024 took 0.106 ms (Vidur's files: 2.13 ms with 8 sessions and 8.05 with 64)."""
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float
    flops: float
    """Dense throughput in the precision of the model's products."""
    overhead_s: float
    """Seconds for launches, sampling and scheduling, which every pass takes beyond the work
    itself."""
    memory_bytes: float | None
    """Memory by the data sheet. None if the machine has no fixed amount."""


@dataclass(frozen=True, slots=True)
class Model:
    parameters: float
    weight_bytes: float
    """Bytes of one parameter."""
    context_bytes: float
    """Bytes of keys and values of one cached token, over all layers."""


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
    """Return the model and machine of MODEL@MACHINE, the value of ``key``. Raises
    ``ValueError``."""
    model_name, _, machine_name = name.partition("@")
    if model_name not in MODELS or machine_name not in MACHINES:
        raise ValueError(
            f"{key} is {name!r}, but must be MODEL@MACHINE with a model of "
            f"{', '.join(MODELS)} and a machine of {', '.join(MACHINES)}"
        )
    return MODELS[model_name], MACHINES[machine_name]


def roofline_law(name: str, share: float = 1.0) -> TimeLaw:
    """Return the law of MODEL@MACHINE for a machine that holds ``share`` of the layers. Raises
    ``ValueError`` that lists the known names."""
    model, machine = model_and_machine("roofline", name)
    read_s = share * model.parameters * model.weight_bytes / machine.bytes_per_s
    row_s = share * 2.0 * model.parameters / machine.flops
    table = tuple(
        (float(rows), machine.overhead_s + max(read_s, rows * row_s) / _EFFICIENCY)
        for rows in _ROWS
    )
    context_s = share * model.context_bytes / machine.bytes_per_s / _EFFICIENCY
    return TimeLaw(table, context_s, session_s=share * _SESSION_S)


# --- how many sessions a machine's memory holds -------------------------------------------------

_USABLE: Final = 0.9
"""Share of the memory for weights and caches. The rest is for activations, the runtime and
fragmentation. vLLM's default for the same share, ``gpu_memory_utilization``, is 0.9 as well."""
DEFAULT_SESSIONS: Final = 64
"""Sessions of a verifier whose memory is unknown; the same as the daemon's default."""


@dataclass(frozen=True, slots=True)
class MemorySum:
    """How many sessions the memory of a verifier holds beside the weights."""

    model: str
    machine: str
    machines: int
    """Number of machines that the layers are spread over."""
    memory_bytes: float
    """Memory of all machines together."""
    weights_bytes: float
    session_tokens: float
    session_bytes: float

    @property
    def sessions(self) -> int:
        """Number of sessions that fit; 0 or less if not even one does."""
        return int((_USABLE * self.memory_bytes - self.weights_bytes) / self.session_bytes)

    @property
    def about(self) -> str:
        """The calculation in words, for a reader."""
        many = f"{self.machines} x {self.machine}" if self.machines > 1 else self.machine
        return (
            f"of the {self.memory_bytes / 1e9:.0f} GB of {many} at most {_USABLE:.0%} are used, the"
            f" weights of {self.model} take {self.weights_bytes / 1e9:.0f} GB, and a session of"
            f" {self.session_tokens:.0f} tokens {self.session_bytes / 1e9:.2f} GB"
        )


def check_cache(section: VerifierSection) -> None:
    """Raise ``ValueError`` if the machine is known and its memory does not hold the KV cache beside
    the weights."""
    name = section.machine or section.pass_time.roofline
    if section.cached_tokens is None or not name:
        return
    model, machine = model_and_machine("machine", name)
    if machine.memory_bytes is None:
        return
    count = 1 if section.stages is None else section.stages.nodes
    free = _USABLE * count * machine.memory_bytes - model.parameters * model.weight_bytes
    most = int(free / model.context_bytes)
    if section.cached_tokens > most:
        raise ValueError(
            f"cached_tokens is {section.cached_tokens}, but beside the weights the memory of"
            f" {name} holds {max(0, most)} tokens"
        )


def memory_sum(section: VerifierSection, session_tokens: float) -> MemorySum | None:
    """Return the calculation for sessions of ``session_tokens`` cached tokens. None if no machine
    is named or its memory is unknown. Raises ``ValueError`` for an unknown machine, and if not a
    single session fits."""
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
    """Return the time law that ``section`` describes. ``folder`` is the base of relative file
    names, ``share`` the share of the layers that a node holds. Raises ``ProfileError`` or
    ``ValueError``."""
    if section.profile:
        profile = read_profile(find_file(section.profile, folder))
        law = profile.draft_step if operation is Operation.DRAFT_STEP else profile.target_pass
        law = _scale_law(law, share)
    elif section.roofline:
        law = roofline_law(section.roofline, share)
    else:
        assert section.ms is not None
        first_s, row_s = share * section.ms / 1e3, share * section.row_ms / 1e3
        table = ((1.0, first_s), (2.0, first_s + row_s)) if row_s else ((1.0, first_s),)
        law = TimeLaw(table, share * section.context_us / 1e6)
    return replace(law, spread=_log_normal(section.jitter)) if section.jitter else law


def describe_cost_source(section: CostSection) -> str:
    """Describe the source of these times for a report."""
    if section.profile:
        return f"measured (profile {section.profile})"
    if section.roofline:
        return f"computed from data sheets, not measured ({section.roofline})"
    return f"assumed ({section.ms:g} ms)"


def _scale_law(law: TimeLaw, share: float) -> TimeLaw:
    if share == 1.0:
        return law
    table = tuple((rows, share * seconds) for rows, seconds in law.table)
    return TimeLaw(table, share * law.context_s, law.spread, share * law.session_s)


def _log_normal(deviation: float) -> tuple[float, ...]:
    """Return the quantiles of a log-normal ratio with mean 1 and relative standard deviation
    ``deviation``."""
    sigma = math.sqrt(math.log1p(deviation * deviation))
    normal = statistics.NormalDist(-sigma * sigma / 2.0, sigma)
    shares = ((index + 0.5) / _SPREAD_POINTS for index in range(_SPREAD_POINTS))
    return tuple(math.exp(normal.inv_cdf(share)) for share in shares)
