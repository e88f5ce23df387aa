"""Measure the cost of a verifier's hostile clients to its honest ones, and the state that they
leave behind.

    python benchmarks/hostile_load.py [--devices 200] [--seconds 60] [--seed 1] [--json FILE]
    python benchmarks/hostile_load.py --keys [--flood-sessions 16]
    python benchmarks/hostile_load.py --kinds stale-drafts --devices 8 --phase 4

The load is a real verifier (toy model with an emulated pass time, or ``--model bundled``), a crowd
of honest devices that join, generate and leave, and four measured devices among them, the victims.
Calm phases, without hostile clients, take turns with hostile ones, in which the ``--kinds`` of
``hostile_clients.py`` (by default all) play at once and the links of every tenth honest device
break; then their process is killed. ``--seconds`` is the time of the hostile phases together. The
kind ``only-cpu`` shows the cost of the second process to the victims even if it sends nothing.

With ``--keys`` each honest device has a key of its own, and all hostile clients share one, whose
sessions ``--flood-sessions`` may bound: an operator's defence against strangers.

Every text of an honest device is compared with the target's own. Each finding makes the exit status
1: a text that is wrong or lost; messages beyond the verifier's budget; a traceback in its log;
after a rest, sessions, blocks, tasks, descriptors or memory that it still holds; and, unless
``--any-latency``, a p99 of the victims' token latency above 1.5 times the calm one (median over
pairs of phases). The hostile process is niced to 10, the crowd to 5, because the measurement is
about the verifier's treatment of a victim, not about the shares of two cores. If all cores are busy
in the calm phases already, the ratio means little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from honest_devices import (
    Crowd,
    Device,
    Tally,
    Waits,
    answers,
    device_agent,
    key_file,
    make_requests,
    toy_answers,
    write_requests,
)
from hostile_clients import CONTROL, KINDS, Hostile, kinds
from watched_verifier import Verifier, kill, make_keys

from edgespec.bench.report import describe_machine, list_versions
from edgespec.config import LimitsSection, PacingSection, VerifierConfig

VICTIMS, FLOODER = 4, "flooder"
ASKED_RATIO = 1.5
# Most resources that the verifier may still hold after a rest, beyond those before the first
# device.
SPARE_TASKS, SPARE_DESCRIPTORS, SPARE_BYTES = 4, 16, 64 << 20
# The budget of all streams is 2,000 messages per second beyond the messages of quiet streams.
MAX_READ_RATE = 2_500.0
REST_WITHIN_S = 30.0


class Load:
    """One verifier under load, in phases, and the measurements of each."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.verifier, self.crowd = Verifier(config_of(options, folder), folder), Crowd()
        self.tally, self.findings = Tally(), list[str]()
        self.victims: list[Device] = []
        self.hostile: Hostile | None = None
        self.row: dict[str, Any] = {}

    async def run(self) -> None:
        options = self.options
        await self.verifier.start()
        before = await self.verifier.look()
        async with AsyncExitStack() as stack:
            for number in range(VICTIMS):
                key = key_file(self.folder if options.keys else None, options.devices + number)
                drafting = number % 2 == 1
                address = self.verifier.address
                agent = device_agent(address, options.model, drafting=drafting, key_file=key)
                await stack.enter_async_context(agent)
                dice = random.Random(f"{options.seed} victim {number}")
                self.victims.append(Device(agent, dice, self.tally))
            requests = make_requests(24, options.seed, 160)
            if options.model == "toy":
                requests = toy_answers(requests)
            else:
                requests = await answers(self.victims[0].agent, requests)
            path = self.folder / "requests.json"
            write_requests(path, requests)
            await self.crowd.start(self.verifier.port, path, options)
            asked = [one for one in requests if len(one.prompt) <= 40]  # their TTFT is comparable
            living = [asyncio.create_task(one.live(asked, 0.1)) for one in self.victims]
            try:
                await asyncio.sleep(options.phase)  # caches and pools fill
                full = await self.verifier.look()
                await self._take_turns()
            finally:
                for task in living:
                    task.cancel()
                await asyncio.gather(*living, return_exceptions=True)
            others = await self.crowd.stop()
        self._judge_texts(others)
        await self._judge_rest(before, full)

    async def _take_turns(self) -> None:
        """Run phases in the order calm, hostile, calm, hostile, ..."""
        options, names = self.options, self.options.kinds
        pairs: list[dict[str, Any]] = []
        for turn in range(options.rounds):
            self.hostile = Hostile()
            seed = options.seed * 1_000 + turn
            shown = self.folder / FLOODER if options.keys else None
            await self.hostile.start(self.verifier, names, options.phase, seed, shown)
            calm, calm_rates, _ = await self._phase(asyncio.sleep(options.phase))
            await self.crowd.cut_links(True)
            loud, loud_rates, sent = await self._phase(self.hostile.play())
            await self.crowd.cut_links(False)
            calm_figures, loud_figures = figures(calm, calm_rates), figures(loud, loud_rates)
            pairs.append({"calm": calm_figures, "hostile": loud_figures, "sent": sent})
            await asyncio.sleep(options.lease_s + 1.0)
        row = self.row = {"kinds": names, **summary(pairs), "pairs": pairs}
        print(line(row), flush=True)
        if (read := row["hostile_read_rate"]) > row["calm_read_rate"] + MAX_READ_RATE:
            self.findings.append(f"{read:.0f} messages a second read")
        judged = not options.any_latency and names != [CONTROL]
        if judged and row["ratio"] > ASKED_RATIO:
            self.findings.append(
                f"p99 of the victims' token latency is {row['ratio']:.2f} times the calm one,"
                f" asked is at most {ASKED_RATIO}"
            )

    async def _phase(self, what: Any) -> tuple[Waits, dict[str, float], Any]:
        """Return the victims' waits while ``what`` runs, rates per second of the verifier, and the
        result of ``what``."""
        waits, start, started_s = Waits(), await self.verifier.look(), time.perf_counter()
        for victim in self.victims:
            victim.waits = waits
        result = await what
        for victim in self.victims:
            victim.waits = None
        end, took_s = await self.verifier.look(), time.perf_counter() - started_s
        names = ("read", "passes", "fed", "drafted", "cpu_s")
        rates = {name: (end[name] - start[name]) / took_s for name in names}
        return waits, rates, result

    def _judge_texts(self, others: dict[str, Any]) -> None:
        for name in ("wrong", "lost"):
            found = [*getattr(self.tally, name), *others[name]]
            if found:
                self.findings.append(f"{len(found)} texts are {name}; the first: {found[0]}")
        self.texts = self.tally.texts + others["texts"]
        self.reconnects = self.tally.reconnects + others["reconnects"]

    async def _judge_rest(self, before: dict[str, Any], full: dict[str, Any]) -> None:
        deadline_s = time.perf_counter() + REST_WITHIN_S
        after = await self.verifier.look()
        while time.perf_counter() < deadline_s and list_leaks(before, after):
            await asyncio.sleep(0.5)
            after = await self.verifier.look()
        self.findings += list_leaks(before, after)
        grown = after["resident_bytes"] - full["resident_bytes"]
        if grown > SPARE_BYTES:
            self.findings.append(f"memory grew by {grown >> 20} MiB since the first calm phase")
        self.rest = {"before": before, "full": full, "after": after}
        self.findings += await self.verifier.stop(20.0)


def config_of(options: argparse.Namespace, folder: Path) -> VerifierConfig:
    names = [f"device-{number}" for number in range(options.devices + VICTIMS)]
    bounds = {**dict.fromkeys(names, 0), FLOODER: options.flood_sessions}
    return VerifierConfig(
        model=options.model,
        port=0,
        pacing=PacingSection(options.pass_ms),
        limits=LimitsSection(
            max_sessions=options.max_sessions,
            max_cached_tokens=options.cached_tokens,
            lease_s=options.lease_s,
        ),
        keys=make_keys(folder, bounds) if options.keys else "",
        drain_s=0.0,
    )


def list_leaks(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each resource that is still held after a rest and should not be."""
    bounds = {
        "sessions": 0,
        "streams": 0,
        "blocks": 0,
        "tasks": before["tasks"] + SPARE_TASKS,
        "descriptors": before["descriptors"] + SPARE_DESCRIPTORS,
    }
    return [
        f"after the rest {after[name]} {name} are left, {bound} may be"
        for name, bound in bounds.items()
        if after[name] > bound
    ]


# --- figures -----------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of all values do not exceed, or NaN without
    values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def figures(waits: Waits, rates: dict[str, float]) -> dict[str, float]:
    """Return the figures of one phase, in milliseconds and per second."""
    return {
        "p50_ms": 1e3 * percentile(waits.next_s, 0.5),
        "p99_ms": 1e3 * percentile(waits.next_s, 0.99),
        "worst_ms": 1e3 * max(waits.next_s, default=float("nan")),
        "ttft_p50_ms": 1e3 * percentile(waits.first_s, 0.5),
        "ttft_worst_ms": 1e3 * max(waits.first_s, default=float("nan")),
        **{f"{name}_rate": rate for name, rate in rates.items()},
    }


def summary(pairs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return medians over the pairs of phases, and for the ratio also the extremes."""
    ratios = [one["hostile"]["p99_ms"] / one["calm"]["p99_ms"] for one in pairs]
    found = {"ratio": median(ratios), "least_ratio": min(ratios), "most_ratio": max(ratios)}
    for phase in ("calm", "hostile"):
        for name in pairs[0][phase]:
            found[f"{phase}_{name}"] = median(one[phase][name] for one in pairs)
    return found


def line(row: dict[str, Any]) -> str:
    """Return all figures of a row, calm and hostile ones side by side."""
    pairs = [name.removeprefix("calm_") for name in row if name.startswith("calm_")]
    shown = [f"{name} {row[f'calm_{name}']:.4g} {row[f'hostile_{name}']:.4g}" for name in pairs]
    spread = f"{row['least_ratio']:.2f}-{row['most_ratio']:.2f}"
    return f"{len(row['kinds'])} kinds: p99 x {row['ratio']:.2f} ({spread}); {', '.join(shown)}"


# --- the command -------------------------------------------------------------------------------


async def measure(options: argparse.Namespace, folder: Path) -> Load:
    load = Load(options, folder)
    try:
        await load.run()
    finally:
        for part in (load.verifier, load.crowd, load.hostile):
            await kill(part)
    return load


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=200, help="honest ones")
    parser.add_argument("--seconds", type=float, default=60.0, help="of all hostile phases")
    parser.add_argument("--phase", type=float, default=10.0, help="seconds of one phase, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keys", action="store_true", help="a key for each device, one for floods")
    parser.add_argument("--flood-sessions", type=int, default=0, help="bound of theirs; 0: none")
    parser.add_argument("--kinds", type=kinds, default=kinds("all"), help=", ".join(KINDS))
    parser.add_argument("--model", default="toy", choices=("toy", "bundled"))
    parser.add_argument("--pass-ms", type=float, help="emulated (default: 5; bundled 0)")
    parser.add_argument("--max-sessions", type=int, default=512)
    parser.add_argument("--cached-tokens", type=int, default=65_536, help="the KV pool")
    parser.add_argument("--lease-s", type=float, default=2.0)
    parser.add_argument("--any-latency", action="store_true", help="judge no ratio")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.phase = min(options.phase, options.seconds)
    options.rounds = max(1, round(options.seconds / options.phase))
    if options.pass_ms is None:
        options.pass_ms = 5.0 if options.model == "toy" else 0.0
    if not 1 <= options.devices <= 1_000:
        parser.error(f"--devices is {options.devices}, but must be in [1, 1000]")
    if not 0.5 <= options.phase <= 600.0:
        parser.error(f"--phase is {options.phase}, but must be in [0.5, 600]")
    return options


def main() -> int:
    options = parse()
    print(
        f"machine: {describe_machine()}\nversions: {list_versions()}\ncommand: {' '.join(sys.argv)}"
    )
    print("victims' waits for tokens (ms) and rates a second: calm, then hostile")
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        load = asyncio.run(measure(options, Path(folder)))
    took_s = time.perf_counter() - started_s
    if options.json is not None:
        found = {
            "machine": describe_machine(),
            "versions": list_versions(),
            "command": " ".join(sys.argv),
            "took_s": round(took_s, 1),
            "texts": load.texts,
            **load.row,
            "rest": load.rest,
            "findings": load.findings,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{load.texts} honest texts compared, {load.reconnects} reconnects; took {took_s:.0f} s")
    for name in ("before", "full", "after"):
        look = load.rest[name]
        memory = f"{look['resident_bytes'] >> 20} MiB"
        counts = ", ".join(f"{look[k]} {k}" for k in ("sessions", "blocks", "tasks", "descriptors"))
        print(f"the verifier {name:6}: {memory}, {counts}")
    print(f"{len(load.findings)} findings")
    for finding in load.findings:
        print(f"  {finding[:4_000]}")
    return 1 if load.findings else 0


if __name__ == "__main__":
    sys.exit(main())
