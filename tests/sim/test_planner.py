"""The plan of a link: figures that the modes must have, and what is recommended where."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from edgespec_sim.planning.link_modes import plan_link, pooled
from edgespec_sim.planning.plan_values import (
    AS_GOOD,
    LEAST_GAIN,
    Mode,
    ModeName,
    Plan,
    PlanSettings,
)

SETTINGS = PlanSettings(tokens=150)


@cache
def plan(settings: PlanSettings) -> Plan:
    return plan_link(settings)


def mode(found: Plan, name: ModeName) -> Mode:
    """The fastest of that name."""
    return min((one for one in found.modes if one.name is name), key=lambda one: one.tpot_s)


@pytest.mark.parametrize(
    "settings",
    [SETTINGS, replace(SETTINGS, rtt_ms=2.0), replace(SETTINGS, draft_ms=30.0, acceptance=0.5)],
)
def test_every_mode_keeps_to_its_bounds(settings: PlanSettings) -> None:
    found = plan(settings)
    assert {one.name for one in found.modes} == set(ModeName)
    assert len({one.title for one in found.modes}) == len(found.modes)
    for one in found.modes:
        if one.name is ModeName.LOCAL:
            assert one.bound_s is None
            continue
        assert one.bound_s is not None
        # Ends of a text (``bounds``): a draft length of stop-and-wait, drafts before the start.
        assert one.tpot_s >= 0.97 * one.bound_s, one.title
        assert 0.0 < one.passes <= 1.0 + 1 / settings.tokens
        assert one.up_bits_per_s > 0.0


def test_cloud_streaming_takes_a_pass_a_token_at_any_round_trip() -> None:
    for rtt_ms in (0.0, 50.0, 400.0):
        streaming = mode(plan(replace(SETTINGS, rtt_ms=rtt_ms)), ModeName.STREAMING)
        assert streaming.tpot_s == pytest.approx(0.025)
        assert (streaming.speed_up, streaming.wasted) == (1.0, 0.0)


def test_run_ahead_wins_at_usual_round_trips_and_says_why() -> None:
    found = plan(SETTINGS)
    assert found.best.name is ModeName.RUN_AHEAD
    assert found.best.speed_up > 1.25
    assert found.reason.startswith(f"{found.best.title} is {found.best.speed_up:.2f} times as fast")
    assert mode(found, ModeName.STOP_AND_WAIT).speed_up < 1.0


@pytest.mark.parametrize(
    ("settings", "because"),
    [
        (replace(SETTINGS, draft_ms=30.0), "a draft step (30 ms) takes no less than a pass"),
        (replace(SETTINGS, rtt_ms=2000.0, acceptance=0.3), "the round trip of 2000 ms is beyond"),
        (replace(SETTINGS, acceptance=0.05, draft_ms=24.5), "it would not even without a round"),
        (replace(SETTINGS, rtt_ms=150.0, acceptance=0.4), "is only 1.0"),
    ],
)
def test_where_drafting_does_not_pay_streaming_is_recommended(
    settings: PlanSettings, because: str
) -> None:
    found = plan(settings)
    assert found.best.name is ModeName.STREAMING
    assert found.reason.startswith("Drafting does not pay here: use cloud streaming, because ")
    assert because in found.reason


def test_what_is_recommended_is_the_fastest_or_as_good_and_cheaper() -> None:
    for settings in (SETTINGS, replace(SETTINGS, rtt_ms=1.0, acceptance=0.95)):
        found = plan(settings)
        exact = [one for one in found.modes if one.name is not ModeName.LOCAL]
        fastest = min(exact, key=lambda one: one.tpot_s)
        assert found.best.tpot_s <= AS_GOOD * fastest.tpot_s
        assert round(found.best.passes, 2) <= round(fastest.passes, 2)
        quicker = f"{fastest.title} is at most 2% faster and takes no fewer passes."
        assert (quicker in found.reason) == (fastest is not found.best)


@pytest.mark.slow
def test_stop_and_wait_breaks_even_where_the_plan_says() -> None:
    long = replace(SETTINGS, tokens=800)
    below_s = plan(long).waiting_pays_below_s
    assert below_s is not None
    there = replace(long, rtt_ms=below_s * 1e3)
    assert mode(plan(there), ModeName.STOP_AND_WAIT).speed_up == pytest.approx(1.0, abs=0.03)
    assert plan(replace(SETTINGS, draft_ms=30.0)).waiting_pays_below_s is None


def test_nothing_gains_beyond_the_round_trip_that_the_plan_names() -> None:
    found = plan(replace(SETTINGS, rtt_ms=2000.0, acceptance=0.3))
    below_s = found.drafting_pays_below_s
    assert below_s is not None
    assert below_s < 2.0
    beyond = plan(replace(found.settings, rtt_ms=below_s * 1.05e3))
    assert mode(beyond, ModeName.RUN_AHEAD).speed_up < LEAST_GAIN


def test_the_texts_have_the_acceptance_asked_for() -> None:
    for acceptance in (0.3, 0.6, 0.8, 0.95):
        assert plan(replace(SETTINGS, acceptance=acceptance)).acceptance == pytest.approx(
            acceptance, abs=0.06
        )


def test_short_texts_without_a_miss_are_planned_too() -> None:
    found = plan(replace(SETTINGS, acceptance=0.99, tokens=100, rtt_ms=5.0))
    assert found.best.speed_up > 1.5
    assert found.waiting_pays_below_s is not None


def test_the_link_counts() -> None:
    base = mode(plan(SETTINGS), ModeName.STOP_AND_WAIT).tpot_s
    thin = mode(plan(replace(SETTINGS, up_mbps=0.02)), ModeName.STOP_AND_WAIT).tpot_s
    shaky = mode(plan(replace(SETTINGS, jitter_ms=30.0)), ModeName.STOP_AND_WAIT).tpot_s
    lossy = mode(plan(replace(SETTINGS, loss=0.1)), ModeName.STOP_AND_WAIT).tpot_s
    assert min(thin, shaky, lossy) > 1.1 * base


def test_the_draft_alone_is_shown_and_never_recommended() -> None:
    found = plan(replace(SETTINGS, draft_ms=2.0, local_tpot_ms=1.0))
    local = mode(found, ModeName.LOCAL)
    assert local.tpot_s == 0.001
    assert local.speed_up == pytest.approx(25.0)
    assert found.best.name is not ModeName.LOCAL


def test_equal_settings_give_equal_plans_and_seeds_other_texts() -> None:
    assert plan_link(SETTINGS) == plan(SETTINGS)
    assert plan(replace(SETTINGS, seed=1)).modes != plan(SETTINGS).modes


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("rtt_ms", -1.0, r"rtt_ms is -1.0, but must be in \[0.0, 10000.0\]"),
        ("draft_ms", 0.0, r"draft_ms is 0.0, but must be in \[0.1, 10000.0\]"),
        ("pass_ms", float("nan"), r"pass_ms is nan, but must be in"),
        ("acceptance", 1.0, r"acceptance is 1.0, but must be in \[0.01, 0.99\]"),
        ("loss", 0.6, r"loss is 0.6, but must be in \[0.0, 0.5\]"),
        ("up_mbps", 0.001, r"up_mbps is 0.001, but must be in"),
        ("tokens", 5, r"tokens is 5, but must be in \[100, 10000\]"),
        ("local_tpot_ms", 0.0, r"local_tpot_ms is 0.0, but must be in"),
    ],
)
def test_mistakes_name_the_value_and_the_range(field: str, value: float, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(SETTINGS, **{field: value})  # type: ignore[arg-type] # what is asked for


def test_several_seeds_make_one_plan_with_intervals() -> None:
    """Oracle: the interval of a ratio of means, and one seed's own plan."""
    first = plan(SETTINGS)
    seeds = [plan_link(replace(SETTINGS, seed=seed), first.gamma) for seed in range(1, 4)]
    found = pooled([first, *seeds])
    assert found.seeds == 4
    assert [one.title for one in found.modes] == [one.title for one in first.modes]
    assert pooled([first]) == first
    for index, one in enumerate(found.modes):
        times_s = [each.modes[index].tpot_s for each in (first, *seeds)]
        assert one.tpot_s == pytest.approx(sum(times_s) / 4)
        if one.name in (ModeName.STREAMING, ModeName.LOCAL):
            assert one.speed_up_interval is None
            continue
        assert one.speed_up_interval is not None
        low, high = one.speed_up_interval
        assert low < one.speed_up < high
        assert one.speed_up == pytest.approx(0.025 / one.tpot_s)
    assert found.half_width is not None
    assert f"{found.best.speed_up:.2f} times as fast" in found.reason
