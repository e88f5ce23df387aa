"""Radio and mobility against the report's own formulae, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec_sim.world.radio_network import RandomWaypoint, UmiGains, path_loss_db


@pytest.mark.parametrize(
    ("distance_m", "sight", "loss_db"),
    [
        # TR 38.901, Table 7.4.1-1, by hand: d3D = sqrt(d^2 + 8.5^2), 20 log 3.5 = 10.8814.
        (100.0, True, 32.4 + 21 * 2.001564 + 10.8814),
        # Past the breakpoint of 4 * 9 * 0.5 * 3.5e9 / 3e8 = 210 m.
        (500.0, True, 32.4 + 40 * 2.699033 + 10.8814 - 9.5 * 4.645149),
        (100.0, False, 35.3 * 2.001564 + 22.4 + 21.3 * 0.544068),
        (5.0, True, 32.4 + 21 * 1.118050 + 10.8814),  # As at 10 m.
    ],
)
def test_path_loss_is_the_reports(distance_m: float, sight: bool, loss_db: float) -> None:
    found = path_loss_db(np.array([distance_m]), np.array([sight]))
    assert found[0] == pytest.approx(loss_db, abs=2e-3)


def test_gains_have_the_models_mean_and_spread() -> None:
    """Far enough out that nothing is in sight: 7.82 dB of shadowing and Rayleigh's 5.57 dB."""
    rng = np.random.default_rng(0)
    field = UmiGains(rng, 4000, 2)
    devices = np.tile([900.0, 0.0], (4000, 1))
    gains_db = 10 * np.log10(field.next(devices, np.zeros((2, 2)), np.zeros(4000)))
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
        gone_m = walk.advance(30.0)  # Long enough for several legs.
        assert np.all((walk.positions_m >= 0) & (walk.positions_m <= 50.0))
        assert np.all((gone_m >= 30.0 - 1e-6) & (gone_m <= 90.0 + 1e-6))
        straight_m = np.linalg.norm(walk.positions_m - before, axis=1)
        assert np.all(straight_m <= gone_m + 1e-9)
