"""Moving devices, base stations, shared air, phones that change cells.

Oracles: Shannon's formula and airtime by hand, 3GPP TR 38.901 by hand, delays added up by hand,
gains that the test writes itself, and the laws of ``conservation.py``; tokens are compared with the
target's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from edgespec.bench.arms import Arm
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.scenario import sections as sc
from edgespec_sim.world import radio_network
from edgespec_sim.world.assembly import World, WorldOutcome
from edgespec_sim.world.network import Network
from edgespec_sim.world.radio_network import RandomWaypoint, UmiGains, path_loss_db
from edgespec_sim.world.run import make_token_source
from edgespec_sim.world.site import WorldSetup
from tests.present import require
from tests.sources import ROOT

HERE = Path()
STEP_S = 0.5
MEC = sc.load_scenario(str(ROOT / "tests/sim/worlds/mec.yaml"))
CELLS = sc.load_scenario(str(ROOT / "tests/sim/worlds/cells.yaml"))
WORK, RADIO = MEC.devices["phone"].workload, require(MEC.radio)


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radio_network, "_STEP_S", STEP_S)
    monkeypatch.setattr(radio_network, "FILTER_K", 0)


def write_gains(monkeypatch: pytest.MonkeyPatch, *slots: list[list[float]]) -> None:
    """Replace the gains of (device, station) by these, slot after slot, in a cycle."""

    class Written:
        def __init__(self, *sizes: object) -> None:
            self._slots = cycle(slots)

        def next_gains(self, *places: object) -> np.ndarray:
            return np.array(next(self._slots))

    monkeypatch.setattr(radio_network, "UmiGains", Written)


def run(scenario: sc.Scenario, arm: Arm = Arm.EDGESPEC) -> WorldOutcome:
    setup = WorldSetup(make_token_source(scenario, 1, HERE), HERE)
    return World(scenario, arm, "1", setup).run()


def make_network(
    monkeypatch: pytest.MonkeyPatch, gains: list[list[float]]
) -> tuple[EventQueue, radio_network.RadioNetwork]:
    """Return one network whose gains stay constant."""
    write_gains(monkeypatch, gains)
    queue = EventQueue()
    return queue, radio_network.RadioNetwork(queue, RADIO, len(gains), len(gains[0]), "1")


def rate(watts: float, gain: float, figure_db: float, other_w: float = 0.0) -> float:
    """Return Shannon's rate over 1 MHz."""
    noise_w = 10.0 ** ((-174.0 + figure_db) / 10.0 - 3.0) * 1e6
    bits = math.log2(1.0 + watts * gain / (noise_w + other_w))
    return 1e6 * min(max(bits, radio_network.MIN_BITS_PER_HZ), radio_network.MAX_BITS_PER_HZ)


DEVICE_W, STATION_W = 0.1, 10.0**0.3


def test_a_cells_devices_share_its_airtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices send at once; the second one waits until the first one, which is slow, has
    finished."""
    gains = [[2e-14], [1e-9]]
    queue, network = make_network(monkeypatch, gains)
    (slow, _), (fast, _) = network.hop(0, 0), network.hop(1, 0)
    bits = (400 + sc.FRAMING_BYTES) * 8
    slow_s = bits / rate(DEVICE_W, 2e-14, radio_network.STATION_NOISE_DB)
    fast_s = bits / (1e6 * radio_network.MAX_BITS_PER_HZ)
    access_s = radio_network.ACCESS_S / 2
    assert slow.arrival(queue.now, 400) == pytest.approx(slow_s + access_s, abs=2e-9)
    assert fast.arrival(queue.now, 400) == pytest.approx(slow_s + fast_s + access_s, abs=4e-9)
    assert slow_s > 5 * fast_s


def test_other_cells_are_noise_for_as_long_as_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 1 sends in cell 1 for an eighth of a step; cell 0 has the noise in the next step."""
    gains = [[1e-12, 1e-15], [2e-12, 1e-9]]
    queue, network = make_network(monkeypatch, gains)
    quiet = network.bits_per_s(0, 0)
    up, down = network.hop(1, 1)
    size_bytes = round(STEP_S / 8 * 1e6 * radio_network.MAX_BITS_PER_HZ / 8) - sc.FRAMING_BYTES
    up.arrival(queue.now, size_bytes)
    queue.run(1.5 * STEP_S)
    noisy = network.bits_per_s(0, 0)
    expected = rate(DEVICE_W, 1e-12, radio_network.STATION_NOISE_DB, DEVICE_W * 2e-12 / 8)
    assert noisy[0] == pytest.approx(expected, rel=1e-3)
    assert noisy[1] == quiet[1]
    # A device's own signal is no noise to it, in any cell; and a step later all is quiet.
    assert network.bits_per_s(1, 0)[0] == pytest.approx(
        rate(DEVICE_W, 2e-12, radio_network.STATION_NOISE_DB)
    )
    queue.run(2.5 * STEP_S)
    assert network.bits_per_s(0, 0) == quiet
    down.arrival(queue.now, size_bytes)
    queue.run(3.5 * STEP_S)
    heard = rate(STATION_W, 1e-12, radio_network.DEVICE_NOISE_DB, STATION_W * 1e-15 / 8)
    assert network.bits_per_s(0, 0)[1] == pytest.approx(heard, rel=1e-3)


def test_a_token_takes_its_way_through_the_air(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one device, one station and plain streaming, TTFT is the sum of connecting, the
    request's airtime, the pass, the commit's airtime, and the access delay of each way."""
    write_gains(monkeypatch, [[1e-9]])
    scenario = replace(
        MEC,
        devices={"phone": sc.DeviceSection(workload=replace(WORK, start_within_s=0.0))},
        verifiers={"near": sc.VerifierSection(pass_time=sc.CostSection(ms=20.0))},
        links={},
        message_ms=0.0,
    )
    record = run(scenario, Arm.TARGET_ONLY).meters.records[0]
    per_byte_s = 8.0 / (1e6 * radio_network.MAX_BITS_PER_HZ)
    access_s = radio_network.ACCESS_S
    # TCP and TLS take a round trip each, then the request takes its own.
    on_air_s = require(record.ttft_s) - 2 * access_s - access_s - 0.020
    assert on_air_s > 2 * sc.FRAMING_BYTES * per_byte_s
    assert on_air_s < (2 * sc.FRAMING_BYTES + 400) * per_byte_s
    assert record.tpot_s == pytest.approx(0.020, rel=1e-3)


NEAR, FAR = 1e-9, 1e-12
"""Gains 30 dB apart, both far above the needs of the best modulation."""


def make_cells(
    monkeypatch: pytest.MonkeyPatch,
    handover: sc.CellHandoverSection,
    phones: int = 2,
    **changes: object,
) -> sc.Scenario:
    """Return two stations, and phones that are in cell 0 for two steps, in cell 1 for two, and so
    on. All phones make requests at once, for as long as the world lasts."""
    slots = [[[NEAR, FAR]] * phones] * 2 + [[[FAR, NEAR]] * phones] * 2
    write_gains(monkeypatch, *slots)
    radio = replace(require(CELLS.radio), handover=handover)
    devices = {"phone": replace(CELLS.devices["phone"], count=phones)}
    return replace(CELLS, radio=radio, devices=devices, **changes)  # type: ignore[arg-type]


def test_a_phone_changes_when_another_cell_is_clearly_stronger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """k = 4 gives the newest measurement half the weight: 0, then 3 dB of a lead of 6, then 4.5."""
    here, lead = np.array([[1.0, 1.0]]), np.array([[1.0, 10.0**0.6]])
    monkeypatch.setattr(radio_network, "FILTER_K", 4)
    monkeypatch.setattr(radio_network, "MARGIN_DB", 3.1)
    attachment = radio_network.Attachment(here)
    assert attachment.cells.tolist() == [0]
    assert attachment.measure(lead) == []
    assert attachment.measure(lead) == [radio_network.CellChange(0, 0, 1)]
    assert attachment.cells.tolist() == [1]
    assert attachment.measure(lead) == [], "it is there"


def test_another_cells_verifier_is_behind_the_backhaul(monkeypatch: pytest.MonkeyPatch) -> None:
    handover = sc.CellHandoverSection(backhaul=sc.BackhaulSection(rtt_ms=30.0, mbps=8.0))
    scenario = make_cells(monkeypatch, handover, message_ms=0.0)
    queue = EventQueue()
    network = Network(queue, scenario, "1", HERE)
    own, other = (network.view("phone", 0, name).rtt_s for name in ("a", "b"))
    assert other - own == pytest.approx(0.030)
    arrived: dict[str, float] = {}

    def note(name: str) -> None:
        arrived[name] = queue.now

    for device, name in enumerate(("a", "b")):
        up, _, _ = network.route("phone", device, name)
        up.send(1000, partial(note, name))
    queue.run(0.4)
    # 1 ms on the line; phone 1 sends after phone 0, in the same cell.
    air_s = (1000 + 84) * 8 / (10e6 * 7.4063)
    assert arrived["b"] - arrived["a"] == pytest.approx(0.015 + 0.001 + air_s, abs=1e-6)


@pytest.mark.parametrize("arm", [Arm.TARGET_ONLY, Arm.VANILLA, Arm.EDGESPEC])
def test_the_text_is_the_targets_own_through_every_handover(
    monkeypatch: pytest.MonkeyPatch, arm: Arm
) -> None:
    outcome = run(make_cells(monkeypatch, sc.CellHandoverSection()), arm)
    whole = outcome.meters.whole()
    assert (whole.mismatches, whole.failed, whole.reconnects) == (0, 0, 0)
    assert whole.handovers >= 4
    assert {one.verifier for one in outcome.meters.records} == {"a"}, "the first listed"


def test_nothing_comes_in_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming takes 20 ms per token, so the longest pause is the gap, a pass and a little
    more."""
    scenario = make_cells(monkeypatch, sc.CellHandoverSection(gap_ms=400.0))
    gaps_s = run(scenario, Arm.TARGET_ONLY).meters.gaps_s
    assert 0.4 < max(gaps_s) < 0.4 + 0.045
    assert sum(gap_s > 0.1 for gap_s in gaps_s) <= 12, "one a change and phone"


@pytest.mark.parametrize(
    ("distance_m", "sight", "loss_db"),
    [
        # TR 38.901, Table 7.4.1-1, by hand: d3D = sqrt(d^2 + 8.5^2), 20 log 3.5 = 10.8814.
        # 32.4 + 21 * 2.001564 + 10.8814
        (100.0, True, 85.314244),
        # Past the breakpoint of 4 * 9 * 0.5 * 3.5e9 / 3e8 = 210 m.
        # 32.4 + 40 * 2.699033 + 10.8814 - 9.5 * 4.645149
        (500.0, True, 107.113805),
        # 35.3 * 2.001564 + 22.4 + 21.3 * 0.544068
        (100.0, False, 104.643858),
        # 32.4 + 21 * 1.118050 + 10.8814, as at 10 m
        (5.0, True, 66.76045),
    ],
)
def test_path_loss_is_the_reports(distance_m: float, sight: bool, loss_db: float) -> None:
    found = path_loss_db(np.array([distance_m]), np.array([sight]))
    assert found[0] == pytest.approx(loss_db, abs=2e-3)


def test_gains_have_the_models_mean_and_spread() -> None:
    """The distance is far enough that nothing is in sight: 7.82 dB of shadowing and Rayleigh's 5.57
    dB."""
    rng = np.random.default_rng(0)
    field = UmiGains(rng, 4000, 2)
    devices = np.tile([900.0, 0.0], (4000, 1))
    gains_db = 10 * np.log10(field.next_gains(devices, np.zeros((2, 2)), np.zeros(4000)))
    loss = path_loss_db(np.array([900.0]), np.array([False]))[0]
    # E[10 log10 of an exponential] = -2.507 dB; 2 % are in sight and gain some.
    assert gains_db.mean() == pytest.approx(-loss - 2.507, abs=0.9)
    assert gains_db.std() == pytest.approx(np.hypot(7.82, 5.57), rel=0.08)
    shared = np.corrcoef(gains_db[:, 0], gains_db[:, 1])[0, 1]
    assert shared == pytest.approx(0.5 * 7.82**2 / (7.82**2 + 5.57**2), abs=0.08)


def test_devices_walk_at_their_speed_and_stay_inside() -> None:
    walk = RandomWaypoint(np.random.default_rng(2), 200, side_m=50.0, speed_m_s=(1.0, 3.0))
    for _ in range(20):
        before = walk.positions_m
        moved_m = walk.advance(30.0)  # long enough for several legs
        assert np.all((walk.positions_m >= 0) & (walk.positions_m <= 50.0))
        assert np.all((moved_m >= 30.0 - 1e-6) & (moved_m <= 90.0 + 1e-6))
        straight_m = np.linalg.norm(walk.positions_m - before, axis=1)
        assert np.all(straight_m <= moved_m + 1e-9)
