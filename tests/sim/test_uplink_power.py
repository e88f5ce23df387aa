"""Uplink power control: 3GPP TS 38.213, 7.1.1 by hand, and what follows for signals and energy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.bench.arms import Arm
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.radio import LEAST_DBM, RESOURCE_BLOCK_HZ, PowerControl, UplinkPower
from edgespec_sim.scenario.network import FRAMING_BYTES, PowerControlSection, RadioSection
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    Scenario,
    TokensFrom,
    TokensSection,
    VerifierSection,
    WorkloadSection,
)
from edgespec_sim.world.radio_network import STATION_NOISE_DB, RadioNetwork
from edgespec_sim.world.run import Job, play

CONTROL = PowerControlSection(p0_dbm=-90.0, alpha=0.8)
BLOCKS_DB = 10.0 * math.log10(1e6 / RESOURCE_BLOCK_HZ)


def air(
    gains: list[list[list[float]]], tmp_path: Path, **changes: object
) -> tuple[EventQueue, RadioNetwork]:
    """One network whose gains are given, step by step."""
    np.savez(tmp_path / "gains.npz", gains=np.array(gains))
    plain = RadioSection(
        area_m=400.0, bandwidth_mhz=1.0, step_s=0.5, gains="gains.npz", power_control=CONTROL
    )
    section = replace(plain, **changes)  # type: ignore[arg-type]
    queue = EventQueue()
    devices, stations = len(gains[0]), len(gains[0][0])
    return queue, RadioNetwork(queue, section, devices, stations, "1", tmp_path, audited=True)


@pytest.mark.parametrize(
    ("loss_db", "dbm"),
    [
        (100.0, -90.0 + BLOCKS_DB + 80.0),  # -2.6 dBm
        (125.0, -90.0 + BLOCKS_DB + 100.0),
        (150.0, 20.0),  # the most that it can
        (40.0, LEAST_DBM),
    ],
)
def test_power_follows_the_path_loss(loss_db: float, dbm: float, tmp_path: Path) -> None:
    _, network = air([[[10.0 ** (-loss_db / 10.0)]]], tmp_path)
    assert network.signal(0, 0).sends_dbm == pytest.approx(dbm, abs=1e-9)


def test_the_station_hears_what_is_sent(tmp_path: Path) -> None:
    _, network = air([[[1e-10]]], tmp_path, interference=False)
    noise_dbm = -174.0 + 60.0 + STATION_NOISE_DB
    sent_dbm = -90.0 + BLOCKS_DB + 0.8 * 100.0
    signal = network.signal(0, 0)
    assert signal.up_snr_db == pytest.approx(sent_dbm - 100.0 - noise_dbm)
    expected = 1e6 * math.log2(1.0 + 10.0 ** (signal.up_snr_db / 10.0))
    assert signal.up_bits_per_s == pytest.approx(expected)


def test_a_slice_may_be_sent_denser_up_to_the_phones_most() -> None:
    """10 dB above full power are asked for; a tenth of the band can have them."""
    control = PowerControl(p0_dbm=0.0, alpha=0.0, filter_k=0)
    shares = np.array([1.0, 0.1])
    band_hz = 10.0 * RESOURCE_BLOCK_HZ
    density = UplinkPower(control, 0.0, band_hz, shares).measure(np.full((2, 1), 1e-9))
    assert density.ravel() == pytest.approx([1.0, 10.0])
    assert (
        UplinkPower(None, 0.0, band_hz, shares).measure(np.ones((2, 3))).tolist() == [[1.0] * 3] * 2
    )


def test_what_is_radiated_is_power_times_time_on_the_air(tmp_path: Path) -> None:
    """Both arrive at the highest rate, so power alone tells them apart."""
    spent = []
    for control in (None, replace(CONTROL, p0_dbm=-80.0)):
        np.savez(tmp_path / "gains.npz", gains=np.array([[[1e-6]]]))
        radio = RadioSection(area_m=400.0, gains="gains.npz", power_control=control)
        work = WorkloadSection(prompt_tokens=16, output_tokens=20, requests=1, start_within_s=0.0)
        scenario = Scenario(
            name="air",
            duration_s=4.0,
            tokens=TokensSection(source=TokensFrom.TOY),
            radio=radio,
            devices={"phone": DeviceSection(workload=work)},
            verifiers={"near": VerifierSection(pass_time=CostSection(ms=20.0))},
        )
        (record,) = play(Job(scenario, Arm.EDGESPEC, 0, 1, tmp_path)).meters.records
        assert record.radiated_j is not None
        spent.append(record.radiated_j)
    blocks_db = 10.0 * math.log10(10e6 / RESOURCE_BLOCK_HZ)
    density = 10.0 ** ((-80.0 + blocks_db + 0.8 * 60.0 - 20.0) / 10.0)
    assert spent[1] / spent[0] == pytest.approx(density, rel=1e-6)
    assert spent[0] > 0.1 * FRAMING_BYTES * 8 / (10e6 * 7.4063)


def test_sections_are_checked() -> None:
    with pytest.raises(ValueError, match=r"alpha is 0.75, but must be one of 0, 0.4"):
        PowerControlSection(alpha=0.75)
    with pytest.raises(ValueError, match=r"p0_dbm is 30.0, but must be in"):
        PowerControlSection(p0_dbm=30.0)
