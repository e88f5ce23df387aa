"""The cost models: the printed formula term by term, and what the corrections do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgespec_uara.cost import (
    CorrectedCost,
    PaperCost,
    device_costs,
    rtt_s,
    sinr,
    uniform,
)
from edgespec_uara.world import UaraSettings, UaraWorld
from tests.uara.small import COSTS, snapshot


def test_the_printed_objective_is_the_papers_formula() -> None:
    """Worked out for each device in SI units, without the arrays of ``Terms``."""
    now, cost = snapshot(3), PaperCost()
    now = replace(now, queue_slots=np.linspace(0.0, 1.5, 4))
    decision = uniform(cost.terms(now), np.arange(24) % 4)
    found = device_costs(cost.terms(now), decision)
    for i in range(24):
        j, y, z = i % 4, 1 / 6, 1 / 6
        noise_w = 10 ** (-174 / 10 - 3) * 10e6 / 4
        snr = now.gains[i, j] * now.transmit_w[i] / noise_w
        rate = y * (10e6 / 4) * np.log2(1 + snr)
        d_md = now.draft_flop[i] / now.device_flops[i]
        d_es = now.queue_slots[j] * 2.0 + now.verify_flop[i] / (z * now.server_flops[j])
        gap_ms = 1e3 * (d_md - now.upload_bits[i] / rate)
        energy_mj = now.draft_flop[i] / 1e9 + 2.6 * y * 1e3 * now.transmit_w[i]
        wanted = 1e3 * (d_md + d_es) + 1e-2 * gap_ms**2
        wanted += 60.0 * energy_mj / now.battery_percent[i]
        assert found[i] == pytest.approx(wanted, rel=1e-9)


def test_the_corrected_cost_adds_what_the_paper_leaves_out() -> None:
    now = snapshot(1)
    printed, corrected = PaperCost().terms(now), CorrectedCost().terms(now)
    assert np.all(sinr(now) < now.snr)
    assert np.all(corrected.uplink > printed.uplink)
    once_ms = 1e3 * now.passes[:, None] * rtt_s(now)
    assert np.all(corrected.delay > printed.delay + once_ms)
    # Energy is power times time on air, in which the share cancels.
    assert not corrected.power.any()


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)
def test_a_decision_that_gives_too_much_is_refused(cost: PaperCost) -> None:
    decision = uniform(cost.terms(snapshot()), np.arange(24) % 4)
    decision.check(4)
    for wrong, said in (
        (replace(decision, bandwidth=decision.bandwidth * 1.01), "gives 1.01"),
        (replace(decision, compute=decision.compute * 1.01), "of its compute"),
        (replace(decision, compute=decision.compute * 0.0), "above 0"),
        (replace(decision, association=decision.association + 1), "outside 0 to 3"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong.check(4)


def test_work_that_does_not_fit_waits() -> None:
    world = UaraWorld(UaraSettings(devices=60, servers=3), 0)
    before = world.snapshot
    after = world.advance(np.zeros(60, dtype=np.int64))
    wanted = before.verify_flop.sum() / before.server_flops[0] / 2.0 - 1.0
    assert after.queue_slots == pytest.approx([wanted, 0.0, 0.0])
    assert wanted > 0
