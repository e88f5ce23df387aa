"""Layers over slow links, for real: what drafts save of the communication, and what was predicted.

    python benchmarks/stages.py [--stages 2,4] [--link-ms 5,20,50] [--drafts 1,2,..,8] [--texts 4]
        [--tokens 32] [--repeats 2] [--json FILE]

Real: ``edgespec verifier --pipeline-stages N --stage-delay-ms T`` on this machine, the bundled
pair, one device that drafts k tokens and waits (k = 0: plain decoding), gRPC. For each N verifiers
with every T, and one without delay, run side by side and are asked in turn, text by text, so that
what else the machine does falls on all. A round is the time from one commit to the next, and what
is shown of it is the lower decile: other work on the machine can only add to it. What the links
cost a token is the round less the same without delay, over the tokens of a round; saved is what k
drafts take off that. Beside it (N-1) t1 (K-1)/K (arXiv 2511.11733), with the K tokens a round of
the same texts, and the simulator, which plays the recorded tape of the same texts with costs fitted
to the runs without delay, and has seen none with.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
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

HIDDEN_BYTES = 384 * 4
"""A row of the bundled target between two stages."""
STARTS_WITHIN_S = 600.0
"""On a machine that is busy with other things."""


@dataclass(slots=True)
class Runs:
    """All texts under one setting, a list for each repeat."""

    rounds_s: list[list[float]] = field(default_factory=list)
    tokens: int = 0
    """Behind the first of each text."""

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / sum(map(len, self.rounds_s))

    def round_ms(self, repeat: int | None = None) -> float:
        """The lower decile; of one repeat, or of all."""
        chosen = self.rounds_s if repeat is None else [self.rounds_s[repeat]]
        return 1e3 * quantiles((one for rounds_s in chosen for one in rounds_s), n=10)[0]


@dataclass(frozen=True, slots=True)
class Setting:
    stages: int
    link_ms: float
    drafts: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a pass and a draft step, in ms."""

    pass_ms: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class Texts:
    tape: MatchTape
    tokens: int
    drafts: tuple[int, ...]
    """Lengths to try, 0 among them."""

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
    stages: int, delays_ms: Sequence[float], texts: Texts, repeats: int
) -> dict[Setting, Runs]:
    config = AgentConfig()
    drafter, tokenizer = load_drafter(config), load_tokenizer(tokenizer_reference(config))
    assert drafter is not None
    found: dict[Setting, Runs] = {}
    async with contextlib.AsyncExitStack() as stack:
        agents: dict[Setting, Agent] = {}
        for link_ms in delays_ms:
            options = [child.PLAIN_STREAMING, "--pipeline-stages", f"{stages}"]
            options += ["--stage-delay-ms", f"{link_ms:g}"]
            address, words = await stack.enter_async_context(child.verifier_process(options))
            say(f"{stages} stages, {link_ms:g} ms: {words}")
            for drafts in texts.drafts:
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
        in_turn = sorted(agents, key=lambda setting: setting.drafts)
        for repeat in range(repeats):
            for number, prompt in enumerate(texts.prompts):
                say(f"{stages} stages, repeat {repeat}, text {number}")
                for setting in in_turn:
                    runs = found.setdefault(setting, Runs())
                    if number == 0:
                        runs.rounds_s.append([])
                    await _one(agents[setting], prompt, texts, runs)
    return found


async def _one(agent: Agent, prompt: tuple[int, ...], texts: Texts, runs: Runs) -> None:
    expected = texts.expected(prompt)
    done = await measure(agent, prompt, SamplingParams(max_tokens=len(expected)), ())
    if done.tokens != expected:
        raise SystemExit(f"another text than the tape's: {done.tokens} instead of {expected}")
    runs.rounds_s[-1] += [gap_s for gap_s in done.gaps_s if gap_s > 0.0]
    runs.tokens += len(expected) - 1


# --- the simulated side ---------------------------------------------------------------------


def fitted(runs: dict[Setting, Runs], stages: int, lengths: Sequence[int]) -> Costs:
    """Costs that explain the rounds without delay. A step and a row cannot be told apart in them:
    both are booked as the step."""
    rounds_ms = [runs[Setting(stages, 0.0, drafts)].round_ms() for drafts in lengths]
    step_ms, pass_ms = np.polyfit(lengths, rounds_ms, 1)
    return Costs(float(pass_ms), max(0.0, float(step_ms)))


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
            "verifier": VerifierSection(pass_time=CostSection(ms=costs.pass_ms), stages=stages)
        },
        message_ms=0.0,
    )
    surrounding = Surrounding(TapeSource(texts.tape), association_policy("lowest-delay"), Path())
    runs = Runs([[]])
    for record in World(scenario, arm, "1", surrounding).run().meters.records:
        assert record.tpot_s is not None
        behind_first = record.tokens - 1
        rounds = record.counters.passes - 1
        runs.rounds_s[0] += [record.tpot_s * behind_first / rounds] * rounds
        runs.tokens += behind_first
    return runs


# --- both -----------------------------------------------------------------------------------


def links_ms(runs: dict[Setting, Runs], setting: Setting, repeat: int | None = None) -> float:
    """What the links cost a token; over all repeats the mean of theirs, since what else the machine
    does changes from one to the next and falls on both sides of a repeat."""
    if repeat is None:
        repeats = range(len(runs[setting].rounds_s))
        return fmean(links_ms(runs, setting, one) for one in repeats)
    near = Setting(setting.stages, 0.0, setting.drafts)
    added_ms = runs[setting].round_ms(repeat) - runs[near].round_ms(repeat)
    return added_ms / runs[setting].tokens_per_round


def saved_ms(runs: dict[Setting, Runs], setting: Setting, repeat: int | None = None) -> float:
    """What drafts take off that."""
    plain = Setting(setting.stages, setting.link_ms, 0)
    return links_ms(runs, plain, repeat) - links_ms(runs, setting, repeat)


def compare(real: dict[Setting, Runs], texts: Texts, stages: int) -> list[dict[str, float]]:
    costs = fitted(real, stages, texts.drafts)
    say(f"{stages} stages, fitted without delay: {costs}")
    virtual = {setting: simulated(setting, texts, costs) for setting in real}
    print("                        round, ms             links, ms a token   saved, ms a token")
    print(" N  t1  k tokens    near    far  /sim  speed    plain    now    real formula  /formula"
          " (of repeats)          /sim")  # fmt: skip
    rows = [_row(real, virtual, setting) for setting in real if setting.link_ms > 0.0]
    rows.sort(key=lambda row: (row["link_ms"], row["drafts"]))
    for row in rows:
        print(_line(row), flush=True)
    return rows


def _row(
    real: dict[Setting, Runs], virtual: dict[Setting, Runs], setting: Setting
) -> dict[str, float]:
    plain = Setting(setting.stages, setting.link_ms, 0)
    near = Setting(setting.stages, 0.0, setting.drafts)
    one, per_round = real[setting], real[setting].tokens_per_round
    formula = (setting.stages - 1) * setting.link_ms * (per_round - 1.0) / per_round
    shares = [
        saved_ms(real, setting, repeat) / formula if formula else math.nan
        for repeat in range(len(one.rounds_s))
    ]
    predicted = saved_ms(virtual, setting)
    return {
        "stages": setting.stages,
        "link_ms": setting.link_ms,
        "drafts": setting.drafts,
        "tokens_per_round": per_round,
        "simulated_tokens_per_round": virtual[setting].tokens_per_round,
        "near_round_ms": real[near].round_ms(),
        "round_ms": one.round_ms(),
        "median_round_ms": 1e3 * median(two for rounds_s in one.rounds_s for two in rounds_s),
        "round_over_simulated": one.round_ms() / virtual[setting].round_ms(),
        "speed_up": real[plain].round_ms() / one.round_ms() * per_round,
        "plain_links_ms": links_ms(real, plain),
        "links_ms": links_ms(real, setting),
        "saved_ms": saved_ms(real, setting),
        "formula_ms": formula,
        "saved_over_formula": saved_ms(real, setting) / formula if formula else math.nan,
        "saved_over_formula_low": min(shares),
        "saved_over_formula_high": max(shares),
        "saved_over_simulated": saved_ms(real, setting) / predicted if formula else math.nan,
    }


def _line(row: dict[str, float]) -> str:
    return (
        f"{row['stages']:2.0f} {row['link_ms']:3g} {row['drafts']:2.0f}"
        f" {row['tokens_per_round']:6.2f} {row['near_round_ms']:7.1f} {row['round_ms']:6.1f}"
        f" {row['round_over_simulated']:5.2f} {row['speed_up']:6.2f}"
        f" {row['plain_links_ms']:8.1f} {row['links_ms']:6.1f} {row['saved_ms']:7.1f}"
        f" {row['formula_ms']:7.1f}  {row['saved_over_formula']:8.3f}"
        f" ({row['saved_over_formula_low']:.3f} to {row['saved_over_formula_high']:.3f})"
        f" {row['saved_over_simulated']:8.3f}"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", default="2,4")
    parser.add_argument("--link-ms", default="5,20,50")
    parser.add_argument("--drafts", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    child.READY_WITHIN_S = STARTS_WITHIN_S
    whole = tape_named("bundled-greedy")
    generations = whole.generations[:: max(1, len(whole.generations) // options.texts)]
    tape = replace(whole, generations=generations[: options.texts])
    lengths = (0, *map(int, options.drafts.split(",")))
    texts = Texts(tape, options.tokens, lengths)
    delays_ms = [float(part) for part in options.link_ms.split(",")]
    rows = []
    for stages in map(int, options.stages.split(",")):
        real = asyncio.run(real_side(stages, [0.0, *delays_ms], texts, options.repeats))
        rows += compare(real, texts, stages)
    if options.json:
        content = {"machine": machine(), "versions": versions(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
