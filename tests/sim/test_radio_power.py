"""Oracle: the states of a radio, integrated in small steps from their definition."""

from __future__ import annotations

import random

import pytest

from edgespec_sim.scenario.verifiers import RADIOS, RadioMeter, RadioPower

STEP_S = 1e-3


def stepped_j(power: RadioPower, packets_s: list[float], end_s: float) -> float:
    """Power by power, each millisecond, and a promotion at each packet that finds it idle."""
    total_j, last_s = 0.0, -1e9
    awake_s = power.connected_s + power.tail_s
    for step in range(round(end_s / STEP_S)):
        now_s = (step + 0.5) * STEP_S
        for packet_s in packets_s:
            if now_s - STEP_S / 2 <= packet_s < now_s + STEP_S / 2:
                total_j += power.promotion_s * power.promotion_w * (packet_s - last_s > awake_s)
                last_s = packet_s
        since_s = now_s - last_s
        if since_s < power.connected_s:
            total_j += power.connected_w * STEP_S
        elif since_s < awake_s:
            total_j += power.tail_w * STEP_S
        else:
            total_j += power.idle_w * STEP_S
    return total_j


@pytest.mark.parametrize("name", sorted(RADIOS))
def test_a_meter_integrates_the_states(name: str) -> None:
    power, dice = RADIOS[name], random.Random(3)
    packets_s = sorted(round(dice.uniform(0.0, 20.0), 3) + STEP_S / 2 for _ in range(30))
    packets_s = [time_s for time_s in packets_s if not 5.0 < time_s < 18.0]
    meter, taken_j = RadioMeter(power), 0.0
    for time_s in packets_s:
        meter.packet(time_s)
        taken_j += meter.take(time_s + 0.0001)
    taken_j += meter.take(40.0)
    assert taken_j == pytest.approx(stepped_j(power, packets_s, 40.0), rel=2e-3)
    assert meter.take(40.0) == 0.0


def test_a_stream_costs_its_time_and_not_its_bytes() -> None:
    """A hundred tokens, 25 ms apart: connected state and tail; the bytes are below a percent."""
    meter, power = RadioMeter(RADIOS["lte"]), RADIOS["lte"]
    for index in range(100):
        meter.packet(10.0 + 0.025 * index, down_bytes=100)
    whole_j = meter.take(30.0)
    bytes_j = 100 * 100 * 8 * power.down_j_per_bit
    tail_j = power.connected_w * power.connected_s + power.tail_w * power.tail_s
    assert whole_j > 1.2 * 99 * 0.025 + tail_j
    assert bytes_j < 0.01 * whole_j
