"""Does the simulator's network agree with a real kernel's TCP, gRPC and the product on top?

    python benchmarks/kernel_network.py streams [--seconds 60]    # plain TCP, one message at a time
    python benchmarks/kernel_network.py product [--rtts 20,100] [--losses 0,0.1,1,3] [--json FILE]

Two network namespaces are joined by a relay *below* TCP (``packet_relay.py``), which delays and
drops IP packets. ``streams`` sends small messages one way and compares their delay with the
simulator's. ``product`` runs the product's verifier (toy target, emulated passes) in one and its
device in the other: TTFT and TPOT of target-only and of our arm, one session and 16 on one
connection, beside the same scenario in virtual time. What a message costs on this machine is
measured first, at no loss and no distance, and given to the simulator. Asked for: within 10 %.
Each ratio has a 95 % interval (bootstrap over the requests of both sides): a p95 under loss hangs
on few requests. A row ends with the figures of which the whole interval lies outside of 10 %.

Wants root (namespaces, TUN) and leaves nothing behind. The machine's load is told with the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from kernel_bench import Bench, Cell, Rows
from kernel_device import Load, load_of, source_of
from kernel_stream import StreamCell, played_stream, real_stream
from namespaces import NoNamespaces, die_with_parent
from numpy.typing import NDArray

from edgespec.benchmark.arms import Arm
from edgespec.core.association.policies import association_policy
from edgespec_sim.scenario.network_sections import FRAMING_BYTES, LinkSection
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
from edgespec_sim.world.surrounding import Surrounding

WITHIN = 0.10
# Of texts as long as a real repetition's.
SIMULATED_SEEDS = {1: 8, 16: 4}
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Costs:
    """Of this machine, beyond the network and the emulated pass."""

    pass_ms: float = 0.0
    message_ms: float = 0.0


FIGURES = ("TTFT", "TTFT p95", "TPOT", "TPOT p95")


def figures_of(times_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """``FIGURES`` in milliseconds of (..., requests, 2) times in seconds: TTFT and TPOT."""
    means, p95s = times_s.mean(axis=-2), np.quantile(times_s, 0.95, axis=-2)
    both = 1e3 * np.stack((means, p95s), axis=-1)
    found: NDArray[np.float64] = both.reshape(*means.shape[:-1], 4)
    return found


def resampled(rows: Rows, together: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """``RESAMPLES`` times the figures of as many requests, drawn with replacement, ``together`` of
    those that began one after another at once: sessions on one connection share its losses."""
    times_s = np.array(rows)
    begins = rng.integers(0, len(rows), (RESAMPLES, -(-len(rows) // together)))
    picked = (begins[:, :, None] + np.arange(together)) % len(rows)
    return figures_of(times_s[picked.reshape(RESAMPLES, -1)])


# --- the simulated side ---------------------------------------------------------------------


def scenario_of(cell: Cell, load: Load, costs: Costs) -> Scenario:
    # A loss that never strikes, so that lossless cells are packets on a connection as well.
    link = LinkSection(
        rtt_ms=cell.rtt_ms,
        loss=cell.loss or 1e-12,
        one_connection=True,
        framing_bytes=FRAMING_BYTES,
    )
    workload = WorkloadSection(
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.tokens,
        think_s=load.think_s,
        requests=load.requests + 1,
        start_within_s=load.think_s,
    )
    return Scenario(
        name="kernel",
        duration_s=900.0,
        tokens=TokensSection(source=TokensFrom.TOY),
        arms=(cell.arm,),
        links={"link": link},
        devices={
            "device": DeviceSection(
                count=cell.sessions,
                path=("link",),
                draft=CostSection(ms=load.draft_ms),
                workload=workload,
            )
        },
        verifiers={
            "verifier": VerifierSection(pass_time=CostSection(ms=load.pass_ms + costs.pass_ms))
        },
        message_ms=costs.message_ms,
    )


def simulated(cell: Cell, costs: Costs, seed: int) -> Rows:
    """TTFT and TPOT of each request but each session's first."""
    load = load_of(cell.arm.value, cell.sessions, seed)
    scenario, source = scenario_of(cell, load, costs), source_of(load)
    surrounding = Surrounding(source, association_policy("lowest-delay"), Path(), checks=False)
    records = World(scenario, cell.arm, str(seed), surrounding).run().meters.records
    begun: set[str] = set()
    rows = []
    for record in sorted(records, key=lambda one: one.started_s):
        if record.device in begun and record.ttft_s is not None and record.tpot_s is not None:
            rows.append((record.ttft_s, record.tpot_s))
        begun.add(record.device)
    return rows


# --- both -----------------------------------------------------------------------------------


def costs_of(sessions: int, arm: Arm, rows: Rows) -> Costs:
    """From a run without distance or loss: what a pass of plain streaming takes beyond its time,
    and what a message does, of which the first token takes one there and one back."""
    load = load_of(arm.value, sessions, 1)
    ttft, _, tpot, _ = (float(value) for value in figures_of(np.array(rows)))
    costs = Costs(pass_ms=max(0.0, tpot - load.pass_ms))
    bare = simulated(Cell(arm, sessions, 0.0, 0.0), costs, 1)
    without = float(figures_of(np.array(bare))[0])
    return replace(costs, message_ms=max(0.0, (ttft - without) / 2.0))


def joined(runs: Iterable[Rows]) -> Rows:
    return list(itertools.chain.from_iterable(runs))


def plain(cell: Cell) -> dict[str, object]:
    """For JSON."""
    return {**asdict(cell), "arm": cell.arm.value}


def row_of(cell: Cell, real: Rows, played: Rows) -> dict[str, object]:
    """Prints a line; the same for JSON."""
    rng = np.random.default_rng(0)
    ratios = resampled(played, cell.sessions, rng) / resampled(real, cell.sessions, rng)
    lows, highs = np.quantile(ratios, (0.025, 0.975), axis=0)
    ours, theirs = figures_of(np.array(real)), figures_of(np.array(played))
    row: dict[str, object] = {**plain(cell), "requests": (len(real), len(played))}
    words, outside = [], []
    for at, name in enumerate(FIGURES):
        real_ms, played_ms = float(ours[at]), float(theirs[at])
        low, high, ratio = float(lows[at]), float(highs[at]), played_ms / real_ms
        row[name] = {"real": real_ms, "simulated": played_ms, "ratio": (ratio, low, high)}
        words.append(f"{name} {real_ms:.1f} | {played_ms:.1f} | {ratio:.2f} ({low:.2f}-{high:.2f})")
        if high < 1.0 - WITHIN or low > 1.0 + WITHIN:
            outside.append(name)
    told = f"; outside: {', '.join(outside)}" if outside else ""
    print(f"{cell.name}, {len(real)} requests: " + "; ".join(words) + told, flush=True)
    return row


def measured(
    cells: Sequence[Cell], repeats: int, beside: int, args: argparse.Namespace
) -> dict[Cell, list[Rows]]:
    """Repetitions of all cells one after another, so that a busy minute does not fall on one cell
    alone; ``beside`` benches at a time. What ``--real`` holds already is not measured again."""
    found: dict[Cell, list[Rows]] = {cell: [] for cell in cells}
    known, jobs = _known(args.real), []
    for repeat, cell in itertools.product(range(repeats), cells):
        load = load_of(cell.arm.value, cell.sessions, args.seed + repeat)
        if (rows := known.get((cell, load))) is not None:
            found[cell].append(rows)
        else:
            jobs.append((cell, load))
    shares = [jobs[start::beside] for start in range(min(beside, len(jobs)))]
    # A process each, or the relays would wait for one another.
    with ProcessPoolExecutor(max(1, len(shares)), get_context("spawn"), die_with_parent) as pool:
        for rows_of in pool.map(partial(_bench, args.real), shares):
            for cell, rows in rows_of:
                found[cell].append(rows)
    return found


def _bench(path: Path | None, jobs: Sequence[tuple[Cell, Load]]) -> list[tuple[Cell, Rows]]:
    found = []
    with Bench(jobs[0][1].pass_ms) as bench:
        for cell, load in jobs:
            rows, counted = bench.play(cell, load)
            found.append((cell, rows))
            seen = ", ".join(f"{value:.1f}" for value in figures_of(np.array(rows)))
            print(f"{cell.name}: {seen} ms; {counted}", file=sys.stderr, flush=True)
            if path is not None:
                line = {"cell": plain(cell), "load": asdict(load), "rows": rows, "about": counted}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    return found


def _known(path: Path | None) -> dict[tuple[Cell, Load], Rows]:
    if path is None or not path.is_file():
        return {}
    known = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        cell = Cell(**{**line["cell"], "arm": Arm(line["cell"]["arm"])})
        known[cell, Load(**line["load"])] = line["rows"]
    return known


def product(args: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    for sessions in args.sessions:
        # Sixteen sessions fill a core; single ones can be measured beside one another.
        beside = args.beside if sessions == 1 else 1
        bare = Cell(Arm.TARGET_ONLY, sessions, 0.0, 0.0)
        cells = [
            Cell(Arm(arm), sessions, rtt_ms, loss / 100.0)
            for rtt_ms, loss, arm in itertools.product(args.rtts, args.losses, args.arms)
        ]
        found = measured((bare, *cells), args.repeats, beside, args)
        runs = found.pop(bare)
        costs = costs_of(sessions, bare.arm, runs[len(runs) // 2])
        print(f"{sessions} sessions: of the machine {costs}", flush=True)
        with ProcessPoolExecutor(2) as pool:
            for cell, ours in found.items():
                seeds = range(args.seed, args.seed + SIMULATED_SEEDS[sessions])
                theirs = pool.map(partial(simulated, cell, costs), seeds)
                rows.append(row_of(cell, joined(ours), joined(theirs)))
    return rows


def streams(args: argparse.Namespace) -> list[dict[str, object]]:
    cells = [
        StreamCell(rtt_ms, loss / 100.0, gap_ms, round(1e3 * args.seconds / gap_ms), args.seed)
        for rtt_ms, loss in itertools.product(args.rtts, args.losses)
        for gap_ms in args.gaps
    ]
    rows = []
    for cell in cells:
        ours, theirs = real_stream(cell), played_stream(cell)
        row = {**asdict(cell), "real": asdict(ours), "simulated": asdict(theirs)}
        print(f"{cell.name}: real {ours} | simulated {theirs}", flush=True)
        rows.append(row)
    return rows


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("streams", "product"))
    parser.add_argument("--rtts", type=_numbers, default=[20.0, 100.0], help="ms")
    parser.add_argument("--losses", type=_numbers, default=[0.0, 0.1, 1.0, 3.0], help="per cent")
    parser.add_argument("--gaps", type=_numbers, default=[8.0, 25.0, 500.0], help="ms, of streams")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each stream")
    parser.add_argument("--sessions", type=lambda text: list(map(int, text.split(","))))
    parser.add_argument(
        "--arms", type=lambda text: text.split(","), default=["target-only", "edgespec"]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--beside", type=int, default=4, help="cells of one session at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", type=Path, help="keep what was measured here, and use it again")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.sessions = args.sessions or [1, 16]
    began_s = time.monotonic()
    print(f"load before: {os.getloadavg()}", flush=True)
    try:
        rows = product(args) if args.what == "product" else streams(args)
    except NoNamespaces as error:
        print(f"kernel_network: {error}", file=sys.stderr)
        return 2
    print(f"load after: {os.getloadavg()}; took {time.monotonic() - began_s:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
