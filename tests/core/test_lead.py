"""The lead that a device needs, its chance, and the speed with drafts.

Oracles: arithmetic by hand; a verifier and a device played token by token with coins; the speeds
that were measured with a real pair (docs/measurements/lead.md).
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest

from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.lead import (
    DraftingCase,
    describe_lead,
    find_case,
    find_lead,
    list_changes,
)
from edgespec.core.protocol.estimators import MovingAverage


def make_case(token_ms: float, step_ms: float, rtt_ms: float, rate: float) -> DraftingCase:
    return DraftingCase(token_ms / 1e3, step_ms / 1e3, rtt_ms / 1e3, rate)


@pytest.mark.parametrize(
    ("case", "tokens", "chance"),
    [
        (make_case(25, 8, 20, 0.87), 20 / 17, 0.85),
        (make_case(25, 8, 200, 0.87), 200 / 17, 0.19),
        (make_case(11.2, 8, 50, 0.87), 50 / 3.2, 0.11),
        (make_case(6.8, 2.5, 20, 0.87), 20 / 4.3, 0.52),
        (make_case(7, 0, 200, 0.98), 200 / 7, 0.56),  # a text that the device has
        (make_case(6.8, 8, 2, 0.99), math.inf, 0.0),
        (make_case(8, 8, 0, 0.99), math.inf, 0.0),
    ],
)
def test_the_lead_is_the_round_trip_over_what_a_token_gains(
    case: DraftingCase, tokens: float, chance: float
) -> None:
    lead = find_lead(case)
    assert lead.tokens == pytest.approx(tokens)
    assert lead.chance == pytest.approx(chance, abs=0.006)
    assert (lead.speedup == 1.0) == (tokens == math.inf)


def test_tokens_of_one_step_share_its_time() -> None:
    case = replace(make_case(25, 10, 50, 0.8), tokens_per_step=4)
    assert find_lead(case).tokens == pytest.approx(50 / 22.5)


def play_coins(case: DraftingCase, tokens: int) -> float:
    """Return the speed with drafts of a device, in times of that without, by playing each run of
    right tokens and the wrong one behind it, pass by pass."""
    dice, passes, count, alone = random.Random(1), 0, 0, 0
    pass_s = case.pass_s or case.token_s
    server_tokens = round(pass_s / case.token_s)
    while count < tokens:
        run = 0
        while dice.random() < case.acceptance:
            run += 1
        count += run + 1
        committed, mine = 0, 0
        while committed < run + 1:
            drafted = case.tokens_per_step * int((mine * pass_s - case.rtt_s) / case.step_s + 1e-9)
            committed = max(committed, min(drafted, run)) + server_tokens
            mine += 1
        passes, alone = passes + mine, alone + math.ceil((run + 1) / server_tokens)
    return alone / passes


@pytest.mark.parametrize(
    "case",
    [
        make_case(25, 8, 2, 0.8),
        make_case(25, 8, 50, 0.87),
        make_case(25, 2.5, 200, 0.95),
        make_case(7, 4.4, 8, 0.9),
        replace(make_case(25, 12, 20, 0.8), tokens_per_step=4),
        replace(make_case(10, 4, 20, 0.9), pass_s=0.02),
    ],
    ids=str,
)
def test_the_speed_is_that_of_played_coins(case: DraftingCase) -> None:
    assert find_lead(case).speedup == pytest.approx(play_coins(case, 200_000), rel=0.02)


MEASURED = {
    (8.0, 0.782): {2: 1.76, 20: 1.51, 50: 1.31, 100: 1.15, 200: 1.06},
    (12.0, 0.977): {2: 1.94, 20: 1.87, 50: 1.78, 100: 1.66, 200: 1.47},
}
"""Speeds of SmolLM2-135M with its own export in 4 and 8 bits, by round trip, for passes of 25 ms;
the keys are a step's milliseconds and the share of right first candidates."""


@pytest.mark.parametrize(("draft", "speeds"), MEASURED.items())
def test_the_speed_is_that_of_a_real_pair(
    draft: tuple[float, float], speeds: dict[float, float]
) -> None:
    step_ms, acceptance = draft
    for rtt_ms, speed in speeds.items():
        found = find_lead(make_case(25, step_ms, rtt_ms, acceptance)).speedup
        assert found == pytest.approx(speed, rel=0.05), rtt_ms


def test_the_first_change_brings_most() -> None:
    far = list_changes(make_case(25, 2, 400, 0.8))
    assert far[0].name == "a round trip of 80 ms instead of 400 ms"
    slow = list_changes(make_case(10, 9, 1, 0.8))
    assert slow[0].name == "draft steps of 4.5 ms instead of 9 ms"
    assert any(one.name == "a draft of 4 tokens a step" for one in slow)
    assert [one.lead.speedup for one in slow] == sorted(
        (one.lead.speedup for one in slow), reverse=True
    )
    parallel = list_changes(replace(make_case(10, 9, 1, 0.8), tokens_per_step=4))
    assert not any("tokens a step" in one.name for one in parallel)


@pytest.mark.parametrize(
    ("case", "answer"),
    [
        (make_case(25, 8, 20, 0.87), r"^Yes: .* 1\.2 tokens ahead .* chance of that is 0\.85"),
        (make_case(11, 8, 20, 0.87), r"^A little: .* 6\.7 tokens ahead"),
        (make_case(3, 2.5, 20, 0.87), r"^Hardly: .* 40\.0 tokens ahead .* 1\.00 times"),
        (make_case(6.8, 8, 20, 0.87), r"^No: .* in 8 ms .* in 6\.8 ms .* never ahead"),
        (
            make_case(6.8, 8, 20, 0.87),
            r"With draft steps of 4 ms instead of 8 ms the chance would be 0\.",
        ),
        (make_case(6.8, 80, 900, 0.1), "Neither a nearer server nor a quicker or better draft"),
        (make_case(25, 8, 50, 0.87), r"2\.0 right tokens in a row are enough for it\.$"),
    ],
)
def test_the_answer_is_in_words(case: DraftingCase, answer: str) -> None:
    assert re.search(answer, describe_lead(case)), describe_lead(case)


def test_a_case_is_known_once_everything_was_timed() -> None:
    """The verifier's time a token is that of many commits: 0.04 s and 0.02 s for 3 and 1 tokens."""
    estimates = DraftEstimates()
    for average, value in (
        (estimates.pass_s, 0.025),
        (estimates.step_s, 0.008),
        (estimates.rtt_s, 0.05),
    ):
        assert find_case(estimates) is None
        average.add(value)
    assert find_case(estimates) is None
    busy = replace(estimates)
    busy.commit_s, busy.server_tokens = MovingAverage(), MovingAverage()
    busy.commit_s.add(0.03)
    busy.server_tokens.add(2.0)
    case = find_case(busy)
    assert case is not None
    assert case.token_s == pytest.approx(0.015), "every pass had nodes of the device"
    for _ in range(2):
        assert find_case(estimates) is None
        estimates.own_speed.add(0.04, 3)
        estimates.own_speed.add(0.02, 1)
    for _ in range(200):
        estimates.own_speed.add(0.04, 3)
        estimates.own_speed.add(0.02, 1)
    case = find_case(estimates)
    assert case is not None
    assert case.token_s == pytest.approx(0.015, rel=0.01)
    assert (case.pass_s, case.step_s, case.rtt_s) == (0.025, 0.008, 0.05)
