"""Back-off. Oracle: doubling delays, shortened by at most a half, until a deadline."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from edgespec.core.device.reconnect import LEAST_S, Reconnect, ReconnectPolicy

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


def test_devices_that_were_told_the_same_time_do_not_come_back_together() -> None:
    told = [Reconnect(POLICY, seed).failed(0.0, retry_after_s=3.0) for seed in range(200)]
    times = [at for at in told if at is not None]
    assert len(set(times)) == 200
    assert 3.0 <= min(times) < 3.05
    assert 3.45 < max(times) <= 3.5


def test_it_is_more_patient_once_it_had_a_stream() -> None:
    reconnect = Reconnect(POLICY, 1)
    reconnect.greeted()
    assert 19.0 <= sum(_attempts(reconnect, 100.0)) <= 20.0


def test_a_token_starts_over_and_a_greeting_does_not() -> None:
    reconnect = Reconnect(POLICY, 1)
    first = reconnect.failed(0.0)
    for now in (1.0, 2.0, 3.0):
        reconnect.failed(now)
    assert first is not None
    reconnect.greeted()
    later = reconnect.failed(40.0)
    assert later is not None
    assert later >= 40.5
    reconnect.progressed()
    again = reconnect.failed(50.0)
    assert again == pytest.approx(50.0 + first)


def test_the_verifier_may_ask_for_more_time() -> None:
    assert Reconnect(POLICY, 1).failed(0.0, retry_after_s=6.0) is None
    assert Reconnect(POLICY, 1).failed(0.0, retry_after_s=math.nan) == Reconnect(POLICY, 1).failed(
        0.0
    )


def test_thousands_of_attempts_do_not_overflow() -> None:
    patient = replace(POLICY, first_s=LEAST_S, longest_s=1e3, give_up_first_s=1e7)
    reconnect, now = Reconnect(patient, 1), 0.0
    for _ in range(5000):
        at = reconnect.failed(now)
        assert at is not None
        assert at - now <= 1e3
        now = at


@pytest.mark.parametrize("field", [field.name for field in fields(ReconnectPolicy)])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is {value}, but must be in \["):
        replace(POLICY, **{field: value})  # type: ignore[arg-type] # a count among the times


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_s": 2.0}, "first_s is 2.0, but must be at most longest_s, which is 1.0"),
        ({"silence_s": 301.0}, "silence_s is 301.0, but must be at most progress_s"),
    ],
)
def test_times_are_in_order(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(POLICY, **change)  # type: ignore[arg-type] # as above


def test_another_verifier_is_tried_at_once_and_makes_no_later_wait_longer() -> None:
    reconnect = Reconnect(POLICY, 1)
    first = Reconnect(POLICY, 1).failed(3.0)
    assert first is not None
    for now in (0.0, 1.0, 2.0):
        assert reconnect.failed(now, at_once=True) == now
    assert reconnect.failed(3.0) == pytest.approx(first)
    assert reconnect.failed(5.1, at_once=True) is None  # patience ends all the same
