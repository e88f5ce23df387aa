"""A device after a time in which it, its verifier or the network stood still: slept, was
stopped, or lost every packet.

Oracle: the text itself, and the same generation without the pause. The world is
``sleeping_world.py``, where the verifier commits the rest of an output meanwhile if it is awake, so
speeds are compared in the generations that follow.
"""

from __future__ import annotations

import pytest

from edgespec.core.device import events as ev
from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.protocol.estimators import MovingAverage
from edgespec.core.verifier.row_price import RowPriceEstimator
from edgespec.core.verifier.server_model import DraftTimes
from tests.core.sleeping_world import Stop, World, token_at
from tests.present import require

SHORT, MINUTES, NIGHT = 1.5, 25.0, 8 * 3600.0
TOKENS = 200
TEXT = [token_at(2 + index) for index in range(TOKENS)]


def run(*stops: Stop) -> tuple[World, list[float]]:
    """Return the world after a generation with ``stops``, and the tokens per second of the next two
    generations."""
    world, speeds = World(), list[float]()
    world.generate(100)
    world.generate(TOKENS, stops)
    assert (type(world.ended), world.output) == (ev.Finish, TEXT)
    for _ in range(2):
        began_s = world.now
        world.generate(TOKENS)
        assert (type(world.ended), world.output) == (ev.Finish, TEXT)
        speeds.append(TOKENS / (world.now - began_s))
    return world, speeds


@pytest.fixture(scope="module")
def usual() -> list[float]:
    """Tokens per second where nothing stands still."""
    speeds = run()[1]
    assert min(speeds) > 1.5 / 0.03  # drafting pays in this world
    return speeds


@pytest.mark.parametrize("seconds", [SHORT, 2.9, MINUTES, NIGHT])
@pytest.mark.parametrize("at_token", [1, 37, 190])
def test_a_device_that_stood_still_drafts_as_before(
    at_token: int, seconds: float, usual: list[float]
) -> None:
    """Its clock has run on meanwhile: one draft step, and one round trip, took all that time. The
    verifier's own speed stays what it is, which says whether a device helps."""
    world, speeds = run(Stop("device", at_token, seconds))
    assert require(world.verifier.own_speed.token_s) < 0.05
    assert all(one > 0.9 * other for one, other in zip(speeds, usual, strict=True))


@pytest.mark.parametrize("part", ["server", "link"])
@pytest.mark.parametrize("seconds", [SHORT, 2.9, MINUTES])
def test_a_verifier_or_a_network_that_stood_still_costs_one_generation_at_most(
    part: str, seconds: float, usual: list[float]
) -> None:
    """Pauses of half a minute and more end the stream (``ReconnectPolicy.silence_s``). A verifier
    whose clock ran on meanwhile takes a device for a slow one, for some hundred tokens."""
    speeds = run(Stop(part, 50, seconds))[1]
    assert speeds[-1] > 0.9 * usual[-1]


def test_a_device_that_slept_often_drafts_as_before(usual: list[float]) -> None:
    stops = [Stop("device", at, NIGHT) for at in range(0, 100, 7)]
    speeds = run(*stops)[1]
    assert speeds[-1] > 0.9 * usual[-1]


@pytest.mark.parametrize("places", [1, 8])
def test_one_endless_step_hardly_changes_what_a_step_takes(places: int) -> None:
    """Steps of 10 ms, or of 10 ms and 1 ms for each further row, and then one of an hour."""
    estimates = DraftEstimates(max_places=places)
    for number in range(100):
        rows = 1 + number % places
        estimates.note_step(1, 0.010 + 0.001 * (rows - 1), rows)
    before = [estimates.position_s(0.03, count) for count in (1, 4, 8)]
    estimates.note_step(1, 3600.0, places)
    after = [estimates.position_s(0.03, count) for count in (1, 4, 8)]
    assert all(one < 6 * other for one, other in zip(after, before, strict=True))


def test_one_endless_pass_hardly_changes_what_a_pass_takes() -> None:
    """Passes of 20 ms and 0.1 ms for each further row, and then one of an hour."""
    price = RowPriceEstimator()
    scheduler_pass(price, rows=1, took_s=0.02)
    for number in range(100):
        rows = 1 + number % 8
        scheduler_pass(price, rows=rows, took_s=0.02 + 0.0001 * rows)
    before = require(price.pass_s), price.row_s
    scheduler_pass(price, rows=1, took_s=3600.0)
    assert require(price.pass_s) < 3 * before[0]
    assert price.row_s < 0.01


def scheduler_pass(price: RowPriceEstimator, rows: int, took_s: float) -> None:
    """Note a pass as ``PassScheduler.finish_pass`` does."""
    took_s = min(took_s, price.longest_pass_s(rows))
    price.note_pass(rows, 0, took_s)


@pytest.mark.parametrize("rows", [64, 512, 4096])
def test_a_long_pass_of_a_prompt_counts_in_full(rows: int) -> None:
    """Each row takes as long as a whole pass of one row, which is the most that rows cost."""
    price = RowPriceEstimator()
    for _ in range(20):
        scheduler_pass(price, rows=1, took_s=0.02)
    assert price.longest_pass_s(rows) >= rows * 0.02


def test_one_endless_step_of_the_server_model_hardly_changes_what_a_step_takes() -> None:
    times = DraftTimes()
    for number in range(50):
        times.note_step(1 + number % 4, 0.002)
    before_s = times.step_s(0.02)
    times.note_step(2, 3600.0)
    assert times.step_s(0.02) < 3 * before_s


def test_a_lasting_change_is_found_in_ten_samples() -> None:
    average = MovingAverage(most_times=8.0)
    for _ in range(50):
        average.add(0.002)
    for _ in range(10):
        average.add(0.2)
    assert 0.1 < average.get(0.0) <= 0.2
