"""What a bench is asked to do, and how it is run: reference, draft length of stop-and-wait,
warm-up, then all arms interleaved.

At each RTT of each repeat, all arms run a prompt before any runs the next one, and a different one
goes first each time: what the machine does meanwhile falls on all of them alike. A repeat that
is cut short keeps the prompts that all arms have finished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from edgespec.bench import measurement as measured
from edgespec.bench.arms import Arm, arm_settings
from edgespec.bench.prompts import Workload
from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions
from edgespec.wire.shaped import TrafficMeter

WARM_UP_TOKENS = 8
MAX_RTT_MS = 10_000.0
MAX_REPEATS = 1000
MAX_PACE_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Raises ``ValueError`` naming the setting, the value and the limit."""

    arms: tuple[Arm, ...] = tuple(Arm)
    rtts_ms: tuple[float, ...] = (2.0, 20.0, 50.0, 100.0, 200.0)
    repeats: int = 1
    prompt_limit: int = 9
    """Use the first so many prompts that fit into the models' context."""
    max_tokens: int = 96
    temperature: float = 0.0
    seed: int = 0
    pass_ms: float = 25.0
    """Emulated time of a target pass; 0 is as fast as the machine goes."""
    draft_ms: float = 8.0
    """The same for a draft step."""
    server_draft_ms: float = 2.5
    """The same for a step of the verifier's own draft model."""

    def __post_init__(self) -> None:
        for rtt_ms in self.rtts_ms:
            bounded("rtt-ms", rtt_ms, 0.0, MAX_RTT_MS)
        bounded("repeats", self.repeats, 1, MAX_REPEATS)
        bounded("limit", self.prompt_limit, 1, 100_000)
        bounded("max-tokens", self.max_tokens, 2, 1 << 20)
        bounded("pass-ms", self.pass_ms, 0.0, MAX_PACE_MS)
        bounded("draft-ms", self.draft_ms, 0.0, MAX_PACE_MS)
        bounded("server-draft-ms", self.server_draft_ms, 0.0, MAX_PACE_MS)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens
        )

    @property
    def emulated(self) -> bool:
        on_server = self.server_draft_ms if self.drafts_on_server else 0.0
        return self.pass_ms > 0 or self.draft_ms > 0 or on_server > 0

    @property
    def drafts_on_server(self) -> bool:
        return any(arm.on_server for arm in self.arms)

    @property
    def timing(self) -> str:
        """What the times of a result are times of; belongs beside every one of them."""
        passes = f"target {self.pass_ms:g} ms a pass" if self.pass_ms else "target as fast as it is"
        steps = f"draft {self.draft_ms:g} ms a step" if self.draft_ms else "draft as fast as it is"
        if self.drafts_on_server:
            step_ms = self.server_draft_ms
            steps += f", on the server {step_ms:g} ms" if step_ms else ", on the server as it is"
        return f"{'emulated' if self.emulated else 'real'} pass time: {passes}, {steps}"


def arm_options(arm: Arm, gamma: int | None = None) -> AgentOptions:
    """``gamma`` is the draft length of ``vanilla``; the other arms do not look at it."""
    settings = arm_settings(arm, gamma)
    return AgentOptions(settings.policy, settings.run_ahead)


def parse_arms(text: str) -> tuple[Arm, ...]:
    """A comma-separated list of names. Raises ``ValueError`` for an unknown or repeated one."""
    try:
        arms = tuple(Arm(name.strip()) for name in text.split(",") if name.strip())
    except ValueError as error:
        known = ", ".join(arm.value for arm in Arm)
        raise ValueError(f"arms is {text!r}: {error}; there are {known}") from None
    _distinct("arms", [arm.value for arm in arms])
    return arms


def parse_rtts_ms(text: str) -> tuple[float, ...]:
    """A comma-separated list of round-trip times. Raises ``ValueError``."""
    try:
        rtts_ms = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"rtt-ms is {text!r}, but must be numbers with commas between") from None
    _distinct("rtt-ms", [f"{rtt_ms:g}" for rtt_ms in rtts_ms])
    return rtts_ms


def rotated(arms: Sequence[Arm], by: int) -> tuple[Arm, ...]:
    """The same arms from another start: none is always the one that runs first."""
    by %= len(arms)
    return (*arms[by:], *arms[:by])


def _distinct(what: str, names: Sequence[str]) -> None:
    if not names:
        raise ValueError(f"{what} is empty, but must name at least one")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} names {', '.join(twice)} more than once")


@dataclass(frozen=True, slots=True)
class Station:
    """An agent on a link of its own, and that link's meter."""

    agent: Agent
    meter: TrafficMeter


OpenStation = Callable[[Arm, AgentOptions, float], Station]
"""Makes a station of an arm with this round-trip time in ms; the runner closes its agent."""


class Progress(Protocol):
    """What is told while a bench runs."""

    def expect(self, total: float) -> None:
        """So many requests will be made."""

    def say(self, text: str) -> None:
        """A step begins."""

    def done(self, what: str, count: float = 1.0) -> None:
        """``count`` of the requests were made."""


_Finished = tuple[measured.Measurement, Counter[str]]
"""Of one prompt on one arm, with its traffic."""


class BenchRunner:
    """``run`` once; ``rows`` holds what is complete at any time, also after a cancellation. Raises
    ``GenerationError`` when the verifier refuses or is lost: a bench does not go on with holes in
    it."""

    def __init__(
        self,
        settings: BenchSettings,
        workload: Workload,
        open_station: OpenStation,
        progress: Progress,
    ) -> None:
        self.rows: list[measured.Row] = []
        self.vanilla_gammas: dict[float, int] = {}
        """Chosen draft length of stop-and-wait by RTT in ms."""
        self.gamma_costs: dict[int, measured.GammaCost] = {}
        self._settings, self._workload = settings, workload
        self._open_station, self._progress = open_station, progress
        self._sampling = settings.sampling
        self.references: tuple[tuple[int, ...], ...] = ()
        """What target-only delivers for each prompt."""

    async def run(self) -> None:
        settings, prompts = self._settings, len(self._workload.prompts)
        sweep = (
            len(measured.GAMMAS) * min(measured.PROMPT_COUNT, prompts)
            if Arm.VANILLA in settings.arms
            else 0
        )
        cells = len(settings.arms) * len(settings.rtts_ms)
        self._progress.expect(prompts + sweep + cells * (1 + settings.repeats * prompts))
        await self._collect_references()
        if Arm.VANILLA in self._settings.arms:
            await self._choose_gammas()
        stations: dict[tuple[Arm, float], Station] = {}
        try:
            for rtt_ms in self._settings.rtts_ms:
                for arm in self._settings.arms:
                    options = arm_options(arm, self.vanilla_gammas.get(rtt_ms))
                    stations[arm, rtt_ms] = self._open_station(arm, options, rtt_ms)
                    await self._warm_up(stations[arm, rtt_ms], arm, rtt_ms)
            for repeat in range(self._settings.repeats):
                for rtt_ms in self._settings.rtts_ms:
                    here = {arm: stations[arm, rtt_ms] for arm in self._settings.arms}
                    await self._run_cells(here, rtt_ms, repeat)
        finally:
            for station in stations.values():
                await station.agent.close()

    async def _collect_references(self) -> None:
        self._progress.say("reference: target-only, no link")
        arm = Arm.TARGET_ONLY
        station = self._open_station(arm, arm_options(arm), 0.0)
        async with station.agent as agent:
            references = []
            for prompt in self._workload.prompts:
                references.append((await self._measure(agent, prompt)).tokens)
                self._progress.done("reference")
        self.references = tuple(references)

    async def _choose_gammas(self) -> None:
        self._progress.say("vanilla: which draft length is best")
        for gamma in measured.GAMMAS:
            station = self._open_station(Arm.VANILLA, arm_options(Arm.VANILLA, gamma), 0.0)
            measurements = []
            async with station.agent as agent:
                for prompt in self._workload.prompts[: measured.PROMPT_COUNT]:
                    measurements.append(await self._measure(agent, prompt))
                    self._progress.done(f"vanilla, draft length {gamma}")
            if (cost := measured.gamma_cost(measurements)) is not None:
                self.gamma_costs[gamma] = cost
        for rtt_ms in self._settings.rtts_ms:
            best = measured.best_gamma_at(self.gamma_costs, rtt_ms / 1e3)
            self.vanilla_gammas[rtt_ms] = best or measured.GAMMAS[0]

    async def _warm_up(self, station: Station, arm: Arm, rtt_ms: float) -> None:
        """Connect the channel, touch the models: not counted."""
        tokens = min(WARM_UP_TOKENS, self._settings.max_tokens)
        sampling, prompt = replace(self._sampling, max_tokens=tokens), self._workload.prompts[0]
        await measured.measure(station.agent, prompt, sampling, self._workload.eos_token_ids)
        self._progress.done(f"warm-up, {arm.value} at {rtt_ms:g} ms")

    async def _run_cells(self, stations: Mapping[Arm, Station], rtt_ms: float, repeat: int) -> None:
        self._progress.say(f"repeat {repeat + 1} of {self._settings.repeats}, RTT {rtt_ms:g} ms")
        finished: list[dict[Arm, _Finished]] = []
        try:
            for number, prompt in enumerate(self._workload.prompts):
                one: dict[Arm, _Finished] = {}
                for arm in rotated(self._settings.arms, repeat + number):
                    agent, meter = stations[arm].agent, stations[arm].meter
                    before = meter.totals.copy()
                    measurement = await self._measure(agent, prompt)
                    one[arm] = measurement, meter.totals - before
                    self._progress.done(f"{arm.value}, {self._workload.names[number]}")
                finished.append(one)
        finally:
            for arm in self._settings.arms if finished else ():
                measurements, traffic = zip(*(one[arm] for one in finished), strict=True)
                told = (measurements, self.references[: len(finished)])
                cell = measured.Cell(arm, rtt_ms, repeat, *told, sum(traffic, Counter[str]()))
                self.rows.append(cell.row())

    async def _measure(self, agent: Agent, prompt: Sequence[int]) -> measured.Measurement:
        return await measured.measure(agent, prompt, self._sampling, self._workload.eos_token_ids)
