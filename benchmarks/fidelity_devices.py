"""Does the simulator hold for several devices on one verifier? Real processes beside virtual ones.

    python benchmarks/fidelity_devices.py [--devices 8] [--repeats 4] [--rtts 20,100] [--json FILE]

Real: one verifier process (toy target, emulated passes) and a process for each device (toy draft,
emulated steps), each on an emulated link of its own, over gRPC. Simulated: the same scenario, and
by the same seeds the same questions, pauses and dice of tokens. The simulator gets this machine's
costs: what passes and draft steps took in that very run, as verifier and devices timed them, and
what a message costs, from plain streaming without distance. What is compared is what follows from
sharing and waiting. Asked for: mean TTFT and TPOT within 5 %. The interval of each ratio is
over repeats, paired by seed, so a busy machine makes it wide. Exits 1 where a whole interval lies
outside of 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from kernel_device import Load, source_of

from edgespec.agent.agent import Agent
from edgespec.benchmark.arm_options import arm_options
from edgespec.benchmark.arms import Arm
from edgespec.benchmark.measurement import measure
from edgespec.cli.child import PLAIN_STREAMING, verifier_process
from edgespec.compose import connect, load_drafter, load_tokenizer
from edgespec.config import AgentConfig, DraftSection
from edgespec.core.association.policies import association_policy
from edgespec.core.network.link_model import LinkModel, LinkSettings
from edgespec.transport.shaped import ShapedTransport
from edgespec_sim.planning.replication import Interval, Total, speedup
from edgespec_sim.scenario.network_sections import LinkSection
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    Scenario,
    TokensFrom,
    TokensSection,
    VerifierSection,
    WorkloadSection,
)
from edgespec_sim.world.assembly import World
from edgespec_sim.world.connections import Connections
from edgespec_sim.world.surrounding import Surrounding
from edgespec_sim.world.user import REQUESTS_PER_USER

WITHIN = 0.05
Rows = list[tuple[float, ...]]
"""TTFT and TPOT of requests, in seconds; of real ones also a pass and a draft step, as timed."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Of this machine."""

    pass_ms: float
    draft_ms: float
    message_ms: float = 0.0


# --- the real side --------------------------------------------------------------------------


async def device(address: str, number: int, rtt_ms: float, load: Load) -> Rows:
    """What one device process does, as a simulated user with that number would."""
    link = LinkSettings(one_way_s=rtt_ms / 2e3)
    transport = ShapedTransport(connect(address), LinkModel(link), LinkModel(link))
    arm, source = Arm(load.arm), source_of(load)
    config = AgentConfig(draft=DraftSection(model="toy", draft_ms=load.draft_ms))
    drafter = load_drafter(config) if arm.drafts else None
    tokenizer = load_tokenizer("toy")
    dice = random.Random(f"{load.seed}/user/{number}")
    rows: Rows = []
    async with Agent(
        transport, drafter, tokenizer.encode, tokenizer.stream, arm_options(arm)
    ) as agent:
        await transport.info()
        await asyncio.sleep(dice.uniform(0.0, load.think_s))
        for asked in range(load.requests + 1):
            request = source.request(
                number * REQUESTS_PER_USER + asked, load.prompt_tokens, load.tokens
            )
            done = await measure(agent, request.prompt, request.sampling, ())
            if asked and done.ttft_s is not None and done.tpot_s is not None:
                assert agent.stats is not None
                pass_s = done.counters.verify_s / max(1, done.counters.passes)
                step_s = agent.stats.estimates.step_s.get(load.draft_ms / 1e3)
                rows.append((done.ttft_s, done.tpot_s, pass_s, step_s))
            await asyncio.sleep(dice.expovariate(1.0 / load.think_s))
    return rows


def be_device(address: str, number: int) -> None:
    """Each line of standard input is a round trip and a ``Load``; each answer a line of rows."""
    print("ready", flush=True)
    for line in sys.stdin:
        rtt_ms, load = json.loads(line)
        rows = asyncio.run(device(address, number, rtt_ms, Load(**load)))
        print(json.dumps(rows), flush=True)


class Devices:
    """Device processes beside one another, for one set-up after another; a context manager."""

    def __init__(self, address: str, count: int) -> None:
        self._address, self._count = address, count
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Devices:
        try:
            for number in range(self._count):
                await self._start(number)
            for process in self._processes:
                await self._line(process)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def play(self, rtt_ms: float, load: Load) -> Rows:
        """All at once; the first request of each warms up and is not in it."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{json.dumps((rtt_ms, asdict(load)))}\n".encode())
        lines = [await self._line(process) for process in self._processes]
        return [tuple(row) for line in lines for row in json.loads(line)]

    async def _start(self, number: int) -> None:
        command = (sys.executable, __file__, "--device", str(number), "--address", self._address)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self._processes.append(process)

    async def _line(self, process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"a device ended with {await process.wait()}")
        return line


# --- the simulated side ---------------------------------------------------------------------


def scenario_of(count: int, rtt_ms: float, load: Load, costs: Costs) -> Scenario:
    workload = WorkloadSection(
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.tokens,
        think_s=load.think_s,
        requests=load.requests + 1,
        start_within_s=load.think_s,
    )
    section = DeviceSection(
        count=count, path=("link",), draft=CostSection(ms=costs.draft_ms), workload=workload
    )
    passes = CostSection(ms=costs.pass_ms)
    return Scenario(
        name="devices",
        duration_s=900.0,
        tokens=TokensSection(source=TokensFrom.TOY),
        arms=(Arm(load.arm),),
        links={"link": LinkSection(rtt_ms=rtt_ms, framing_bytes=0)},
        devices={"device": section},
        verifiers={"verifier": VerifierSection(pass_time=passes)},
        message_ms=costs.message_ms,
    )


def simulated(count: int, rtt_ms: float, load: Load, costs: Costs) -> Rows:
    scenario = scenario_of(count, rtt_ms, load, costs)
    surrounding = Surrounding(source_of(load), association_policy("lowest-delay"), Path())
    # The product's emulated link takes a round trip to open each stream, not only the first.
    with patch.object(Connections, "known", return_value=False):
        records = World(scenario, Arm(load.arm), str(load.seed), surrounding).run().meters.records
    begun: set[str] = set()
    rows: Rows = []
    for one in sorted(records, key=lambda record: record.started_s):
        if one.device in begun and one.ttft_s is not None and one.tpot_s is not None:
            rows.append((one.ttft_s, one.tpot_s))
        begun.add(one.device)
    return rows


# --- both -----------------------------------------------------------------------------------


def means(rows: Rows) -> tuple[float, float]:
    return fmean(row[0] for row in rows), fmean(row[1] for row in rows)


def timed(real: Rows, message_ms: float = 0.0) -> Costs:
    """Passes and steps of that run."""
    pass_s, step_s = (fmean(row[column] for row in real) for column in (2, 3))
    return Costs(1e3 * pass_s, 1e3 * step_s, message_ms)


def message_ms_of(count: int, load: Load, real: Rows) -> float:
    """From plain streaming without distance: of what a message takes, the first token takes one
    there and one back."""
    ttft_s, _ = means(real)
    without_s, _ = means(simulated(count, 0.0, load, timed(real)))
    return max(0.0, 1e3 * (ttft_s - without_s) / 2.0)


def ratio(virtual: Sequence[Rows], real: Sequence[Rows], what: int) -> Interval:
    """Simulated over real, paired by repeat; ``what``: 0 TTFT, 1 TPOT."""
    totals = [
        [Total(sum(row[what] for row in rows), len(rows)) for rows in side]
        for side in (virtual, real)
    ]
    value, interval = speedup(*totals)
    assert value is not None
    return interval or Interval(value, value, value)


def told(name: str, real: Sequence[Rows], virtual: Sequence[Rows]) -> dict[str, object]:
    row: dict[str, object] = {"set-up": name}
    words = []
    for what, figure in enumerate(("TTFT", "TPOT")):
        found = ratio(virtual, real, what)
        ours, theirs = (1e3 * fmean(means(rows)[what] for rows in side) for side in (real, virtual))
        outside = found.low > 1.0 + WITHIN or found.high < 1.0 - WITHIN
        sure = 1.0 - WITHIN <= found.low and found.high <= 1.0 + WITHIN
        verdict = "OUT" if outside else "within" if sure else "open"
        words.append(
            f"{figure} {ours:.1f} -> {theirs:.1f} ms, {found.value:.3f}"
            f" ({found.low:.3f} to {found.high:.3f}) {verdict}"
        )
        row[figure] = {"real_ms": ours, "simulated_ms": theirs, **asdict(found), "is": verdict}
    print(f"{name}: {'; '.join(words)}", flush=True)
    return row


async def compare(args: argparse.Namespace) -> list[dict[str, object]]:
    load = Load(requests=args.requests, draft_ms=60.0, pass_ms=120.0, tokens=16)
    seeds = range(args.seed, args.seed + args.repeats)
    count: int = args.devices
    options = ("--model", "toy", PLAIN_STREAMING, "--pass-ms", f"{load.pass_ms:g}")
    cells = [(arm, rtt_ms) for arm in args.arms for rtt_ms in args.rtts]
    real: dict[tuple[str, float], list[Rows]] = {cell: [] for cell in cells}
    message_ms: list[float] = []
    async with verifier_process(options) as (address, _), Devices(address, count) as devices:
        for seed in seeds:
            mine = replace(load, seed=seed)
            message_ms.append(message_ms_of(count, mine, await devices.play(0.0, mine)))
            for arm, rtt_ms in cells:
                found = await devices.play(rtt_ms, replace(mine, arm=arm))
                real[arm, rtt_ms].append(found)
                said = f"seed {seed}, {arm}, {rtt_ms:g} ms: {timed(found, message_ms[-1])}"
                print(said, file=sys.stderr, flush=True)
    table = []
    for (arm, rtt_ms), sides in real.items():
        virtual = [
            simulated(count, rtt_ms, replace(load, arm=arm, seed=seed), timed(rows, one_ms))
            for seed, rows, one_ms in zip(seeds, sides, message_ms, strict=True)
        ]
        table.append(told(f"{arm}, {count} devices, RTT {rtt_ms:g} ms", sides, virtual))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8, help="of each device")
    parser.add_argument(
        "--arms", type=lambda text: text.split(","), default=["target-only", "edgespec"]
    )
    parser.add_argument(
        "--rtts",
        type=lambda text: [float(one) for one in text.split(",")],
        default=[20.0, 100.0],
        help="ms",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    for name in ("--device", "--address"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device is not None:
        be_device(args.address, int(args.device))
        return 0
    print(f"load before: {os.getloadavg()}", flush=True)
    table = asyncio.run(compare(args))
    print(f"load after: {os.getloadavg()}")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return int(any("OUT" in json.dumps(row) for row in table))


if __name__ == "__main__":
    raise SystemExit(main())
