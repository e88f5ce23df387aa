"""The default draft policy beside fixed ones, over pass, step and round-trip times.

Each cell of the grid is one device and one verifier in virtual time. The default policy and its
rivals answer the same questions with the same dice, so their ratio is paired. Device alone: the
rivals are ``windowed``, ``pearl``, ``vanilla`` (stop-and-wait) and ``target-only`` (streaming).
Both ends: the default beside a draft on the server has the same rivals, and ``server-draft`` and
the device alone as well. Oracle: nowhere may the default take more than ``LIMIT`` times as long for
a token as its best rival. A cell that is not decided, because its interval includes the limit, gets
more seeds. A few cells are a test, ``benchmarks/policy_grid.py`` plays the whole grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgespec.bench.arms import Arm
from edgespec_sim.commands.plan_link import SCENARIO, link_settings
from edgespec_sim.replication import TpotTotal, measure_speedup
from edgespec_sim.scenario.sections import load_scenario, scenario_path
from edgespec_sim.world import run

LIMIT: Final = 1.03
FIRST_SEEDS: Final = 4
MAX_SEEDS: Final = 64
FAR: Final = 1.4
"""A rival this many times slower than the default in the first world is omitted from the others."""
REQUESTS: Final = 3
"""Requests of 128 tokens that each arm completes in a world. The first one has no learned
estimates."""
TAPES: Final = {0.0: "bundled-greedy", 0.7: "bundled-sampled"}
"""Tapes, by temperature, whose shape the agreement of draft and target has."""
SERVER_STEP: Final = 0.1
"""A step of the server's draft, as a share of the pass."""
PASS_MS: Final = (3.0, 8.0, 15.0, 40.0)
STEP_MS: Final = (1.0, 3.0, 8.0)
RTT_MS: Final = (0.5, 5.0, 30.0, 200.0)
ACCEPTANCE: Final = (0.6, 0.8, 0.95)
DEVICE_RIVALS: Final = (Arm.TARGET_ONLY, Arm.VANILLA, Arm.PEARL, Arm.WINDOWED)


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid."""

    temperature: float
    both_ends: bool
    rtt_ms: float
    step_ms: float
    pass_ms: float
    acceptance: float

    @property
    def default(self) -> Arm:
        """The arm that does what the agent does by default."""
        return Arm.BOTH if self.both_ends else Arm.EDGESPEC

    @property
    def rivals(self) -> tuple[Arm, ...]:
        """The arms that the default is compared with."""
        if self.both_ends:
            return (*DEVICE_RIVALS, Arm.EDGESPEC, Arm.SERVER_DRAFT)
        return DEVICE_RIVALS


@dataclass(frozen=True, slots=True)
class Verdict:
    """The default's time per token over that of its closest rival, with its 95 % interval."""

    cell: Cell
    rival: Arm
    ratio: float
    low: float
    high: float
    seeds: int
    ms: Mapping[str, float]
    """Milliseconds per token, by arm."""

    @property
    def is_decided(self) -> bool:
        """Return whether the interval lies on one side of the limit."""
        return self.high <= LIMIT or self.low > LIMIT


Played = dict[Arm, TpotTotal]


@dataclass(frozen=True, slots=True)
class World:
    """One unit of work: these arms of a cell with the dice of one seed."""

    cell: Cell
    seed: int
    arms: Sequence[Arm]


def play_world(world: World) -> Played:
    """Play a world; return the times per token by arm."""
    cell = world.cell
    server_ms = SERVER_STEP * cell.pass_ms if cell.both_ends else 0.0
    settings: dict[str, Any] = {
        **link_settings(cell.rtt_ms, cell.step_ms, cell.pass_ms, cell.acceptance, server_ms),
        "tokens.tape": TAPES[cell.temperature],
        "devices.laptop.workload.requests": REQUESTS,
        "devices.laptop.workload.think_s": 0.1,
        "duration_s": 3600.0,
    }
    scenario, folder = load_scenario(SCENARIO, settings), scenario_path(SCENARIO).parent
    jobs = [run.Job(scenario, arm, 0, world.seed, folder, checks=False) for arm in world.arms]
    return {job.arm: run.play(job).meters.tpot for job in jobs}


def judge(cell: Cell, worlds: Sequence[Played]) -> Verdict:
    """Compare the default with its strongest rival, among the rivals played in every world."""
    arms = [arm for arm in worlds[0] if all(arm in world for world in worlds)]
    totals = {arm: [world[arm] for world in worlds] for arm in arms}
    ms = {
        arm.value: 1e3 * sum(one.seconds for one in mine) / sum(one.requests for one in mine)
        for arm, mine in totals.items()
    }
    verdicts = []
    for rival in [arm for arm in arms if arm is not cell.default]:
        ratio, interval = measure_speedup(totals[cell.default], totals[rival])
        assert ratio is not None
        low, high = (interval.low, interval.high) if interval else (0.0, math.inf)
        verdicts.append(Verdict(cell, rival, ratio, low, high, len(worlds), ms))
    above = [one for one in verdicts if one.low > LIMIT]
    undecided = [one for one in verdicts if not one.is_decided]
    return max(above or undecided or verdicts, key=lambda one: one.ratio)


def play_grid(
    cells: Sequence[Cell],
    play_all: Callable[[Sequence[World]], Iterator[Played]],
    most_seeds: int = MAX_SEEDS,
) -> list[Verdict]:
    """Play every cell until enough seeds decide it; return a verdict for each.

    ``play_all`` plays worlds, perhaps on several cores, and yields their results in order.
    """
    played: dict[Cell, list[Played]] = {cell: [] for cell in cells}
    undecided = list(cells)
    while undecided:
        worlds = []
        for cell in undecided:
            done = len(played[cell])
            arms = near_arms(cell, played[cell][0]) if done else (cell.default, *cell.rivals)
            wanted = min(max(2 * done, FIRST_SEEDS), most_seeds) if done else 1
            worlds += [World(cell, seed, arms) for seed in range(done + 1, wanted + 1)]
        for world, found in zip(worlds, play_all(worlds), strict=True):
            played[world.cell].append(found)
        undecided = [cell for cell in undecided if needs_more(cell, played[cell], most_seeds)]
    return [judge(cell, played[cell]) for cell in cells]


def needs_more(cell: Cell, played: Sequence[Played], most_seeds: int) -> bool:
    """Return whether more seeds are needed before a cell is judged."""
    if len(played) < min(FIRST_SEEDS, most_seeds):
        return True
    return len(played) < most_seeds and not judge(cell, played).is_decided


def near_arms(cell: Cell, first: Played) -> tuple[Arm, ...]:
    """Choose the default and the rivals that may be as fast, by the first world of a cell."""
    ms = {arm: one.seconds / one.requests for arm, one in first.items()}
    near = [arm for arm in cell.rivals if ms[arm] <= FAR * ms[cell.default]]
    fastest = min(cell.rivals, key=lambda arm: ms[arm])
    return (cell.default, *(near or [fastest]))


def whole_grid() -> Iterable[Cell]:
    """Return the cells that the benchmark plays."""
    return itertools.starmap(
        Cell, itertools.product(TAPES, (False, True), RTT_MS, STEP_MS, PASS_MS, ACCEPTANCE)
    )
