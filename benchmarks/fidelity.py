"""Check the simulator: real runs beside simulated ones, case by case.

    edgespec profile --pass-ms 25 --draft-ms 8 --out profile.json     # of this machine
    python benchmarks/fidelity.py --profile profile.json [--repeats 3] [--prompts 6] [--json FILE]
        [--texts sim/edgespec_sim/data/prompts/tapes.jsonl] [--temperature 0.7]
    python benchmarks/fidelity.py --model SMOLLM2 --draft SMOLLM2-INT4 --kinds chat,code,maths
        --pass-ms 100 --draft-ms 32 --only / --repeats 1 --prompts 6 --tokens 96

Real: the bundled models or a pair of your own, a verifier process, gRPC, the product's emulated
link; passes take 25 ms and draft steps 8 ms, or the times that are given. Simulated: the same texts
as a match tape recorded here, the profile's times or without one the given times, the same links in
virtual time; and made-up texts of a process that is fitted to the tape. Four arms run at five
round-trip times, then our arm on ten recorded networks (``EDGESPEC_DATA``; skipped without). The
targets are TPOT within 5 % of the real median, and tokens per pass within 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from edgespec.bench.arms import Arm, arm_settings
from edgespec.bench.intervals import mean_interval
from edgespec.bench.measurement import LentDrafter, Measurement, measure
from edgespec.bench.prompts import (
    BUILT_IN,
    DEFAULT_PROMPTS,
    BenchPrompt,
    Workload,
    choose_workload,
    read_prompts,
)
from edgespec.bench.report import describe_machine, list_versions, tape_about
from edgespec.cli.verifier import PLAIN_STREAMING, verifier_process
from edgespec.config import AgentConfig, DraftSection
from edgespec.core.device.events import DraftCounters
from edgespec.core.link_model import LinkModel, LinkSettings
from edgespec.core.ports import Drafter
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import (
    PromptTokenizer,
    connect,
    load_drafter,
    load_tokenizer,
    tokenizer_reference,
)
from edgespec.models.folders import BUNDLED
from edgespec.models.tokenizer import prompt_encoder
from edgespec.wire.shaped import ShapedTransport
from edgespec_sim.commands.record_tape import record_tape
from edgespec_sim.cost_profile import read_profile
from edgespec_sim.links.formats import read_trace
from edgespec_sim.links.path import TraceSchedules
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    LinkSection,
    Scenario,
    TokensFrom,
    TokensSection,
    VerifierSection,
    WorkloadSection,
)
from edgespec_sim.token_sources.acceptance_process import fit
from edgespec_sim.token_sources.match_tape import MatchTape
from edgespec_sim.token_sources.source import ProcessSource, TapeSource, TokenSource
from edgespec_sim.world.assembly import World
from edgespec_sim.world.site import WorldSetup

GAMMA = 4
RTTS_MS = (2.0, 20.0, 50.0, 100.0, 200.0)
ARMS = (Arm.TARGET_ONLY, Arm.VANILLA, Arm.PEARL, Arm.EDGESPEC)
TRACES = (
    "cellular_us_drive/2023-05-13_verizon.ping.txt",
    "cellular_us_drive/2023-05-13_tmobile.ping.txt",
    "cellular_us_drive/2023-08-05_atnt.ping.txt",
    "cicv5g/arterial_n78_v50_run02.txt",
    "cicv5g/arterial_n8_v50_run02.txt",
    "cicv5g/urban_n78_v20_run01.txt",
    "cicv5g/urban_n8_v20_run01.txt",
    "starlink_fjordlink/2024-12-12-20-10-51-starlink.csv",
    "starlink_fjordlink/2025-02-13-14-31-23-starlink.csv",
    "wan_jitterbug/raw_days01-10.csv",
)
TPOT_WITHIN, TOKENS_WITHIN = 0.05, 0.02
SIMULATED_SEEDS = 8
MADE_UP_TEXTS = 24
"""Texts of a process for each seed. They scatter more than a tape's, which every seed repeats."""
MESSAGE_MS = 0.3
"""One-way time of a message besides the link, without a profile."""


@dataclass(frozen=True, slots=True)
class SetUp:
    arm: Arm
    rtt_ms: float = 0.0
    trace: str = ""

    @property
    def name(self) -> str:
        return f"{self.arm.value:12s} " + (self.trace or f"RTT {self.rtt_ms:g} ms")


@dataclass(slots=True)
class Seen:
    """The results of one case on one side: median TPOT over requests, and sums."""

    tpots_s: list[float] = field(default_factory=list)
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    """Time behind the first tokens, and the number of tokens that arrived in it."""
    timed: int = 0

    def add(self, tpot_s: float | None, counters: DraftCounters) -> None:
        if tpot_s is not None:
            self.tpots_s.append(tpot_s)
            self.seconds += tpot_s * (counters.committed - 1)
            self.timed += counters.committed - 1
        self.tokens += counters.committed
        self.passes += counters.passes

    @property
    def tpot_s(self) -> float:
        """Median over requests of the time per token."""
        return median(self.tpots_s)

    @property
    def token_s(self) -> float:
        """Time per token over all tokens behind a first one."""
        return self.seconds / self.timed

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes


# --- the real side --------------------------------------------------------------------------


class Real:
    """Runs cases on real processes; ``seen`` collects the repeats."""

    def __init__(
        self,
        address: str,
        drafter: Drafter,
        tokenizer: PromptTokenizer,
        tape: MatchTape,
        sampling: SamplingParams,
    ) -> None:
        self.seen: dict[SetUp, Seen] = {}
        self._address, self._drafter, self._tokenizer = address, drafter, tokenizer
        self._eos = frozenset(tape.eos_token_ids)
        source = TapeSource(tape)
        self._prompts = [source.request(n, 0, 4096).prompt for n in range(len(tape.generations))]
        self._sampling = sampling

    async def run(self, set_up: SetUp, data: Path | None) -> None:
        up, down = links_of(set_up, data)
        transport = ShapedTransport(connect(self._address), up, down)
        drafter = LentDrafter(self._drafter) if set_up.arm.drafts else None
        options = AgentOptions(*arm_settings(set_up.arm, GAMMA))
        encode, stream = self._tokenizer.encode, self._tokenizer.stream
        seen = self.seen.setdefault(set_up, Seen())
        async with Agent(transport, drafter, encode, stream, options) as agent:
            for prompt in self._prompts:
                done = await self._measure(agent, prompt)
                seen.add(done.tpot_s, done.counters)

    async def _measure(self, agent: Agent, prompt: tuple[int, ...]) -> Measurement:
        return await measure(agent, prompt, self._sampling, self._eos)


def links_of(set_up: SetUp, data: Path | None) -> tuple[LinkModel, LinkModel]:
    if set_up.trace:
        assert data is not None
        return TraceSchedules.from_trace(read_trace(data / "traces" / set_up.trace)).make_links()
    settings = LinkSettings(one_way_s=set_up.rtt_ms / 2e3)
    return LinkModel(settings), LinkModel(settings)


# --- the simulated side ---------------------------------------------------------------------


def scenario_of(
    set_up: SetUp, tape: MatchTape, cost: tuple[CostSection, CostSection], message_s: float
) -> Scenario:
    """Return the world of a set-up with the tape's texts, one after another. ``cost`` holds the
    times of a step and of a pass."""
    link = LinkSection(rtt_ms=set_up.rtt_ms, trace=set_up.trace, framing_bytes=0)
    workload = WorkloadSection(
        prompt_tokens=0,
        output_tokens=4096,
        think_s=0.002,
        requests=len(tape.generations),
        start_within_s=0.0,
    )
    return Scenario(
        name="fidelity",
        duration_s=600.0,
        tokens=TokensSection(source=TokensFrom.TAPE),
        arms=(set_up.arm,),
        gamma=GAMMA,
        links={"link": link},
        devices={"device": DeviceSection(path=("link",), draft=cost[0], workload=workload)},
        verifiers={"verifier": VerifierSection(pass_time=cost[1])},
        message_ms=1e3 * message_s,
    )


def made_up(scenario: Scenario, tape: MatchTape) -> Scenario:
    """Return the world with made-up texts, as long as the tape's in the mean."""
    prompt = fmean(len(one.prompt) for one in tape.generations)
    output = fmean(len(one.tokens) for one in tape.generations)
    device = scenario.devices["device"]
    workload = replace(
        device.workload,
        prompt_tokens=round(prompt),
        output_tokens=round(output),
        requests=MADE_UP_TEXTS,
    )
    return replace(
        scenario,
        duration_s=3600.0,
        tokens=TokensSection(source=TokensFrom.PROCESS),
        devices={"device": replace(device, workload=workload)},
    )


def simulate(scenario: Scenario, arm: Arm, sources: Sequence[TokenSource], folder: Path) -> Seen:
    """Play a world on as many seeds as there are sources, and add up what was measured."""
    simulated = Seen()
    for seed, source in enumerate(sources):
        world = World(scenario, arm, str(seed), WorldSetup(source, folder))
        for record in world.run().meters.records:
            simulated.add(record.tpot_s, record.counters)
    return simulated


# --- all of it ------------------------------------------------------------------------------


async def real_side(
    args: argparse.Namespace, set_ups: Sequence[SetUp], data: Path | None
) -> tuple[MatchTape, dict[SetUp, Seen]]:
    """Record the tape and run all set-ups for real."""
    config = AgentConfig(draft=DraftSection(model=args.draft, draft_ms=args.draft_ms))
    drafter = load_drafter(config)
    walker = load_drafter(AgentConfig(draft=DraftSection(model=args.draft)))
    assert drafter is not None
    assert walker is not None
    tokenizer = load_tokenizer(tokenizer_reference(config))
    verifier = ["--model", args.model, "--pass-ms", f"{args.pass_ms:g}", PLAIN_STREAMING]
    async with verifier_process(verifier) as (address, _):
        transport = connect(address)
        info = (await transport.info()).model
        await transport.close()
        workload = choose_workload(
            choose_prompts(args),
            prompt_encoder(tokenizer, chat=bool(args.kinds)),
            limit=args.prompts,
            room=min(info.context_length, MAX_PROMPT_TOKENS) - args.tokens,
            eos_token_ids=info.eos_token_ids,
        )
        tape = await taped(args, address, walker, tokenizer, workload)
        real = Real(address, drafter, tokenizer, tape, sampling_of(args))
        # The first run of one set-up warms up and is not counted.
        for repeat in range(args.repeats + 1):
            turn = repeat % len(set_ups)
            for set_up in (*set_ups[turn:], *set_ups[:turn]) if repeat else set_ups[:1]:
                print(f"real, repeat {repeat}: {set_up.name}", file=sys.stderr, flush=True)
                await real.run(set_up, data)
            if repeat == 0:
                real.seen.clear()
    return tape, real.seen


MAX_PROMPT_TOKENS = 4096


def choose_prompts(args: argparse.Namespace) -> Iterable[BenchPrompt]:
    """Return the prompts of a file, of the bench's sets in turn, or of the bench itself."""
    if args.texts:
        return read_prompts(args.texts)
    if args.kinds:
        sets = [BUILT_IN[kind] for kind in args.kinds.split(",")]
        return [one for several in zip(*sets, strict=True) for one in several]
    return DEFAULT_PROMPTS


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(args.temperature, seed=1, max_tokens=args.tokens)


async def taped(
    args: argparse.Namespace,
    address: str,
    walker: Drafter,
    tokenizer: PromptTokenizer,
    workload: Workload,
) -> MatchTape:
    sampling = sampling_of(args)
    options = AgentOptions(*arm_settings(Arm.TARGET_ONLY))
    encode, stream = tokenizer.encode, tokenizer.stream
    async with Agent(connect(address), None, encode, stream, options) as agent:
        texts = [
            (await measure(agent, prompt, sampling, workload.eos_token_ids)).tokens
            for prompt in workload.prompts
        ]
    about = tape_about(sampling, "built-in")
    return await record_tape(walker, args.model, workload, texts, sampling, print, about=about)


def compare(
    args: argparse.Namespace,
    set_ups: Sequence[SetUp],
    tape: MatchTape,
    real: dict[SetUp, Seen],
    data: Path | None,
) -> list[dict[str, Any]]:
    """Play every set-up in virtual time, and print both sides."""
    if args.profile:
        path = str(args.profile.resolve())
        cost = (CostSection(profile=path), CostSection(profile=path))
        message_s = read_profile(args.profile).message.seconds(1)
    else:
        cost = (CostSection(ms=args.draft_ms), CostSection(ms=args.pass_ms))
        message_s = MESSAGE_MS / 1e3
    law = fit(tape)
    rows = []
    head = f"{'set-up':62s} {'real ms':>8s} {'sim ms':>8s} {'error':>7s}"
    print(f"{head}   tokens/pass real sim error   made-up texts: time, tokens/pass")
    for set_up in set_ups:
        folder = data / "traces" if data else Path()
        scenario = scenario_of(set_up, tape, cost, message_s)
        tapes = [TapeSource(tape) for _ in range(SIMULATED_SEEDS)]
        simulated = simulate(scenario, set_up.arm, tapes, folder)
        processes = [ProcessSource(law, seed) for seed in range(SIMULATED_SEEDS)]
        other = simulate(made_up(scenario, tape), set_up.arm, processes, folder)
        seen = real[set_up]
        tpot = simulated.tpot_s / seen.tpot_s - 1.0
        tokens = simulated.tokens_per_pass / seen.tokens_per_pass - 1.0
        good = abs(tpot) <= TPOT_WITHIN and abs(tokens) <= TOKENS_WITHIN
        print(
            f"{set_up.name:62s} {1e3 * seen.tpot_s:8.2f} {1e3 * simulated.tpot_s:8.2f} {tpot:+7.1%}"
            f"   {seen.tokens_per_pass:6.3f} {simulated.tokens_per_pass:6.3f} {tokens:+6.1%}"
            f"   {other.token_s / seen.token_s - 1.0:+7.1%}"
            f" {other.tokens_per_pass / seen.tokens_per_pass - 1.0:+7.1%}"
            f"{'' if good else '   OUT'}",
            flush=True,
        )
        rows.append(
            {
                "arm": set_up.arm.value,
                "rtt_ms": set_up.rtt_ms,
                "trace": set_up.trace,
                "real_tpot_ms": 1e3 * seen.tpot_s,
                "simulated_tpot_ms": 1e3 * simulated.tpot_s,
                "tpot_error": tpot,
                "real_token_ms": 1e3 * seen.token_s,
                "simulated_token_ms": 1e3 * simulated.token_s,
                "made_up_token_ms": 1e3 * other.token_s,
                "real_tokens_per_pass": seen.tokens_per_pass,
                "simulated_tokens_per_pass": simulated.tokens_per_pass,
                "made_up_tokens_per_pass": other.tokens_per_pass,
                "tokens_per_pass_error": tokens,
                "within": good,
            }
        )
    return rows


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, help="file of `edgespec profile`; else given times")
    parser.add_argument("--model", default=BUNDLED, help="target")
    parser.add_argument("--draft", default=BUNDLED, help="draft, as for `edgespec bench`")
    parser.add_argument("--pass-ms", type=float, default=25.0, help="emulated time of a pass")
    parser.add_argument("--draft-ms", type=float, default=8.0, help="emulated time of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--texts", type=Path, help="prompts; else the bench's own")
    parser.add_argument("--kinds", default="", help="sets of chat prompts in turn, with commas")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--only", default="", help="set-ups whose name holds this")
    parser.add_argument("--json", type=Path)
    return parser


def run_cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run and play the set-ups that the options name. Raises ``ValueError`` if there is none."""
    data = Path(os.environ.get("EDGESPEC_DATA", "../shared/data"))
    have_data = (data / "traces").is_dir()
    set_ups = [SetUp(arm, rtt_ms) for rtt_ms in RTTS_MS for arm in ARMS]
    if have_data:
        set_ups += [SetUp(Arm.EDGESPEC, trace=trace) for trace in TRACES]
    else:
        print(f"no recorded networks: {data} is not there", file=sys.stderr)
    set_ups = [set_up for set_up in set_ups if args.only in set_up.name]
    if not set_ups:
        raise ValueError(f"--only is {args.only!r}, which no set-up's name holds")
    found = data if have_data else None
    tape, real = asyncio.run(real_side(args, set_ups, found))
    return compare(args, set_ups, tape, real, found)


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    started_s = time.monotonic()
    try:
        rows = run_cases(args)
    except ValueError as error:
        parser.error(str(error))
    for name, what in (
        ("tpot_error", "time of the tape over the real one, less 1"),
        ("tokens_per_pass_error", "tokens a pass of the tape over the real ones, less 1"),
    ):
        values = [row[name] for row in rows]
        low, high = mean_interval(values)
        print(f"{what}, mean of {len(rows)}: {fmean(values):.3f} ({low:.3f} to {high:.3f})")
    within = sum(bool(row["within"]) for row in rows)
    print(f"{within} of {len(rows)} set-ups within {TPOT_WITHIN:.0%} and {TOKENS_WITHIN:.0%}")
    if args.json:
        content = {"machine": describe_machine(), "versions": list_versions(), "rows": rows}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"took {time.monotonic() - started_s:.0f} s")
    return 0 if within == len(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
