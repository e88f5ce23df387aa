"""A verifier's GPU that a radio access network shares.

Oracles: the free share integrated in small steps; 1 / (1 - share) for a constant one; the same
world without the section; arithmetic of days and bursts by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgespec_sim as sim
from edgespec.config import ConfigError
from edgespec_sim.links.network_trace import TraceError
from edgespec_sim.report.page import render
from edgespec_sim.report.tables import ran_rows
from edgespec_sim.scenario.ran import MAX_SHARE, RanCapacity, RanSection
from tests.present import require

HERE = Path()
DAY = tuple(0.1 + 0.03 * (hour % 12) for hour in range(24))


def draw(section: RanSection, until_s: float = 100.0, seed: str = "1") -> RanCapacity:
    return RanCapacity.draw(section, until_s, seed, HERE)


def integrate(capacity: RanCapacity, start_s: float, end_s: float, steps: int = 20_000) -> float:
    """Return the free seconds of an interval, by the midpoint rule."""
    step_s = (end_s - start_s) / steps
    return step_s * sum(
        capacity.free_share(start_s + (index + 0.5) * step_s) for index in range(steps)
    )


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
def test_a_constant_share_stretches_every_pass(share: float) -> None:
    capacity = draw(RanSection(shares=(share,)))
    assert capacity.finish_s(3.0, 0.02) == pytest.approx(3.0 + 0.02 / (1.0 - share))


def test_a_day_is_interpolated_and_repeats() -> None:
    """With a day in 24 seconds an hour is a second. Steps are five minutes of the day."""
    capacity = draw(RanSection(shares=DAY, compress=3600.0))
    for now_s in (0.0, 3.5, 11.99, 23.5, 24.0 + 3.5, 240.0 + 11.99):
        hour = now_s % 24.0
        low, part = int(hour), hour - int(hour)
        expected = (1.0 - part) * DAY[low] + part * DAY[(low + 1) % 24]
        assert capacity.free_share(now_s) == pytest.approx(1.0 - expected, abs=0.03)
    later = draw(RanSection(shares=DAY, compress=3600.0, starts_at_h=6.0))
    assert later.free_share(1.03) == capacity.free_share(7.03)


COURSES = [
    RanSection(shares=DAY, compress=3600.0),
    RanSection(shares=(0.3,), bursts_per_s=5.0, burst_ms=80.0, burst_share=0.4),
    RanSection(shares=DAY, compress=7200.0, bursts_per_s=1.0, burst_ms=500.0, burst_share=0.6),
]


@pytest.mark.parametrize("section", COURSES, ids=["day", "bursts", "both"])
@given(start_s=st.floats(0.0, 60.0), work_s=st.floats(0.001, 3.0))
def test_work_ends_when_the_free_share_adds_up_to_it(
    section: RanSection, start_s: float, work_s: float
) -> None:
    capacity = draw(section)
    end_s = capacity.finish_s(start_s, work_s)
    assert end_s >= start_s + work_s
    assert integrate(capacity, start_s, end_s, 2000) == pytest.approx(work_s, rel=0.01, abs=1e-3)


def test_bursts_come_as_often_and_last_as_long_as_stated() -> None:
    """Bursts of 50 ms, two a second, cover 1 - exp(-0.1) of the time (M/M/infinity)."""
    section = RanSection(shares=(0.1,), bursts_per_s=2.0, burst_ms=50.0, burst_share=0.5)
    capacity = draw(section, until_s=2000.0)
    covered = 1.0 - 2.718281828**-0.1
    free = integrate(capacity, 0.0, 2000.0, 400_000) / 2000.0
    assert free == pytest.approx(0.9 - 0.5 * covered, abs=0.004)
    assert draw(section, 2000.0).finish_s(1.0, 5.0) == capacity.finish_s(1.0, 5.0)
    assert draw(section, 2000.0, "2").finish_s(1.0, 5.0) != capacity.finish_s(1.0, 5.0)


def test_network_and_burst_leave_a_rest() -> None:
    section = RanSection(shares=(0.9,), bursts_per_s=100.0, burst_ms=1000.0, burst_share=0.9)
    assert draw(section).free_share(50.0) == pytest.approx(1.0 - MAX_SHARE)


# --- a file -----------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_file(text: str) -> Path:
        path = tmp_path / "ran.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def test_a_file_is_played_again_and_again(write: Callable[[str], Path]) -> None:
    """The clock of the file begins anywhere, and its last row lasts as long as the one before."""
    path = write("time_s,share\n100,0.5\n101,0\n103,0.75\n")
    capacity = draw(RanSection(file=str(path)))
    assert [capacity.free_share(now_s) for now_s in (0.5, 2.5, 4.9, 5.5)] == [0.5, 1.0, 0.25, 0.5]
    assert capacity.finish_s(0.0, 1.5) == pytest.approx(2.0)
    assert capacity.finish_s(4.0, 0.75) == pytest.approx(4.0 + 1.0 + 1.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("share\n0.5\n", ":1: the header is 'share', but must have time_s and share"),
        ("time_s,share\n0,0.5\n1,high\n", ":3: share is 'high', but must be a number"),
        ("time_s,share\n0,0.5\n1,1.0\n", r":3: share is '1.0', but must be in \[0, 0.95\]"),
        ("time_s,share\n0,0.5\nnan,0.1\n", ":3: time_s is 'nan', but must be finite"),
        ("time_s,share\n1,0.5\n1,0.1\n", ":3: time_s is 1, but must increase row by row"),
        ("time_s,share\n1,0.5\n", "has 1 rows, but a course needs at least 2"),
        ("time_s,share\n1\n2,0.1\n", ":2: share is None"),
    ],
    ids=["header", "word", "all", "nan", "order", "short", "cell"],
)
def test_a_wrong_file_is_refused_by_line(
    text: str, problem: str, write: Callable[[str], Path]
) -> None:
    with pytest.raises(TraceError, match=problem):
        draw(RanSection(file=str(write(text))))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(TraceError, match=r"nowhere\.csv: cannot be read"):
        draw(RanSection(file="nowhere.csv"))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "exactly one of shares and file, but names none of them"),
        ({"shares": [0.1], "file": "a.csv"}, "but names both"),
        ({"shares": [0.1, 0.2]}, "shares has 2 numbers, but must have 1 or 24"),
        ({"shares": [1.0]}, r"shares is 1.0, but must be in \[0.0, 0.95\]"),
        ({"shares": [0.1], "bursts_per_s": 2}, "bursts_per_s is 2 and burst_share 0"),
    ],
    ids=["none", "both", "two", "all", "half"],
)
def test_a_wrong_course_is_refused_by_name(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        play(verifiers__server__ran=given)


def test_too_many_bursts_are_refused() -> None:
    section = RanSection(shares=(0.1,), bursts_per_s=1000.0, burst_share=0.1)
    with pytest.raises(ValueError, match="about 2000001 changes in 1000 s, but at most 1000000"):
        draw(section, until_s=1000.0)


# --- in a world -------------------------------------------------------------------------------

SHORT: dict[str, Any] = {
    "seeds": 1,
    "processes": 1,
    "duration_s": 8,
    "arms": ["target-only", "edgespec"],
    "devices.laptop.workload.output_tokens": 30,
}


def play(**more: Any) -> sim.RunResult:
    return sim.run("single-device", **{**SHORT, **more})


def test_a_network_that_takes_nothing_changes_nothing() -> None:
    plain, shared = play(), play(verifiers__server__ran={"shares": [0.0]})
    assert [one.row for one in shared.requests] == [one.row for one in plain.requests]
    assert ran_rows(plain.summary) == []
    assert require(shared.summary.arms[0].verifiers[0].ran_s) == pytest.approx(0.0, abs=1e-9)


def test_half_a_gpu_takes_twice_as_long_and_the_same_energy() -> None:
    """Plain streaming takes a pass for each token; what is left over is the link's jitter. The
    joules of passes pay for the work alone, since the network pays for its own."""
    more: dict[str, Any] = {"verifiers.server.gpu_power": "h200", "arms": ["target-only"]}
    (plain,), (shared,) = (
        result.summary.arms
        for result in (play(**more), play(verifiers__server__ran={"shares": [0.5]}, **more))
    )
    factor = require(shared.all.tpot_s).mean / require(plain.all.tpot_s).mean
    assert factor == pytest.approx(2.0, rel=2e-3)
    assert shared.all.mismatches == 0
    assert shared.all.verifier_j_per_token == pytest.approx(
        require(plain.all.verifier_j_per_token), rel=2e-2
    )
    (verifier,) = shared.verifiers
    assert require(verifier.ran_s) == pytest.approx(verifier.busy_s / 2.0)


def test_pages_show_what_the_network_took() -> None:
    result = play(verifiers__server__ran={"shares": [0.4]})
    page = render(result.summary, None, {})
    assert "RAN, of busy" in page
    assert "GPU of server: a radio access network takes 40% of it all day" in page
    assert ran_rows(result.summary)[0][2] == "40 %"


def test_a_loaded_cell_is_left_for_an_idle_one() -> None:
    """Devices choose a verifier by what a round takes now."""
    result = sim.run(
        "mec",
        seeds=1,
        processes=1,
        duration_s=6.0,
        arms=["edgespec"],
        verifiers__fast__ran={"shares": [0.9]},
    )
    plain = sim.run("mec", seeds=1, processes=1, duration_s=6.0, arms=["edgespec"])

    def served_by_fast(of: sim.RunResult) -> int:
        return sum(one.row.verifier == "fast" for one in of.requests)

    assert served_by_fast(result) < served_by_fast(plain) / 2


class HalfInTheSecondHalf:
    """An own course: half of the machine is taken from 4 s on."""

    def free_share(self, now_s: float) -> float:
        return 1.0 if now_s < 4.0 else 0.5

    def finish_s(self, start_s: float, work_s: float) -> float:
        before_s = max(0.0, min(work_s, 4.0 - start_s))
        return start_s + before_s + 2.0 * (work_s - before_s)


def test_an_own_course_is_used() -> None:
    result = play(
        parts=sim.Parts(capacities={"server": HalfInTheSecondHalf()}), arms=["target-only"]
    )
    early = [one.row for one in result.requests if one.row.started_s < 2.5]
    late = [one.row for one in result.requests if one.row.started_s > 4.0]
    for rows, pass_s in ((early, 0.025), (late, 0.05)):
        known = [row.tpot_s for row in rows if row.tpot_s is not None]
        assert known
        assert known == pytest.approx([pass_s] * len(known), rel=0.01)
    with pytest.raises(ValueError, match=r"parts\.capacities has 'gpu'"):
        play(parts=sim.Parts(capacities={"gpu": HalfInTheSecondHalf()}))
    with pytest.raises(ValueError, match=r"parts\.capacities has server, but .* has ran"):
        play(
            parts=sim.Parts(capacities={"server": HalfInTheSecondHalf()}),
            verifiers__server__ran={"shares": [0.1]},
        )


def test_the_bursts_of_an_arm_do_not_depend_on_other_arms() -> None:
    once, again = (
        play(
            verifiers__server__ran={
                "shares": [0.2],
                "bursts_per_s": 1,
                "burst_ms": 100,
                "burst_share": 0.5,
            },
            arms=arms,
        )
        for arms in (["target-only"], ["target-only", "edgespec"])
    )
    plain = [one.row for one in again.requests if one.arm == "target-only"]
    assert [one.row for one in once.requests] == plain


def test_a_bundle_holds_the_course_and_the_profile(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    profile = tmp_path / "board.yaml"
    figure = "{value: 4, kind: measured, source: my meter, date: 2026-11}"
    profile.write_text(f"name: mine\nabout: a board\ndraft_w: {figure}\n", encoding="utf-8")
    course = write("time_s,share\n0,0.5\n1,0.2\n")
    result = play(
        **{"verifiers.server.ran": {"file": str(course)}, "devices.laptop.profile": str(profile)}
    )
    bundle = tmp_path / "result.zip"
    sim.write_bundle(bundle, result)
    course.unlink()
    profile.unlink()
    assert sim.rerun(bundle).is_same
