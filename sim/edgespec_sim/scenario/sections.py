"""The keys of a scenario. Every section checks itself; an error names the key, the value and the
range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, replace
from enum import Enum
from pathlib import Path

from edgespec.bench.arms import Arm
from edgespec.config.loading import ConfigError, load_config
from edgespec.core.association.policies import Association
from edgespec.core.device.goodput_policy import DEFAULT_POLICY, PolicyName
from edgespec.core.device.memory import SMALLEST_WINDOW
from edgespec.core.ports import MAX_PLACES
from edgespec.core.protocol.checks import (
    Section,
    check_limits,
    check_range,
    choice_field,
    range_field,
)
from edgespec_sim.scenario.device_power import BatterySection, ThermalSection
from edgespec_sim.scenario.radio_5g import Radio5gSection
from edgespec_sim.scenario.verifiers import (
    DEFAULT_SESSIONS,
    RADIOS,
    MemorySum,
    check_cache,
    memory_sum,
)
from edgespec_sim.scenario.verifiers import MAX_DEVICES as MAX_DEVICES
from edgespec_sim.scenario.verifiers import CostSection as CostSection
from edgespec_sim.scenario.verifiers import ServerDraftSection as ServerDraftSection
from edgespec_sim.scenario.verifiers import StagesSection as StagesSection
from edgespec_sim.scenario.verifiers import VerifierSection as VerifierSection

_MINUTE_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class BackhaulSection(Section):
    """The network between the base stations. Each station has one line for all its traffic to the
    others."""

    rtt_ms: float = range_field(4.0, 0.0, _MINUTE_MS)
    """Round-trip time between any two stations."""
    mbps: float = range_field(1000.0, 0.1, 1e6)
    """Capacity of each station's line, each way."""


@dataclass(frozen=True, slots=True)
class CellHandoverSection(Section):
    """Makes a phone use the cell with the strongest signal, and lets it use any verifier. Traffic
    to the verifier of another cell crosses the backhaul. A running session stays with its
    verifier."""

    gap_ms: float = range_field(60.0, 0.0, _MINUTE_MS)
    """Interruption of the radio link at a handover."""
    backhaul: BackhaulSection = field(default_factory=BackhaulSection)


_HOUR_MS = 3_600_000.0
_MAX_MBPS = 1e6

# Ethernet 18, IPv4 20, TCP with timestamps 32, HTTP/2 frame 9, gRPC prefix 5: RFCs 894, 791,
# 9293, 7323, 9113. TLS would add 22.
FRAMING_BYTES = 84


@dataclass(frozen=True, slots=True)
class OutageSection(Section):
    """An interruption during which nothing passes; messages wait for its end."""

    at_s: float = range_field(0.0, 0.0, 1e6)
    for_s: float = range_field(1.0, 0.001, 1e6)


@dataclass(frozen=True, slots=True)
class HandoverSection(Section):
    """Periodic moves of the device to another cell."""

    every_s: float = range_field(60.0, 0.1, 1e6)
    """Mean time between two handovers; the intervals scatter by a quarter."""
    gap_ms: float = range_field(60.0, 0.0, _HOUR_MS)
    """Interruption at each handover. 3GPP TS 36.133 allows about 50 ms; measured tails reach
    seconds."""
    breaks: bool = False
    """Whether a handover changes the address, so that streams break and devices reconnect."""


@dataclass(frozen=True, slots=True)
class LinkSection:
    """One hop of a path. Its delay comes from ``rtt_ms``, from a ``trace``, or from both."""

    rtt_ms: float = range_field(0.0, 0.0, _HOUR_MS)
    """Propagation delay, both ways together. It is added to the delay of a trace, as the path
    behind the trace. With a trace that has only capacity it is the whole delay."""
    trace: str = ""
    """A trace file, or ``generate:KIND`` (wifi, lte, 5g, starlink, broadband, wan)."""
    trace_columns: str = ""
    """Meaning of the trace file's columns, in the syntax of ``edgespec-sim trace --columns``:
    ``time=NAME:s,rtt=NAME:ms``. Empty: the file has a known format."""
    trace_format: str = "auto"
    """Format of the trace file, such as ``pensieve`` (docs/simulator-importers.md). ``auto``: the
    content shows it."""
    trace_spread_s: float = range_field(0.0, 0.0, 1e6)
    """Offset between the devices' starts in the trace: device i starts at i times this. 0: all
    devices see the same conditions at the same time."""
    jitter_ms: float = range_field(0.0, 0.0, _HOUR_MS)
    """Mean of an exponential extra delay each way. A trace with delays has its own jitter
    instead."""
    loss: float = range_field(0.0, 0.0, 0.9)
    """Share of packets lost; a trace with losses overrides it. A lost packet is sent again and
    delays everything behind it. A device keeps one TCP connection for all its requests."""
    up_mbps: float = range_field(math.inf, 1e-4, _MAX_MBPS)
    down_mbps: float = range_field(math.inf, 1e-4, _MAX_MBPS)
    """Capacity. The capacity columns of a trace, if it has them, replace it."""
    shared: bool = False
    """Whether all devices send through one queue, instead of one queue each."""
    cross_up: float = range_field(0.0, 0.0, 0.95)
    cross_down: float = range_field(0.0, 0.0, 0.95)
    """Share of the capacity that other traffic uses, in [0, 0.95]. It needs a finite capacity."""
    framing_bytes: int = range_field(FRAMING_BYTES, 0, 1500)
    """Bytes that each message takes besides its payload."""
    outages: tuple[OutageSection, ...] = ()
    handover: HandoverSection | None = None
    radio_5g: Radio5gSection | None = None
    """The 5G air of this hop: grants of the uplink, slots, repetitions and sleep. ``{}`` is a
    common mid-band network. null: messages wait for nothing of the kind."""

    def __post_init__(self) -> None:
        check_limits(self)
        for name, share, capacity in (
            ("cross_up", self.cross_up, self.up_mbps),
            ("cross_down", self.cross_down, self.down_mbps),
        ):
            if share and capacity == math.inf:
                raise ValueError(f"{name} is {share:g}, but the link's capacity has no limit")
        ends_s = 0.0
        for outage in self.outages:
            if outage.at_s < ends_s:
                raise ValueError(f"outages: the one at {outage.at_s:g} s begins before {ends_s:g}")
            ends_s = outage.at_s + outage.for_s


@dataclass(frozen=True, slots=True)
class RadioSection(Section):
    """Mobile edge: devices move among the base stations of the verifiers."""

    area_m: float = range_field(1000.0, 10.0, 1e5)
    """Side of the square that contains all devices and stations. The stations stand on a grid."""
    bandwidth_mhz: float = range_field(10.0, 0.1, 1000.0)
    """Bandwidth of each base station, each way. Its devices share the airtime, and all stations use
    the same band."""
    device_dbm: float = range_field(20.0, -20.0, 40.0)
    """Power that a device radiates while it sends, at any distance. Its amplifier draws more."""
    load: float = range_field(0.0, 0.0, 0.95)
    """Share of every cell's airtime that other traffic uses, each way, in [0, 0.95]."""
    speed_m_per_s: float = range_field(1.5, 0.0, 100.0)
    """Mean speed of the random waypoint model: each leg has half to one and a half times this
    speed. 0: no device moves."""
    mobility: str = ""
    """A file of recorded movement in place of that model: SUMO's floating car data, GPX, or a table
    of positions. The devices take its tracks in order, within the square."""
    mobility_columns: str = ""
    """Meaning of the columns of a table of positions, ``time=NAME:s,device=NAME,x=NAME:m,y=NAME:m``
    or with ``lat`` and ``lon``. Empty: the file has a known format."""
    mobility_format: str = "auto"
    """Format of the file (sumo-fcd, sumo-fcd-geo, gpx or positions). ``auto``: the content shows
    it."""
    handover: CellHandoverSection | None = None
    """Handover between cells. null: a phone is always in the cell of the verifier that it uses."""


HOURS = 24
MAX_RATE_PER_S = 10_000.0
DRAIN_S = 60.0
"""Default of ``drain_s`` with an open loop."""


class ArrivalKind(Enum):
    POISSON = "poisson"
    DIURNAL = "diurnal"
    RECORDED = "recorded"


class AtDevice(Enum):
    """Handling of a request whose device is busy."""

    OWN = "own"
    """The request waits at its device, behind earlier ones."""
    FREE = "free"
    """The request goes to the next free device of the same group, and waits for one if there is
    none."""


@dataclass(frozen=True, slots=True)
class ArrivalsSection:
    """An open loop: requests arrive whether or not earlier ones have ended. Each arrives at a
    device drawn uniformly. Arrival times, devices, lengths and prompts are the same for every
    arm."""

    kind: ArrivalKind = ArrivalKind.POISSON
    rate: float = 0.0
    """poisson: requests per second of all devices together."""
    rates: tuple[float, ...] = range_field((), 0.0, MAX_RATE_PER_S)
    """diurnal: requests per second at 0 h, 1 h, ... 23 h, interpolated linearly; the day
    repeats."""
    compress: float = range_field(1.0, 1.0, 86_400.0)
    """diurnal: seconds of the day that pass in one second of the world. Rates are not changed, so a
    day compressed into 24 minutes has a sixtieth of its requests."""
    file: str = ""
    """recorded: a CSV file with ``time_s`` (or ``timestamp``), and optionally the lengths; or a
    trace of Azure's LLM inference, or BurstGPT."""
    columns: str = ""
    """recorded: meaning of the file's columns, ``time=NAME:s,prompt=NAME,output=NAME``. Empty: the
    file has a known format."""
    format: str = "auto"
    """recorded: format of the file (arrivals, azure or burstgpt). ``auto``: its header shows it."""
    from_s: float = range_field(0.0, 0.0, 1e9)
    """recorded: seconds of the file that are skipped, such as 86400 for its second day."""
    speed: float = range_field(1.0, 1e-3, 1e4)
    """recorded: speed-up of the playback, which raises the rate by the same factor."""
    at: AtDevice = AtDevice.OWN

    def __post_init__(self) -> None:
        check_limits(self)
        given = {"rate": bool(self.rate), "rates": bool(self.rates), "file": bool(self.file)}
        wanted = {
            ArrivalKind.POISSON: "rate",
            ArrivalKind.DIURNAL: "rates",
            ArrivalKind.RECORDED: "file",
        }[self.kind]
        for name, is_given in given.items():
            if is_given != (name == wanted):
                verb = "is missing" if name == wanted else "is given"
                raise ValueError(f"{name} {verb}, but {self.kind.value} arrivals take {wanted}")
        if self.kind is ArrivalKind.POISSON:
            check_range("rate", self.rate, 0.0, MAX_RATE_PER_S, open_low=True)
        if self.rates and len(self.rates) != HOURS:
            raise ValueError(f"rates has {len(self.rates)} numbers, but must have {HOURS}")
        if self.rates and not any(self.rates):
            raise ValueError("rates are all 0, but at least one of them must be above 0")

    @property
    def about(self) -> str:
        """Description of the arrivals for a report, and of where they wait."""
        if self.kind is ArrivalKind.POISSON:
            what = f"Poisson, {self.rate:g} requests/s"
        elif self.kind is ArrivalKind.DIURNAL:
            what = f"a day's curve, {min(self.rates):g} to {max(self.rates):g} requests/s"
        else:
            faster = f", played {self.speed:g} times as fast" if self.speed != 1.0 else ""
            what = f"recorded in {self.file}{faster}"
        where = {
            AtDevice.OWN: "at its own device, and waits there while that is busy",
            AtDevice.FREE: "at a free device, or waits for one",
        }[self.at]
        return f"{what}; each arrives {where}"

    def rate_at(self, now_s: float) -> float:
        """Return the requests per second at a time (poisson and diurnal)."""
        if self.kind is ArrivalKind.POISSON:
            return self.rate
        hour = (now_s * self.compress / 3600.0) % HOURS
        low = int(hour) % HOURS
        share = hour - int(hour)
        return (1.0 - share) * self.rates[low] + share * self.rates[(low + 1) % HOURS]

    @property
    def highest_rate(self) -> float:
        """The highest rate at any time (poisson and diurnal)."""
        return max((self.rate, *self.rates))

    def divide(self, parts: int) -> ArrivalsSection:
        """Return one of ``parts`` equal shares of the arrivals. Raises ``ValueError`` for recorded
        ones."""
        if self.kind is ArrivalKind.RECORDED:
            raise ValueError(
                f"shards is {parts}, but recorded arrivals are played in one world: shards 1"
            )
        rates = tuple(rate / parts for rate in self.rates)
        return replace(self, rate=self.rate / parts, rates=rates)


@dataclass(frozen=True, slots=True)
class SloSection(Section):
    """Service objectives: 95 % of the requests must meet each of them. A request attains them if it
    ended well and met both."""

    ttft_p95_ms: float | None = range_field(None, 0.1, 3_600_000.0)
    tpot_p95_ms: float | None = range_field(None, 0.1, 3_600_000.0)

    @property
    def ttft_s(self) -> float:
        """The objective in seconds, infinite if there is none."""
        return math.inf if self.ttft_p95_ms is None else self.ttft_p95_ms / 1e3

    @property
    def tpot_s(self) -> float:
        return math.inf if self.tpot_p95_ms is None else self.tpot_p95_ms / 1e3

    @property
    def has_objectives(self) -> bool:
        return self.ttft_p95_ms is not None or self.tpot_p95_ms is not None


@dataclass(frozen=True, slots=True)
class ConditionSection(Section):
    """A device's conditions from ``at_s`` on. A value that is left out keeps its value from the row
    before; one that no row gives is unknown, as on a device without such a sensor."""

    at_s: float = range_field(MISSING, 0.0, 1e6)
    resident_mib: float | None = range_field(None, 0.0, 1e6)
    """Memory of the agent's process without the draft's keys and values."""
    slowdown: float | None = range_field(None, 0.01, 100.0)
    """Factor on the duration of draft steps, for every arm that drafts."""


@dataclass(frozen=True, slots=True)
class ConditionsSection:
    """A course of conditions, and the memory budget that the device's memory guard keeps. The guard
    acts in the arm ``edgespec``; the other arms draft as their papers describe."""

    course: tuple[ConditionSection, ...]
    """Rows in order of time, beginning at 0; the last row holds until the end."""
    budget_mib: float | None = range_field(None, 1.0, 1e6)
    """Memory budget of the process; null: no budget. ``resident_mib`` of the course counts in
    it."""
    window: int = range_field(4096, SMALLEST_WINDOW, 1 << 20)
    """Most tokens whose keys and values the draft holds, if there is a budget."""
    token_kib: float = range_field(112.0, 1e-3, 1e5)
    """Size of one token's keys and values. The default is Qwen3-0.6B's: 28 layers of 8 heads of 128
    in float16."""

    def __post_init__(self) -> None:
        check_limits(self)
        if not self.course or self.course[0].at_s != 0.0:
            raise ValueError("course must begin with a row at_s 0")
        for before, after in itertools.pairwise(self.course):
            if after.at_s <= before.at_s:
                raise ValueError(
                    f"course has {after.at_s:g} s after {before.at_s:g} s, but must increase"
                )


class TokensFrom(Enum):
    PROCESS = "process"
    TAPE = "tape"
    TOY = "toy"


@dataclass(frozen=True, slots=True)
class TokensSection:
    """How well drafts agree with the target, and the source of that agreement."""

    source: TokensFrom = TokensFrom.PROCESS
    acceptance: float | None = range_field(None, 0.01, 0.99)
    """process: mean share of first candidates that are right; null: the share of the tape."""
    tape: str = "bundled-greedy"
    """A file, or the name of a bundled tape. tape: it is replayed; process: its shape is fitted."""
    noise: float = range_field(0.25, 0.0, 10.0)
    """toy: distance of the draft from the target, in units of the target's sharpness."""
    temperature: float = range_field(0.0, 0.0, 100.0)
    """toy: sampling temperature. A tape has its own."""
    lossy_threshold: float | None = range_field(None, 0.0, 1.0)
    """toy: a LOSSY rule (``dsd``) that also accepts drafts of at least this probability, relative
    to the target's best token. null: commit exactly the target's own tokens."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.acceptance is not None and self.source is not TokensFrom.PROCESS:
            raise ValueError(
                f"acceptance is {self.acceptance:g}, but only source: process has this key"
            )
        if self.lossy_threshold is not None and self.source is not TokensFrom.TOY:
            raise ValueError(
                f"lossy_threshold is {self.lossy_threshold:g}, but only source: toy has this key,"
                " since the other sources have no probabilities of wrong tokens"
            )


@dataclass(frozen=True, slots=True)
class WorkloadSection(Section):
    """The behaviour of each user: send a request, read, think, repeat."""

    prompt_tokens: int = range_field(64, 0, 65_536)
    """Mean length of a prompt. 0: the prompts of the tape, only with tokens from a tape."""
    output_tokens: int = range_field(128, 1, 32_000)
    length_spread: float = range_field(0.0, 0.0, 3.0)
    """Relative standard deviation of both lengths, log-normal; 0: all equal."""
    think_s: float = range_field(5.0, 0.0, 1e6)
    """Mean pause between an output and the user's next request, exponential."""
    requests: int = range_field(0, 0, 1_000_000)
    """Number of requests after which a user stops; 0: continue until the world ends."""
    start_within_s: float = range_field(1.0, 0.0, 1e6)
    """First requests are spread evenly over this time."""
    turns: int = range_field(1, 1, 1000)
    """Requests of a conversation. Each further turn sends the prompt of the turn before again, as
    long a text as its output was, and ``turn_tokens`` more. 1: every request stands alone."""
    turn_tokens: int = range_field(0, 0, 65_536)
    """Mean number of tokens that a further turn adds: the result of a tool, or a question."""
    tool_s: float = range_field(0.0, 0.0, 1e6)
    """Mean pause between the turns of a conversation, exponential, such as the time of a tool.
    ``think_s`` is the pause between conversations."""
    start_thinking: bool = False
    """Start the users in a thinking pause instead, so that the world begins near its steady
    state."""


@dataclass(frozen=True, slots=True)
class DeviceSection(Section):
    """A group of equal devices."""

    count: int = range_field(1, 1, MAX_DEVICES)
    path: tuple[str, ...] = ()
    """Links from the device outwards."""
    draft: CostSection = field(default_factory=lambda: CostSection(ms=8.0))
    further_places: tuple[float, ...] = ()
    """A parallel draft, which fills several positions in one step: for each position behind the
    next one, the share of the draft's right tokens that it still gets right there. [0.8, 0.6] is a
    draft for three positions. Each position costs ``row_ms`` of ``draft``. Not with tokens from the
    toy model."""
    workload: WorkloadSection = field(default_factory=WorkloadSection)
    profile: str = ""
    """Published energy figures: a bundled name (docs/energy.md) or a YAML file. Keys that the
    scenario gives itself win over it."""
    idle_w: float | None = range_field(None, 0.0, 1000.0)
    """Power of the device while nothing runs, without its radio. It counts for ``battery`` and
    ``thermal``; energies per request and token are those above idle. null: unknown."""
    draft_w: float = range_field(0.0, 0.0, 1000.0)
    """Power of a running draft step above idle, in watts."""
    battery: BatterySection | None = None
    """The device's battery. null: it does not run empty."""
    thermal: ThermalSection | None = None
    """Temperature and throttling. null: the device stays cool. ``conditions`` has a course of
    slowdowns by other causes; both factors apply."""
    policy: PolicyName = DEFAULT_POLICY
    """Draft policy of the arm ``edgespec``."""
    radio_power: str = choice_field("", ("", *RADIOS))
    """lte or wifi: published power of the radio in each of its states. Without this key or
    ``draft_w``, no energy is reported."""
    conditions: ConditionsSection | None = None
    """Other programs and memory over time; null: conditions are ignored."""

    def __post_init__(self) -> None:
        check_limits(self)
        if len(self.further_places) >= MAX_PLACES:
            raise ValueError(
                f"further_places has {len(self.further_places)} values, but at most"
                f" {MAX_PLACES - 1} count"
            )
        for share in self.further_places:
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"further_places has {share:g}, but must be in [0, 1]")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A world and the arms to compare in it."""

    name: str
    devices: Mapping[str, DeviceSection]
    verifiers: Mapping[str, VerifierSection] = field(
        default_factory=lambda: {"verifier": VerifierSection()}
    )
    links: Mapping[str, LinkSection] = field(default_factory=dict)
    about: str = ""
    duration_s: float = range_field(60.0, 0.1, 1e6)
    warm_up_s: float = 0.0
    """Start of the window in which requests count. Requests sent before it, or after
    ``duration_s``, do not count."""
    drain_s: float | None = range_field(None, 0.0, 1e5)
    """Time after ``duration_s`` in which requests that count may still end, under the same load.
    null: 60 with ``arrivals``, else 0, so that the world's end cuts them off."""
    arrivals: ArrivalsSection | None = None
    """An open loop in place of users who think; null: a closed loop."""
    slo: SloSection = field(default_factory=SloSection)
    tokens: TokensSection = field(default_factory=TokensSection)
    arms: tuple[Arm, ...] = tuple(Arm)
    """Arms to compare. Default: all, those with a server's draft only if a verifier has one."""
    gamma: int | None = range_field(None, 1, 32)
    """Draft length of the arm ``vanilla``; null: the best length by its own estimates."""
    association: Association = Association.LOWEST_DELAY
    """How a verifier is chosen for each request: listed, lowest-delay or rendezvous."""
    radio: RadioSection | None = None
    shards: int = range_field(1, 1, 1024)
    """Number of separate worlds that devices and verifiers are divided among."""
    message_ms: float = range_field(0.3, 0.0, 1000.0)
    """One-way time of a message besides the link: codec, event loops, sockets
    (docs/measurements/simulator.md)."""
    lease_s: float = range_field(30.0, 0.0, 86_400.0)
    connect_trips: int = range_field(2, 0, 10)
    """Round trips of a new connection before its first request: one each for TCP and TLS 1.3, so 1
    without TLS. A request on an existing connection does not pay them."""
    connected: bool = False
    """Whether devices are connected when the world begins, like agents that have run for a while.
    false: each device connects once, when it first uses a verifier."""

    def __post_init__(self) -> None:
        check_limits(self)
        if not self.name or len(self.name) > 64:
            raise ValueError(f"name is {self.name!r}, but must have 1 to 64 characters")
        if not self.devices:
            raise ValueError("devices is empty, but must name at least one group")
        if not self.verifiers:
            raise ValueError("verifiers is empty, but must name at least one")
        self._check_server_drafts()
        self._check_further_places()
        if not self.arms or len(set(self.arms)) != len(self.arms):
            names = ", ".join(arm.value for arm in self.arms)
            raise ValueError(f"arms is [{names}], but must name each wanted one once")
        if not 0.0 <= self.warm_up_s < self.duration_s:
            raise ValueError(
                f"warm_up_s is {self.warm_up_s:g}, but must be at least 0 and less than duration_s,"
                f" {self.duration_s:g}"
            )
        for name, section in self.devices.items():
            if section.workload.turns > 1 and self.tokens.source is TokensFrom.TAPE:
                raise ValueError(
                    f"devices.{name}.workload.turns is {section.workload.turns}, but a tape has"
                    " prompts of one turn: take tokens.source process or toy"
                )
        if self.tokens.source is not TokensFrom.TAPE:
            for name, section in self.devices.items():
                if section.workload.prompt_tokens == 0:
                    raise ValueError(
                        f"devices.{name}.workload.prompt_tokens is 0, which only a tape allows"
                    )
        if self.arrivals is not None:
            self._check_arrivals(self.arrivals)
        self._check_names()
        for kind in self.verifiers:
            try:
                self.memory_sum(kind)
                check_cache(self.verifiers[kind])
            except ValueError as error:
                raise ValueError(f"verifiers.{kind}: {error}") from None

    def memory_sum(self, kind: str) -> MemorySum | None:
        """Return how the memory of a verifier of that kind is divided, for sessions of the mean
        length. None if its machine is unknown. Raises ``ValueError`` if not even one session
        fits."""
        return memory_sum(self.verifiers[kind], self.session_tokens)

    def session_limit(self, kind: str) -> int:
        """Return the most sessions that a verifier of that kind runs at a time."""
        section, memory = self.verifiers[kind], self.memory_sum(kind)
        if memory is None or section.cached_tokens is not None:
            return section.max_sessions or DEFAULT_SESSIONS
        return min(section.max_sessions or memory.sessions, memory.sessions)

    def memory_note(self, kind: str) -> str:
        """Describe how many sessions a verifier of that kind runs at a time, and the reason."""
        section, memory = self.verifiers[kind], self.memory_sum(kind)
        takes = f"verifier {kind} takes {self.session_limit(kind)} sessions at a time"
        if section.cached_tokens is not None:
            return (
                f"Memory: {takes}. Its KV cache holds {section.cached_tokens} tokens, as"
                " cached_tokens says: prompts share their beginnings, and sessions wait while it is"
                " full."
            )
        if memory is None:
            why = "as max_sessions says" if section.max_sessions else "the daemon's default"
            return f"Memory: {takes} ({why}; its memory is unknown)."
        room = f"memory has room for {memory.sessions}: {memory.about}"
        if section.max_sessions and section.max_sessions < memory.sessions:
            return f"Memory: {takes}, as max_sessions says; its {room}."
        more = ""
        if section.max_sessions and section.max_sessions > memory.sessions:
            more = f" max_sessions is {section.max_sessions}, which is more than fits."
        return f"Memory: {takes}, as its {room}.{more}"

    @property
    def session_tokens(self) -> float:
        """Mean tokens of a whole request, in the group with the longest requests. The log-normal
        spread of a length keeps its median and raises its mean, hence the root."""
        return max(
            (one.workload.prompt_tokens + one.workload.output_tokens)
            * math.sqrt(1.0 + one.workload.length_spread**2)
            for one in self.devices.values()
        )

    @property
    def window_s(self) -> float:
        """Length of the window in which requests are sent that count."""
        return self.duration_s - self.warm_up_s

    @property
    def drain_limit_s(self) -> float:
        if self.drain_s is not None:
            return self.drain_s
        return DRAIN_S if self.arrivals is not None else 0.0

    @property
    def device_count(self) -> int:
        return sum(section.count for section in self.devices.values())

    def verifier_name(self, kind: str, number: int) -> str:
        """Return the name of a verifier from its kind and number (from 0)."""
        return kind if self.verifiers[kind].count == 1 else f"{kind}-{number + 1}"

    def device_name(self, group: str, number: int) -> str:
        """Return the name of a device from its group and number (from 0)."""
        return group if self.devices[group].count == 1 else f"{group}-{number + 1}"

    def _check_server_drafts(self) -> None:
        for name, section in self.verifiers.items():
            draft = section.server_draft
            if draft is None or draft.acceptance is None:
                continue
            if self.tokens.source is not TokensFrom.PROCESS:
                raise ValueError(
                    f"verifiers.{name}.server_draft.acceptance is {draft.acceptance:g}, but only"
                    f" tokens.source: process has this key, and it is {self.tokens.source.value}"
                )
        if any(section.server_draft is not None for section in self.verifiers.values()):
            return
        if set(self.arms) == set(Arm):
            object.__setattr__(self, "arms", tuple(one for one in self.arms if not one.on_server))
        for arm in self.arms:
            if arm.on_server:
                raise ValueError(f"arms names {arm.value}, but no verifier has a server_draft")

    def _check_further_places(self) -> None:
        if self.tokens.source is not TokensFrom.TOY:
            return
        for name, section in self.devices.items():
            if section.further_places:
                raise ValueError(
                    f"devices.{name}.further_places is {list(section.further_places)}, but not with"
                    " tokens.source: toy, whose draft fills one position a step"
                )

    def _check_arrivals(self, arrivals: ArrivalsSection) -> None:
        if self.shards > 1:
            arrivals.divide(self.shards)
        for name, section in self.devices.items():
            if section.workload.requests:
                raise ValueError(
                    f"devices.{name}.workload.requests is {section.workload.requests}, but with"
                    " arrivals the requests come from there, so it must be 0"
                )

    def _check_links_behind_stations(self) -> None:
        """Check the links between the stations and the verifiers. With handover, a stream's paths
        are built anew at each change of cell. The state of a TCP connection or a trace would be
        lost then."""
        for name, section in self.verifiers.items():
            for link in section.path:
                if self.links[link].loss or self.links[link].trace:
                    raise ValueError(
                        f"radio.handover: the path of verifiers.{name} has link {link!r}, but with"
                        " handover such a link must have no loss and no trace"
                    )

    def _check_names(self) -> None:
        for kind, sections in (("devices", self.devices), ("verifiers", self.verifiers)):
            for name, section in sections.items():
                for link in section.path:
                    if link not in self.links:
                        known = ", ".join(self.links) or "none"
                        raise ValueError(
                            f"{kind}.{name}.path names link {link!r}, but links has {known}"
                        )
                if section.count % self.shards:
                    raise ValueError(
                        f"{kind}.{name}.count is {section.count}, "
                        f"but must divide by shards, {self.shards}"
                    )
        if self.radio is not None:
            if self.radio.mobility and self.shards > 1:
                raise ValueError(
                    f"shards is {self.shards}, but radio.mobility is played in one world: shards 1"
                )
            for name, section in self.devices.items():
                if section.path:
                    raise ValueError(
                        f"devices.{name}.path names links, but with radio the air is the first hop;"
                        " links behind a base station belong to the verifiers' paths"
                    )
            if self.radio.handover is not None:
                self._check_links_behind_stations()


# In a checkout the scenarios lie beside the package, in an installation inside it.
_FOLDERS = (Path(__file__).parents[1] / "scenarios", Path(__file__).parents[2] / "scenarios")


def bundled_scenarios() -> dict[str, Path]:
    """Return the files of the scenarios that come with the simulator, by name."""
    return {
        path.stem: path
        for folder in _FOLDERS
        if folder.is_dir()
        for path in sorted(folder.glob("*.yaml"))
    }


def scenario_path(name: str) -> Path:
    """Return the file of a scenario, given as a path or a bundled name. Raises ``ConfigError`` that
    lists the bundled scenarios."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    bundled = bundled_scenarios()
    if name not in bundled:
        raise ConfigError(f"no scenario {name!r}: not a YAML file, nor one of {', '.join(bundled)}")
    return bundled[name]


def load_scenario(name: str, overrides: Mapping[str, object] | None = None) -> Scenario:
    """Load a scenario with ``overrides`` of its keys. Raises ``ConfigError`` that names what is
    wrong, where, and what would be right."""
    return load_config(Scenario, scenario_path(name), overrides)
