"""``python -m edgespec_uara.real_sessions``: the same decisions, played by real sessions.

The cost models of this package add up operations. Here one slot's world becomes a scenario of the
full simulator: the product's sessions, round trips, downlink, airtime, and passes that read the
weights once and take a little more for each row. Decisions are made by the methods of ``methods``,
held for the run, and played in two ways:

    slices    as decided: every device has its slice of the band and of the server, used or not
    shared    the association alone: cells share airtime, servers batch whoever has work

beside policies that agents use, asked anew at each request, shared. All of them with speculation
(the product's default) and without (plain streaming).

Ours, where the paper says nothing: one transmit power for all (20 dBm, also for the decisions), one
acceptance rate for all, and a draft step takes as long as a phone needs to read the draft's weights
at 50 GB/s, which is far more than its operations take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from edgespec.bench.arms import Arm
from edgespec_sim.association import AssociationPolicy, association_policy
from edgespec_sim.scenario.network import LinkSection, RadioSection
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    Scenario,
    TokensSection,
    VerifierSection,
    WorkloadSection,
)
from edgespec_sim.world.assembly import World
from edgespec_sim.world.run import token_source
from edgespec_sim.world.surrounding import Allocation, Surrounding
from edgespec_uara.association import shipped_association
from edgespec_uara.cost import AIR_RTT_S, SERVER_W, CorrectedCost, Decision
from edgespec_uara.methods import SESSIONS_MAX, TMA_MASAC, TMA_MASAC_MOVES, Actor, methods, plan
from edgespec_uara.world import (
    DRAFT_PARAMETERS,
    TARGET_BYTES,
    TARGET_PARAMETERS,
    Snapshot,
    UaraSettings,
    UaraWorld,
)

GAINS = "gains.npz"
DEVICE_DBM = 20.0
PHONE_BYTES_PER_S = 50e9
ACCEPTANCE = 0.75
PLAYED = (
    "random",
    "max-SINR",
    "max-compute",
    TMA_MASAC,
    TMA_MASAC_MOVES,
    "TMA + optimal shares",
    "greedy + search + optimal shares",
)
ARMS = (Arm.TARGET_ONLY, Arm.EDGESPEC)
SLICES, SHARED, ASKED = "slices", "shared", "asked at each request"
# Judging every step of a world costs a third of its time.
_CHECKED_DEVICES = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One method, played in one way."""

    method: str
    way: str
    arm: str
    answer_s: float
    """Mean over finished requests, from asking to the last token."""
    tpot_ms: float
    ttft_p95_ms: float
    tokens_per_second: float


def scenario_of(snapshot: Snapshot, folder: Path, duration_s: float = 20.0) -> Scenario:
    """One slot's world. Its gains, which hold for the run, are written to ``folder``."""
    np.savez(folder / GAINS, gains=snapshot.gains[None])
    settings = snapshot.settings
    step_ms = 1e3 * 2 * DRAFT_PARAMETERS / PHONE_BYTES_PER_S
    work = WorkloadSection(
        prompt_tokens=32, output_tokens=100, length_spread=0.3, think_s=2.0, start_within_s=2.0
    )
    verifiers, links = {}, {}
    for server in range(settings.servers):
        row_ms = 1e3 * 2 * TARGET_PARAMETERS / float(snapshot.server_flops[server])
        weights_ms = 1e3 * TARGET_BYTES / float(snapshot.server_bytes_per_s[server])
        link = f"backhaul-{server}"
        links[link] = LinkSection(rtt_ms=1e3 * float(snapshot.backhaul_rtt_s[server]))
        verifiers[_server(server)] = VerifierSection(
            pass_time=CostSection(ms=weights_ms + row_ms, row_ms=row_ms),
            path=(link,),
            max_sessions=SESSIONS_MAX,
        )
    return Scenario(
        name="uara",
        duration_s=duration_s,
        tokens=TokensSection(acceptance=ACCEPTANCE),
        devices={
            _device(device): DeviceSection(draft=CostSection(ms=step_ms), workload=work)
            for device in range(settings.devices)
        },
        verifiers=verifiers,
        links=links,
        arms=ARMS,
        radio=RadioSection(
            area_m=settings.side_m,
            carrier_ghz=settings.radio.carrier_ghz,
            bandwidth_mhz=snapshot.band_hz / 1e6,
            device_dbm=DEVICE_DBM,
            station_dbm=10.0 * float(np.log10(SERVER_W)) + 30.0,
            interference=False,  # the servers' bands are disjoint
            access_ms=1e3 * AIR_RTT_S,
            speed_m_per_s=0.0,
            gains=GAINS,
        ),
    )


def allocation_of(decision: Decision, way: str) -> Allocation:
    """A decision by name; ``shared`` keeps its association alone."""
    places = {_device(i): _server(int(j)) for i, j in enumerate(decision.association)}
    if way == SHARED:
        return Allocation(places)
    bandwidth = {_device(i): min(1.0, float(y)) for i, y in enumerate(decision.bandwidth)}
    compute = {_device(i): min(1.0, float(z)) for i, z in enumerate(decision.compute)}
    return Allocation(places, bandwidth, compute)


def play(
    scenario: Scenario,
    arm: Arm,
    folder: Path,
    seed: int,
    policy: AssociationPolicy,
    allocation: Allocation | None = None,
) -> Row:
    """Names of method and way are left to the caller. Raises ``ConservationError``."""
    surrounding = Surrounding(
        source=token_source(scenario, seed, folder),
        association=policy,
        folder=folder,
        checks=len(scenario.devices) <= _CHECKED_DEVICES,
        allocation=allocation,
    )
    meters = World(scenario, arm, f"{seed}/0", surrounding).run().meters
    answers_s = [
        one.ttft_s + one.tpot_s * (one.tokens - 1)
        for one in meters.records
        if one.complete and one.ttft_s is not None and one.tpot_s is not None
    ]
    whole = meters.whole()
    return Row(
        method="",
        way="",
        arm=arm.value,
        answer_s=fmean(answers_s) if answers_s else float("inf"),
        tpot_ms=1e3 * whole.tpot_s.median if whole.tpot_s else float("inf"),
        ttft_p95_ms=1e3 * whole.ttft_s.p95 if whole.ttft_s else float("inf"),
        tokens_per_second=whole.tokens_per_second,
    )


def compare(
    snapshot: Snapshot, folder: Path, seed: int, duration_s: float, arms: tuple[Arm, ...] = ARMS
) -> Iterator[Row]:
    scenario = scenario_of(snapshot, folder, duration_s)
    every, lowest = methods(Actor.shipped()), association_policy("lowest-delay")
    runs = partial(play, scenario, folder=folder, seed=seed)
    asked: Mapping[str, AssociationPolicy] = {
        "lowest-delay": lowest,
        "learned association": shipped_association(),
    }
    for arm in arms:
        for name in PLAYED:
            decision = plan(snapshot, CorrectedCost(), every[name], seed).decision
            for way in (SLICES, SHARED):
                row = runs(arm, policy=lowest, allocation=allocation_of(decision, way))
                yield replace(row, method=name, way=way)
        for name, policy in asked.items():
            yield replace(runs(arm, policy=policy), method=name, way=ASKED)


def _device(index: int) -> str:
    return f"device-{index}"


def _server(index: int) -> str:
    return f"server-{index}"


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results")],
    devices: Annotated[int, typer.Option(min=1)] = 30,
    servers: Annotated[int, typer.Option(min=1)] = 4,
    duration: Annotated[float, typer.Option(min=1.0, help="Virtual seconds")] = 20.0,
    seed: int = 0,
) -> None:
    """Play the methods' decisions on the full simulator."""
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    settings = UaraSettings(devices=devices, servers=servers, transmit_dbm=(DEVICE_DBM, DEVICE_DBM))
    snapshot = UaraWorld(settings, seed).snapshot
    total = len(ARMS) * (2 * len(PLAYED) + 2)
    rows = list(track(compare(snapshot, out, seed, duration), "play", total=total, console=console))
    text = json.dumps([asdict(row) for row in rows], indent=1)
    (out / "real_sessions.json").write_text(text + "\n", encoding="utf-8")
    shown = Table(title=f"{devices} devices, {servers} servers, {duration:g} s, seed {seed}")
    for column in ("arm", "method", "way", "answer s", "TPOT ms", "TTFT p95 ms", "tokens/s"):
        shown.add_column(column, justify="left" if column in ("arm", "method", "way") else "right")
    for row in rows:
        numbers = (row.answer_s, row.tpot_ms, row.ttft_p95_ms, row.tokens_per_second)
        shown.add_row(row.arm, row.method, row.way, *(f"{value:.2f}" for value in numbers))
    console.print(shown)


if __name__ == "__main__":
    typer.run(main)
