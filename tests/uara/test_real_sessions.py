"""Decisions on the full simulator. Oracles: the snapshot they were made for, and arithmetic."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from edgespec.bench.arms import Arm
from edgespec_sim.association import association_policy
from edgespec_sim.world.assembly import World
from edgespec_sim.world.run import token_source
from edgespec_sim.world.surrounding import Surrounding
from edgespec_uara.cost import Decision
from edgespec_uara.real_sessions import (
    ASKED,
    PLAYED,
    SHARED,
    SLICES,
    allocation_of,
    compare,
    scenario_of,
)
from edgespec_uara.world import TARGET_BYTES, Snapshot
from tests.uara.small import snapshot

HERE = Path()


def small() -> Snapshot:
    return snapshot(seed=2, devices=5, servers=3)


def test_a_slot_becomes_the_same_world(tmp_path: Path) -> None:
    """Who hears whom best, what a pass costs, how far a server is."""
    slot = small()
    scenario = scenario_of(slot, tmp_path)
    policy = association_policy("strongest-signal")
    surrounding = Surrounding(token_source(scenario, 0, HERE), policy, tmp_path)
    world = World(scenario, Arm.EDGESPEC, "0", surrounding)
    names = [site.name for site, _ in world.sites]
    for device, user in enumerate(world.users):
        views = [world.network.view(user.settings.group, user.number, name) for name in names]
        heard = [view.snr_db for view in views]
        assert int(np.argmax(slot.gains[device])) == heard.index(max(s for s in heard if s))
        for server, view in enumerate(views):
            expected_s = 0.008 + float(slot.backhaul_rtt_s[server]) + 2 * 0.0003
            assert view.rtt_s == pytest.approx(expected_s)
    for server, (site, _) in enumerate(world.sites):
        read_s = TARGET_BYTES / float(slot.server_bytes_per_s[server])
        assert read_s < site.pass_s < 1.2 * read_s


def test_a_decision_keeps_its_shares_or_its_association_alone() -> None:
    decision = Decision(np.array([0, 0, 1]), np.array([0.25, 0.75, 1.0]), np.array([0.5, 0.5, 1.0]))
    whole, places = (allocation_of(decision, way) for way in (SLICES, SHARED))
    assert whole.slices_of("server-0") == {"device-0": 0.5, "device-1": 0.5}
    assert whole.bandwidth == {"device-0": 0.25, "device-1": 0.75, "device-2": 1.0}
    assert whole.verifiers == places.verifiers
    assert not places.bandwidth
    assert not places.compute


def test_every_method_is_played_in_every_way(tmp_path: Path) -> None:
    rows = list(compare(small(), tmp_path, 0, 4.0, (Arm.EDGESPEC,)))
    played = {(row.method, row.way) for row in rows}
    assert {(name, way) for name in PLAYED for way in (SLICES, SHARED)} <= played
    assert sum(way == ASKED for _, way in played) == 2
    for row in rows:
        assert math.isfinite(row.answer_s)
        assert row.tokens_per_second > 10.0
    # What is cut is not faster than what is shared, whoever cuts.
    times_s = {(row.method, row.way): row.tpot_ms for row in rows}
    for name in PLAYED:
        assert times_s[name, SLICES] >= 0.99 * times_s[name, SHARED]
