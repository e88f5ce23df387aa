"""What the verifier's own guesses bring to a device that is far away.

    EDGESPEC_DATA=... python benchmarks/server_drafts.py [--rtt-ms 200] [--pass-ms 25] [--limit 4]

Code (HumanEval) and summaries (Spec-Bench) are gone on with by the bundled pair and by the toy,
over an emulated link, with real gRPC: by a device that drafts nothing and by one that drafts, and
by a verifier with and without guesses of its own. All four run a prompt before any runs the next,
and take turns in going first. Tokens, passes and rows are real; pass time and link are emulated.
Prints medians over the prompts, with the lowest and the highest. Exits 1 if a text differs between
arms.

``--virtual`` plays the same sessions and the same models in virtual time, without gRPC: then no
other work on the machine can lengthen a pass, and times count too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from virtual_station import VirtualDevice, VirtualVerifier

from edgespec.agent.agent import Agent
from edgespec.benchmark.measurement import Measurement, measure
from edgespec.benchmark.report import machine, versions
from edgespec.compose import (
    build_agent,
    build_verifier,
    load_drafter,
    load_target,
    load_tokenizer,
)
from edgespec.config import AgentConfig, DraftSection, LinkSection, PacingSection, VerifierConfig
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.engine_events import KeepNodes, RunBatch

CODE, SUMMARIES = "code", "summaries"
FILES: Final = {CODE: "humaneval.jsonl", SUMMARIES: "spec_bench.jsonl"}


@dataclass
class ServedCounts:
    """Counts the rows of passes as the verifier's trace tells them."""

    drafted: int = 0
    """Nodes that were guesses of the verifier's, and those that came true."""
    accepted: int = 0
    _riding: dict[str, bool] = field(default_factory=dict)

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        match item:
            case RunBatch(requests):
                for request in requests:
                    self.drafted += request.served
                    self._riding[request.key] = request.served > 0
            case KeepNodes(key, nodes) if self._riding.get(key):
                self.accepted += len(nodes)


@dataclass(frozen=True, slots=True)
class Arm:
    drafts: bool
    """Whether the device does."""
    served: bool
    """Whether the verifier guesses."""


ARMS: Final = tuple(Arm(drafts, served) for drafts in (False, True) for served in (False, True))


@dataclass(frozen=True, slots=True)
class Found:
    """One prompt on one arm."""

    measurement: Measurement
    drafted: int
    accepted: int

    @property
    def tpot_ms(self) -> float:
        return (self.measurement.tpot_s or 0.0) * 1e3

    @property
    def tokens_per_pass(self) -> float:
        return len(self.measurement.tokens) / self.measurement.counters.passes


@dataclass(slots=True)
class Station:
    device: Agent | VirtualDevice
    counts: ServedCounts

    async def run(self, prompt: Sequence[int], sampling: SamplingParams) -> Found:
        before = self.counts.drafted, self.counts.accepted
        if isinstance(self.device, VirtualDevice):
            measurement = self.device.run(prompt, sampling)
        else:
            measurement = await measure(self.device, prompt, sampling, ())
        drafted, accepted = self.counts.drafted - before[0], self.counts.accepted - before[1]
        return Found(measurement, drafted, accepted)


def texts(folder: Path, kind: str) -> Iterator[str]:
    """The prompts of a kind, in the order of their file."""
    with (folder / FILES[kind]).open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if kind == CODE:
                yield row["prompt"]
            elif row["category"] == "summarization":
                yield row["turns"][0]


@contextlib.asynccontextmanager
async def verifier(
    options: Any, model: str, *, served: bool
) -> AsyncIterator[tuple[str, Any, Any]]:
    """A verifier on a free port; yields its address, what it serves, and its counts."""
    pacing = PacingSection(options.pass_ms, options.row_ms)
    config = VerifierConfig(model, port=0, pacing=pacing, server_drafts=served)
    counts = ServedCounts()
    target = await asyncio.to_thread(load_target, config)
    serving, server = build_verifier(config, target=target, tracer=counts)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}", target.info, counts
    finally:
        await serving.stop()
        await server.stop(0.0)


async def real_stations(
    stack: contextlib.AsyncExitStack, options: Any, model: str
) -> tuple[dict[Arm, Station], int]:
    """Agents and verifiers behind gRPC, and the target's context."""
    stations: dict[Arm, Station] = {}
    context_length = 0
    for served in (False, True):
        address, info, counts = await stack.enter_async_context(
            verifier(options, model, served=served)
        )
        context_length = info.context_length
        for drafts in (False, True):
            draft = DraftSection(model if drafts else "none", threads=1, draft_ms=options.draft_ms)
            link = LinkSection(rtt_ms=options.rtt_ms)
            agent = build_agent(AgentConfig(address, tokenizer=model, draft=draft, link=link))
            stations[Arm(drafts, served)] = Station(await stack.enter_async_context(agent), counts)
    return stations, context_length


def virtual_stations(options: Any, model: str) -> tuple[dict[Arm, Station], int]:
    """The same in virtual time."""
    stations: dict[Arm, Station] = {}
    context_length = 0
    for served in (False, True):
        target, counts = load_target(VerifierConfig(model)), ServedCounts()
        context_length = target.info.context_length
        site = VirtualVerifier(target, options.pass_ms, options.row_ms, counts, served=served)
        for drafts in (False, True):
            drafter = load_drafter(AgentConfig("virtual", draft=DraftSection(model, threads=1)))
            assert drafter is not None
            device = VirtualDevice(site, drafter, options.rtt_ms, options.draft_ms, drafts=drafts)
            stations[Arm(drafts, served)] = Station(device, counts)
    return stations, context_length


async def compare(options: Any, folder: Path, model: str) -> list[dict[str, Any]]:
    """All arms on all prompts of both kinds; one row a kind."""
    async with contextlib.AsyncExitStack() as stack:
        if options.virtual:
            stations, context_length = virtual_stations(options, model)
        else:
            stations, context_length = await real_stations(stack, options, model)
        encode = load_tokenizer(model).encode
        room = context_length - options.max_tokens
        rows: list[dict[str, Any]] = []
        for kind in FILES:
            prompts = [
                encode(text)
                for text, _ in zip(texts(folder, kind), range(options.limit), strict=False)
            ]
            cut = sum(len(prompt) > room for prompt in prompts)
            found = await run_all(options, stations, [prompt[:room] for prompt in prompts])
            rows += table(model, kind, cut, found)
        return rows


async def run_all(
    options: Any, stations: dict[Arm, Station], prompts: Sequence[Sequence[int]]
) -> list[dict[Arm, Found]]:
    found: list[dict[Arm, Found]] = []
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(
            options.temperature, seed=number, max_tokens=options.max_tokens, ignore_eos=True
        )
        one: dict[Arm, Found] = {}
        for arm in (*ARMS[number % 4 :], *ARMS[: number % 4]):
            one[arm] = await stations[arm].run(prompt, sampling)
        found.append(one)
    return found


def table(
    model: str, kind: str, cut: int, found: Sequence[dict[Arm, Found]]
) -> list[dict[str, Any]]:
    """One row for devices that draft, one for those that do not."""
    rows = []
    for drafts in (False, True):
        without = [one[Arm(drafts, False)] for one in found]
        with_it = [one[Arm(drafts, True)] for one in found]
        tokens = sum(len(one.measurement.tokens) for one in with_it)
        ratios = [a.tpot_ms / b.tpot_ms for a, b in zip(without, with_it, strict=True)]
        differ = sum(
            a.measurement.tokens != one[ARMS[0]].measurement.tokens
            for one in found
            for a in one.values()
        )
        rows.append(
            {
                "model": model,
                "prompts": kind,
                "count": len(found),
                "cut": cut,
                "device_drafts": drafts,
                "tokens_per_pass": spread([one.tokens_per_pass for one in without]),
                "tokens_per_pass_served": spread([one.tokens_per_pass for one in with_it]),
                "tpot_ms": spread([one.tpot_ms for one in without]),
                "tpot_ms_served": spread([one.tpot_ms for one in with_it]),
                "speed_up": spread(ratios),
                "served_rows_per_token": sum(one.drafted for one in with_it) / tokens,
                "served_accepted_per_token": sum(one.accepted for one in with_it) / tokens,
                "texts_that_differ": differ,
            }
        )
    return rows


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest, highest."""
    return median(values), min(values), max(values)


def shown(values: tuple[float, float, float]) -> str:
    return f"{values[0]:.2f} ({values[1]:.2f}-{values[2]:.2f})"


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(
        "| model | prompts | device | tokens/pass | with | ms/token | with | speed-up |"
        " rows/token |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | ---: |")
    for row in rows:
        device = "drafts" if row["device_drafts"] else "drafts nothing"
        names = ("tokens_per_pass", "tokens_per_pass_served", "tpot_ms", "tpot_ms_served")
        cells = [shown(row[name]) for name in (*names, "speed_up")]
        head = [row["model"], row["prompts"], device]
        print("|", " | ".join([*head, *cells, f"{row['served_rows_per_token']:.2f}"]), "|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="bundled,toy")
    parser.add_argument("--rtt-ms", type=float, default=200.0)
    parser.add_argument("--pass-ms", type=float, default=25.0)
    parser.add_argument("--row-ms", type=float, default=0.0, help="of each row of a pass")
    parser.add_argument("--draft-ms", type=float, default=8.0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--limit", type=int, default=4, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--virtual", action="store_true", help="in virtual time, without gRPC")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    data = os.environ.get("EDGESPEC_DATA", "")
    folder = Path(data) / "prompts"
    missing = [name for name in FILES.values() if not data or not (folder / name).is_file()]
    if missing:
        print(f"skipped: EDGESPEC_DATA is {data!r}, where prompts/{missing[0]} is not to be found")
        return 0
    command = shlex.join(("python", *sys.argv))
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        rows += asyncio.run(compare(options, folder, model))
    show(rows)
    about = {"command": command, "machine": machine(), "versions": versions()}
    print(json.dumps(about))
    if options.json is not None:
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    differ = sum(row["texts_that_differ"] for row in rows)
    if differ:
        print(f"{differ} texts differ from those without drafts")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
