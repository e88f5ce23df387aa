"""Tests of ``edgespec plan``. The capacity search must end at the number that simulated events
show, and name what forbids more. The link plan must print its table, its advice, and the reason.

Oracles: made-up results, whose right number of verifiers is therefore known; a verifier whose
passes take a fixed time, however many sessions share them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from edgespec.bench.arms import Arm
from edgespec.cli.options import read_settings
from edgespec_sim import playing
from edgespec_sim.commands import plan_capacity, plan_link
from edgespec_sim.commands import play as player
from edgespec_sim.commands.main import app as sim
from edgespec_sim.commands.plan_capacity import (
    GPUS,
    CapacityQuestion,
    Meets,
    Observation,
    Planner,
    Search,
    explain_never,
    judge,
)
from edgespec_sim.commands.plan_link import (
    FLAGS,
    MIN_GAIN,
    SCENARIO,
    LinkAdvice,
    advise,
    link_settings,
)
from edgespec_sim.playing import (
    ScenarioPoint,
    SeedPlan,
    Task,
    Workers,
    play_seeds,
    summary_of,
)
from edgespec_sim.replication import TpotTotal
from edgespec_sim.run_summary import ArmSummary, RunSummary, read_summary
from edgespec_sim.scenario import sections as sc
from edgespec_sim.scenario.verifiers import MACHINES, roofline_law
from edgespec_sim.world.assembly import World, WorldOutcome
from edgespec_sim.world.run import Job, make_token_source, play
from edgespec_sim.world.site import WorldSetup
from tests.kit.live_verifier import run_command
from tests.present import require

# Users who ask for a word or two keep the simulated worlds small.
SETTINGS = (
    "devices.laptop.workload.output_tokens=4",
    "devices.laptop.workload.think_s=1",
    "devices.laptop.workload.prompt_tokens=8",
    "tokens.source=toy",
    "tokens.acceptance=null",
)
SMALL = ("--users", "1", *(w for s in ("arms=[target-only]", *SETTINGS) for w in ("--set", s)))
FOLDER = sc.scenario_path("laptop-floor").parent


def capacity(*arguments: str) -> Result:
    return run_command("plan", "capacity", *arguments)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_capacity, "default_processes", lambda: 1)
    monkeypatch.setattr(player, "default_processes", lambda: 1)
    brief = {"duration_s": 10.0}
    monkeypatch.setattr(plan_link, "link_settings", lambda *link: link_settings(*link) | brief)


def make_observation(verifiers: int, tpot_ms: float, half_ms: float = 0.01) -> Observation:
    triple = (tpot_ms / 1e3, (tpot_ms - half_ms) / 1e3, (tpot_ms + half_ms) / 1e3)
    if tpot_ms <= 30.0:
        meets = Meets.YES if tpot_ms + half_ms <= 30.0 else Meets.LIKELY
    else:
        meets = Meets.NO if tpot_ms - half_ms > 30.0 else Meets.UNLIKELY
    return Observation(verifiers, verifiers, 1, 100, 0, (0.1, 0.1, 0.1), triple, 0.5, meets)


@pytest.mark.parametrize("proposal_ms", [100.0, 300.0, 900.0])
@pytest.mark.parametrize("truth_ms", [20.0, 100.0, 170.0, 299.0, 301.0, 890.0])
def test_events_have_the_last_word(truth_ms: float, proposal_ms: float) -> None:
    """Small worlds suggest ``proposal_ms`` over the number of verifiers, events show ``truth_ms``.
    The search must believe the events."""
    search = Search(Arm.TARGET_ONLY, first=4, max_verifiers=200)
    while (number := search.next_proposal()) is not None:
        search.proposed[number] = proposal_ms / number <= 30.0
    assert len(search.proposed) <= 8
    for _ in range(20):
        new = [one for one in search.numbers_to_play() if one not in search.observed]
        if not new:
            break
        for number in new:
            search.observed[number] = make_observation(number, truth_ms / number)
    right = math.ceil(truth_ms / 30.0)
    assert (search.candidate, search.interval, search.unplayed) == (right, (right, right), [])
    assert {right, right - 1} - {0} <= set(search.observed)
    assert len(search.observed) <= 18


def test_a_number_that_nothing_meets_is_never_taken() -> None:
    search = Search(Arm.TARGET_ONLY, first=4, max_verifiers=100)
    while (number := search.next_proposal()) is not None:
        search.proposed[number] = False
        if number == search.max_verifiers:
            search.uncontended = make_observation(number, 50.0)
    assert (search.never_meets, search.numbers_to_play()) == (True, [])


def make_question(pass_ms: float = 20.0, **slo: float) -> CapacityQuestion:
    loaded = sc.load_scenario("laptop-floor", read_settings(SETTINGS))
    gpu = sc.VerifierSection(pass_time=sc.CostSection(ms=pass_ms))
    devices = {"laptop": replace(loaded.devices["laptop"], count=4)}
    scenario = replace(loaded, devices=devices, verifiers={"gpu": gpu})
    return CapacityQuestion(scenario, sc.SloSection(**slo), (Arm.TARGET_ONLY,), FOLDER)


def play_worlds(doing: str, jobs: Sequence[Job], until_s: float) -> list[WorldOutcome]:
    return [play(job) for job in jobs]


def test_a_fixed_pass_takes_one_verifier_and_every_round_has_seeds_of_its_own() -> None:
    seeds: list[list[int]] = []

    def note_call(doing: str, jobs: Sequence[Job], until_s: float) -> list[WorldOutcome]:
        seeds.append([job.seed for job in jobs])
        return play_worlds(doing, jobs, until_s)

    planner = Planner(make_question(tpot_p95_ms=30.0), note_call, at_once=2)
    planner.search(math.inf)
    (search,) = planner.searches
    assert planner.best is search
    assert (search.candidate, search.interval, search.unplayed) == (1, (1, 1), [])
    assert search.observed[1].tpot_p95_s[0] == pytest.approx(0.020, rel=0.2)
    assert seeds[-1] == [1, 2], "two worlds at once, no seed twice"


@pytest.mark.parametrize(
    ("users", "pass_time", "work", "slo", "right"),
    [
        (12, (10.0, 4.0), (4, 8, 0.5), {"tpot_p95_ms": 30.0}, 2),
        (8, (10.0, 5.0), (40, 4, 1.0), {"ttft_p95_ms": 800.0}, 3),
    ],
)
def test_a_load_for_several_verifiers_gets_as_many_and_no_more(
    users: int,
    pass_time: tuple[float, float],
    work: tuple[int, int, float],
    slo: dict[str, float],
    right: int,
) -> None:
    """The search is checked against longer worlds with other seeds: the objectives must hold with
    the named number of verifiers, and fail with one fewer."""
    asked, (ms, row_ms), (prompt, output, think_s) = make_question(**slo), pass_time, work
    device, gpu = asked.scenario.devices["laptop"], sc.CostSection(ms=ms, row_ms=row_ms)
    load = replace(device.workload, prompt_tokens=prompt, output_tokens=output, think_s=think_s)
    scenario = replace(
        asked.scenario,
        devices={"laptop": replace(device, count=users, workload=load)},
        verifiers={"gpu": sc.VerifierSection(pass_time=gpu)},
    )
    planner = Planner(replace(asked, scenario=scenario), play_worlds, at_once=2)
    planner.search(math.inf)
    assert require(planner.best).candidate == right
    load = replace(load, start_within_s=1.0)
    for number in (right - 1, right):
        world = replace(
            scenario,
            devices={"laptop": replace(device, count=users, workload=load)},
            verifiers={"gpu": sc.VerifierSection(number, gpu)},
            warm_up_s=4.0,
            duration_s=34.0,
            drain_s=5.0,
        )
        records = play(Job(world, Arm.TARGET_ONLY, 0, 101, FOLDER)).meters.records
        times = [one.pace_s if "tpot_p95_ms" in slo else one.ttft_s for one in records]
        known = sorted(one for one in times if one is not None)
        kept = 1e3 * known[int(0.95 * len(known))] <= next(iter(slo.values()))
        assert kept == (number == right), number


def test_without_time_the_answer_says_what_was_not_played(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A round that runs out of time is not used, because its quick worlds would have come first and
    biased it."""
    asked = make_question(tpot_p95_ms=30.0)
    planner = Planner(asked, play_worlds)
    planner.search(0.0, now_s=lambda: 1.0)
    assert planner.searches[0].unplayed == [1]
    plan_capacity._show(asked, planner, "h200")
    said = capsys.readouterr().out
    assert "target-only: 1 H200 not simulated at length: the time was up" in said
    assert "on 1 H200 (proposed by small worlds, not simulated at length)" in said

    def finish_late(doing: str, jobs: Sequence[Job], until_s: float) -> list[WorldOutcome]:
        if until_s < math.inf:
            raise TimeoutError
        return play_worlds(doing, jobs, until_s)

    planner = Planner(make_question(tpot_p95_ms=30.0), finish_late)
    planner.search(5.0, now_s=lambda: 1.0)
    assert planner.searches[0].observed == {}


def test_what_forbids_an_objective_is_named() -> None:
    asked = make_question(tpot_p95_ms=10.0, ttft_p95_ms=5.0)
    world = asked.make_world(asked.max_verifiers, 4.0, 20.0)
    job = Job(replace(world, arms=asked.arms), Arm.TARGET_ONLY, 0, 1, FOLDER, checks=False)
    alone = judge(asked.slo, asked.max_verifiers, world, [play(job)])
    assert alone.meets is Meets.NO
    why = explain_never(asked, Arm.TARGET_ONLY, alone)
    assert "a pass 20.0 ms" in why
    assert "sending a request takes a round trip" in why
    crowded = explain_never(replace(asked, rate=500.0), Arm.TARGET_ONLY, alone)
    assert "verifiers are too few for this load" in crowded


def test_what_events_say_goes_before_a_mere_proposal() -> None:
    planner = Planner(
        replace(make_question(tpot_p95_ms=30.0), arms=(Arm.TARGET_ONLY, Arm.EDGESPEC)), play_worlds
    )
    plain, ours = planner.searches
    plain.proposed = {2: True, 1: False}
    ours.proposed = {1: True}
    plain.observed = {2: make_observation(2, 20.0), 1: make_observation(1, 40.0)}
    assert (planner.best, ours.unplayed, plan_capacity.count_saved_verifiers(planner)) == (
        plain,
        [1],
        None,
    )
    ours.observed = {1: make_observation(1, 20.0)}
    saved = (Arm.TARGET_ONLY, 1)
    assert (planner.best, ours.unplayed, plan_capacity.count_saved_verifiers(planner)) == (
        ours,
        [],
        saved,
    )


@pytest.mark.parametrize("users", ["1", "3"])
def test_a_warm_connection_costs_a_request_nothing(users: str) -> None:
    """Oracle: a request waits for one round trip, for the pass under way and for its own. With a
    round trip of 157 ms and passes of 10 ms that is at most 177.6 ms. If connecting cost even one
    more round trip, no number of verifiers could reach 320 ms."""
    links = ("links.office={rtt_ms: 7}", "links.fibre={rtt_ms: 150}")
    result = capacity(
        *("--users", users, "--gpu", "llama-3.1-8b-bf16@h100", "--ttft-p95", "320", "--json"),
        *(w for s in ("arms=[target-only]", *SETTINGS, *links) for w in ("--set", s)),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["verifiers"] == 1
    (arm,) = found["arms"]
    pass_ms = 1e3 * roofline_law("llama-3.1-8b-bf16@h100").seconds(9, 12)
    value, _, high = arm["events"][0]["ttft_p95_ms"]
    assert 157.0 < value <= high <= 157.0 + 0.7 + 2 * pass_ms


def test_a_gpu_holds_what_its_memory_has_room_for() -> None:
    """Oracle: the sum by hand, from the data sheet's bytes; `run` and `plan capacity` print it."""
    assert set(GPUS) <= set(MACHINES)
    hand = int((0.9 * 80e9 - 8.03e9 * 2) / (2 * 32 * 8 * 128 * 2 * 1000.0))
    devices = {
        "laptop": sc.DeviceSection(
            workload=sc.WorkloadSection(prompt_tokens=900, output_tokens=100)
        )
    }
    scenario = sc.Scenario("s", devices, {"gpu": sc.VerifierSection()})
    for given, admitted in ((None, hand), (hand + 1, hand), (7, 7)):
        gpu = sc.VerifierSection(
            pass_time=sc.CostSection(roofline="llama-3.1-8b-bf16@h100"), max_sessions=given
        )
        scenario = replace(scenario, verifiers={"gpu": gpu})
        around = WorldSetup(make_token_source(scenario, 1, FOLDER), FOLDER)
        assert scenario.session_limit("gpu") == admitted
        assert f"memory has room for {hand}" in scenario.memory_note("gpu")
        assert f"takes {admitted} sessions at a time" in scenario.memory_note("gpu")
        site = World(scenario, Arm.TARGET_ONLY, "1", around).sites[0]
        assert site._servers[0].engine.engine_limits.max_sessions == admitted
    spread = replace(scenario.verifiers["gpu"], stages=sc.StagesSection(nodes=2), max_sessions=None)
    assert replace(scenario, verifiers={"gpu": spread}).session_limit("gpu") == int(
        (0.9 * 160e9 - 8.03e9 * 2) / (2 * 32 * 8 * 128 * 2 * 1000.0)
    )
    unknown = sc.VerifierSection(pass_time=sc.CostSection(ms=20.0))
    assert replace(scenario, verifiers={"gpu": unknown}).session_limit("gpu") == 64
    small = sc.VerifierSection(pass_time=sc.CostSection(roofline="llama-3.1-70b-fp8@rtx-4090"))
    with pytest.raises(ValueError, match=r"verifiers\.gpu: rtx-4090 has no room .* take 71 GB"):
        replace(scenario, verifiers={"gpu": small})


@pytest.mark.parametrize(("gpu", "fits"), [("h100", 10), ("h200", 420)])
def test_run_and_plan_print_the_same_memory(gpu: str, fits: int) -> None:
    """Oracle, by hand: (0.9 x 80 or 141 GB - 70.6 GB) / (350 x sqrt(1.36) x 327,680 bytes)."""
    one = ("--set", "arms=[target-only]", "--set", "devices.laptop.count=1")
    roofline = f"verifiers.h200.pass_time.roofline=llama-3.1-70b-fp8@{gpu}"
    ran = CliRunner().invoke(
        sim,
        ["run", "laptop-floor", "--seed", "1", "--set", roofline, *one],
    )
    assert ran.exit_code == 0, ran.output
    planned = capacity(
        *("--users", "1", "--gpu", gpu, "--ttft-p95", "900", "--tpot-p95", "60"),
        *("--set", "arms=[target-only]"),
    )
    assert planned.exit_code == 0, planned.output
    line = next(one for one in planned.stdout.splitlines() if one.startswith("Memory: "))
    assert f"h200 takes {fits} sessions at a time" in line
    assert line in ran.output


class Played:
    """Stand-in for a simulated world, whose clock moves by ``step_s`` with each progress report."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s
        self.steps = 0

    def clock(self) -> float:
        return self.now_s

    def __call__(self, job: Job, tracer: object, report: Callable[[float], None]) -> Any:
        for step in range(1, 6):
            self.steps += 1
            self.now_s += self.step_s
            report(job.scenario.duration_s * step / 5)
        return "played"


def task(name: str) -> Task:
    scenario = replace(sc.load_scenario("laptop-floor"), duration_s=10.0, warm_up_s=0.0)
    return Task(name, Job(scenario, Arm.TARGET_ONLY, 0, 1, Path()))


def test_the_time_ends_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Played(4.0)
    monkeypatch.setattr(playing, "play", world)
    with Workers(1, clock=world.clock) as workers:
        events = workers.play([task("a"), task("b")], "events", until_s=27.0)
        assert next(events)[0] == 0
        with pytest.raises(TimeoutError, match="the time is up: events"):
            next(events)
        assert world.steps == 7
        rest: Any = workers.play([task("c")])
        assert list(rest) == [(0, "played")]


def test_off_terminals_a_line_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A world of 10 s takes five steps of 4 s here, so there is a line at the beginning and one
    every 10 s."""
    world = Played(4.0)
    monkeypatch.setattr(playing, "play", world)
    with Workers(1, player.ShownProgress(clock=world.clock)) as workers:
        list(workers.play([task("a"), task("b")]))
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    places = (("simulated", 0), ("a", 6), ("b", 12), ("b", 18))
    assert said == [f"{doing}: {at} of 20 virtual s" for doing, at in places]


def test_an_answer_with_its_cost() -> None:
    result = capacity(*SMALL, "--ttft-p95", "500", "--tpot-p95", "60")
    assert result.exit_code == 0, result.output
    assert "take: target-only on 1 H200 (95 %: 1), $3.99 an hour" in result.stdout
    assert "all of them simulated" in result.stdout
    assert "hyperstack" in result.stdout
    assert "answered in" in result.stderr


def test_json_says_what_forbids_an_objective() -> None:
    result = capacity(*SMALL, "--tpot-p95", "5", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["take"], found["verifiers"], found["cost_per_hour"]) == (None, None, None)
    (arm,) = found["arms"]
    assert "a pass 23.0 ms" in arm["why"]


def test_objectives_of_a_run(tmp_path: Path) -> None:
    arguments = (
        *("run", "single-device", "--seed", "1", "--out", str(tmp_path)),
        *("--set", "slo={ttft_p95_ms: 400, tpot_p95_ms: 30}", "--set", "duration_s=4"),
        *("--set", "arms=[target-only]", "--set", "arrivals={rate: 0.5}"),
    )
    result = CliRunner().invoke(sim, arguments)
    assert result.exit_code == 0, result.output
    assert "attained" in result.output
    assert "objective 400" in result.output
    (arm,) = read_summary(tmp_path / "summary.json").arms
    assert arm.attainment is not None
    assert (arm.attainment.slo_ttft_s, arm.attainment.slo_tpot_s) == (0.4, 0.03)
    assert arm.attainment.asked == arm.all.requests + arm.all.unfinished > 0


@cache
def plan(*arguments: str) -> dict[str, Any]:
    result = run_command("plan", "link", "--json", "--seeds", "1", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_table_a_recommendation_its_reason_and_the_flags_to_copy() -> None:
    result = run_command("plan", "link", "--rtt-ms", "5", "--server-draft-ms", "0", "--seeds", "4")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    (take,) = (line for line in lines if line.startswith("take: "))
    arm, _, sure = take.removeprefix("take: ").partition(" ")
    assert sure == "(sure)"
    interval = r"\d\.\d\d times \(\d\.\d\d to \d\.\d\d\) as fast as plain streaming"
    assert re.search(interval, result.stdout)
    assert lines[lines.index(take) + 1].startswith(f"{arm} is ")
    assert any(line.startswith("flags: ") for line in lines)
    assert any(line.startswith("GPU, ms a token: target-only 25.") for line in lines)


def test_run_ahead_wins_at_usual_round_trips() -> None:
    found = plan("--server-draft-ms", "0")
    assert (found["take"], found["flags"]) == ("edgespec", "")
    assert found["arms"]["edgespec"]["speed_up"] > 1.25
    assert found["arms"]["vanilla"]["speed_up"] < 1.0


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        (("--draft-ms", "60"), "a draft step (60 ms) takes no less than a pass (25 ms)"),
        (("--rtt-ms", "2000", "--acceptance", "0.3"), "is only 1.00 times as fast"),
        (("--acceptance", "0.05", "--draft-ms", "24.5"), "is only 1.00 times as fast"),
    ],
)
def test_where_drafting_does_not_pay_streaming_is_advised(
    arguments: tuple[str, ...], because: str
) -> None:
    found = plan(*arguments, "--server-draft-ms", "0")
    assert (found["take"], found["flags"]) == ("target-only", "--draft none")
    assert because in found["reason"]


def test_a_server_that_drafts_is_weighed_as_well() -> None:
    """A device 300 ms away can add nothing to such a server, and its nodes are wasted."""
    found = plan("--rtt-ms", "300", "--draft-ms", "20")
    assert (found["take"], found["flags"]) == ("server-draft", "--draft none")
    assert found["arms"]["server-draft"]["speed_up"] > 1.8
    assert found["arms"]["both"]["speed_up"] > 0.98 * found["arms"]["server-draft"]["speed_up"]
    assert found["arms"]["server-draft"]["gpu_ms_per_token"] < 25.0


def test_a_run_of_the_world_that_is_named_says_the_same(tmp_path: Path) -> None:
    arguments = ("--rtt-ms", "30", "--acceptance", "0.7")
    found = plan(*arguments)
    program, *words = found["run"].split()
    assert (program, found["seeds"]) == ("edgespec-sim", 1)
    result = CliRunner().invoke(sim, [*words, "--seed", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    run = {arm.arm: arm for arm in read_summary(tmp_path / "summary.json").arms}
    assert {name: one["speed_up"] for name, one in found["arms"].items()} == {
        name: arm.speedup for name, arm in run.items()
    }
    fastest = max(run, key=lambda name: run[name].speedup or 0.0)
    assert found["take"] == fastest or found["gain"] < MIN_GAIN


@cache
def _summary() -> RunSummary:
    scenario = sc.load_scenario(SCENARIO, link_settings(5.0, 8.0, 25.0, 0.8))
    point = ScenarioPoint("link", replace(scenario, duration_s=5.0), Path())
    play_seeds([point], seed_plan := SeedPlan(1, 1), Workers(1))
    return summary_of(point, seed_plan)


def make_advice(**arms: tuple[tuple[float, ...], float]) -> LinkAdvice:
    """Build advice from ``arms``: the seconds per token in each world, and the wasted nodes per
    token."""
    base = {"target-only": ((0.025,) * 3, 0.0), **arms}
    summaries: list[ArmSummary] = []
    for name, (seconds, wasted) in base.items():
        arm = _summary().arms[0]
        value = sum(base["target-only"][0]) / sum(seconds)
        whole = replace(arm.all, wasted_per_token=wasted)
        summaries.append(replace(arm, arm=name, all=whole, speedup=value))
    totals = {Arm(name): [TpotTotal(one, 1) for one in mine[0]] for name, mine in base.items()}
    return advise(replace(_summary(), arms=tuple(summaries)), totals, 8.0, 25.0)


def test_of_arms_that_take_as_long_the_one_with_fewer_wasted_nodes_is_taken() -> None:
    """A difference within noise is no reason to send more nodes."""
    noisy = make_advice(edgespec=((0.010, 0.013, 0.010), 3.0), pearl=((0.011, 0.012, 0.0105), 0.2))
    assert noisy.arm is Arm.PEARL
    assert "edgespec (2.27) is not faster by more than chance, and sends 3.00" in noisy.reason
    clear = make_advice(edgespec=((0.010, 0.0101, 0.010), 3.0), pearl=((0.012, 0.0121, 0.012), 0.2))
    assert clear.arm is Arm.EDGESPEC
    assert "chance" not in clear.reason


@pytest.mark.parametrize(
    ("both", "take", "gain", "sure"),
    [
        ((0.01004, 0.01006, 0.01002), Arm.SERVER_DRAFT, 1.012, True),
        ((0.0090, 0.0091, 0.0092), Arm.BOTH, 1.12, True),
        ((0.0060, 0.0120, 0.0100), Arm.SERVER_DRAFT, 1.09, False),
        ((0.0091,), Arm.BOTH, 1.12, None),
        ((0.01004,), Arm.SERVER_DRAFT, 1.012, None),
    ],
    ids=["server-has-it", "device-adds", "perhaps", "one-seed", "one-seed-little"],
)
def test_a_device_is_compared_with_the_server_alone(
    both: tuple[float, ...], take: Arm, gain: float, sure: bool | None
) -> None:
    """The server alone takes 10.16 ms per token, plain streaming 25. Oracle: ratios of the
    means."""
    alone = (0.01016, 0.01018, 0.01014)[: len(both)]
    plain = (0.025,) * len(both)
    found = make_advice(
        **{"target-only": (plain, 0.0), "server-draft": (alone, 0.0), "both": (both, 0.4)}
    )
    assert (found.arm, found.baseline, found.is_sure) == (take, Arm.SERVER_DRAFT, sure)
    assert found.gain == pytest.approx(gain, rel=0.01)
    assert ("one seed only" in found.certainty) == (sure is None)
    assert re.search("needs no device|adds little|beyond chance", found.reason)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--rtt-ms", "-5"),
        ("--rtt-ms", "nan"),
        ("--draft-ms", "-1"),
        ("--pass-ms", "1e9"),
        ("--acceptance", "1.5"),
        ("--server-draft-ms", "-2"),
    ],
)
def test_an_error_of_plan_link_names_the_option(option: str, value: str) -> None:
    result = run_command("plan", "link", f"{option}={value}")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option} is ")
    assert "links." not in result.stderr + result.stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--ttft-p95", "-5"),
        ("--tpot-p95", "nan"),
        ("--rate", "0"),
        ("--rate", "1e9"),
        ("--users", "9000000"),
        ("--gpu", "h300"),
    ],
)
def test_an_error_of_plan_capacity_names_the_option(option: str, value: str) -> None:
    others = {"--ttft-p95": "500", "--users": "3"} | {option: value}
    if option == "--rate":
        del others["--users"]
    result = run_command("plan", "capacity", *(f"{name}={one}" for name, one in others.items()))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option} is "), result.stderr


def test_flags_are_an_agents() -> None:
    assert set(FLAGS) == set(Arm)
