"""Compare the formula of the lead (``core/device/lead.py``) with played sessions, over a grid.

    PYTHONPATH=.:sim python benchmarks/lead_grid.py [--jobs 2] [--seeds 4] [--out lead.json]

Each cell is one device and one verifier in virtual time: passes, draft steps, round-trip times,
acceptance, and what the verifier drafts by itself (nothing, by the device's model, or by another).
The formula gets the time a token that the verifier was measured to take without the device. Prints
the played speeds by the expected ones, the cells where both differ most, and draft steps and joules
per thousand tokens. The exit status is 1 if the formula's answer is surely another than the played
one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import Pool
from typing import Any, Final

from edgespec.bench.arms import Arm
from edgespec.core.device.lead import DraftingCase, find_lead
from edgespec_sim.commands.plan_link import MIN_GAIN, SCENARIO, link_settings
from edgespec_sim.replication import TpotTotal, measure_speedup
from edgespec_sim.scenario.sections import load_scenario, scenario_path
from edgespec_sim.world import run
from edgespec_sim.world.meters import RequestRecord

PASS_MS: Final = (7.0, 11.0, 25.0, 50.0)
STEP_MS: Final = (2.5, 4.4, 8.0, 17.0)
RTT_MS: Final = (2.0, 8.0, 20.0, 50.0, 200.0)
ACCEPTANCE: Final = (0.6, 0.8, 0.9)
TAPES: Final = {0.0: "bundled-greedy", 0.7: "bundled-sampled"}
"""Tapes, by temperature, whose shape the agreement of draft and target has."""
SERVERS: Final = ("none", "same", "other")
"""Drafts of the verifier: none, by the device's model, or by one with errors of its own."""
SERVER_STEP: Final = 0.1
"""A step of the server's draft, as a share of the pass."""
REQUESTS: Final = 4
OUTPUT_TOKENS: Final = 256
DRAFT_W: Final = 12.0
"""Watts of a running draft step, as in the scenario ``household``."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid. Times are in milliseconds."""

    temperature: float
    server: str
    pass_ms: float
    step_ms: float
    rtt_ms: float
    acceptance: float


@dataclass(frozen=True, slots=True)
class World:
    """The measurements of one cell with the dice of one seed."""

    base: TpotTotal
    """Times per token without the device."""
    device: TpotTotal
    passes: int
    """Passes without the device, and their duration with the verifier's own draft steps."""
    passes_s: float
    tokens: int
    steps: int
    """Draft steps of the device in all requests."""
    joules: float
    tried: int
    hits: int


@dataclass(frozen=True, slots=True)
class Row:
    """The played speeds of one cell, beside the formula."""

    cell: Cell
    token_ms: float
    """Time a token without the device."""
    pass_ms: float
    """Duration of a pass without the device, with the verifier's own draft steps."""
    acceptance: float
    """Share of the judged first candidates that were right."""
    played: float
    """Speed with the device, in times of the verifier's own."""
    low: float
    high: float
    lead: float
    chance: float
    expected: float
    """Speed by the formula."""
    steps: float
    """Draft steps per thousand tokens."""
    joules: float
    """Joules of drafting per thousand tokens."""


def make_cells(servers: Sequence[str], every: int) -> list[Cell]:
    """Return the cells to play: every ``every``-th of the grid."""
    grid = itertools.product(TAPES, servers, PASS_MS, STEP_MS, RTT_MS, ACCEPTANCE)
    return [Cell(*values) for values in grid][::every]


def play_cell(work: tuple[Cell, int]) -> list[World]:
    """Play a cell with seeds 1 to N."""
    cell, seeds = work
    return [_play_world(cell, seed) for seed in range(1, seeds + 1)]


def _play_world(cell: Cell, seed: int) -> World:
    server_ms = 0.0 if cell.server == "none" else SERVER_STEP * cell.pass_ms
    settings: dict[str, Any] = {
        **link_settings(cell.rtt_ms, cell.step_ms, cell.pass_ms, cell.acceptance, server_ms),
        "tokens.tape": TAPES[cell.temperature],
        "devices.laptop.workload.requests": REQUESTS,
        "devices.laptop.workload.output_tokens": OUTPUT_TOKENS,
        "devices.laptop.workload.think_s": 0.1,
        "devices.laptop.draft_w": DRAFT_W,
        "duration_s": 36_000.0,
    }
    if cell.server == "other":
        settings["verifiers.server.server_draft.acceptance"] = cell.acceptance
    scenario, folder = load_scenario(SCENARIO, settings), scenario_path(SCENARIO).parent
    arms = (Arm.TARGET_ONLY, Arm.EDGESPEC) if not server_ms else (Arm.SERVER_DRAFT, Arm.BOTH)
    base, device = (
        run.play(run.Job(scenario, arm, 0, seed, folder, checks=False)).meters for arm in arms
    )

    def total(records: Iterable[RequestRecord], name: str) -> float:
        return sum(float(asdict(one.counters)[name]) for one in records)

    return World(
        base=base.tpot,
        device=device.tpot,
        passes=int(total(base.records, "passes")),
        passes_s=total(base.records, "verify_s"),
        tokens=sum(one.tokens for one in device.records),
        steps=int(total(device.records, "steps")),
        joules=sum(one.energy_j for one in device.records),
        tried=int(total(device.records, "tried")),
        hits=int(total(device.records, "hits")),
    )


def judge(cell: Cell, worlds: Sequence[World]) -> Row:
    """Compare what was played in a cell with the formula."""
    speedup, interval = measure_speedup(
        [one.base for one in worlds], [one.device for one in worlds]
    )
    assert speedup is not None
    token_ms = (
        1e3 * sum(one.base.seconds for one in worlds) / sum(one.base.requests for one in worlds)
    )
    tried, tokens = sum(one.tried for one in worlds), sum(one.tokens for one in worlds)
    pass_ms = 1e3 * sum(one.passes_s for one in worlds) / sum(one.passes for one in worlds)
    lead = find_lead(make_case(cell, token_ms, pass_ms))
    return Row(
        cell=cell,
        token_ms=token_ms,
        pass_ms=pass_ms,
        acceptance=sum(one.hits for one in worlds) / tried if tried else 0.0,
        played=speedup,
        low=interval.low if interval else 0.0,
        high=interval.high if interval else 99.0,
        lead=lead.tokens,
        chance=lead.chance,
        expected=lead.speedup,
        steps=1e3 * sum(one.steps for one in worlds) / tokens,
        joules=1e3 * sum(one.joules for one in worlds) / tokens,
    )


def make_case(cell: Cell, token_ms: float, pass_ms: float) -> DraftingCase:
    """Return the case of a cell whose verifier takes ``token_ms`` a token and ``pass_ms`` a pass by
    itself."""
    return DraftingCase(
        token_s=token_ms / 1e3,
        step_s=cell.step_ms / 1e3,
        rtt_s=cell.rtt_ms / 1e3,
        acceptance=cell.acceptance,
        pass_s=pass_ms / 1e3,
    )


def describe(row: Row) -> str:
    """Return a line about a cell."""
    cell = row.cell
    return (
        f"temperature {cell.temperature:g}, server {cell.server}, pass {cell.pass_ms:g} step"
        f" {cell.step_ms:g} RTT {cell.rtt_ms:g} acceptance {cell.acceptance:g}: token"
        f" {row.token_ms:.1f} ms, lead {row.lead:.1f}, chance {row.chance:.2f}, expected"
        f" {row.expected:.3f}, played {row.played:.3f} ({row.low:.3f}-{row.high:.3f}),"
        f" {row.steps:.0f} steps and {row.joules:.1f} J per 1,000 tokens"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Play the grid, print the tables and the cells where the formula is most wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seeds", type=int, default=4, help="seeds of a cell")
    parser.add_argument("--server", choices=SERVERS, action="append", help="drafts of the verifier")
    parser.add_argument("--every", type=int, default=1, help="play every Nth cell only")
    parser.add_argument("--out", help="a file to add the rows to, one JSON object a line")
    args = parser.parse_args(argv)
    cells = make_cells(args.server or SERVERS, args.every)
    begun, rows = time.monotonic(), list[Row]()
    with Pool(args.jobs) as pool:
        work = [(cell, args.seeds) for cell in cells]
        for cell, worlds in zip(cells, pool.imap(play_cell, work), strict=True):
            rows.append(judge(cell, worlds))
            if args.out:
                with open(args.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(rows[-1])) + "\n")
            if len(rows) % 50 == 0:
                print(f"{len(rows)} of {len(cells)} cells", file=sys.stderr, flush=True)
    print(make_table(rows))
    wrong = [row for row in rows if is_wrong(row)]
    for row in sorted(rows, key=lambda row: -abs(row.expected / row.played - 1.0))[:12]:
        print("furthest: " + describe(row))
    for row in wrong:
        print("wrong: " + describe(row))
    print(f"{len(rows)} cells, {len(wrong)} wrong, {time.monotonic() - begun:.0f} s")
    return 1 if wrong else 0


GROUPS: Final = ((0.0, 1.005), (1.005, 1.03), (1.03, 1.1), (1.1, 1.3), (1.3, 2.0), (2.0, 99.0))
"""Bounds of expected speeds, by which the table groups cells."""


def is_wrong(row: Row) -> bool:
    """Return whether the formula's answer is surely another than the played one: a device that
    helps gains ``MIN_GAIN`` or more."""
    hardly, clearly = (1.0 + MIN_GAIN) / 2.0, 2.0 * MIN_GAIN - 1.0
    if row.expected < hardly:
        return row.low > clearly
    return row.expected > clearly and row.high < hardly


def make_table(rows: Sequence[Row]) -> str:
    """Return the played speeds by the expected ones, in Markdown."""
    lines = [
        "| expected | cells | played: least | mean | most | expected over played | steps | J |"
    ]
    lines.append("| --- |" + " ---: |" * 7)
    for low, high in GROUPS:
        here = [row for row in rows if low <= row.expected < high]
        if not here:
            continue
        played = [row.played for row in here]
        ratios = [row.expected / row.played for row in here]
        count = len(here)
        lines.append(
            f"| {low:g} to {high:g} | {count} | {min(played):.3f} | {sum(played) / count:.3f} |"
            f" {max(played):.3f} | {min(ratios):.2f} to {max(ratios):.2f} |"
            f" {sum(row.steps for row in here) / count:.0f} |"
            f" {sum(row.joules for row in here) / count:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
