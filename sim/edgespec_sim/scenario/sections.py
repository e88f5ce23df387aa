"""What a scenario says. Every section checks itself: the error names key, value and range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from edgespec.bench.arms import Arm
from edgespec.config.loading import ConfigError, load_config
from edgespec.core.device.goodput_policy import DEFAULT_POLICY, PolicyName
from edgespec.core.device.memory import SMALLEST_WINDOW
from edgespec.core.protocol.checks import bounded
from edgespec_sim.scenario.verifiers import MAX_DEVICES as MAX_DEVICES
from edgespec_sim.scenario.verifiers import RADIOS
from edgespec_sim.scenario.verifiers import CostSection as CostSection
from edgespec_sim.scenario.verifiers import StagesSection as StagesSection
from edgespec_sim.scenario.verifiers import VerifierSection as VerifierSection

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

    gap_ms: float = 60.0
    """Nothing passes on the air meanwhile."""
    sessions: Sessions = Sessions.CHEAPEST
    """cheapest, stay, recompute or kv."""
    kv_bytes_per_token: int = 131_072
    """Of a position's keys and values: 32 layers of 8 heads of 128, two of two bytes (Llama 3.1
    8B)."""
    backhaul: BackhaulSection = field(default_factory=BackhaulSection)

    def __post_init__(self) -> None:
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
    3GPP TS 38.213, 7.1.1 (``radio_network.py``), up to ``device_dbm``."""

    p0_dbm: float = -80.0
    """What a station is to receive of a resource block of 180 kHz, were ``alpha`` 1. Operators set
    it, for a deployment; this value is ours."""
    alpha: float = 0.8
    """Share of the path loss that is made up for: one of those of TS 38.331 (``Alpha``)."""

    def __post_init__(self) -> None:
        bounded("p0_dbm", self.p0_dbm, -202.0, 24.0)  # TS 38.331: p0-NominalWithGrant
        if self.alpha not in ALPHAS:
            known = ", ".join(f"{one:g}" for one in ALPHAS)
            raise ValueError(f"alpha is {self.alpha:g}, but must be one of {known}")


@dataclass(frozen=True, slots=True)
class RadioSection:
    """Mobile edge: devices move among the verifiers' base stations."""

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
    rates: tuple[float, ...] = ()
    """diurnal: requests a second at 0 h, 1 h, ... 23 h; a line between, and the day begins anew."""
    compress: float = 1.0
    """diurnal: seconds of the day that one second of the world stands for. Rates stay as they
    are: 24 h in 24 minutes have a sixtieth of the requests."""
    file: str = ""
    """recorded: CSV with ``time_s`` (or ``timestamp``), and lengths where it has them."""
    speed: float = 1.0
    """recorded: how many times faster it is played; the rate rises with it."""
    at: AtDevice = AtDevice.OWN

    def __post_init__(self) -> None:
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
        for rate in self.rates:
            bounded("rates", rate, 0.0, MOST_PER_S)
        if self.rates and not any(self.rates):
            raise ValueError("rates are all 0, but one of them must be above it")
        bounded("compress", self.compress, 1.0, 86_400.0)
        bounded("speed", self.speed, 1e-3, 1e4)

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

    def check_workloads(self, requests: Mapping[str, int]) -> None:
        """``requests``: how many each group of devices is to ask by itself, which must be none.
        Raises ``ValueError``."""
        for name, count in requests.items():
            if count:
                raise ValueError(
                    f"devices.{name}.workload.requests is {count}, but with"
                    " arrivals the requests come from there: 0"
                )


@dataclass(frozen=True, slots=True)
class SloSection:
    """Objectives of service: 95 % of the requests have to keep to each. A request attains them if
    it ended well and keeps to both."""

    ttft_p95_ms: float | None = None
    tpot_p95_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft_p95_ms", self.ttft_p95_ms), ("tpot_p95_ms", self.tpot_p95_ms)):
            if value is not None:
                bounded(name, value, 0.1, 3_600_000.0)

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


def window_s(duration_s: float, warm_up_s: float) -> float:
    """How long requests count that are asked in it. Raises ``ValueError``."""
    if not 0.0 <= warm_up_s < duration_s:
        raise ValueError(
            f"warm_up_s is {warm_up_s:g}, but must be at least 0 and less than duration_s, "
            f"{duration_s:g}"
        )
    return duration_s - warm_up_s


@dataclass(frozen=True, slots=True)
class ConditionSection:
    """What holds from ``at_s`` on. What is left out stays as the row before said, or is not known;
    a device says as little about itself where it has no such sensor."""

    at_s: float
    resident_mib: float | None = None
    """What the agent's process holds beside the draft's keys and values."""
    slowdown: float | None = None
    """How many times as long draft steps take, under every arm that drafts."""

    def __post_init__(self) -> None:
        bounded("at_s", self.at_s, 0.0, 1e6)
        for name, value, low, high in (
            ("resident_mib", self.resident_mib, 0.0, 1e6),
            ("slowdown", self.slowdown, 0.01, 100.0),
        ):
            if value is not None:
                bounded(name, value, low, high)


@dataclass(frozen=True, slots=True)
class ConditionsSection:
    """A course of conditions, and the memory budget that the device's governor keeps. It governs
    the arm ``edgespec``; the others draft as their papers say."""

    course: tuple[ConditionSection, ...]
    """Rows in order of time, the first of them at 0; the last one holds to the end."""
    budget_mib: float | None = None
    """What the process may hold; null: no budget. ``resident_mib`` of the course counts in it."""
    window: int = 4096
    """Tokens whose keys and values the draft holds at most, with a budget."""
    token_kib: float = 112.0
    """What those of one token take: 28 layers of 8 heads of 128 in float16, as Qwen3-0.6B has."""

    def __post_init__(self) -> None:
        if not self.course or self.course[0].at_s != 0.0:
            raise ValueError("course must begin with a row at_s 0")
        for before, after in itertools.pairwise(self.course):
            if after.at_s <= before.at_s:
                raise ValueError(f"course has {after.at_s:g} s behind {before.at_s:g} s")
        bounded("window", self.window, SMALLEST_WINDOW, 1 << 20)
        bounded("token_kib", self.token_kib, 1e-3, 1e5)
        if self.budget_mib is not None:
            bounded("budget_mib", self.budget_mib, 1.0, 1e6)


class TokensFrom(Enum):
    PROCESS = "process"
    TAPE = "tape"
    TOY = "toy"


@dataclass(frozen=True, slots=True)
class TokensSection:
    """How well drafts agree with the target, and where that is known from."""

    source: TokensFrom = TokensFrom.PROCESS
    acceptance: float | None = None
    """process: mean share of first guesses that are right; null: that of the tape."""
    tape: str = "bundled-greedy"
    """tape: a file, or the name of a bundled one; process: what its shape is fitted to."""
    noise: float = 0.25
    """toy: how far the draft is from the target, in units of the target's sharpness."""
    temperature: float = 0.0
    """toy only; a tape has its own."""
    lossy_threshold: float | None = None
    """toy only: LOSSY. Tolerate drafts at least so likely, relative to the target's best token
    (``relaxed_rule.py``); null: commit the target's own tokens and nothing else."""

    def __post_init__(self) -> None:
        if self.acceptance is not None:
            bounded("acceptance", self.acceptance, 0.01, 0.99)
            if self.source is not TokensFrom.PROCESS:
                raise ValueError(
                    f"acceptance is {self.acceptance:g}, but only source: process takes one"
                )
        bounded("noise", self.noise, 0.0, 10.0)
        bounded("temperature", self.temperature, 0.0, 100.0)
        if self.lossy_threshold is not None:
            bounded("lossy_threshold", self.lossy_threshold, 0.0, 1.0)
            if self.source is not TokensFrom.TOY:
                raise ValueError(
                    f"lossy_threshold is {self.lossy_threshold:g}, but only source: toy takes one,"
                    " as nothing else knows how likely a wrong token is"
                )


@dataclass(frozen=True, slots=True)
class WorkloadSection:
    """What each user does: ask, read, think, ask again."""

    prompt_tokens: int = 64
    """0: as the tape's own prompts; only with tokens from a tape."""
    output_tokens: int = 128
    length_spread: float = 0.0
    """Relative standard deviation of both lengths, log-normal; 0: all alike."""
    think_s: float = 5.0
    """Mean pause between an answer and the next question, exponential."""
    requests: int = 0
    """Stop after so many; 0: go on until the world ends."""
    start_within_s: float = 1.0
    """First questions come evenly within this time."""
    start_thinking: bool = False
    """First questions come after a pause like any other instead: near the long run at once."""

    def __post_init__(self) -> None:
        bounded("prompt_tokens", self.prompt_tokens, 0, 32_000)
        bounded("output_tokens", self.output_tokens, 1, 32_000)
        bounded("length_spread", self.length_spread, 0.0, 3.0)
        bounded("think_s", self.think_s, 0.0, 1e6)
        bounded("requests", self.requests, 0, 1_000_000)
        bounded("start_within_s", self.start_within_s, 0.0, 1e6)


@dataclass(frozen=True, slots=True)
class DeviceSection:
    """A group of devices that are alike."""

    count: int = 1
    path: tuple[str, ...] = ()
    """Links from the device outwards."""
    draft: CostSection = field(default_factory=lambda: CostSection(ms=8.0))
    workload: WorkloadSection = field(default_factory=WorkloadSection)
    draft_w: float = 0.0
    """Power while a draft step runs, in watts, above idle."""
    policy: PolicyName = DEFAULT_POLICY
    """By which the arm ``edgespec`` drafts."""
    radio_power: str = ""
    """lte or wifi: what the radio takes in each of its states. Without it, or
    without ``draft_w``, no energy is reported."""
    conditions: ConditionsSection | None = None
    """Other programs and memory over time; null: they are not looked at."""

    def __post_init__(self) -> None:
        bounded("count", self.count, 1, MAX_DEVICES)
        bounded("draft_w", self.draft_w, 0.0, 1000.0)
        if self.radio_power and self.radio_power not in RADIOS:
            known = ", ".join(RADIOS)
            raise ValueError(f"radio_power is {self.radio_power!r}, but must be one of {known}")


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
    duration_s: float = 60.0
    warm_up_s: float = 0.0
    """Requests that are asked before do not count; nor those after ``duration_s``."""
    drain_s: float | None = None
    """How long after ``duration_s`` requests that count may take to end, under the same load;
    null: 60 with ``arrivals``, else 0, and then the world's end cuts them off."""
    arrivals: ArrivalsSection | None = None
    """An open loop in place of users who think; null: a closed one."""
    slo: SloSection = field(default_factory=SloSection)
    tokens: TokensSection = field(default_factory=TokensSection)
    arms: tuple[Arm, ...] = tuple(Arm)
    gamma: int | None = None
    """Draft length of the arm ``vanilla``; null: the best one by its own estimates."""
    association: str = "lowest-delay"
    radio: RadioSection | None = None
    shards: int = 1
    """Worlds apart from one another that devices and verifiers are dealt out to."""
    message_ms: float = 0.3
    """One way, besides the link: codec, event loops, sockets (docs/measurements.md)."""
    lease_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 64:
            raise ValueError(f"name is {self.name!r}, but must have 1 to 64 characters")
        if not self.devices:
            raise ValueError("devices is empty, but must name at least one group")
        if not self.verifiers:
            raise ValueError("verifiers is empty, but must name at least one")
        if not self.arms or len(set(self.arms)) != len(self.arms):
            names = ", ".join(arm.value for arm in self.arms)
            raise ValueError(f"arms is [{names}], but must name each wanted one once")
        if self.gamma is not None:
            bounded("gamma", self.gamma, 1, 32)
        bounded("duration_s", self.duration_s, 0.1, 1e6)
        window_s(self.duration_s, self.warm_up_s)
        if self.drain_s is not None:
            bounded("drain_s", self.drain_s, 0.0, 1e5)
        bounded("shards", self.shards, 1, 1024)
        bounded("message_ms", self.message_ms, 0.0, 1000.0)
        bounded("lease_s", self.lease_s, 0.0, 86_400.0)
        if self.tokens.source is not TokensFrom.TAPE:
            for name, section in self.devices.items():
                if section.workload.prompt_tokens == 0:
                    raise ValueError(
                        f"devices.{name}.workload.prompt_tokens is 0, which only a tape allows"
                    )
        if self.arrivals is not None:
            self._check_arrivals(self.arrivals)
        self._check_names()

    @property
    def window_s(self) -> float:
        """How long requests count that are asked in it."""
        return window_s(self.duration_s, self.warm_up_s)

    @property
    def longest_drain_s(self) -> float:
        if self.drain_s is not None:
            return self.drain_s
        return DRAIN_S if self.arrivals is not None else 0.0

    def verifier_name(self, kind: str, number: int) -> str:
        """Of the verifier of that kind and number (from 0)."""
        return kind if self.verifiers[kind].count == 1 else f"{kind}-{number + 1}"

    def device_name(self, group: str, number: int) -> str:
        """Of the device of that group and number (from 0)."""
        return group if self.devices[group].count == 1 else f"{group}-{number + 1}"

    def _check_arrivals(self, arrivals: ArrivalsSection) -> None:
        if self.shards > 1:
            arrivals.divided(self.shards)
        arrivals.check_workloads(
            {name: section.workload.requests for name, section in self.devices.items()}
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
        if self.radio is not None:
            for name, section in self.devices.items():
                if section.path:
                    raise ValueError(
                        f"devices.{name}.path names links, but with radio the air is the first hop"
                        " and what lies behind a base station belongs to verifiers"
                    )
            ways = {name: section.path for name, section in self.verifiers.items()}
            self.radio.check_ways(ways, self.links)
        if self.shards > 1:
            for kind, counted in (("devices", self.devices), ("verifiers", self.verifiers)):
                for name, one in counted.items():
                    if one.count % self.shards:
                        raise ValueError(
                            f"{kind}.{name}.count is {one.count}, "
                            f"but must divide by shards, {self.shards}"
                        )


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
