"""The ladder in random worlds. Oracle: the bounds as its docstring states them, by plain loops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.device.draft_ladder import (
    BATTERY,
    CELSIUS,
    OTHERS_LOAD,
    RECOVERY_S,
    Bounds,
    DraftLadder,
    LadderPolicy,
    MachineReading,
    Rung,
)
from edgespec.core.device.draft_view import DraftView
from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.policy_names import PolicyName, default_policy, named_policy
from edgespec.core.protocol.tree import ROOT, CommittedPrefix, SpeculationTree
from tests.sim.faults.options import WorldOptions
from tests.sim.faults.worlds import run_world

READINGS = st.builds(
    MachineReading,
    st.none() | st.floats(0.0, 1.0),
    st.none() | st.floats(20.0, 100.0),
    st.none() | st.floats(0.0, 1.0),
)


def _wanted(seen: MachineReading) -> Rung:
    """By the figures of the module, one by one."""
    rungs = [Rung.ALL]
    if seen.battery is not None:
        rungs += [Rung(n) for n, bound in enumerate((0.3, 0.2, 0.1), 1) if seen.battery <= bound]
    for value, bounds in (
        (seen.celsius, (70.0, 78.0, 85.0)),
        (seen.others_load, (0.6, 0.8, 0.95)),
    ):
        if value is not None:
            rungs += [Rung(n) for n, bound in enumerate(bounds, 1) if value >= bound]
    return max(rungs)


@given(st.lists(st.tuples(READINGS, st.floats(0.5, 40.0)), max_size=60))
def test_down_at_once_and_up_one_by_one_after_a_while(
    world: list[tuple[MachineReading, float]],
) -> None:
    ladder, now, asked_at = DraftLadder(), 0.0, -1e9
    for seen, after_s in world:
        now += after_s
        before, wanted = ladder.rung, _wanted(seen)
        changed = ladder.observe(seen, now)
        assert ladder.rung >= wanted
        assert ladder.rung <= max(before, wanted)
        assert changed == (None if ladder.rung is before else ladder.rung)
        if ladder.rung < before:
            assert ladder.rung == before - 1
            assert now - asked_at >= RECOVERY_S
            asked_at = now
        if wanted >= before:
            asked_at = now
        assert bool(ladder.why) == (ladder.rung is not Rung.ALL)


def test_it_walks_down_before_the_limit_and_up_again() -> None:
    ladder = DraftLadder()
    rungs = []
    for celsius in (60, 71, 76, 79, 84, 86):
        ladder.observe(MachineReading(celsius=celsius), 0.0)
        rungs.append(ladder.rung)
    assert rungs == [Rung.ALL, Rung.NARROW, Rung.NARROW, Rung.THRIFTY, Rung.THRIFTY, Rung.NONE]
    assert ladder.why == "the device is at 86 °C"
    assert ladder.walked_down == 3
    walked = [
        ladder.rung
        for second in range(0, 100, 10)
        if ladder.observe(MachineReading(celsius=50), float(second)) is not None
    ]
    assert walked == [Rung.THRIFTY, Rung.NARROW]
    ladder.observe(MachineReading(celsius=50), 200.0)
    assert (ladder.rung, ladder.why) == (Rung.ALL, "")


def test_a_value_at_its_bound_does_not_swing() -> None:
    ladder = DraftLadder()
    for second in range(0, 600, 2):
        ladder.observe(MachineReading(battery=0.3 if second % 4 else 0.31), float(second))
    assert (ladder.rung, ladder.walked_down) == (Rung.NARROW, 1)


@pytest.mark.parametrize(
    ("bounds", "margin", "falling"),
    [((3.0, 2.0, 1.0), 0.1, False), ((1.0, 2.0, 3.0), 0.1, True), ((1.0, 2.0, 3.0), 0.0, False)],
)
def test_bounds_must_get_worse(
    bounds: tuple[float, float, float], margin: float, falling: bool
) -> None:
    with pytest.raises(ValueError, match=r"bounds are \(.*margin of"):
        Bounds(bounds, margin, falling)


def test_the_bounds_are_those_of_the_table() -> None:
    assert [one.rung(0.15) for one in (BATTERY, OTHERS_LOAD)] == [Rung.THRIFTY, Rung.ALL]
    assert CELSIUS.rung(85.0) is Rung.NONE


# --- the policy of a rung -----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PolicyName))
def test_each_rung_drafts_less(name: PolicyName) -> None:
    inner = named_policy(name)
    ladder = DraftLadder()
    policy: DraftPolicy = LadderPolicy(inner, ladder)
    view = DraftView(SpeculationTree(CommittedPrefix((1, 2))), 0, 0, 100, 1000, DraftEstimates())
    assert (policy.width, policy.extend(view)) == (inner.width, ROOT)
    widths = []
    for rung in (Rung.NARROW, Rung.THRIFTY, Rung.NONE):
        ladder.rung = rung
        widths.append(policy.width)
    assert widths == [1, 1, 1]
    assert policy.extend(view) is None


def test_the_text_is_the_same_on_every_rung() -> None:
    """``run_world`` holds each token against the target's own stream."""
    sent = []
    for rung in Rung:
        ladder = DraftLadder()
        ladder.rung = rung
        options = WorldOptions(policies=(LadderPolicy(default_policy(), ladder),))
        (device,) = run_world(options, 3).devices
        sent.append(device.counters.sent)
    assert sent[0] > max(sent[1:3])
    assert min(sent[1:3]) > 0
    assert sent[3] == 0
