"""What a scenario says. Every section checks itself: the error names key, value and range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from edgespec.bench.arms import Arm
from edgespec.core.device.policy_names import DEFAULT_POLICY, PolicyName
from edgespec.core.device.preference import Prefer
from edgespec.core.protocol.checks import bounded
from edgespec_sim.radio.power import RADIOS
from edgespec_sim.scenario.arrival_sections import DRAIN_S, ArrivalsSection, SloSection, window_s
from edgespec_sim.scenario.condition_sections import ConditionsSection
from edgespec_sim.scenario.network_sections import LinkSection, RadioSection
from edgespec_sim.scenario.verifier_sections import MAX_DEVICES as MAX_DEVICES
from edgespec_sim.scenario.verifier_sections import CostSection as CostSection
from edgespec_sim.scenario.verifier_sections import StagesSection as StagesSection
from edgespec_sim.scenario.verifier_sections import VerifierSection as VerifierSection

_MINUTE_MS = 60_000.0


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
    lossy_by_importance: bool = False
    """With it: thresholds rise from there to 1 with a token's importance, as the laws of target and
    draft tell it (a reading of arXiv 2511.11733; ``token_importance.py``)."""

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
        elif self.lossy_by_importance:
            raise ValueError("lossy_by_importance is true, but there is no lossy_threshold")


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
    draft_context_tokens: int = 65_536
    draft_w: float = 0.0
    """Power while a draft step runs, in watts, above idle."""
    policy: PolicyName = DEFAULT_POLICY
    """By which the arm ``edgespec`` drafts."""
    prefer: Prefer = Prefer.SPEED
    """What its drafts have to be worth."""
    radio_w: float = 0.0
    """Power while sending; taken where no ``radio_power`` is named."""
    radio_power: str = ""
    """lte or wifi: what the radio takes in each of its states (``radio_power.py``). Without it, or
    without ``draft_w``, no energy is reported."""
    battery_j: float | None = None
    """Charge at the start; a device that has used it up goes on without drafting."""
    conditions: ConditionsSection | None = None
    """Battery, heat, other programs and memory over time; null: they are not looked at."""

    def __post_init__(self) -> None:
        bounded("count", self.count, 1, MAX_DEVICES)
        bounded("draft_context_tokens", self.draft_context_tokens, 16, 1 << 24)
        bounded("draft_w", self.draft_w, 0.0, 1000.0)
        bounded("radio_w", self.radio_w, 0.0, 100.0)
        if self.radio_power and self.radio_power not in RADIOS:
            known = ", ".join(RADIOS)
            raise ValueError(f"radio_power is {self.radio_power!r}, but must be one of {known}")
        if self.battery_j is not None:
            bounded("battery_j", self.battery_j, 0.0, 1e9)


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
    distances_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Extra round trip between a group of devices and a verifier."""
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
        for group, row in self.distances_ms.items():
            if group not in self.devices:
                raise ValueError(f"distances_ms.{group} is no group of devices")
            for verifier, rtt_ms in row.items():
                if verifier not in self.verifiers:
                    raise ValueError(f"distances_ms.{group}.{verifier} is no verifier")
                bounded(f"distances_ms.{group}.{verifier}", rtt_ms, 0.0, _MINUTE_MS)
        if self.shards > 1:
            for kind, counted in (("devices", self.devices), ("verifiers", self.verifiers)):
                for name, one in counted.items():
                    if one.count % self.shards:
                        raise ValueError(
                            f"{kind}.{name}.count is {one.count}, "
                            f"but must divide by shards, {self.shards}"
                        )
