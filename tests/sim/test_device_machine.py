"""The draft ladder in virtual time. Oracles: the same text without one; the ladder's bounds."""

from __future__ import annotations

from edgespec.bench.arms import Arm
from edgespec.core.device.draft_ladder import DraftLadder, LadderPolicy, MachineReading, Rung
from edgespec.core.device.policy import WindowedPolicy
from edgespec.core.protocol.messages import RunAhead
from edgespec_sim.world.governors import DeviceMachine, ReadAt, battery
from tests.sim.test_bounds import PASS_S, TOKENS, Way, played_on

PLAIN = Way(Arm.EDGESPEC, WindowedPolicy(width=2), RunAhead.AUTO)


def laddered(read: ReadAt) -> tuple[Way, DeviceMachine]:
    ladder = DraftLadder()
    way = Way(Arm.EDGESPEC, LadderPolicy(WindowedPolicy(width=2), ladder), RunAhead.AUTO)
    return way, DeviceMachine(ladder, read)


def test_a_machine_that_is_well_changes_nothing() -> None:
    plain = played_on(PLAIN, "coin 0.9", 0.03, 0.004)
    way, machine = laddered(lambda now, drafting_s: MachineReading(0.9, 40.0, 0.1))
    found = played_on(way, "coin 0.9", 0.03, 0.004, machine)
    assert found == plain
    assert machine.rungs == []


def test_drafting_empties_the_battery_and_gets_less() -> None:
    plain = played_on(PLAIN, "coin 0.9", 0.03, 0.004)
    way, machine = laddered(battery(0.32, per_drafting_s=0.08))
    machine.every_s = 1.0
    found = played_on(way, "coin 0.9", 0.03, 0.004, machine)
    assert [rung for _, rung in machine.rungs] == [Rung.NARROW, Rung.THRIFTY]
    assert len(found.times_s) == TOKENS
    assert found.wasted < plain.wasted  # one guess a step instead of two; every token comes


def test_a_flat_battery_streams_at_the_pace_of_the_passes() -> None:
    way, machine = laddered(battery(0.05, per_drafting_s=0.0))
    found = played_on(way, "coin 0.9", 0.03, 0.004, machine)
    assert machine.rungs == [(0.0, Rung.NONE)]
    assert found.hits == 0
    assert found.times_s[-1] - found.times_s[0] <= (TOKENS - 1) * PASS_S + 1e-6


def test_a_device_that_cools_down_drafts_again() -> None:
    def read(now: float, drafting_s: float) -> MachineReading:
        return MachineReading(celsius=90.0 if now < 1.0 else 50.0)

    way, machine = laddered(read)
    played_on(way, "coin 0.9", 0.03, 0.004, machine)
    # The text is over before the ladder goes up: from here on the device is watched by itself.
    machine.ladder.observe(read(2.0, 0.0), 2.0)
    assert machine.ladder.rung is Rung.NONE
    seen = [machine.ladder.observe(read(now, 0.0), now) for now in (32.0, 62.0, 92.0, 122.0, 152.0)]
    assert [rung for rung in seen if rung is not None] == [Rung.THRIFTY, Rung.NARROW, Rung.ALL]
