"""Open loops: every arm has the same load, no request is lost, and queues obey their laws.

Oracles: the arrivals themselves, listed beforehand; the mean wait of an M/D/1 queue by Pollaczek
and Khinchine; the integral of a day's curve.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.network_trace import TraceError
from edgespec_sim.scenario import sections as sc
from edgespec_sim.world.arrivals import (
    Arrival,
    ArrivalDispatcher,
    DeviceSlot,
    draw_arrivals,
)
from edgespec_sim.world.recorded_arrivals import read_arrivals
from edgespec_sim.world.run import Job, make_jobs, play, summarise
from tests.present import require
from tests.sources import ROOT

WORLD = sc.load_scenario(str(ROOT / "tests/sim/worlds/open.yaml"))


def list_arrivals(of: sc.Scenario) -> tuple[Arrival, ...]:
    return draw_arrivals(of, "1/0", Path())


def list_counted_times(of: sc.Scenario) -> list[float]:
    return [one.at_s for one in list_arrivals(of) if of.warm_up_s <= one.at_s <= of.duration_s]


@pytest.mark.parametrize("at", list(sc.AtDevice))
def test_every_arm_meets_the_same_load(at: sc.AtDevice) -> None:
    world = replace(WORLD, arrivals=replace(require(WORLD.arrivals), at=at))
    for arm in world.arms:
        records = play(Job(world, arm, 0, 1, Path())).meters.records
        assert sorted(one.started_s for one in records) == pytest.approx(list_counted_times(world))
        assert all(one.complete and one.mismatches == 0 for one in records)


def test_what_was_not_over_is_told() -> None:
    world = replace(WORLD, duration_s=12.0, drain_s=0.5, arrivals=sc.ArrivalsSection(rate=12.0))
    outcome = play(Job(world, Arm.TARGET_ONLY, 0, 1, Path()))
    found = summarise(
        replace(world, arms=(Arm.TARGET_ONLY,)), (1,), Path(), [(Arm.TARGET_ONLY, outcome)]
    )
    (arm,) = found.arms
    assert arm.attainment is not None
    assert arm.all.unfinished > 0
    assert (
        arm.attainment.asked
        == len(list_counted_times(world))
        == arm.all.requests + arm.all.unfinished
    )
    assert any("had not ended by then" in note for note in found.notes)


def test_little_load_is_attained() -> None:
    world = replace(WORLD, arrivals=sc.ArrivalsSection(rate=0.5), arms=(Arm.TARGET_ONLY,))
    found = summarise(
        world, (1,), Path(), [(job.arm, play(job)) for job in make_jobs(world, 1, Path())]
    )
    reached = require(found.arms[0].attainment)
    assert reached.share == 1.0
    assert reached.goodput == pytest.approx(reached.asked / world.window_s)
    assert reached.share_interval[0] < 1.0 == reached.share_interval[1]


def test_a_day_in_24_minutes() -> None:
    rates = tuple(2.0 + 10.0 * (8 <= hour < 20) for hour in range(24))
    day = sc.ArrivalsSection(sc.ArrivalKind.DIURNAL, rates=rates, compress=60.0)
    world = replace(WORLD, duration_s=24 * 60.0, arrivals=day, drain_s=0.0)
    hours = [0] * 24
    for one in list_arrivals(world):
        hours[int(one.at_s / 60.0) % 24] += 1
    for hour, came in enumerate(hours):
        expected = 60.0 * (rates[hour] + rates[(hour + 1) % 24]) / 2.0
        assert came == pytest.approx(expected, abs=5 * math.sqrt(expected))


CSV = "time_s,prompt_tokens,output_tokens\n10,7,5\n10.5,,9\n12,3,\n"
PUBLISHED = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.680590,7,5\n2023-11-16 18:15:47.180590,,9\n2023-11-16 18:15:48.680590,3,\n"
)


@pytest.mark.parametrize("text", [CSV, PUBLISHED])
def test_recorded_ones_are_played_as_they_were(text: str, tmp_path: Path) -> None:
    (tmp_path / "load").write_text(text, encoding="utf-8")
    recorded = sc.ArrivalsSection(sc.ArrivalKind.RECORDED, file="load", speed=0.5)
    found = draw_arrivals(replace(WORLD, arrivals=recorded), "1/0", tmp_path)
    assert [one.at_s for one in found] == pytest.approx([0.0, 1.0, 4.0])
    assert (found[0].prompt_tokens, found[0].output_tokens) == (7, 5)
    assert (found[1].output_tokens, found[2].prompt_tokens) == (9, 3)
    assert found[2].output_tokens >= 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "contains no arrivals"),
        ("when\n3\n", "2: column 'time_s': expected seconds or a date and a time"),
        ("time_s\nsoon\n", "2: column 'time_s': expected seconds or a date and a time, found"),
        ("time_s\nnan\n", "2: column 'time_s': expected a finite time"),
        ("time_s\n3\n1\n", "3: expected a time not before 3 s"),
        (
            "time_s,output_tokens\n3,0\n",
            "2: column 'output_tokens': expected a whole number of at least 1",
        ),
    ],
)
def test_a_file_that_cannot_be_played(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=says):
        list(read_arrivals(path))


class Counter:
    """Devices that take a fixed time, with the outcome of each request."""

    def __init__(self, at: sc.AtDevice, groups: str, service_s: float) -> None:
        self.queue, self.waits_s = EventQueue(), {}
        self.began: list[tuple[int, int]] = []
        self._service_s = service_s
        self.servers = [
            DeviceSlot(partial(self._serve, device), group) for device, group in enumerate(groups)
        ]
        self.at = at

    waits_s: dict[int, float]

    def play(self, arrivals: list[Arrival]) -> None:
        self.reception = ArrivalDispatcher(self.queue, arrivals, self.at, self.servers)
        self.reception.start()
        self.queue.run(math.inf)

    def _serve(self, device: int, arrival: Arrival) -> None:
        self.began.append((arrival.number, device))
        self.waits_s[arrival.number] = self.queue.now - arrival.at_s
        self.queue.after(self._service_s, partial(self.reception.release, device))


def make_arrivals(*pairs: tuple[float, int]) -> list[Arrival]:
    return [Arrival(number, at_s, device, 1, 1) for number, (at_s, device) in enumerate(pairs)]


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_device_waits_like_m_d_1(load: float) -> None:
    world = replace(
        WORLD,
        devices={"laptop": replace(WORLD.devices["laptop"], count=1)},
        duration_s=20_000.0,
        drain_s=0.0,
        arrivals=sc.ArrivalsSection(rate=load),
    )
    counter = Counter(sc.AtDevice.OWN, "a", 1.0)
    counter.play(list(list_arrivals(world)))
    mean_s = sum(counter.waits_s.values()) / len(counter.waits_s)
    assert mean_s == pytest.approx(load / (2.0 * (1.0 - load)), rel=0.1)


@pytest.mark.parametrize("at", list(sc.AtDevice))
def test_first_come_first_served(at: sc.AtDevice) -> None:
    """Any free device serves the first request in the queue. Oracle: waits by Lindley's
    recursion."""
    counter = Counter(at, "aa", 1.0)
    came = make_arrivals((0.0, 0), (0.1, 0), (0.2, 0), (0.3, 1), (5.0, 1))
    counter.play(came)
    both = [0.0, 0.0]
    free_s = {0: [0.0], 1: [0.0]} if at is sc.AtDevice.OWN else {0: both, 1: both}
    for arrival in came:
        line = free_s[arrival.device]
        start_s = max(arrival.at_s, heapq.heappop(line))
        heapq.heappush(line, start_s + 1.0)
        assert counter.waits_s.get(arrival.number) == pytest.approx(start_s - arrival.at_s)
