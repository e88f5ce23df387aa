"""Runs a bench: reference, draft length of stop-and-wait, warm-up, then all arms interleaved.

At each RTT of each repeat, all arms run a prompt before any runs the next one, and a different one
goes first each time: what the machine does meanwhile falls on all of them alike. A repeat that
is cut short keeps the prompts that all arms have finished.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from edgespec.bench.arms import Arm
from edgespec.bench.measurement import (
    GAMMAS,
    PROMPT_COUNT,
    GammaCost,
    Measurement,
    best_gamma_at,
    gamma_cost,
    measure,
)
from edgespec.bench.prompts import Workload
from edgespec.bench.report import Cell, Row, machine, numbers, summarise, versions
from edgespec.bench.settings import WARM_UP_TOKENS, BenchSettings, arm_options, request_s, rotated
from edgespec.core.ports import Drafter
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions
from edgespec.telemetry.match_tape import MatchTape, TapedGeneration, Walk, walk_along
from edgespec.wire.shaped import TrafficMeter


@dataclass(frozen=True, slots=True)
class Station:
    """An agent on a link of its own, and that link's meter."""

    agent: Agent
    meter: TrafficMeter


class OpenStation(Protocol):
    """Makes a station; the runner closes its agent."""

    def __call__(self, options: AgentOptions, *, drafts: bool, rtt_ms: float) -> Station: ...


class Progress(Protocol):
    """What is told while the bench runs; ``worth_s`` is how long it was expected to take."""

    def say(self, text: str) -> None: ...

    def done(self, what: str, worth_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class _Finished:
    """One prompt on one arm."""

    measurement: Measurement
    traffic: Counter[str]


class BenchRunner:
    """``run`` once; ``rows`` holds what is complete at any time, also after a cancellation.

    Raises ``GenerationError`` when the verifier refuses or is lost: a bench does not go on with
    holes in it.
    """

    def __init__(
        self,
        settings: BenchSettings,
        workload: Workload,
        open_station: OpenStation,
        progress: Progress,
    ) -> None:
        self.rows: list[Row] = []
        self.vanilla_gammas: dict[float, int] = {}
        """Chosen draft length of stop-and-wait by RTT in ms."""
        self.gamma_costs: dict[int, GammaCost] = {}
        self._settings, self._workload = settings, workload
        self._open_station, self._progress = open_station, progress
        self._sampling = settings.sampling
        self.references: tuple[tuple[int, ...], ...] = ()
        """What target-only delivers for each prompt."""

    async def run(self) -> None:
        await self._collect_references()
        if Arm.VANILLA in self._settings.arms:
            await self._choose_gammas()
        stations: dict[tuple[Arm, float], Station] = {}
        try:
            for rtt_ms in self._settings.rtts_ms:
                for arm in self._settings.arms:
                    stations[arm, rtt_ms] = self._station(arm, rtt_ms)
                    await self._warm_up(stations[arm, rtt_ms], arm, rtt_ms)
            for repeat in range(self._settings.repeats):
                for rtt_ms in self._settings.rtts_ms:
                    here = {arm: stations[arm, rtt_ms] for arm in self._settings.arms}
                    await self._run_cells(here, rtt_ms, repeat)
        finally:
            for station in stations.values():
                await station.agent.close()

    # --- before ----------------------------------------------------------------------------

    async def _collect_references(self) -> None:
        self._progress.say("reference: target-only, no link")
        station = self._open_station(arm_options(Arm.TARGET_ONLY), drafts=False, rtt_ms=0.0)
        async with station.agent as agent:
            references = []
            for prompt in self._workload.prompts:
                references.append((await self._measure(agent, prompt)).tokens)
                self._told(Arm.TARGET_ONLY, 0.0, "reference")
        self.references = tuple(references)

    async def _choose_gammas(self) -> None:
        self._progress.say("vanilla: which draft length is best")
        for gamma in GAMMAS:
            await self._try_gamma(gamma)
        for rtt_ms in self._settings.rtts_ms:
            best = best_gamma_at(self.gamma_costs, rtt_ms / 1e3)
            self.vanilla_gammas[rtt_ms] = best or GAMMAS[0]

    async def _try_gamma(self, gamma: int) -> None:
        options = arm_options(Arm.VANILLA, gamma)
        measurements = []
        station = self._open_station(options, drafts=True, rtt_ms=0.0)
        async with station.agent as agent:
            for prompt in self._workload.prompts[:PROMPT_COUNT]:
                measurements.append(await self._measure(agent, prompt))
                self._told(Arm.TARGET_ONLY, 0.0, f"vanilla, draft length {gamma}")
        if (cost := gamma_cost(measurements)) is not None:
            self.gamma_costs[gamma] = cost

    def _station(self, arm: Arm, rtt_ms: float) -> Station:
        options = arm_options(arm, self.vanilla_gammas.get(rtt_ms))
        return self._open_station(options, drafts=arm.drafts, rtt_ms=rtt_ms)

    async def _warm_up(self, station: Station, arm: Arm, rtt_ms: float) -> None:
        """Connect the channel, touch the models: not counted."""
        tokens = min(WARM_UP_TOKENS, self._settings.max_tokens)
        sampling = replace(self._sampling, max_tokens=tokens)
        await measure(
            station.agent, self._workload.prompts[0], sampling, self._workload.eos_token_ids
        )
        worth_s = request_s(self._settings, arm, rtt_ms, tokens)
        self._progress.done(f"warm-up, {arm.value} at {rtt_ms:g} ms", worth_s)

    # --- the cells of one RTT and repeat ---------------------------------------------------

    async def _run_cells(self, stations: Mapping[Arm, Station], rtt_ms: float, repeat: int) -> None:
        self._progress.say(f"repeat {repeat + 1} of {self._settings.repeats}, RTT {rtt_ms:g} ms")
        finished: list[dict[Arm, _Finished]] = []
        try:
            for number, prompt in enumerate(self._workload.prompts):
                one: dict[Arm, _Finished] = {}
                for arm in rotated(self._settings.arms, repeat + number):
                    one[arm] = await self._run_one(stations[arm], prompt)
                    self._told(arm, rtt_ms, f"{arm.value}, {self._workload.names[number]}")
                finished.append(one)
        finally:
            if finished:
                self.rows += [
                    self._cell(arm, rtt_ms, repeat, [one[arm] for one in finished]).row()
                    for arm in self._settings.arms
                ]

    async def _run_one(self, station: Station, prompt: Sequence[int]) -> _Finished:
        before = station.meter.totals.copy()
        measurement = await self._measure(station.agent, prompt)
        return _Finished(measurement, station.meter.totals - before)

    def _cell(self, arm: Arm, rtt_ms: float, repeat: int, finished: Sequence[_Finished]) -> Cell:
        traffic: Counter[str] = Counter()
        for one in finished:
            traffic.update(one.traffic)
        return Cell(
            arm,
            rtt_ms,
            repeat,
            tuple(one.measurement for one in finished),
            self.references[: len(finished)],
            traffic,
        )

    async def _measure(self, agent: Agent, prompt: Sequence[int]) -> Measurement:
        return await measure(agent, prompt, self._sampling, self._workload.eos_token_ids)

    def _told(self, arm: Arm, rtt_ms: float, what: str) -> None:
        worth_s = request_s(self._settings, arm, rtt_ms, self._settings.max_tokens)
        self._progress.done(what, worth_s)


# --- from the texts of a bench to a match tape -------------------------------------------------
# the draft walks along each of them once.
# The bench's target-only texts are the target's own, whatever the arms did, so they are recorded
# and not generated again. The walk asks the drafter for its guesses at every position of them.


# As many guesses as any policy is likely to send; a walk costs the same for one.
TAPE_WIDTH = 8


class Recording(Protocol):
    """What is told while the tape is recorded."""

    def say(self, text: str) -> None: ...


async def record_tape(
    drafter: Drafter,
    target: str,
    workload: Workload,
    texts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    progress: Recording,
    *,
    width: int = TAPE_WIDTH,
    about: Mapping[str, str],
) -> MatchTape:
    """``texts[i]`` is what the target says to prompt i of the workload; empty ones are left out.
    The drafter must not be used meanwhile. Raises ``TapeError`` when no text is left."""
    generations = []
    context_length = drafter.info.context_length
    for number, text in enumerate(texts):
        name, prompt = workload.names[number], workload.prompts[number]
        # The walk ends where the draft's memory does, as the product's own drafting would.
        tokens = tuple(text)[: max(0, context_length - len(prompt))]
        if not tokens:
            continue
        progress.say(f"tape: {name}, {number + 1} of {len(texts)}")
        walk = await asyncio.to_thread(_walk, drafter, prompt, tokens, sampling, width)
        generations.append(TapedGeneration(name, prompt, tokens, *walk))
    return MatchTape(
        target,
        drafter.info.name,
        width,
        tuple(generations),
        tuple(sorted(workload.eos_token_ids)),
        dict(about),
    )


def tape_about(command: str, sampling: SamplingParams, prompts: str) -> dict[str, str]:
    """Whatever a reader needs to trust a tape."""
    found = machine()
    return {
        "sampling": (
            f"temperature {sampling.temperature:g}, seed {sampling.seed},"
            f" at most {sampling.max_tokens} tokens"
        ),
        "prompts": prompts,
        "machine": f"{found['processor']}, {found['cpu_count']} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def tape_report(tape: MatchTape, rows: Sequence[Row]) -> str:
    """One line: what was recorded, beside what the bench's own drafting saw of the same texts."""
    positions = sum(len(generation.tokens) for generation in tape.generations)
    first, second = tape.acceptance(0), tape.acceptance(1) if tape.width > 1 else 0.0
    line = (
        f"tape: {len(tape.generations)} texts, {positions} tokens,"
        f" {first:.1%} accepted, {second:.1%} more by the second guess"
    )
    ours = [row for row in summarise(rows) if row["arm"] == Arm.EDGESPEC.value]
    seen = numbers(ours, "acceptance")
    return f"{line}; edgespec arm: {sum(seen) / len(seen):.1%} accepted" if seen else line


def _walk(
    drafter: Drafter,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: SamplingParams,
    width: int,
) -> Walk:
    drafter.begin(len(prompt), sampling)
    return walk_along(drafter.step, prompt, tokens, width)
