"""Settings of a benchmark, and its run: reference, draft length of stop-and-wait, warm-up, arms.

At each RTT of each repeat, all arms run one prompt before any arm runs the next one, and a
different arm goes first each time. So other load of the machine falls on all arms alike. A repeat
that is cut short keeps the prompts that all arms have finished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from edgespec.bench import draft_lengths
from edgespec.bench import measurement as measured
from edgespec.bench.arms import Arm, arm_settings
from edgespec.bench.prompts import Workload
from edgespec.config.common import MINUTE_MS
from edgespec.core.protocol.checks import Section, range_field
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions
from edgespec.wire.shaped import TrafficMeter

WARM_UP_TOKENS = 8
_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True, slots=True)
class BenchSettings(Section):
    """Settings of a benchmark. ``ValueError`` names the setting, the value and the limit."""

    arms: tuple[Arm, ...] = tuple(Arm)
    rtts_ms: tuple[float, ...] = range_field((2.0, 20.0, 50.0, 100.0, 200.0), 0.0, 10_000.0)
    repeats: int = range_field(1, 1, 1000)
    prompt_limit: int = range_field(9, 1, 100_000)
    """Number of prompts to use, the first ones that fit into the models' context."""
    max_tokens: int = range_field(96, 2, 1 << 20)
    temperature: float = 0.0
    seed: int = 0
    pass_ms: float = range_field(25.0, 0.0, MINUTE_MS)
    """Emulated duration of a target pass. 0 runs at the machine's own speed."""
    draft_ms: float = range_field(8.0, 0.0, MINUTE_MS)
    """Emulated duration of a draft step on the device. 0 runs at the machine's own speed."""
    server_draft_ms: float = range_field(2.5, 0.0, MINUTE_MS)
    """Emulated duration of a step of the verifier's draft model. 0 runs at the machine's speed."""

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
        """Description of the durations of passes and steps, to stand beside every measured time."""
        passes = f"target {self.pass_ms:g} ms a pass" if self.pass_ms else "target as fast as it is"
        steps = f"draft {self.draft_ms:g} ms a step" if self.draft_ms else "draft as fast as it is"
        if self.drafts_on_server:
            step_ms = self.server_draft_ms
            steps += f", on the server {step_ms:g} ms" if step_ms else ", on the server as it is"
        return f"{'emulated' if self.emulated else 'real'} pass time: {passes}, {steps}"


def parse_list(
    what: str, text: str, kind: Callable[[str], _Parsed], known: str
) -> tuple[_Parsed, ...]:
    """Return the values of a comma-separated list.

    ``what`` is the list's name, ``kind`` parses one value, and ``known`` describes the values for
    the error message. Raises ``ValueError`` for an empty list and for a repeated or wrong value."""
    try:
        found = tuple(kind(name.strip()) for name in text.split(",") if name.strip())
    except ValueError as error:
        raise ValueError(f"{what} is {text!r}: {error}; it takes {known}") from None
    if not found:
        raise ValueError(f"{what} is empty, but must name at least one")
    if len(set(found)) < len(found):
        raise ValueError(f"{what} is {text!r}, but must name each once")
    return found


@dataclass(frozen=True, slots=True)
class Station:
    """Agent on a link of its own, and the meter of that link."""

    agent: Agent
    meter: TrafficMeter


OpenStation = Callable[[Arm, AgentOptions, float], Station]
"""Function that makes the station of an arm for a round trip in ms. The runner closes its agent."""


class BenchProgress(Progress):
    """Progress of a benchmark: a bar on a terminal, one line per step elsewhere."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
        quiet = not console.is_terminal
        super().__init__(
            *columns, TimeRemainingColumn(), console=console, disable=quiet, transient=True
        )
        self._task = self.add_task("loading", total=None)

    def expect(self, total: float) -> None:
        """Set the number of requests that the whole run will make."""
        self.update(self._task, total=total)

    def say(self, text: str) -> None:
        """Show that a step begins."""
        if self.console.is_terminal:
            self.update(self._task, description=text)
        else:
            self.console.print(text, markup=False, highlight=False)

    def done(self, what: str, count: float = 1.0) -> None:
        """Record that ``count`` more requests were made, and describe the last one by ``what``."""
        self.update(self._task, advance=count, description=what)


_Finished = tuple[measured.Measurement, Counter[str]]
"""Measurement of one prompt on one arm, and its traffic."""


class BenchRunner:
    """Runs one benchmark. Call ``run`` once.

    ``rows`` holds the complete results at any time, also after a cancellation. ``run`` raises
    ``GenerationError`` if the verifier refuses a request or is lost, because results with gaps
    could not be compared."""

    def __init__(
        self,
        settings: BenchSettings,
        workload: Workload,
        open_station: OpenStation,
        progress: BenchProgress,
    ) -> None:
        self.rows: list[measured.Row] = []
        self.vanilla_gammas: dict[float, int] = {}
        """Best draft length of stop-and-wait, by RTT in ms."""
        self.gamma_costs: dict[int, draft_lengths.GammaCost] = {}
        self.workload, self._settings = workload, settings
        self._open_station, self._progress = open_station, progress
        self.references: tuple[tuple[int, ...], ...] = ()
        """Tokens of target-only for each prompt."""

    async def run(self) -> None:
        settings, prompts = self._settings, len(self.workload.prompts)
        sweep = len(draft_lengths.GAMMAS) * min(draft_lengths.PROMPT_COUNT, prompts)
        sweep *= Arm.VANILLA in settings.arms
        cells = len(settings.arms) * len(settings.rtts_ms)
        self._progress.expect(prompts + sweep + cells * (1 + settings.repeats * prompts))
        await self._collect_references()
        if sweep:
            await self._choose_gammas()
        stations: dict[tuple[Arm, float], Station] = {}
        try:
            for rtt_ms in settings.rtts_ms:
                for arm in settings.arms:
                    station = self._station(arm, rtt_ms, self.vanilla_gammas.get(rtt_ms))
                    stations[arm, rtt_ms] = station
                    await self._measure(station.agent, self.workload.prompts[0], warm_up=True)
                    self._progress.done(f"warm-up, {arm.value} at {rtt_ms:g} ms")
            for repeat in range(settings.repeats):
                for rtt_ms in settings.rtts_ms:
                    here = {arm: stations[arm, rtt_ms] for arm in settings.arms}
                    await self._run_cells(here, rtt_ms, repeat)
        finally:
            for station in stations.values():
                await station.agent.close()

    async def _collect_references(self) -> None:
        self._progress.say("reference: target-only, no link")
        async with self._station(Arm.TARGET_ONLY, 0.0).agent as agent:
            references = []
            for prompt in self.workload.prompts:
                references.append((await self._measure(agent, prompt)).tokens)
                self._progress.done("reference")
        self.references = tuple(references)

    async def _choose_gammas(self) -> None:
        self._progress.say("vanilla: which draft length is best")
        for gamma in draft_lengths.GAMMAS:
            measurements = []
            async with self._station(Arm.VANILLA, 0.0, gamma).agent as agent:
                for prompt in self.workload.prompts[: draft_lengths.PROMPT_COUNT]:
                    measurements.append(await self._measure(agent, prompt))
                    self._progress.done(f"vanilla, draft length {gamma}")
            if (cost := draft_lengths.gamma_cost(measurements)) is not None:
                self.gamma_costs[gamma] = cost
        for rtt_ms in self._settings.rtts_ms:
            self.vanilla_gammas[rtt_ms] = draft_lengths.best_gamma_at(
                self.gamma_costs, rtt_ms / 1e3
            )

    def _station(self, arm: Arm, rtt_ms: float, gamma: int | None = None) -> Station:
        return self._open_station(arm, AgentOptions(*arm_settings(arm, gamma)), rtt_ms)

    async def _run_cells(self, stations: Mapping[Arm, Station], rtt_ms: float, repeat: int) -> None:
        self._progress.say(f"repeat {repeat + 1} of {self._settings.repeats}, RTT {rtt_ms:g} ms")
        arms, finished = self._settings.arms, list[dict[Arm, _Finished]]()
        try:
            for number, prompt in enumerate(self.workload.prompts):
                one: dict[Arm, _Finished] = {}
                first = (repeat + number) % len(arms)
                for arm in (*arms[first:], *arms[:first]):
                    agent, meter = stations[arm].agent, stations[arm].meter
                    before = meter.totals.copy()
                    measurement = await self._measure(agent, prompt)
                    one[arm] = measurement, meter.totals - before
                    self._progress.done(f"{arm.value}, {self.workload.names[number]}")
                finished.append(one)
        finally:
            for arm in arms if finished else ():
                done, traffic = zip(*(one[arm] for one in finished), strict=True)
                texts, sums = self.references[: len(finished)], sum(traffic, Counter[str]())
                self.rows.append(measured.row_of(arm, rtt_ms, repeat, done, texts, sums))

    async def _measure(
        self, agent: Agent, prompt: Sequence[int], *, warm_up: bool = False
    ) -> measured.Measurement:
        """Measure one prompt. With ``warm_up`` it is short and only connects the channel and
        touches the models."""
        sampling = self._settings.sampling
        if warm_up:
            sampling = replace(sampling, max_tokens=min(WARM_UP_TOKENS, sampling.max_tokens))
        return await measured.measure(agent, prompt, sampling, self.workload.eos_token_ids)
