"""Phones that change cells while their session runs.

Oracles: the filter and margin of 3GPP TS 38.331 by hand, delays added up by hand, gains that the
test writes itself, and the laws of ``conservation.py``; tokens are judged against the target.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgespec.bench.arms import Arm
from edgespec.core.protocol.work import PassRequest
from edgespec.telemetry.cost_profile import TimeLaw
from edgespec_sim.association import association_policy
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.radio import Attachment, Change
from edgespec_sim.scenario.network import (
    BackhaulSection,
    CellHandoverSection,
    LinkSection,
    RadioSection,
    Sessions,
)
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    Scenario,
    TokensFrom,
    TokensSection,
    VerifierSection,
    WorkloadSection,
    load_scenario,
)
from edgespec_sim.world.assembly import World, WorldOutcome
from edgespec_sim.world.network import Network
from edgespec_sim.world.run import token_source
from edgespec_sim.world.site import Machine
from edgespec_sim.world.surrounding import Surrounding

STEP_S = 0.5
NEAR, FAR = 1e-9, 1e-12
"""30 dB apart, and both far above what the best modulation needs."""


def cellular(
    tmp_path: Path, handover: CellHandoverSection, phones: int = 2, **changes: object
) -> Scenario:
    """Two stations and phones that are in cell 0 for two steps, in cell 1 for two, and so on; all
    ask at once and for as long as the world lasts."""
    slots = [[[NEAR, FAR]] * phones] * 2 + [[[FAR, NEAR]] * phones] * 2
    np.savez(tmp_path / "gains.npz", gains=np.array(slots))
    radio = RadioSection(
        area_m=400.0, gains="gains.npz", step_s=STEP_S, speed_m_per_s=0.0, handover=handover
    )
    work = WorkloadSection(prompt_tokens=20, output_tokens=120, think_s=0.05, start_within_s=0.01)
    scenario = Scenario(
        name="cells",
        duration_s=3.2,
        tokens=TokensSection(source=TokensFrom.TOY),
        association="listed",
        radio=radio,
        devices={"phone": DeviceSection(count=phones, workload=work)},
        verifiers={
            "a": VerifierSection(pass_time=CostSection(ms=20.0, row_ms=0.5)),
            "b": VerifierSection(pass_time=CostSection(ms=20.0, row_ms=0.5)),
        },
    )
    return replace(scenario, **changes)  # type: ignore[arg-type]


def section(sessions: Sessions, **changes: object) -> CellHandoverSection:
    plain = CellHandoverSection(sessions=sessions, filter_k=0)
    return replace(plain, **changes)  # type: ignore[arg-type]


def play(scenario: Scenario, arm: Arm, folder: Path) -> WorldOutcome:
    source = token_source(scenario, 1, folder)
    surrounding = Surrounding(source, association_policy(scenario.association), folder)
    return World(scenario, arm, "1", surrounding).run()


# --- which cell -------------------------------------------------------------------------------


def test_a_phone_changes_when_another_cell_is_clearly_stronger() -> None:
    """k = 4 gives the newest measurement half the weight: 0, then 3 dB of a lead of 6, then 4.5."""
    here, lead = np.array([[1.0, 1.0]]), np.array([[1.0, 10.0**0.6]])
    attachment = Attachment(here, margin_db=3.1, filter_k=4)
    assert attachment.cells.tolist() == [0]
    assert attachment.measure(lead) == []
    assert attachment.measure(lead) == [Change(0, 0, 1)]
    assert attachment.cells.tolist() == [1]
    assert attachment.measure(lead) == [], "it is there"


def test_another_cells_verifier_is_behind_the_backhaul(tmp_path: Path) -> None:
    handover = section(Sessions.STAY, backhaul=BackhaulSection(rtt_ms=30.0, mbps=8.0))
    scenario = cellular(tmp_path, handover, message_ms=0.0)
    queue = EventQueue()
    network = Network(queue, scenario, "1", tmp_path, audited=True)
    own, other = (network.view("phone", 0, name).rtt_s for name in ("a", "b"))
    assert other - own == pytest.approx(0.030)
    arrived: dict[str, float] = {}

    def note(name: str) -> None:
        arrived[name] = queue.now

    for device, name in enumerate(("a", "b")):
        up, _, _ = network.route("phone", device, name)
        up.send(1000, partial(note, name))
    queue.run(0.4)
    # 1 ms on the line; phone 1 sends behind phone 0, in the same cell.
    air_s = (1000 + 84) * 8 / (10e6 * 7.4063)
    assert arrived["b"] - arrived["a"] == pytest.approx(0.015 + 0.001 + air_s, abs=1e-6)


# --- what becomes of a session ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("sessions", "arm"),
    [
        *((sessions, Arm.EDGESPEC) for sessions in Sessions),
        (Sessions.RECOMPUTE, Arm.TARGET_ONLY),
        (Sessions.KV, Arm.VANILLA),
    ],
)
def test_the_text_is_the_targets_own_through_every_handover(
    tmp_path: Path, arm: Arm, sessions: Sessions
) -> None:
    outcome = play(cellular(tmp_path, section(sessions)), arm, tmp_path)
    whole = outcome.meters.whole()
    assert (whole.mismatches, whole.failed) == (0, 0)
    assert whole.handovers >= 4
    moves = {
        Sessions.RECOMPUTE: whole.moves_recomputed,
        Sessions.KV: whole.moves_with_kv,
    }
    if sessions in moves:
        assert moves[sessions] >= 2
        assert sum(moves.values()) == moves[sessions]
        assert whole.reconnects == moves[sessions]
    elif sessions is Sessions.STAY:
        assert sum(moves.values()) == 0
        assert {one.verifier for one in outcome.meters.records} == {"a"}, "the first listed"
    assert outcome.watched is not None
    told = {one.what for one in outcome.watched.interruptions}
    assert told <= {"handover", "session moved"}
    assert "session moved" not in told or sum(moves.values()) > 0


def test_equal_seeds_give_equal_handovers(tmp_path: Path) -> None:
    scenario = cellular(tmp_path, section(Sessions.CHEAPEST))
    first, second = (play(scenario, Arm.EDGESPEC, tmp_path) for _ in range(2))
    assert first.meters == second.meters
    assert first.watched == second.watched


def test_nothing_comes_in_the_gap(tmp_path: Path) -> None:
    """Streaming at 20 ms a token: the longest gap is the gap, and a pass and a bit."""
    scenario = cellular(tmp_path, section(Sessions.STAY, gap_ms=400.0))
    gaps_s = play(scenario, Arm.TARGET_ONLY, tmp_path).meters.gaps_s
    assert 0.4 < max(gaps_s) < 0.4 + 0.045
    assert sum(gap_s > 0.1 for gap_s in gaps_s) <= 12, "one a change and phone"


@pytest.mark.parametrize(
    ("backhaul", "kv_bytes", "expected"),
    [
        (BackhaulSection(rtt_ms=0.0), 131_072, (0, 0)),
        (BackhaulSection(rtt_ms=400.0, mbps=1e5), 1, (0, 1)),
        (BackhaulSection(rtt_ms=400.0, mbps=1.0), 1 << 20, (1, 0)),
    ],
    ids=["near", "far, small cache", "far, large cache"],
)
def test_the_cheapest_way_is_taken(
    tmp_path: Path, backhaul: BackhaulSection, kv_bytes: int, expected: tuple[int, int]
) -> None:
    """Stop-and-wait pays the backhaul at each round: stay where it costs nothing; else move, with
    the cache if the line carries it sooner than a pass over the prefix takes."""
    handover = section(Sessions.CHEAPEST, backhaul=backhaul, kv_bytes_per_token=kv_bytes)
    verifiers = {
        name: VerifierSection(pass_time=CostSection(ms=20.0, row_ms=4.0)) for name in ("a", "b")
    }
    scenario = cellular(tmp_path, handover, 1, duration_s=1.3, verifiers=verifiers)
    whole = play(scenario, Arm.VANILLA, tmp_path).meters.whole()
    moved = (whole.moves_recomputed, whole.moves_with_kv)
    assert tuple(min(1, count) for count in moved) == expected


def test_what_came_with_the_cache_costs_no_rows() -> None:
    """50 positions came: a pass in two parts over 60 computes the last ten."""
    queue = EventQueue()
    law = TimeLaw(((1, 0.001), (2, 0.002)))
    machines = [Machine(queue, law, "1"), Machine(queue, law, "1")]
    machines[0].brought["s"] = 50
    parts = (
        PassRequest("s", 0, tuple(range(40)), sample=False),
        PassRequest("s", 40, tuple(range(20))),
    )
    for machine in machines:
        for part in parts:
            machine.run((part,), lambda: None)
    assert [machine.counters.rows for machine in machines] == [10, 60]
    assert machines[0].brought == {}


# --- what cannot be ---------------------------------------------------------------------------


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="margin_db"):
        CellHandoverSection(margin_db=-1.0)
    with pytest.raises(ValueError, match="mbps"):
        BackhaulSection(mbps=0.0)
    behind = {"a": VerifierSection(path=("metro",)), "b": VerifierSection()}
    for link in (LinkSection(rtt_ms=5.0, loss=0.01), LinkSection(trace="generate:wifi")):
        with pytest.raises(ValueError, match=r"verifiers.a lies behind 'metro'.* no loss and no"):
            cellular(tmp_path, section(Sessions.STAY), links={"metro": link}, verifiers=behind)
    with pytest.raises(ValueError, match="sessions"):
        load_scenario("mec", {"radio.handover.sessions": "sometimes"})
    found = load_scenario("mec", {"radio.handover.sessions": "kv"}).radio
    assert found is not None
    assert found.handover is not None
    assert found.handover.sessions is Sessions.KV
