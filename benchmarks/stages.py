"""Layers over slow links, for real: what drafts save of the communication, and what was predicted.

    python benchmarks/stages.py [--stages 2,4] [--link-ms 5,20,50] [--texts 4] [--tokens 32]
        [--repeats 2] [--json FILE]

Real: ``edgespec verifier --pipeline-stages N --stage-delay-ms T`` on this machine, the bundled
pair, one device that drafts k tokens and waits (k = 0: plain decoding), gRPC. For each N verifiers
with every T, and one without delay, run side by side and are asked in turn, text by text, so that
what else the machine does falls on all. What a link costs a token is the time a token less the same
without delay; saved is what k drafts take off that. Beside it (N-1) t1 (K-1)/K (arXiv 2511.11733),
with the K tokens a pass of the same texts, and the simulator, which plays the recorded tape of the
same texts with costs fitted to the runs without delay, and has seen none with.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, quantiles

import numpy as np

from edgespec.agent.agent import Agent
from edgespec.benchmark.arm_options import arm_options
from edgespec.benchmark.arms import Arm
from edgespec.benchmark.lent_drafter import LentDrafter
from edgespec.benchmark.measurement import measure
from edgespec.benchmark.report import machine, versions
from edgespec.cli import child
from edgespec.compose import connect, load_drafter, load_tokenizer, tokenizer_reference
from edgespec.config import AgentConfig
from edgespec.core.association.policies import association_policy
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.telemetry.match_tape import MatchTape
from edgespec_sim.scenario.network_sections import LinkSection
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    Scenario,
    StagesSection,
    TokensFrom,
    TokensSection,
    VerifierSection,
    WorkloadSection,
)
from edgespec_sim.token_sources.tape import TapeSource, tape_named
from edgespec_sim.world.assembly import World
from edgespec_sim.world.surrounding import Surrounding

DRAFTS = tuple(range(9))
HIDDEN_BYTES = 384 * 4
"""A row of the bundled target between two stages."""
STARTS_WITHIN_S = 600.0
"""On a machine that is busy with other things."""


@dataclass(slots=True)
class Runs:
    """All texts under one (stages, link, drafts), in the order of texts and repeats."""

    tpots_s: list[float] = field(default_factory=list)
    passes: int = 0
    tokens: int = 0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes


@dataclass(frozen=True, slots=True)
class Setting:
    stages: int
    link_ms: float
    drafts: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a pass and a draft step, in ms."""

    pass_ms: float
    row_ms: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class Texts:
    tape: MatchTape
    tokens: int

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        source = TapeSource(self.tape)
        count = len(self.tape.generations)
        return [source.request(number, 0, self.tokens).prompt for number in range(count)]

    def expected(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        source = TapeSource(self.tape)
        for number in range(len(self.tape.generations)):
            request = source.request(number, 0, self.tokens)
            if request.prompt == prompt:
                return tuple(source.expected(request, self.tokens))
        raise LookupError(prompt)


# --- the real side --------------------------------------------------------------------------


async def real_side(
    stages: int, links_ms: Sequence[float], texts: Texts, repeats: int
) -> dict[Setting, Runs]:
    config = AgentConfig()
    drafter, tokenizer = load_drafter(config), load_tokenizer(tokenizer_reference(config))
    assert drafter is not None
    found: dict[Setting, Runs] = {}
    async with contextlib.AsyncExitStack() as stack:
        agents: dict[Setting, Agent] = {}
        for link_ms in links_ms:
            options = [child.PLAIN_STREAMING, "--pipeline-stages", f"{stages}"]
            options += ["--stage-delay-ms", f"{link_ms:g}"]
            address, words = await stack.enter_async_context(child.verifier_process(options))
            say(f"{stages} stages, {link_ms:g} ms: {words}")
            for drafts in DRAFTS:
                arm = Arm.VANILLA if drafts else Arm.TARGET_ONLY
                agent = Agent(
                    connect(address),
                    LentDrafter(drafter) if drafts else None,
                    tokenizer.encode,
                    tokenizer.stream,
                    arm_options(arm, drafts or None),
                )
                setting = Setting(stages, link_ms, drafts)
                agents[setting] = await stack.enter_async_context(agent)
        for agent in agents.values():  # connects, and warms up
            await measure(agent, texts.prompts[0], SamplingParams(max_tokens=8), ())
        for repeat in range(repeats):
            for number, prompt in enumerate(texts.prompts):
                say(f"{stages} stages, repeat {repeat}, text {number}")
                for setting, agent in agents.items():
                    await _one(agent, prompt, texts, found.setdefault(setting, Runs()))
    return found


async def _one(agent: Agent, prompt: tuple[int, ...], texts: Texts, runs: Runs) -> None:
    expected = texts.expected(prompt)
    done = await measure(agent, prompt, SamplingParams(max_tokens=len(expected)), ())
    if done.tokens != expected:
        raise SystemExit(f"another text than the tape's: {done.tokens} instead of {expected}")
    assert done.tpot_s is not None
    runs.tpots_s.append(done.tpot_s)
    runs.passes += done.counters.passes
    runs.tokens += done.counters.committed


# --- the simulated side ---------------------------------------------------------------------


def fitted(runs: dict[Setting, Runs], stages: int) -> Costs:
    """Costs that explain the runs without delay: passes of k + 1 rows, and k steps for each."""
    rows, times_ms = [], []
    for drafts in DRAFTS:
        one = runs[Setting(stages, 0.0, drafts)]
        passes = 1.0 / one.tokens_per_pass
        rows.append([passes, passes * drafts, passes * drafts])
        times_ms.append(1e3 * median(one.tpots_s))
    # A row and a step cannot be told apart by stop-and-wait: all of it is booked as the step.
    matrix = np.array(rows)[:, :2]
    (pass_ms, step_ms), *_ = np.linalg.lstsq(matrix, np.array(times_ms), rcond=None)
    return Costs(float(pass_ms), 0.0, max(0.0, float(step_ms)))


def simulated(setting: Setting, texts: Texts, costs: Costs) -> Runs:
    workload = WorkloadSection(
        prompt_tokens=0,
        output_tokens=texts.tokens,
        think_s=0.002,
        requests=len(texts.tape.generations),
        start_within_s=0.0,
    )
    stages = StagesSection(nodes=setting.stages, link_ms=setting.link_ms, hidden_bytes=HIDDEN_BYTES)
    arm = Arm.VANILLA if setting.drafts else Arm.TARGET_ONLY
    scenario = Scenario(
        name="stages",
        duration_s=36_000.0,
        tokens=TokensSection(source=TokensFrom.TAPE),
        arms=(arm,),
        gamma=setting.drafts or None,
        links={"link": LinkSection(rtt_ms=0.0, framing_bytes=0)},
        devices={
            "device": DeviceSection(
                path=("link",), draft=CostSection(ms=costs.step_ms), workload=workload
            )
        },
        verifiers={
            "verifier": VerifierSection(
                pass_time=CostSection(ms=costs.pass_ms, row_ms=costs.row_ms), stages=stages
            )
        },
        message_ms=0.0,
    )
    surrounding = Surrounding(TapeSource(texts.tape), association_policy("lowest-delay"), Path())
    runs = Runs()
    for record in World(scenario, arm, "1", surrounding).run().meters.records:
        assert record.tpot_s is not None
        runs.tpots_s.append(record.tpot_s)
        runs.passes += record.counters.passes
        runs.tokens += record.counters.committed
    return runs


# --- both -----------------------------------------------------------------------------------


def saved_ms(runs: dict[Setting, Runs], setting: Setting) -> list[float]:
    """Text by text: what drafts take off the links' part of a token."""

    def links_ms(drafts: int) -> list[float]:
        far = runs[Setting(setting.stages, setting.link_ms, drafts)].tpots_s
        near = runs[Setting(setting.stages, 0.0, drafts)].tpots_s
        return [1e3 * (one - other) for one, other in zip(far, near, strict=True)]

    return [one - other for one, other in zip(links_ms(0), links_ms(setting.drafts), strict=True)]


def compare(
    real: dict[Setting, Runs], texts: Texts, stages: int, links_ms: Sequence[float]
) -> list[dict[str, float]]:
    costs = fitted(real, stages)
    say(f"{stages} stages, fitted without delay: {costs}")
    virtual = {setting: simulated(setting, texts, costs) for setting in real}
    print(
        f"{'N':>2} {'t1':>3} {'k':>2} {'tok/pass':>8} {'real ms':>8} {'speed':>6} {'r/sim':>6}"
        "  links ms/token: plain  now  saved  formula  sim   saved/formula (quartiles)  saved/sim"
    )
    rows = []
    for setting in real:
        if setting.link_ms > 0.0 and setting.stages == stages:
            rows.append(_row(real, virtual, setting))
            print(_line(rows[-1]), flush=True)
    return rows


def _row(
    real: dict[Setting, Runs], virtual: dict[Setting, Runs], setting: Setting
) -> dict[str, float]:
    plain = Setting(setting.stages, setting.link_ms, 0)
    one, sim = real[setting], virtual[setting]
    per_pass = one.tokens_per_pass
    formula = (setting.stages - 1) * setting.link_ms * (per_pass - 1.0) / per_pass
    saved, predicted = saved_ms(real, setting), fmean(saved_ms(virtual, setting))
    near = Setting(setting.stages, 0.0, 0)
    plain_links = 1e3 * (fmean(real[plain].tpots_s) - fmean(real[near].tpots_s))
    share = [value / formula for value in saved] if formula else [float("nan")] * len(saved)
    low, middle, high = quantiles(share, n=4)
    return {
        "stages": setting.stages,
        "link_ms": setting.link_ms,
        "drafts": setting.drafts,
        "tokens_per_pass": per_pass,
        "simulated_tokens_per_pass": sim.tokens_per_pass,
        "tpot_ms": 1e3 * fmean(one.tpots_s),
        "speed_up": fmean(real[plain].tpots_s) / fmean(one.tpots_s),
        "tpot_over_simulated": fmean(one.tpots_s) / fmean(sim.tpots_s),
        "plain_links_ms": plain_links,
        "links_ms": plain_links - fmean(saved),
        "saved_ms": fmean(saved),
        "formula_ms": formula,
        "simulated_saved_ms": predicted,
        "saved_over_formula_low": low,
        "saved_over_formula": middle,
        "saved_over_formula_high": high,
        "saved_over_simulated": fmean(saved) / predicted if predicted else float("nan"),
    }


def _line(row: dict[str, float]) -> str:
    return (
        f"{row['stages']:2.0f} {row['link_ms']:3g} {row['drafts']:2.0f}"
        f" {row['tokens_per_pass']:8.2f} {row['tpot_ms']:8.1f} {row['speed_up']:6.2f}"
        f" {row['tpot_over_simulated']:6.3f}                  {row['plain_links_ms']:6.1f}"
        f" {row['links_ms']:6.1f} {row['saved_ms']:6.1f} {row['formula_ms']:7.1f}"
        f" {row['simulated_saved_ms']:6.1f}   {row['saved_over_formula']:.3f}"
        f" ({row['saved_over_formula_low']:.3f} to {row['saved_over_formula_high']:.3f})"
        f"  {row['saved_over_simulated']:.3f}"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", default="2,4")
    parser.add_argument("--link-ms", default="5,20,50")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    child.READY_WITHIN_S = STARTS_WITHIN_S
    whole = tape_named("bundled-greedy")
    generations = whole.generations[:: max(1, len(whole.generations) // options.texts)]
    tape = replace(whole, generations=generations[: options.texts])
    texts = Texts(tape, options.tokens)
    links_ms = [float(part) for part in options.link_ms.split(",")]
    rows = []
    for stages in map(int, options.stages.split(",")):
        real = asyncio.run(real_side(stages, [0.0, *links_ms], texts, options.repeats))
        rows += compare(real, texts, stages, links_ms)
    if options.json:
        content = {"machine": machine(), "versions": versions(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
