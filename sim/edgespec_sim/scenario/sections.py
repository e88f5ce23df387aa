"""What a scenario says. Every section checks itself: the error names key, value and range."""

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
from edgespec.core.protocol.checks import Section, among, bounded, check_limits, limited
from edgespec_sim.scenario.verifiers import MAX_DEVICES as MAX_DEVICES
from edgespec_sim.scenario.verifiers import RADIOS, SESSIONS_UNKNOWN, MemorySum, memory_sum
from edgespec_sim.scenario.verifiers import CostSection as CostSection
from edgespec_sim.scenario.verifiers import ServerDraftSection as ServerDraftSection
from edgespec_sim.scenario.verifiers import StagesSection as StagesSection
from edgespec_sim.scenario.verifiers import VerifierSection as VerifierSection

_MINUTE_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class BackhaulSection(Section):
    """Between the base stations; each has one line to the others, for all that it sends."""

    rtt_ms: float = limited(4.0, 0.0, _MINUTE_MS)
    """Between any two of them."""
    mbps: float = limited(1000.0, 0.1, 1e6)
    """Of each station's line, each way."""


@dataclass(frozen=True, slots=True)
class CellHandoverSection(Section):
    """A phone is attached to the cell that it hears best, and may use any verifier; what is not
    its cell's own goes over the backhaul. A session that runs stays with its verifier."""

    gap_ms: float = limited(60.0, 0.0, _MINUTE_MS)
    """Nothing passes on the air meanwhile."""
    backhaul: BackhaulSection = field(default_factory=BackhaulSection)


_HOUR_MS = 3_600_000.0
_MAX_MBPS = 1e6

# Ethernet 18, IPv4 20, TCP with timestamps 32, HTTP/2 frame 9, gRPC prefix 5: RFCs 894, 791,
# 9293, 7323, 9113. TLS would add 22.
FRAMING_BYTES = 84


@dataclass(frozen=True, slots=True)
class OutageSection(Section):
    """Nothing passes for a while; messages wait."""

    at_s: float = limited(0.0, 0.0, 1e6)
    for_s: float = limited(1.0, 0.001, 1e6)


@dataclass(frozen=True, slots=True)
class HandoverSection(Section):
    """The device moves to another cell again and again."""

    every_s: float = limited(60.0, 0.1, 1e6)
    """Mean time between two; the times scatter by a quarter."""
    gap_ms: float = limited(60.0, 0.0, _HOUR_MS)
    """Nothing passes meanwhile. 3GPP TS 36.133 allows some 50 ms; measured tails reach seconds."""
    breaks: bool = False
    """The address changes, so streams break and devices reconnect."""


@dataclass(frozen=True, slots=True)
class LinkSection:
    """One hop. Delay comes from ``rtt_ms`` or from a ``trace``, both ways together."""

    rtt_ms: float = limited(0.0, 0.0, _HOUR_MS)
    """Propagation there and back; with a trace it comes on top (the path behind the trace), and
    with one of capacity alone it is all there is."""
    trace: str = ""
    """A trace file, or ``generate:KIND`` (wifi, lte, 5g, starlink, broadband, wan)."""
    trace_columns: str = ""
    """Which columns of the trace file are what, as ``--columns`` of ``edgespec-sim trace`` says it:
    ``time_s=NAME,rtt_ms=NAME``; empty: a known format."""
    trace_spread_s: float = limited(0.0, 0.0, 1e6)
    """Device i enters the trace at i times this; 0: all see the same weather."""
    jitter_ms: float = limited(0.0, 0.0, _HOUR_MS)
    """Mean of an exponential extra delay each way; a trace's own instead, where there is one."""
    loss: float = limited(0.0, 0.0, 0.9)
    """Share of packets lost, or what a trace says. A lost one is sent again and holds up what
    follows. A device keeps one TCP connection for all its requests."""
    up_mbps: float = limited(math.inf, 1e-4, _MAX_MBPS)
    down_mbps: float = limited(math.inf, 1e-4, _MAX_MBPS)
    """Capacity; a trace's own capacity columns, where it has them, take their place."""
    shared: bool = False
    """All devices send through one queue, instead of one queue each."""
    cross_up: float = limited(0.0, 0.0, 0.95)
    cross_down: float = limited(0.0, 0.0, 0.95)
    """Share of the capacity that others use, in [0, 0.95]; needs a finite capacity."""
    framing_bytes: int = limited(FRAMING_BYTES, 0, 1500)
    """What each message takes besides its payload."""
    outages: tuple[OutageSection, ...] = ()
    handover: HandoverSection | None = None

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
    """Mobile edge: devices move among the verifiers' base stations."""

    area_m: float = limited(1000.0, 10.0, 1e5)
    """Side of the square in which all is; the stations stand on a grid in it."""
    bandwidth_mhz: float = limited(10.0, 0.1, 1000.0)
    """Of each base station, each way; its devices share the airtime. All use the same band."""
    device_dbm: float = limited(20.0, -20.0, 40.0)
    """What a device radiates while it sends, near or far; its amplifier draws more."""
    load: float = limited(0.0, 0.0, 0.95)
    """Share of every cell's airtime that others use, each way, in [0, 0.95]."""
    speed_m_per_s: float = limited(1.5, 0.0, 100.0)
    """Random waypoint, each leg at half to one and a half times this; 0: nobody moves."""
    handover: CellHandoverSection | None = None
    """None: a phone is in the cell of the verifier that it uses."""


HOURS = 24
MOST_PER_S = 10_000.0
DRAIN_S = 60.0
"""Of an open loop whose scenario does not say."""


class ArrivalKind(Enum):
    POISSON = "poisson"
    DIURNAL = "diurnal"
    RECORDED = "recorded"


class AtDevice(Enum):
    """What becomes of a request whose device is busy."""

    OWN = "own"
    """It waits there, behind those that came before it."""
    FREE = "free"
    """It takes the next free device of the same group, and waits for one if there is none."""


@dataclass(frozen=True, slots=True)
class ArrivalsSection:
    """An open loop: requests come whether or not earlier ones have ended. Each comes at a device
    that is drawn evenly; instants, devices, lengths and questions are the same for every arm."""

    kind: ArrivalKind = ArrivalKind.POISSON
    rate: float = 0.0
    """poisson: requests a second, of all devices together."""
    rates: tuple[float, ...] = limited((), 0.0, MOST_PER_S)
    """diurnal: requests a second at 0 h, 1 h, ... 23 h; a line between, and the day begins anew."""
    compress: float = limited(1.0, 1.0, 86_400.0)
    """diurnal: seconds of the day that one second of the world stands for. Rates stay as they
    are: 24 h in 24 minutes have a sixtieth of the requests."""
    file: str = ""
    """recorded: CSV with ``time_s`` (or ``timestamp``), and lengths where it has them."""
    speed: float = limited(1.0, 1e-3, 1e4)
    """recorded: how many times faster it is played; the rate rises with it."""
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
            bounded("rate", self.rate, 0.0, MOST_PER_S, open_low=True)
        if self.rates and len(self.rates) != HOURS:
            raise ValueError(f"rates has {len(self.rates)} numbers, but must have {HOURS}")
        if self.rates and not any(self.rates):
            raise ValueError("rates are all 0, but one of them must be above it")

    @property
    def about(self) -> str:
        """For a reader: what comes, and where it waits."""
        if self.kind is ArrivalKind.POISSON:
            what = f"Poisson, {self.rate:g} requests/s"
        elif self.kind is ArrivalKind.DIURNAL:
            what = f"a day's curve, {min(self.rates):g} to {max(self.rates):g} requests/s"
        else:
            faster = f", {self.speed:g} times as fast" if self.speed != 1.0 else ""
            what = f"recorded in {self.file}{faster}"
        where = {
            AtDevice.OWN: "at its own device, and waits there",
            AtDevice.FREE: "at a free device, and waits for one",
        }[self.at]
        return f"{what}; each comes {where}"

    def rate_at(self, now_s: float) -> float:
        """Requests a second (poisson and diurnal)."""
        if self.kind is ArrivalKind.POISSON:
            return self.rate
        hour = (now_s * self.compress / 3600.0) % HOURS
        low = int(hour) % HOURS
        share = hour - int(hour)
        return (1.0 - share) * self.rates[low] + share * self.rates[(low + 1) % HOURS]

    @property
    def most(self) -> float:
        """The highest rate of all (poisson and diurnal)."""
        return max((self.rate, *self.rates))

    def divided(self, parts: int) -> ArrivalsSection:
        """One of so many equal shares. Raises ``ValueError`` for recorded ones."""
        if self.kind is ArrivalKind.RECORDED:
            raise ValueError(
                f"shards is {parts}, but recorded arrivals are played in one world: shards 1"
            )
        rates = tuple(rate / parts for rate in self.rates)
        return replace(self, rate=self.rate / parts, rates=rates)


@dataclass(frozen=True, slots=True)
class SloSection(Section):
    """Objectives of service: 95 % of the requests have to keep to each. A request attains them if
    it ended well and keeps to both."""

    ttft_p95_ms: float | None = limited(None, 0.1, 3_600_000.0)
    tpot_p95_ms: float | None = limited(None, 0.1, 3_600_000.0)

    @property
    def ttft_s(self) -> float:
        """Infinite where there is none."""
        return math.inf if self.ttft_p95_ms is None else self.ttft_p95_ms / 1e3

    @property
    def tpot_s(self) -> float:
        return math.inf if self.tpot_p95_ms is None else self.tpot_p95_ms / 1e3

    @property
    def given(self) -> bool:
        return self.ttft_p95_ms is not None or self.tpot_p95_ms is not None


@dataclass(frozen=True, slots=True)
class ConditionSection(Section):
    """What holds from ``at_s`` on. What is left out stays as the row before said, or is not known;
    a device says as little about itself where it has no such sensor."""

    at_s: float = limited(MISSING, 0.0, 1e6)
    resident_mib: float | None = limited(None, 0.0, 1e6)
    """What the agent's process holds beside the draft's keys and values."""
    slowdown: float | None = limited(None, 0.01, 100.0)
    """How many times as long draft steps take, under every arm that drafts."""


@dataclass(frozen=True, slots=True)
class ConditionsSection:
    """A course of conditions, and the memory budget that the device's governor keeps. It governs
    the arm ``edgespec``; the others draft as their papers say."""

    course: tuple[ConditionSection, ...]
    """Rows in order of time, the first of them at 0; the last one holds to the end."""
    budget_mib: float | None = limited(None, 1.0, 1e6)
    """What the process may hold; null: no budget. ``resident_mib`` of the course counts in it."""
    window: int = limited(4096, SMALLEST_WINDOW, 1 << 20)
    """Tokens whose keys and values the draft holds at most, with a budget."""
    token_kib: float = limited(112.0, 1e-3, 1e5)
    """What those of one token take: 28 layers of 8 heads of 128 in float16, as Qwen3-0.6B has."""

    def __post_init__(self) -> None:
        check_limits(self)
        if not self.course or self.course[0].at_s != 0.0:
            raise ValueError("course must begin with a row at_s 0")
        for before, after in itertools.pairwise(self.course):
            if after.at_s <= before.at_s:
                raise ValueError(f"course has {after.at_s:g} s behind {before.at_s:g} s")


class TokensFrom(Enum):
    PROCESS = "process"
    TAPE = "tape"
    TOY = "toy"


@dataclass(frozen=True, slots=True)
class TokensSection:
    """How well drafts agree with the target, and where that is known from."""

    source: TokensFrom = TokensFrom.PROCESS
    acceptance: float | None = limited(None, 0.01, 0.99)
    """process: mean share of first guesses that are right; null: that of the tape."""
    tape: str = "bundled-greedy"
    """tape: a file, or the name of a bundled one; process: what its shape is fitted to."""
    noise: float = limited(0.25, 0.0, 10.0)
    """toy: how far the draft is from the target, in units of the target's sharpness."""
    temperature: float = limited(0.0, 0.0, 100.0)
    """toy only; a tape has its own."""
    lossy_threshold: float | None = limited(None, 0.0, 1.0)
    """toy only: LOSSY. Tolerate drafts at least so likely, relative to the target's best token
    (the rule ``dsd``); null: commit the target's own tokens and nothing else."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.acceptance is not None and self.source is not TokensFrom.PROCESS:
            raise ValueError(
                f"acceptance is {self.acceptance:g}, but only source: process takes one"
            )
        if self.lossy_threshold is not None and self.source is not TokensFrom.TOY:
            raise ValueError(
                f"lossy_threshold is {self.lossy_threshold:g}, but only source: toy takes one,"
                " as nothing else knows how likely a wrong token is"
            )


@dataclass(frozen=True, slots=True)
class WorkloadSection(Section):
    """What each user does: ask, read, think, ask again."""

    prompt_tokens: int = limited(64, 0, 32_000)
    """0: as the tape's own prompts; only with tokens from a tape."""
    output_tokens: int = limited(128, 1, 32_000)
    length_spread: float = limited(0.0, 0.0, 3.0)
    """Relative standard deviation of both lengths, log-normal; 0: all alike."""
    think_s: float = limited(5.0, 0.0, 1e6)
    """Mean pause between an answer and the next question, exponential."""
    requests: int = limited(0, 0, 1_000_000)
    """Stop after so many; 0: go on until the world ends."""
    start_within_s: float = limited(1.0, 0.0, 1e6)
    """First questions come evenly within this time."""
    start_thinking: bool = False
    """First questions come after a pause like any other instead: near the long run at once."""


@dataclass(frozen=True, slots=True)
class DeviceSection(Section):
    """A group of devices that are alike."""

    count: int = limited(1, 1, MAX_DEVICES)
    path: tuple[str, ...] = ()
    """Links from the device outwards."""
    draft: CostSection = field(default_factory=lambda: CostSection(ms=8.0))
    workload: WorkloadSection = field(default_factory=WorkloadSection)
    draft_w: float = limited(0.0, 0.0, 1000.0)
    """Power while a draft step runs, in watts, above idle."""
    policy: PolicyName = DEFAULT_POLICY
    """By which the arm ``edgespec`` drafts."""
    radio_power: str = among("", ("", *RADIOS))
    """lte or wifi: what the radio takes in each of its states. Without it, or
    without ``draft_w``, no energy is reported."""
    conditions: ConditionsSection | None = None
    """Other programs and memory over time; null: they are not looked at."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A world and what to compare in it."""

    name: str
    devices: Mapping[str, DeviceSection]
    verifiers: Mapping[str, VerifierSection] = field(
        default_factory=lambda: {"verifier": VerifierSection()}
    )
    links: Mapping[str, LinkSection] = field(default_factory=dict)
    about: str = ""
    duration_s: float = limited(60.0, 0.1, 1e6)
    warm_up_s: float = 0.0
    """Requests that are asked before do not count; nor those after ``duration_s``."""
    drain_s: float | None = limited(None, 0.0, 1e5)
    """How long after ``duration_s`` requests that count may take to end, under the same load;
    null: 60 with ``arrivals``, else 0, and then the world's end cuts them off."""
    arrivals: ArrivalsSection | None = None
    """An open loop in place of users who think; null: a closed one."""
    slo: SloSection = field(default_factory=SloSection)
    tokens: TokensSection = field(default_factory=TokensSection)
    arms: tuple[Arm, ...] = tuple(Arm)
    """All of them: those of a server's draft only where a verifier has one."""
    gamma: int | None = limited(None, 1, 32)
    """Draft length of the arm ``vanilla``; null: the best one by its own estimates."""
    association: Association = Association.LOWEST_DELAY
    """Of a verifier for each request: listed, lowest-delay or rendezvous."""
    radio: RadioSection | None = None
    shards: int = limited(1, 1, 1024)
    """Worlds apart from one another that devices and verifiers are dealt out to."""
    message_ms: float = limited(0.3, 0.0, 1000.0)
    """One way, besides the link: codec, event loops, sockets (docs/measurements.md)."""
    lease_s: float = limited(30.0, 0.0, 86_400.0)
    connect_trips: int = limited(3, 0, 10)
    """Round trips that a new connection takes before its first request: one each for TCP, TLS 1.3
    and the settings of HTTP/2, so 2 without TLS. Requests on a connection that is there pay
    nothing for it."""
    connected: bool = False
    """Whether devices have their connections when the world begins, as agents have that run for a
    while; false: each device connects once, when it first asks a verifier."""

    def __post_init__(self) -> None:
        check_limits(self)
        if not self.name or len(self.name) > 64:
            raise ValueError(f"name is {self.name!r}, but must have 1 to 64 characters")
        if not self.devices:
            raise ValueError("devices is empty, but must name at least one group")
        if not self.verifiers:
            raise ValueError("verifiers is empty, but must name at least one")
        self._check_server_drafts()
        if not self.arms or len(set(self.arms)) != len(self.arms):
            names = ", ".join(arm.value for arm in self.arms)
            raise ValueError(f"arms is [{names}], but must name each wanted one once")
        if not 0.0 <= self.warm_up_s < self.duration_s:
            raise ValueError(
                f"warm_up_s is {self.warm_up_s:g}, but must be at least 0 and less than duration_s,"
                f" {self.duration_s:g}"
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
            except ValueError as error:
                raise ValueError(f"verifiers.{kind}: {error}") from None

    def memory_sum(self, kind: str) -> MemorySum | None:
        """Return what the memory of a verifier of that kind holds, in sessions of the mean length;
        None where nothing says what machine it is. Raises ``ValueError`` if not one fits."""
        return memory_sum(self.verifiers[kind], self.session_tokens)

    def most_sessions(self, kind: str) -> int:
        """Return how many sessions a verifier of that kind takes at a time."""
        section, memory = self.verifiers[kind], self.memory_sum(kind)
        if memory is None:
            return section.max_sessions or SESSIONS_UNKNOWN
        return min(section.max_sessions or memory.sessions, memory.sessions)

    def memory_note(self, kind: str) -> str:
        """Say how many sessions a verifier of that kind takes at a time, and why so many."""
        section, memory = self.verifiers[kind], self.memory_sum(kind)
        takes = f"verifier {kind} takes {self.most_sessions(kind)} sessions at a time"
        if memory is None:
            why = "as max_sessions says" if section.max_sessions else "the daemon's default"
            return f"Memory: {takes} ({why}; its memory is not known)."
        room = f"memory has room for {memory.sessions}: {memory.about}"
        if section.max_sessions and section.max_sessions < memory.sessions:
            return f"Memory: {takes}, as max_sessions says; its {room}."
        more = ""
        if section.max_sessions and section.max_sessions > memory.sessions:
            more = f" max_sessions is {section.max_sessions}, which is more than fits."
        return f"Memory: {takes}, as its {room}.{more}"

    @property
    def session_tokens(self) -> float:
        """Tokens of a whole request of the group with the longest ones, in the mean. A log-normal
        spread of a length leaves its median where it is and moves its mean."""
        return max(
            (one.workload.prompt_tokens + one.workload.output_tokens)
            * math.sqrt(1.0 + one.workload.length_spread**2)
            for one in self.devices.values()
        )

    @property
    def window_s(self) -> float:
        """How long requests count that are asked in it."""
        return self.duration_s - self.warm_up_s

    @property
    def longest_drain_s(self) -> float:
        if self.drain_s is not None:
            return self.drain_s
        return DRAIN_S if self.arrivals is not None else 0.0

    @property
    def device_count(self) -> int:
        return sum(section.count for section in self.devices.values())

    def verifier_name(self, kind: str, number: int) -> str:
        """Of the verifier of that kind and number (from 0)."""
        return kind if self.verifiers[kind].count == 1 else f"{kind}-{number + 1}"

    def device_name(self, group: str, number: int) -> str:
        """Of the device of that group and number (from 0)."""
        return group if self.devices[group].count == 1 else f"{group}-{number + 1}"

    def _check_server_drafts(self) -> None:
        for name, section in self.verifiers.items():
            draft = section.server_draft
            if draft is None or draft.acceptance is None:
                continue
            if self.tokens.source is not TokensFrom.PROCESS:
                raise ValueError(
                    f"verifiers.{name}.server_draft.acceptance is {draft.acceptance:g}, but only"
                    f" tokens.source: process takes one, and it is {self.tokens.source.value}"
                )
        if any(section.server_draft is not None for section in self.verifiers.values()):
            return
        if set(self.arms) == set(Arm):
            object.__setattr__(self, "arms", tuple(one for one in self.arms if not one.on_server))
        for arm in self.arms:
            if arm.on_server:
                raise ValueError(f"arms names {arm.value}, but no verifier has a server_draft")

    def _check_arrivals(self, arrivals: ArrivalsSection) -> None:
        if self.shards > 1:
            arrivals.divided(self.shards)
        for name, section in self.devices.items():
            if section.workload.requests:
                raise ValueError(
                    f"devices.{name}.workload.requests is {section.workload.requests}, but with"
                    " arrivals the requests come from there: 0"
                )

    def _check_ways(self) -> None:
        """Behind stations. With handover a stream's paths are made anew at each change of cell, and
        what was under way on a TCP connection or a trace would be without one."""
        for name, section in self.verifiers.items():
            for link in section.path:
                if self.links[link].loss or self.links[link].trace:
                    raise ValueError(
                        f"radio.handover: verifiers.{name} lies behind {link!r}, but with handover"
                        " such a link has no loss and no trace"
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
            for name, section in self.devices.items():
                if section.path:
                    raise ValueError(
                        f"devices.{name}.path names links, but with radio the air is the first hop"
                        " and what lies behind a base station belongs to verifiers"
                    )
            if self.radio.handover is not None:
                self._check_ways()


# In a checkout the scenarios lie beside the package, in an installation within it.
_FOLDERS = (Path(__file__).parents[1] / "scenarios", Path(__file__).parents[2] / "scenarios")


def bundled_scenarios() -> dict[str, Path]:
    """Files of the scenarios that come with the simulator, by name."""
    return {
        path.stem: path
        for folder in _FOLDERS
        if folder.is_dir()
        for path in sorted(folder.glob("*.yaml"))
    }


def scenario_path(name: str) -> Path:
    """Raises ``ConfigError`` that names the bundled scenarios."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    bundled = bundled_scenarios()
    if name not in bundled:
        raise ConfigError(f"no scenario {name!r}: not a YAML file, nor one of {', '.join(bundled)}")
    return bundled[name]


def load_scenario(name: str, overrides: Mapping[str, object] | None = None) -> Scenario:
    """Raises ``ConfigError``: what is wrong, where, and what would be right."""
    return load_config(Scenario, scenario_path(name), overrides)
