"""Useless and slow drafters. Oracles: what a guess may be, and a clock in the test's hands."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgespec.core.ports import (
    Cancelled,
    Candidate,
    ModelInfo,
    StepCancelledError,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.drafters.paced import PacedDrafter
from edgespec.device.drafters.toy import (
    AdversarialDrafter,
    RandomDrafter,
    ToyDrafter,
    random_ids,
    toy_info,
)

MODEL = ToyModel(vocabulary_size=20)


def test_random_guesses_are_right_as_often_as_chance() -> None:
    law, guesser = ToyDrafter(MODEL), RandomDrafter(toy_info(MODEL))
    params = SamplingParams(temperature=1.0, seed=0)
    law.begin(1, params)
    guesser.begin(1, params)
    feed, hits, length = [1], 0, 2000
    for position in range(length):
        (right,) = law.step(position, feed, 1)
        (guess,) = guesser.step(position, feed, 1)
        hits += guess.token == right.token
        feed = [right.token]
    assert hits / length == pytest.approx(1 / 20, abs=0.02)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_adversary_never_guesses_what_its_inner_drafter_would(width: int) -> None:
    law, adversary = ToyDrafter(MODEL), AdversarialDrafter(ToyDrafter(MODEL))
    for drafter in (law, adversary):
        drafter.begin(1, SamplingParams())
    feed = [1]
    for position in range(100):
        right = law.step(position, feed, width)
        wrong = adversary.step(position, feed, width)
        assert len(wrong) == width
        assert not {c.token for c in right} & {c.token for c in wrong}
        feed = [right[0].token]


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_random_ids_are_every_id_once(size: int) -> None:
    for position in range(5):
        assert sorted(random_ids(3, position, size)) == list(range(size))
    assert next(random_ids(3, 1, 1 << 20)) != next(random_ids(3, 2, 1 << 20))


class ManualTime:
    """A clock that only sleeping and the slow inner drafter move."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.slept_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def pause(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.now_s += duration_s


class SlowDrafter:
    """A drafter whose step takes a given time on a ``ManualTime``."""

    def __init__(self, time: ManualTime, step_s: float) -> None:
        self.info: ModelInfo = toy_info(MODEL)
        self._time = time
        self._step_s = step_s

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None: ...

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        self._time.now_s += self._step_s
        return (Candidate(0, 0.0),)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("own_s", "feed_length", "expected_s"),
    [(0.004, 1, 0.010), (0.004, 11, 0.030), (0.050, 1, 0.050), (0.010, 1, 0.010)],
)
def test_a_paced_step_takes_its_time_in_total(
    own_s: float, feed_length: int, expected_s: float
) -> None:
    time = ManualTime()
    paced = PacedDrafter(SlowDrafter(time, own_s), 10.0, 2.0, sleep=time.pause, clock=time.clock)
    assert paced.emulated
    assert paced.step(0, [1] * feed_length, 1) == (Candidate(0, 0.0),)
    assert time.now_s - 5.0 == pytest.approx(expected_s)
    assert all(duration > 0 for duration in time.slept_s)


def test_a_paced_step_that_nobody_wants_any_more_does_not_sleep_to_its_end() -> None:
    time = ManualTime()
    paced = PacedDrafter(SlowDrafter(time, 0.0), 60_000.0, sleep=time.pause, clock=time.clock)
    with pytest.raises(StepCancelledError):
        paced.step(0, [1], 1, lambda: time.now_s > 6.0)
    assert time.now_s < 6.1


@pytest.mark.parametrize("step_ms", [-1.0, 1e9, float("nan")])
def test_an_absurd_pace_is_refused(step_ms: float) -> None:
    with pytest.raises(ValueError, match="step_ms"):
        PacedDrafter(ToyDrafter(MODEL), step_ms)
