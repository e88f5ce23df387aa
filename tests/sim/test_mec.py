"""Moving devices, base stations and shared air.

Oracles: Shannon's formula and airtime by hand, gains that the test writes itself, and the laws of
``conservation.py`` with planted faults.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgespec.bench.arms import Arm
from edgespec.core.link_model import SharedQueue
from edgespec_sim.association import (
    DeviceView,
    LinkView,
    VerifierView,
    association_policy,
)
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.scenario.network import FRAMING_BYTES, LinkSection, RadioSection
from edgespec_sim.scenario.power import TRANSMIT_FACTOR
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    Scenario,
    VerifierSection,
    WorkloadSection,
    load_scenario,
)
from edgespec_sim.world.assembly import World, WorldOutcome
from edgespec_sim.world.conservation import ConservationError
from edgespec_sim.world.radio_network import (
    DEVICE_NOISE_DB,
    LEAST_BITS_PER_HZ,
    MOST_BITS_PER_HZ,
    STATION_NOISE_DB,
    RadioNetwork,
)
from edgespec_sim.world.run import token_source
from edgespec_sim.world.surrounding import Allocation, FixedAssociation, Surrounding

HERE = Path()
WORK = WorkloadSection(prompt_tokens=16, output_tokens=30, think_s=0.3, start_within_s=0.5)
RADIO = RadioSection(area_m=400.0, bandwidth_mhz=1.0, step_s=0.5)
MEC = Scenario(
    name="mec",
    duration_s=5.0,
    arms=(Arm.EDGESPEC,),
    radio=RADIO,
    devices={"phone": DeviceSection(count=6, draft_w=2.0, workload=WORK)},
    verifiers={
        "near": VerifierSection(pass_time=CostSection(ms=20.0)),
        "far": VerifierSection(count=2, pass_time=CostSection(ms=12.0), path=("metro",)),
    },
    links={"metro": LinkSection(rtt_ms=20.0)},
)


def run(
    scenario: Scenario,
    arm: Arm = Arm.EDGESPEC,
    allocation: Allocation | None = None,
    folder: Path = HERE,
) -> WorldOutcome:
    surrounding = Surrounding(
        token_source(scenario, 1, HERE),
        association_policy(scenario.association),
        folder,
        allocation=allocation,
    )
    return World(scenario, arm, "1", surrounding).run()


def air(
    gains: list[list[float]], tmp_path: Path, **changes: object
) -> tuple[EventQueue, RadioNetwork]:
    """One network whose gains stay as they are given."""
    np.savez(tmp_path / "gains.npz", gains=np.array([gains]))
    section = replace(RADIO, gains="gains.npz", **changes)  # type: ignore[arg-type]
    queue = EventQueue()
    network = RadioNetwork(queue, section, len(gains), len(gains[0]), "1", tmp_path, audited=True)
    return queue, network


def rate(watts: float, gain: float, figure_db: float, other_w: float = 0.0) -> float:
    """Shannon over 1 MHz."""
    noise_w = 10.0 ** ((-174.0 + figure_db) / 10.0 - 3.0) * 1e6
    bits = math.log2(1.0 + watts * gain / (noise_w + other_w))
    return 1e6 * min(max(bits, LEAST_BITS_PER_HZ), MOST_BITS_PER_HZ)


DEVICE_W, STATION_W = 0.1, 10.0**0.3


# --- the air --------------------------------------------------------------------------------


def test_rates_are_shannons_within_what_modulation_can_do(tmp_path: Path) -> None:
    gains = [[3e-12, 1e-5], [1e-19, 5e-13]]
    _, network = air(gains, tmp_path, interference=False)
    for device, row in enumerate(gains):
        for station, gain in enumerate(row):
            signal = network.signal(device, station)
            up, down = (
                rate(DEVICE_W, gain, STATION_NOISE_DB),
                rate(STATION_W, gain, DEVICE_NOISE_DB),
            )
            assert signal.up_bits_per_s == pytest.approx(up)
            assert signal.down_bits_per_s == pytest.approx(down)
    assert network.signal(0, 1).up_bits_per_s == 1e6 * MOST_BITS_PER_HZ
    assert network.signal(1, 0).up_bits_per_s == 1e6 * LEAST_BITS_PER_HZ


def test_a_cells_devices_share_its_airtime(tmp_path: Path) -> None:
    """Two devices send at once; the second waits until the first, which is slow, is through."""
    gains = [[2e-14], [1e-9]]
    queue, network = air(gains, tmp_path, interference=False)
    (slow, _), (fast, _) = network.hop(0, 0), network.hop(1, 0)
    bits = (400 + FRAMING_BYTES) * 8
    slow_s = bits / rate(DEVICE_W, 2e-14, STATION_NOISE_DB)
    fast_s = bits / (1e6 * MOST_BITS_PER_HZ)
    access_s = RADIO.access_ms / 2e3
    assert slow.arrival(queue.now, 400) == pytest.approx(slow_s + access_s, abs=2e-9)
    assert fast.arrival(queue.now, 400) == pytest.approx(slow_s + fast_s + access_s, abs=4e-9)
    assert slow_s > 5 * fast_s


def test_other_cells_are_noise_for_as_long_as_they_send(tmp_path: Path) -> None:
    """Device 1 sends in cell 1 for an eighth of a step; cell 0 hears it the step after."""
    gains = [[1e-12, 1e-15], [2e-12, 1e-9]]
    queue, network = air(gains, tmp_path)
    quiet = network.signal(0, 0)
    up, down = network.hop(1, 1)
    size_bytes = round(RADIO.step_s / 8 * 1e6 * MOST_BITS_PER_HZ / 8) - FRAMING_BYTES
    up.arrival(queue.now, size_bytes)
    queue.run(1.5 * RADIO.step_s)
    noisy = network.signal(0, 0)
    expected = rate(DEVICE_W, 1e-12, STATION_NOISE_DB, DEVICE_W * 2e-12 / 8)
    assert noisy.up_bits_per_s == pytest.approx(expected, rel=1e-3)
    assert noisy.down_bits_per_s == quiet.down_bits_per_s
    # Its own signal is no noise to it, wherever it goes next; and a step later all is quiet.
    assert network.signal(1, 0).up_bits_per_s == pytest.approx(
        rate(DEVICE_W, 2e-12, STATION_NOISE_DB)
    )
    queue.run(2.5 * RADIO.step_s)
    assert network.signal(0, 0) == quiet
    down.arrival(queue.now, size_bytes)
    queue.run(3.5 * RADIO.step_s)
    heard = rate(STATION_W, 1e-12, DEVICE_NOISE_DB, STATION_W * 1e-15 / 8)
    assert network.signal(0, 0).down_bits_per_s == pytest.approx(heard, rel=1e-3)


# --- worlds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", list(Arm))
def test_every_arm_delivers_the_targets_own_text(arm: Arm) -> None:
    """And every law of a world is kept: the checks are on."""
    whole = run(MEC, arm).meters.whole()
    assert whole.tokens > 200
    assert whole.mismatches == 0
    assert whole.failed == 0


def test_equal_seeds_give_equal_worlds() -> None:
    assert run(MEC).meters.records == run(MEC).meters.records


def test_a_token_takes_its_way_through_the_air(tmp_path: Path) -> None:
    """One device, one station, plain streaming: TTFT is connecting, the request's airtime, the
    pass, the commit's airtime, and the access delay of each way."""
    np.savez(tmp_path / "gains.npz", gains=np.array([[[1e-9]]]))
    scenario = replace(
        MEC,
        radio=replace(RADIO, gains="gains.npz"),
        devices={"phone": DeviceSection(workload=replace(WORK, start_within_s=0.0))},
        verifiers={"near": VerifierSection(pass_time=CostSection(ms=20.0))},
        links={},
        message_ms=0.0,
    )
    record = run(scenario, Arm.TARGET_ONLY, folder=tmp_path).meters.records[0]
    per_byte_s = 8.0 / (1e6 * MOST_BITS_PER_HZ)
    access_s = RADIO.access_ms / 1e3
    assert record.ttft_s is not None
    on_air_s = record.ttft_s - access_s - access_s - 0.020
    assert on_air_s > 2 * FRAMING_BYTES * per_byte_s
    assert on_air_s < (2 * FRAMING_BYTES + 400) * per_byte_s
    assert record.tpot_s == pytest.approx(0.020, rel=1e-3)


def test_energy_is_what_is_radiated_over_the_airtime(tmp_path: Path) -> None:
    """A device that hears its station 100 times weaker, but still at the highest rate, pays the
    same; one at the lowest rate pays for 126 times the airtime."""
    spent = []
    for gain in (1e-7, 1e-9, 1e-19):
        np.savez(tmp_path / "gains.npz", gains=np.array([[[gain]]]))
        scenario = replace(
            MEC,
            duration_s=20.0,
            radio=replace(RADIO, gains="gains.npz"),
            devices={"phone": DeviceSection(workload=replace(WORK, requests=1))},
            verifiers={"near": VerifierSection()},
            links={},
        )
        (record,) = run(scenario, Arm.TARGET_ONLY, folder=tmp_path).meters.records
        spent.append(record.energy_j)
    assert spent[0] == spent[1]
    assert spent[2] / spent[0] == pytest.approx(MOST_BITS_PER_HZ / LEAST_BITS_PER_HZ, rel=0.2)
    watts = TRANSMIT_FACTOR * DEVICE_W
    assert FRAMING_BYTES * 8 / (1e6 * MOST_BITS_PER_HZ) * watts < spent[0] < watts * 0.05


def test_devices_choose_anew_as_they_move() -> None:
    fast = replace(RADIO, speed_m_per_s=40.0, area_m=900.0)
    scenario = replace(MEC, radio=fast, association="strongest-signal", duration_s=12.0)
    records = run(scenario, Arm.TARGET_ONLY).meters.records
    used = {
        device: {one.verifier for one in records if one.device == device}
        for device in {one.device for one in records}
    }
    assert max(map(len, used.values())) > 1


# --- decisions made before ------------------------------------------------------------------

NAMES = [f"phone-{index + 1}" for index in range(6)]
PLACES = dict(zip(NAMES, ["near"] * 3 + ["far-1"] * 2 + ["far-2"], strict=True))
SHARES = dict(zip(NAMES, [0.5, 0.3, 0.2, 0.6, 0.4, 1.0], strict=True))


def test_a_fixed_association_is_followed() -> None:
    for record in run(MEC, allocation=Allocation(PLACES)).meters.records:
        assert record.verifier == PLACES[record.device]


def test_a_device_whose_verifier_is_down_goes_to_the_nearest_other() -> None:
    policy = FixedAssociation({"phone": "gone"})
    views = [VerifierView(name, 0.02, 0, 8) for name in ("a", "b")]
    links = [[LinkView(0.03), LinkView(0.01)]]
    assert policy.assign([DeviceView("phone", 0.01)], views, links) == (1,)


def test_a_slice_of_compute_is_one_s_own_and_slower_by_its_share() -> None:
    """Plain streaming: each device's token takes 20 ms or 12 ms over its share; nobody batches."""
    scenario = replace(MEC, radio=replace(RADIO, bandwidth_mhz=50.0))
    outcome = run(scenario, Arm.TARGET_ONLY, Allocation(PLACES, compute=SHARES))
    for record in outcome.meters.records:
        if record.tpot_s is not None:
            pass_s = 0.020 if record.verifier == "near" else 0.012
            assert record.tpot_s == pytest.approx(pass_s / SHARES[record.device], rel=0.02)
    assert all(one.sessions_per_pass == 1.0 for one in outcome.verifiers)


def test_a_slice_of_the_band_is_slower_by_its_share(tmp_path: Path) -> None:
    gains = np.full((6, 3), 1e-9)
    np.savez(tmp_path / "gains.npz", gains=gains[None])
    radio = replace(RADIO, bandwidth_mhz=0.1, gains="gains.npz", interference=False)
    scenario = replace(MEC, radio=radio)
    surrounding = Surrounding(
        token_source(scenario, 1, HERE),
        association_policy("random"),
        tmp_path,
        allocation=Allocation(PLACES, bandwidth=SHARES),
    )
    world = World(scenario, Arm.EDGESPEC, "1", surrounding)
    network = world.network
    rates = {
        name: network.view("phone", index, PLACES[name]).up_bits_per_s
        for index, name in enumerate(NAMES)
    }
    assert rates == pytest.approx({name: SHARES[name] * 1e5 * MOST_BITS_PER_HZ for name in NAMES})
    # Slices do not wait for one another.
    first, second = (network.route("phone", index, "near")[0] for index in (0, 1))
    arrived: dict[int, float] = {}
    queue = world.queue

    def arrive(index: int) -> None:
        arrived[index] = queue.now

    for index, path in enumerate((first, second)):
        path.send(400, partial(arrive, index))
    queue.run(0.4)
    fixed_s = RADIO.access_ms / 2e3 + scenario.message_ms / 1e3
    for index, name in enumerate(NAMES[:2]):
        on_air_s = (400 + FRAMING_BYTES) * 8 / rates[name]
        assert arrived[index] == pytest.approx(on_air_s + fixed_s, abs=1e-7)


def test_an_allocation_gives_nothing_twice() -> None:
    with pytest.raises(ValueError, match=r"near gives 1\.5 of its compute"):
        Allocation({"a": "near", "b": "near"}, compute={"a": 1.0, "b": 0.5})
    with pytest.raises(ValueError, match=r"bandwidth of a is 0.0, but must be in \(0, 1\]"):
        Allocation({"a": "near"}, bandwidth={"a": 0.0})
    with pytest.raises(ValueError, match="compute: 'b' has a share or a verifier"):
        Allocation({"a": "near"}, compute={"a": 0.5, "b": 0.5})


# --- laws, and sections ---------------------------------------------------------------------


def test_two_messages_in_one_cell_at_once_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SharedQueue, "first_free_s", lambda self, now_s, ready_s, size_bytes: ready_s
    )
    with pytest.raises(ConservationError, match="two messages leave through one queue"):
        run(replace(MEC, radio=replace(RADIO, bandwidth_mhz=0.1)))


def test_the_air_is_the_first_hop() -> None:
    device = replace(MEC.devices["phone"], path=("metro",))
    with pytest.raises(ValueError, match=r"devices\.phone\.path names links, but with radio"):
        replace(MEC, devices={"phone": device})
    with pytest.raises(ValueError, match=r"load is 0.99, but must be in \[0.0, 0.95\]"):
        RadioSection(load=0.99)


def test_recorded_gains_have_to_be_there_and_of_the_right_shape(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"radio\.gains is 'rays\.npz', but there is no such file"):
        run(replace(MEC, radio=replace(RADIO, gains="rays.npz")))
    np.savez(tmp_path / "rays.npz", gains=np.ones((1, 2, 3)))
    with pytest.raises(ValueError, match=r"recorded gains are of shape \(2, 3\), not \(6, 3\)"):
        run(replace(MEC, radio=replace(RADIO, gains="rays.npz")), folder=tmp_path)


def test_the_bundled_scenario_is_played() -> None:
    bundled = load_scenario("mec")
    assert bundled.radio is not None
    whole = run(replace(bundled, duration_s=2.0), Arm.EDGESPEC).meters.whole()
    assert whole.tokens > 50
    assert whole.mismatches == 0
    assert whole.energy_j_per_token is None  # No powers of a 5G radio.
