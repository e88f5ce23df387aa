"""Association policies. Oracles: the definition of each, brute force over small worlds, and the
law that a full verifier is named only when all are full."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec_sim.association import (
    POLICIES,
    AssociationPolicy,
    DeviceView,
    LinkView,
    LowestDelay,
    MostCompute,
    RandomAssociation,
    StrongestSignal,
    VerifierView,
    association_policy,
    round_s,
)

DEVICE = DeviceView("laptop", 0.008)


@st.composite
def worlds(
    draw: st.DrawFn, most_devices: int = 6, most_verifiers: int = 4
) -> tuple[list[DeviceView], list[VerifierView], list[list[LinkView]]]:
    device_count = draw(st.integers(1, most_devices))
    count = draw(st.integers(1, most_verifiers))
    sessions = st.integers(0, 3)
    verifiers = [
        VerifierView(
            f"v{number}",
            draw(st.floats(0.001, 0.2)),
            draw(sessions),
            draw(st.integers(0, 6)),
            draw(st.sampled_from((0.0, 0.002, 0.02))),
        )
        for number in range(count)
    ]
    link = st.builds(
        LinkView,
        st.floats(0.0, 0.3),
        st.sampled_from((1e5, 1e7, math.inf)),
        st.sampled_from((1e6, math.inf)),
        st.none() | st.floats(-10.0, 40.0),
    )
    links = [[draw(link) for _ in range(count)] for _ in range(device_count)]
    return [DeviceView(f"d{n}", 0.01) for n in range(device_count)], verifiers, links


@pytest.mark.parametrize("name", POLICIES)
@given(world=worlds(), seed=st.integers(0, 1 << 40))
@settings(max_examples=60)
def test_a_full_verifier_is_named_only_when_all_are_full(
    name: str,
    world: tuple[list[DeviceView], list[VerifierView], list[list[LinkView]]],
    seed: int,
) -> None:
    devices, verifiers, links = world
    chosen = association_policy(name, seed).assign(devices, verifiers, links)
    assert len(chosen) == len(devices)
    assert all(0 <= verifier < len(verifiers) for verifier in chosen)
    room = sum(max(0, view.max_sessions - view.sessions) for view in verifiers)
    over = sum(
        max(0, chosen.count(v) - max(0, view.max_sessions - view.sessions))
        for v, view in enumerate(verifiers)
    )
    assert over == max(0, len(devices) - room)
    assert chosen == association_policy(name, seed).assign(devices, verifiers, links)


def total_s(
    chosen: Sequence[int], verifiers: Sequence[VerifierView], links: Sequence[Sequence[LinkView]]
) -> float:
    return sum(
        round_s(verifiers[v], links[device][v], chosen.count(v) - 1)
        for device, v in enumerate(chosen)
    )


@given(world=worlds(4, 3))
@settings(max_examples=100)
def test_lowest_delay_lies_between_the_best_of_all_and_taking_turns(
    world: tuple[list[DeviceView], list[VerifierView], list[list[LinkView]]],
) -> None:
    devices, verifiers, links = world
    roomy = [VerifierView(v.name, v.pass_s, v.sessions, 99, v.session_s) for v in verifiers]
    found = total_s(LowestDelay().assign(devices, roomy, links), roomy, links)
    every = itertools.product(range(len(roomy)), repeat=len(devices))
    best = min(total_s(chosen, roomy, links) for chosen in every)
    greedy = total_s(LowestDelay(sweeps=0).assign(devices, roomy, links), roomy, links)
    assert best - 1e-9 <= found <= greedy + 1e-9
    assert len(devices) > 1 or found <= best + 1e-9


@given(world=worlds(4, 3))
@settings(max_examples=100)
def test_with_sweeps_enough_no_single_move_helps_any_more(
    world: tuple[list[DeviceView], list[VerifierView], list[list[LinkView]]],
) -> None:
    devices, verifiers, links = world
    roomy = [VerifierView(v.name, v.pass_s, v.sessions, 99, v.session_s) for v in verifiers]
    chosen = LowestDelay(sweeps=100).assign(devices, roomy, links)
    found = total_s(chosen, roomy, links)
    for device, other in itertools.product(range(len(devices)), range(len(roomy))):
        moved = (*chosen[:device], other, *chosen[device + 1 :])
        assert total_s(moved, roomy, links) >= found - 1e-7


def test_moves_find_what_taking_turns_misses() -> None:
    """Four devices crowd on a verifier that is a little nearer; apart they are faster."""
    verifiers = [
        VerifierView("near", 0.02, 0, 99, session_s=0.030),
        VerifierView("far", 0.02, 0, 99, session_s=0.0),
    ]
    links = [[LinkView(0.001), LinkView(0.080)] for _ in range(4)]
    devices = [DEVICE] * 4
    turns = LowestDelay(sweeps=0).assign(devices, verifiers, links)
    moved = LowestDelay().assign(devices, verifiers, links)
    assert turns.count(0) == 3
    assert moved.count(0) == 2
    assert total_s(moved, verifiers, links) < total_s(turns, verifiers, links)


def test_each_policy_looks_at_its_own_thing() -> None:
    verifiers = [
        VerifierView("near", 0.050, 0, 8),
        VerifierView("strong", 0.030, 0, 8),
        VerifierView("loud", 0.100, 0, 8),
    ]
    links = [[LinkView(0.010, snr_db=5.0), LinkView(0.200, snr_db=9.0), LinkView(0.1, snr_db=30.0)]]
    answers: dict[AssociationPolicy, int] = {
        LowestDelay(): 0,
        MostCompute(): 1,
        StrongestSignal(): 2,
    }
    for policy, right in answers.items():
        assert policy.assign([DEVICE], verifiers, links) == (right,), policy.name


def test_a_slow_uplink_counts() -> None:
    verifiers = [VerifierView("thin", 0.02, 0, 8), VerifierView("wide", 0.02, 0, 8)]
    links = [[LinkView(0.010, up_bits_per_s=2e4), LinkView(0.030)]]
    assert LowestDelay().assign([DEVICE], verifiers, links) == (1,)


def test_load_counts() -> None:
    verifiers = [
        VerifierView("busy", 0.02, 10, 99, session_s=0.005),
        VerifierView("idle", 0.03, 0, 99, session_s=0.005),
    ]
    links = [[LinkView(0.01), LinkView(0.01)]]
    for policy in (LowestDelay(), MostCompute()):
        assert policy.assign([DEVICE], verifiers, links) == (1,)
    crowd = MostCompute().assign([DEVICE] * 40, verifiers, links * 40)
    assert (crowd.count(0), crowd.count(1)) == (16, 24)  # 26 each, but a pass is 10 ms shorter


@pytest.mark.parametrize("policy", [LowestDelay(), MostCompute(), StrongestSignal()])
def test_equal_verifiers_share_the_devices(policy: AssociationPolicy) -> None:
    """Where a further session costs nothing: nine devices at three verifiers, and one device where
    the loads are told. With loads alike too, it is the first."""
    alike = [VerifierView(f"v{n}", 0.02, 0, 99) for n in range(3)]
    links = [[LinkView(0.01)] * 3] * 9
    chosen = policy.assign([DEVICE] * 9, alike, links)
    assert [chosen.count(v) for v in range(3)] == [3, 3, 3]
    assert chosen[0] == 0
    told = [VerifierView(f"v{n}", 0.02, load, 99) for n, load in enumerate((5, 3, 4))]
    assert policy.assign([DEVICE], told, links[:1]) == (1,)


def test_a_nearer_verifier_is_taken_before_an_emptier_one() -> None:
    told = [VerifierView("near", 0.02, 50, 99), VerifierView("far", 0.02, 0, 99)]
    links = [[LinkView(0.010), LinkView(0.011)]]
    assert LowestDelay().assign([DEVICE], told, links) == (0,)
    assert StrongestSignal().assign([DEVICE], told, links) == (0,)
    assert MostCompute().assign([DEVICE], told, links) == (1,), "whatever the link"


def test_a_cable_beats_radio_and_a_shorter_cable_a_longer() -> None:
    verifiers = [VerifierView(name, 0.02, 0, 8) for name in ("radio", "far", "near")]
    links = [[LinkView(0.001, snr_db=30.0), LinkView(0.020), LinkView(0.010)]]
    assert StrongestSignal().assign([DEVICE], verifiers, links) == (2,)


def test_random_spreads_over_devices_and_seeds() -> None:
    verifiers = [VerifierView(f"v{n}", 0.02, 0, 1000) for n in range(4)]
    devices = [DeviceView(f"d{n}", 0.01) for n in range(400)]
    links = [[LinkView(0.01)] * 4] * 400
    chosen = RandomAssociation(3).assign(devices, verifiers, links)
    assert all(60 <= chosen.count(v) <= 140 for v in range(4))  # 100 expected, 4.6 sigma
    assert chosen != RandomAssociation(4).assign(devices, verifiers, links)
    alone = {RandomAssociation(s).assign([DEVICE], verifiers, links[:1])[0] for s in range(40)}
    assert alone == {0, 1, 2, 3}


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"association is 'nearest', but must be one of random, "):
        association_policy("nearest")
    assert {association_policy(name).name for name in POLICIES} == set(POLICIES)
