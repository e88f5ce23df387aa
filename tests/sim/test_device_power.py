"""Energy, batteries and heat of devices, and the published profiles.

Oracles: closed forms (steady state, time constant, the integral of V dq), the same laws integrated
in small steps, the joules of all requests and of the time between them, the same world without the
sections; the documentation names every number of a profile with its source.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import edgespec_sim as sim
from edgespec.bench.arms import Arm
from edgespec.config import ConfigError
from edgespec_sim.commands.main import app
from edgespec_sim.report.page import render
from edgespec_sim.report.tables import power_rows
from edgespec_sim.scenario.device_power import (
    FIGURE_UNITS,
    BatterySection,
    DeviceProfile,
    ThermalSection,
    bundled_profiles,
    load_profile,
)
from edgespec_sim.scenario.sections import DeviceSection, load_scenario
from edgespec_sim.world.assembly import World
from edgespec_sim.world.device_power import Battery, DevicePower, apply_profile
from edgespec_sim.world.run import make_token_source
from edgespec_sim.world.site import WorldSetup
from tests.present import require
from tests.sources import ROOT

HERE = Path()
HEAT = ThermalSection(k_per_w=8.0, time_constant_s=200.0, limit_c=45.0, slowdown=2.0)
CELL = BatterySection(capacity_mah=1000.0)
"""One cell of 1 Ah from 4.2 to 3 V: 3600 C x 3.6 V = 12,960 J."""

# --- heat -------------------------------------------------------------------------------------


def test_a_device_reaches_its_steady_state_with_its_time_constant() -> None:
    """Idle at 1 W it begins at 25 + 8 = 33 °C. At 3 W it goes to 49 °C: after one time constant
    all but 1 / e of the difference is gone."""
    power = DevicePower(1.0, 2.0, thermal=replace(HEAT, limit_c=100.0))
    assert power.temperature_c == 33.0
    assert power.begin_step(0.0, 2000.0) == 2000.0
    power.advance(200.0)
    assert power.temperature_c == pytest.approx(49.0 - 16.0 / math.e)
    power.advance(2000.0)
    assert power.temperature_c == pytest.approx(49.0, abs=0.001)
    power.advance(2200.0)
    assert power.temperature_c == pytest.approx(33.0 + 16.0 / math.e, abs=0.001)


STEPS = st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(0.001, 20.0)), max_size=20)


@given(steps=STEPS)
def test_temperature_and_energy_are_the_integrals_of_the_power(
    steps: list[tuple[float, float]],
) -> None:
    """The law is integrated in steps of at most 10 ms, with the power of each moment."""
    power = DevicePower(0.5, 6.0, thermal=HEAT)
    temperature_c, energy_j, now_s, throttles = require(power.temperature_c), 0.0, 0.0, False

    def integrate(seconds: float, watts: float) -> None:
        nonlocal temperature_c, energy_j
        count = max(1, math.ceil(seconds / 0.01))
        for _ in range(count):
            change = (watts * HEAT.k_per_w - (temperature_c - HEAT.ambient_c)) / 200.0
            temperature_c += change * seconds / count
            energy_j += watts * seconds / count

    for pause_s, step_s in steps:
        integrate(pause_s, 0.5)
        now_s += pause_s
        if abs(temperature_c - HEAT.limit_c) < 0.05 or abs(temperature_c - 42.0) < 0.05:
            return  # Too near to a threshold for the coarser of the two integrals.
        throttles = temperature_c >= HEAT.limit_c or (throttles and temperature_c > 42.0)
        took_s = power.begin_step(now_s, step_s)
        assert took_s == (2.0 * step_s if throttles else step_s)
        integrate(took_s, 3.5 if throttles else 6.5)
        now_s += took_s
    power.advance(now_s)
    assert power.drawn_j == pytest.approx(energy_j, rel=1e-9)
    assert power.temperature_c == pytest.approx(temperature_c, abs=0.02)


def test_throttling_has_hysteresis() -> None:
    """At 6.5 W the device would reach 77 °C. It throttles from 45 °C on, and runs freely again
    from 42 °C on, not before."""
    power = DevicePower(0.5, 6.0, thermal=HEAT)
    now_s, states = 0.0, []
    for _ in range(4000):
        now_s += power.begin_step(now_s, 0.1)
        states.append((require(power.temperature_c), power.is_throttled))
    first = next(index for index, (_, throttled) in enumerate(states) if throttled)
    assert states[first][0] >= 45.0 > states[first - 1][0]
    # In steady state at 3.5 W it would be at 53 °C, so it never cools down while it drafts.
    assert all(throttled for _, throttled in states[first:])
    power.advance(now_s + 30.0)
    assert 42.0 < require(power.temperature_c) < 45.0 or require(power.temperature_c) > 45.0
    now_s += 30.0
    while require(power.temperature_c) > 42.0:
        power.advance(now_s := now_s + 1.0)
    assert power.begin_step(now_s, 0.1) == 0.1


def test_a_throttled_step_takes_as_much_energy_unless_a_power_is_given() -> None:
    for throttled_w, expected_j in ((None, 6.0), (5.0, 10.0)):
        thermal = replace(HEAT, start_c=60.0, throttled_w=throttled_w)
        power = DevicePower(0.0, 6.0, thermal=thermal)
        assert power.begin_step(0.0, 1.0) == 2.0
        power.advance(2.0)
        assert power.drawn_j == pytest.approx(expected_j)
        assert power.throttled_s == 2.0


def test_a_step_that_outlives_its_request_is_accounted_whole() -> None:
    """The next request may begin a step while the last one of the request before still runs."""
    power = DevicePower(1.0, 4.0)
    power.begin_step(0.0, 2.0)
    power.begin_step(1.0, 2.0)
    power.advance(10.0)
    assert power.drawn_j == pytest.approx(10.0 * 1.0 + 4.0 * 4.0)


# --- batteries --------------------------------------------------------------------------------


@given(
    full_v=st.floats(3.5, 20.0),
    empty_v=st.floats(1.0, 3.5),
    start=st.floats(0.1, 1.0),
    share=st.floats(0.0, 0.99),
)
def test_the_charge_falls_by_the_integral_of_power(
    full_v: float, empty_v: float, start: float, share: float
) -> None:
    """A constant power is integrated as current: dq/dt = P / V(q)."""
    section = BatterySection(
        capacity_mah=1000.0, full_v=full_v, empty_v=empty_v, cutoff_v=0.0, start=start
    )
    battery = Battery(section)
    charge = 3600.0
    used = (1.0 - start) * charge
    available_j = sum(
        (full_v - (full_v - empty_v) * (used + (charge - used) * (index + 0.5) / 2000) / charge)
        for index in range(2000)
    ) * ((charge - used) / 2000)
    taken_j, steps = share * available_j, 4000
    for _ in range(steps):
        # The midpoint rule: the voltage in the middle of the step.
        rough = taken_j / steps / (full_v - (full_v - empty_v) * used / charge)
        middle_v = full_v - (full_v - empty_v) * (used + rough / 2.0) / charge
        used += taken_j / steps / middle_v
    assert battery.share(taken_j) == pytest.approx(1.0 - used / charge, abs=1e-5)
    assert battery.volts(taken_j) == pytest.approx(
        full_v - (full_v - empty_v) * used / charge, abs=1e-4
    )


def test_a_battery_is_empty_at_its_cut_off() -> None:
    """From 4.2 to 3.6 V are half of the charge, at a mean of 3.9 V: 1800 C x 3.9 V = 7,020 J."""
    assert CELL.full_j == pytest.approx(12_960.0)
    battery = Battery(replace(CELL, cutoff_v=3.6))
    assert not battery.is_empty(7019.0)
    assert battery.is_empty(7021.0)
    assert battery.share(7020.0) == pytest.approx(0.5)
    assert Battery(CELL).share(12_960.0) == 0.0
    assert Battery(CELL).is_empty(13_000.0)
    flat = Battery(replace(CELL, full_v=3.7, empty_v=3.7))
    assert flat.share(0.25 * 3600 * 3.7) == pytest.approx(0.75)


# --- in a world -------------------------------------------------------------------------------

SHORT: dict[str, Any] = {
    "seeds": 1,
    "processes": 1,
    "duration_s": 20,
    "arms": ["target-only", "edgespec"],
    "devices.laptop.workload.output_tokens": 30,
    "devices.laptop.workload.think_s": 1,
    "devices.laptop.draft_w": 5,
    "devices.laptop.radio_power": "wifi",
}
POWERED: dict[str, Any] = {
    "devices.laptop.idle_w": 2,
    "devices.laptop.battery": {"capacity_mah": 1000},
}


def play(**more: Any) -> sim.RunResult:
    return sim.run("single-device", **{**SHORT, **more})


def test_a_battery_and_a_cool_body_change_no_time() -> None:
    """They are measured, and what was measured before stays as it was, bit for bit."""
    cool = {"k_per_w": 1.0, "time_constant_s": 100.0, "limit_c": 90.0}
    plain, powered = play(), play(**POWERED, devices__laptop__thermal=cool)
    for one, other in zip(plain.requests, powered.requests, strict=True):
        assert other.row.throttled_s == 0.0
        assert 0.0 < require(other.row.battery) < 1.0
        same = replace(other.row, battery=None, temperature_c=None, throttled_s=None)
        # Reading the radio's meter more often rounds its sum differently.
        assert same.device_j == pytest.approx(require(one.row.device_j), rel=1e-9)
        assert replace(same, device_j=None) == replace(one.row, device_j=None)


def test_the_battery_loses_what_the_device_took() -> None:
    """The energy is that of idling all the time, and of all requests and pauses: drafting and
    radio, as the requests were charged."""
    scenario = load_scenario("single-device", {**drop_run(SHORT), **POWERED})
    setup = WorldSetup(make_token_source(scenario, 1, HERE), HERE)
    world = World(scenario, Arm.EDGESPEC, "1", setup)
    outcome = world.run()
    (user,) = world.users
    requests_j = sum(one.energy_j for one in outcome.meters.records)
    # The radio idles until the first request, which is charged to none.
    first_s = outcome.meters.records[0].started_s
    expected_j = 2.0 * 20.0 + requests_j + 0.02 * first_s
    section = require(scenario.devices["laptop"].battery)
    taken_j = user._taken_j(require(user.power))
    assert taken_j == pytest.approx(expected_j, rel=0.01)
    assert user.battery_share() == pytest.approx(Battery(section).share(taken_j))
    course = require(outcome.meters.power_course())
    charges = [require(one) for one in course.battery]
    assert charges[0] == 1.0
    assert charges == sorted(charges, reverse=True)


def drop_run(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are keys of the scenario."""
    return {key: value for key, value in settings.items() if key not in ("seeds", "processes")}


def test_an_empty_battery_ends_the_work() -> None:
    """1 mAh of 3.6 V are 13 J: idle at 2 W they last for some six seconds."""
    result = play(**{**POWERED, "devices.laptop.battery": {"capacity_mah": 1}})
    for arm in ("target-only", "edgespec"):
        rows = [one.row for one in result.requests if one.arm == arm]
        assert rows[-1].failed == "the battery is empty"
        assert 3.0 < rows[-1].started_s < 9.0
        assert all(not one.failed for one in rows[:-1])
        assert any(one.tokens for one in rows[:-1])


@pytest.mark.parametrize("at", ["own", "free"])
def test_a_dead_device_takes_no_arrival(at: str) -> None:
    result = play(
        **{
            **POWERED,
            "devices.laptop.count": 2,
            "devices.laptop.battery": {"capacity_mah": 1},
            "arrivals": {"kind": "poisson", "rate": 2.0, "at": at},
            "drain_s": 2,
            "arms": ["edgespec"],
        }
    )
    (arm,) = result.summary.arms
    assert arm.all.failed == (2 if at == "free" else arm.all.failed)
    assert arm.all.failed >= 2
    late = [one.row for one in result.requests if one.row.started_s > 12.0]
    assert late
    assert not any(one.tokens for one in late)


def test_a_hot_device_drafts_slower_and_says_so() -> None:
    hot = {
        "k_per_w": 10.0,
        "time_constant_s": 5.0,
        "limit_c": 55.0,
        "slowdown": 4.0,
    }
    more: dict[str, Any] = {"duration_s": 40, "devices.laptop.idle_w": 1}
    cool, hot_run = play(**more), play(**more, devices__laptop__thermal=hot)
    ours = hot_run.arm("edgespec")
    assert 0.05 < require(ours.all.throttled_share) < 1.0
    assert require(hot_run.arm("target-only").all.throttled_share) == 0.0
    assert ours.all.mismatches == 0
    assert require(ours.all.tpot_s).mean > require(cool.arm("edgespec").all.tpot_s).mean
    assert max(require(one.row.temperature_c) for one in hot_run.requests) > 52.0
    rows = {row[0]: row for row in power_rows(hot_run.summary)}
    assert rows["target-only"][5:] == ("0 %", "0 %")
    page = render(hot_run.summary, None, {})
    assert "Batteries and heat" in page
    assert "steps take 4 times as long from 55 °C until it has cooled down to 52 °C" in page
    assert "Batteries and heat" not in render(cool.summary, None, {})


def test_a_course_of_slowdowns_and_heat_apply_both() -> None:
    """The hand-drawn course stays: other programs slow a device down, whatever its heat."""
    course = {"course": [{"at_s": 0, "slowdown": 2}]}
    always = {"k_per_w": 1.0, "time_constant_s": 1e6, "limit_c": 30.0, "start_c": 80.0}
    more: dict[str, Any] = {"devices.laptop.idle_w": 1, "arms": ["vanilla"], "gamma": 2}
    both = play(**more, devices__laptop__thermal=always, devices__laptop__conditions=course)
    alone = play(**more, devices__laptop__conditions={"course": [{"at_s": 0, "slowdown": 4}]})
    for one, other in zip(both.requests, alone.requests, strict=True):
        assert one.row.tpot_s == other.row.tpot_s


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"battery": {"capacity_mah": 10}}, ValueError, r"laptop\.battery is given, .* idle_w"),
        (
            {"thermal": {"k_per_w": 1, "time_constant_s": 1, "limit_c": 60}, "idle_w": 1}
            | {"draft_w": 0},
            ValueError,
            r"laptop\.thermal is given, .* draft_w",
        ),
        ({"battery": {}}, ConfigError, "capacity_mah"),
        (
            {"battery": {"capacity_mah": 1, "cutoff_v": 5}},
            ConfigError,
            "cutoff_v is 5, but must be less than full_v, 4.2",
        ),
        (
            {"battery": {"capacity_mah": 1, "empty_v": 5}},
            ConfigError,
            "empty_v is 5, but must not exceed full_v, 4.2",
        ),
        (
            {"thermal": {"k_per_w": 1, "time_constant_s": 1, "limit_c": 20}},
            ConfigError,
            "limit_c is 20, but must be above ambient_c, 25",
        ),
        (
            {"thermal": {"k_per_w": 1, "time_constant_s": 1, "limit_c": 40, "resume_c": 41}},
            ConfigError,
            "resume_c is 41, but must be below limit_c, 40",
        ),
        ({"profile": "toaster"}, ConfigError, "no device profile 'toaster': not a YAML file, nor"),
        ({"profile": "toaster.yaml"}, ConfigError, r"toaster\.yaml: No such file"),
    ],
    ids=[
        "idle",
        "draft",
        "capacity",
        "cutoff",
        "empty",
        "limit",
        "resume",
        "profile",
        "profile file",
    ],
)
def test_a_wrong_battery_body_or_profile_is_named(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        play(**{f"devices.laptop.{key}": value for key, value in given.items()})


# --- profiles ---------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "energy.md"


@pytest.mark.parametrize("name", sorted(bundled_profiles()))
def test_the_page_has_every_number_of_a_profile_with_its_source(name: str) -> None:
    profile, page = load_profile(name, HERE), PAGE.read_text(encoding="utf-8")
    assert f"## {profile.name}" in page
    assert f"`{name}`" in page
    for key, figure in profile.figures:
        row = (
            f"| `{key}` | {figure.value:g} {FIGURE_UNITS[key]} | {figure.kind.value} |"
            f" {figure.source} | {figure.date} |"
        )
        assert row in page
    for text in profile.missing:
        assert text in page


def test_a_profile_lists_every_number_that_it_may_have() -> None:
    texts = {"name", "about", "missing"}
    assert {field.name for field in fields(DeviceProfile)} == set(FIGURE_UNITS) | texts


@pytest.mark.parametrize("name", sorted(bundled_profiles()))
def test_a_profile_can_be_played(name: str) -> None:
    result = play(
        devices__laptop__profile=name, devices__laptop__draft_w=0, duration_s=5, arms=["edgespec"]
    )
    profile = load_profile(name, HERE)
    assert any(
        note.startswith(f"Profile of laptop: {profile.name}") for note in result.summary.notes
    )
    has_battery = profile.battery is not None
    assert all((one.row.battery is not None) == has_battery for one in result.requests)
    assert result.summary.arms[0].all.energy_j_per_token is not None


def test_keys_of_the_scenario_win_over_a_profile() -> None:
    section = DeviceSection(profile="galaxy-s25-ultra", draft_w=3.0, battery=CELL)
    found = apply_profile("phone", section, HERE)
    assert found.draft_w == 3.0
    assert found.battery == CELL
    assert found.idle_w == 0.44
    assert require(found.thermal).limit_c == 42.0
    assert found.profile == ""


def test_a_profile_of_your_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    figure = "{value: 4, kind: measured, source: my meter, date: 2026-11}"
    path.write_text(f"name: mine\nabout: a board\ndraft_w: {figure}\n", encoding="utf-8")
    found = apply_profile("board", DeviceSection(profile="mine.yaml"), tmp_path)
    assert found.draft_w == 4.0
    assert found.idle_w is None
    path.write_text("name: mine\nabout: a board\ndraft_w: {value: 4}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="draft_w"):
        apply_profile("board", DeviceSection(profile="mine.yaml"), tmp_path)


def test_the_list_names_the_profiles() -> None:
    done = CliRunner().invoke(app, ["list"])
    assert done.exit_code == 0, done.output
    for name in bundled_profiles():
        assert name in done.output
