"""Back-off. Oracle: doubling delays, shortened by at most a half, until a deadline."""

from __future__ import annotations

import pytest

from edgespec.core.reconnect import Reconnect, ReconnectPolicy

POLICY = ReconnectPolicy(
    first_s=0.1, longest_s=1.0, give_up_first_s=5.0, give_up_s=20.0, answer_s=1.0
)


def _attempts(reconnect: Reconnect, now: float = 0.0) -> list[float]:
    """Delays until it gives up, when every attempt fails at once."""
    delays = []
    while (at := reconnect.failed(now)) is not None:
        delays.append(at - now)
        now = at
        assert len(delays) < 1000
    return delays


@pytest.mark.parametrize("seed", range(5))
def test_delays_double_with_jitter_and_are_bounded(seed: int) -> None:
    delays = _attempts(Reconnect(POLICY, seed))
    for attempt, delay_s in enumerate(delays):
        longest_s = min(0.1 * 2**attempt, 1.0)
        assert longest_s / 2 - 1e-9 <= delay_s <= longest_s + 1e-9
    assert 4.0 <= sum(delays) <= 5.0


def test_devices_do_not_come_back_together() -> None:
    assert len({Reconnect(POLICY, seed).failed(0.0) for seed in range(50)}) == 50


def test_it_is_more_patient_once_it_had_a_stream() -> None:
    reconnect = Reconnect(POLICY, 1)
    reconnect.succeeded()
    assert 19.0 <= sum(_attempts(reconnect, 100.0)) <= 20.0


def test_success_starts_over() -> None:
    reconnect = Reconnect(POLICY, 1)
    first = reconnect.failed(0.0)
    for now in (1.0, 2.0, 3.0):
        reconnect.failed(now)
    reconnect.succeeded()
    again = reconnect.failed(50.0)
    assert first is not None
    assert again == pytest.approx(50.0 + first)


def test_the_verifier_may_ask_for_more_time() -> None:
    assert Reconnect(POLICY, 1).failed(0.0, retry_after_s=3.0) == 3.0
    assert Reconnect(POLICY, 1).failed(0.0, retry_after_s=6.0) is None
