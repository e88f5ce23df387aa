"""Check the simulator: real runs beside simulated ones, case by case.

    edgespec profile --pass-ms 25 --draft-ms 8 --out profile.json     # of this machine
    python benchmarks/fidelity.py --profile profile.json [--repeats 3] [--prompts 6] [--json FILE]
        [--texts sim/edgespec_sim/data/prompts/tapes.jsonl] [--temperature 0.7]

Real: the bundled models, a verifier process, gRPC, the product's emulated link; passes take 25 ms
and draft steps 8 ms. Simulated: the same texts as a match tape recorded here, the profile's times,
the same links in virtual time. Four arms run at five round-trip times, then our arm on ten recorded
networks (``EDGESPEC_DATA``; skipped without). The targets are TPOT within 5 % of the real median,
and tokens per pass within 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from edgespec.bench.arms import Arm, arm_settings
from edgespec.bench.measurement import LentDrafter, Measurement, mean_interval, measure
from edgespec.bench.prompts import DEFAULT_PROMPTS, Workload, choose_workload, read_prompts
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
from edgespec.wire.shaped import ShapedTransport
from edgespec_sim.commands.record_tape import record_tape
from edgespec_sim.cost_profile import CostProfile, read_profile
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
from edgespec_sim.token_sources.match_tape import MatchTape
from edgespec_sim.token_sources.source import TapeSource
from edgespec_sim.world.assembly import World
from edgespec_sim.world.site import WorldSetup

PASS_MS, DRAFT_MS, GAMMA = 25.0, 8.0, 4
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

    def add(self, tpot_s: float | None, counters: DraftCounters) -> None:
        if tpot_s is not None:
            self.tpots_s.append(tpot_s)
        self.tokens += counters.committed
        self.passes += counters.passes

    @property
    def tpot_s(self) -> float:
        return median(self.tpots_s)

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


def scenario_of(set_up: SetUp, tape: MatchTape, profile: Path, message_s: float) -> Scenario:
    link = LinkSection(rtt_ms=set_up.rtt_ms, trace=set_up.trace, framing_bytes=0)
    workload = WorkloadSection(
        prompt_tokens=0,
        output_tokens=4096,
        think_s=0.002,
        requests=len(tape.generations),
        start_within_s=0.0,
    )
    cost = CostSection(profile=str(profile))
    return Scenario(
        name="fidelity",
        duration_s=600.0,
        tokens=TokensSection(source=TokensFrom.TAPE),
        arms=(set_up.arm,),
        gamma=GAMMA,
        links={"link": link},
        devices={"device": DeviceSection(path=("link",), draft=cost, workload=workload)},
        verifiers={"verifier": VerifierSection(pass_time=cost)},
        message_ms=1e3 * message_s,
    )


# --- all of it ------------------------------------------------------------------------------


async def real_side(
    args: argparse.Namespace, set_ups: Sequence[SetUp], data: Path | None
) -> tuple[MatchTape, dict[SetUp, Seen]]:
    config = AgentConfig(draft=DraftSection(draft_ms=DRAFT_MS))
    drafter = load_drafter(config)
    walker = load_drafter(AgentConfig())
    assert drafter is not None
    assert walker is not None
    tokenizer = load_tokenizer(tokenizer_reference(config))
    async with verifier_process(["--pass-ms", f"{PASS_MS:g}", PLAIN_STREAMING]) as (address, _):
        transport = connect(address)
        info = (await transport.info()).model
        await transport.close()
        room = info.context_length - args.tokens
        workload = choose_workload(
            read_prompts(args.texts) if args.texts else DEFAULT_PROMPTS,
            tokenizer.encode,
            limit=args.prompts,
            room=room,
            eos_token_ids=info.eos_token_ids,
        )
        tape = await taped(args, address, walker, tokenizer, workload)
        real = Real(address, drafter, tokenizer, tape, sampling_of(args))
        for repeat in range(args.repeats + 1):  # the first one warms up and is not counted
            for set_up in (*set_ups[repeat % len(set_ups) :], *set_ups[: repeat % len(set_ups)]):
                if repeat == 0 and set_up not in set_ups[: len(ARMS)]:
                    continue
                print(f"real, repeat {repeat}: {set_up.name}", file=sys.stderr, flush=True)
                await real.run(set_up, data)
            if repeat == 0:
                real.seen.clear()
    return tape, real.seen


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
    return await record_tape(walker, "bundled", workload, texts, sampling, print, about=about)


def compare(
    set_ups: Sequence[SetUp],
    tape: MatchTape,
    real: dict[SetUp, Seen],
    profile_path: Path,
    profile: CostProfile,
    data: Path | None,
) -> list[dict[str, Any]]:
    rows = []
    head = f"{'set-up':62s} {'real ms':>8s} {'sim ms':>8s} {'error':>7s}"
    print(f"{head}   tokens/pass real sim error")
    for set_up in set_ups:
        folder = data / "traces" if data else Path()
        scenario = scenario_of(set_up, tape, profile_path.resolve(), profile.message.seconds(1))
        simulated = Seen()
        for seed in range(SIMULATED_SEEDS):
            world = World(scenario, set_up.arm, str(seed), WorldSetup(TapeSource(tape), folder))
            for record in world.run().meters.records:
                simulated.add(record.tpot_s, record.counters)
        seen = real[set_up]
        tpot = simulated.tpot_s / seen.tpot_s - 1.0
        tokens = simulated.tokens_per_pass / seen.tokens_per_pass - 1.0
        good = abs(tpot) <= TPOT_WITHIN and abs(tokens) <= TOKENS_WITHIN
        print(
            f"{set_up.name:62s} {1e3 * seen.tpot_s:8.2f} {1e3 * simulated.tpot_s:8.2f} {tpot:+7.1%}"
            f"   {seen.tokens_per_pass:6.3f} {simulated.tokens_per_pass:6.3f} {tokens:+6.1%}"
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
                "real_tokens_per_pass": seen.tokens_per_pass,
                "simulated_tokens_per_pass": simulated.tokens_per_pass,
                "tokens_per_pass_error": tokens,
                "within": good,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, required=True, help="file of `edgespec profile`")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--texts", type=Path, help="prompts; else the bench's own")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--only", default="", help="set-ups whose name holds this")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    profile = read_profile(args.profile)
    data = Path(os.environ.get("EDGESPEC_DATA", "../shared/data"))
    have_data = (data / "traces").is_dir()
    set_ups = [SetUp(arm, rtt_ms) for rtt_ms in RTTS_MS for arm in ARMS]
    if have_data:
        set_ups += [SetUp(Arm.EDGESPEC, trace=trace) for trace in TRACES]
    else:
        print(f"no recorded networks: {data} is not there", file=sys.stderr)
    set_ups = [set_up for set_up in set_ups if args.only in set_up.name]
    if not set_ups:
        parser.error(f"--only is {args.only!r}, which no set-up's name holds")
    started_s = time.monotonic()
    tape, real = asyncio.run(real_side(args, set_ups, data if have_data else None))
    rows = compare(set_ups, tape, real, args.profile, profile, data if have_data else None)
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
