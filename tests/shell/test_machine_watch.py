"""Sensors of faked files, and an agent that walks its ladder by them.

Oracle: the figures that were written, and the text that the same agent gives without a ladder.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.config import AgentConfig, DraftSection
from edgespec.core.device.draft_ladder import DraftLadder, MachineReading, Rung
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent
from edgespec.device.machine_watch import LOOK_EVERY_S, MachineWatch
from edgespec.device.status import StatusSource
from edgespec.models.toy import ToyTokenizer
from edgespec.telemetry.machine_sensors import MachineSensors
from tests.shell.live_verifier import serving

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


class FakeMachine:
    """Files as Linux has them, under a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.sys, self.proc = folder / "sys", folder / "proc"
        self.sensors = MachineSensors(self.sys, self.proc)

    def write(self, path: str, text: str) -> None:
        file = self.sys.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")

    def battery(
        self, name: str, percent: str, status: str = "Discharging", scope: str = ""
    ) -> None:
        folder = f"sys/class/power_supply/{name}"
        self.write(f"{folder}/type", "Battery")
        self.write(f"{folder}/capacity", percent)
        self.write(f"{folder}/status", status)
        if scope:
            self.write(f"{folder}/scope", scope)

    def cores(self, busy: int, idle: int, own: int) -> None:
        self.write("proc/stat", f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0")
        self.write("proc/self/stat", f"7 (py) thon) R 1 1 1 0 -1 0 0 0 0 0 {own} 0 0 0 20 0 1 0")


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def test_a_machine_without_sensors_says_nothing(machine: FakeMachine) -> None:
    assert machine.sensors.read() == MachineReading()


def test_the_emptiest_battery_that_empties(machine: FakeMachine) -> None:
    machine.battery("BAT0", "40")
    machine.battery("BAT1", "25")
    machine.battery("BAT2", "5", status="Charging")
    machine.battery("mouse", "3", scope="Device")
    machine.battery("broken", "full")
    machine.write("sys/class/power_supply/AC/type", "Mains")
    assert machine.sensors.read().battery == 0.25


def test_the_hottest_sensor_that_is_connected(machine: FakeMachine) -> None:
    machine.write("sys/class/thermal/thermal_zone0/temp", "51000")
    machine.write("sys/class/thermal/thermal_zone1/temp", "-273000")
    machine.write("sys/class/hwmon/hwmon0/temp1_input", "64500")
    machine.write("sys/class/hwmon/hwmon0/temp2_input", "255000")
    machine.write("sys/class/hwmon/hwmon0/temp1_max", "99000")
    machine.write("sys/class/hwmon/hwmon0/temp3_input", "n/a")
    assert machine.sensors.read().celsius == 64.5


def test_the_load_is_that_of_others(machine: FakeMachine) -> None:
    machine.cores(busy=100, idle=100, own=50)
    assert machine.sensors.read().others_load is None
    machine.cores(busy=190, idle=110, own=80)  # of 100 ticks 90 busy, 30 our own
    assert machine.sensors.read().others_load == pytest.approx(0.6)
    machine.write("proc/stat", "cpu 1 2")
    assert machine.sensors.read().others_load is None
    machine.cores(busy=190, idle=110, own=80)
    assert machine.sensors.read().others_load is None


def _looked(watch: MachineWatch) -> Rung:
    watch.soon()
    watch.close()
    return watch.ladder.rung


def test_the_watch_walks_by_the_files(machine: FakeMachine) -> None:
    now = [0.0]
    watch = MachineWatch(DraftLadder(), machine.sensors.read, lambda: now[0])
    machine.battery("BAT0", "60")
    assert _looked(watch) is Rung.ALL
    machine.battery("BAT0", "8")
    assert _looked(watch) is Rung.ALL  # not due yet
    now[0] += LOOK_EVERY_S
    assert _looked(watch) is Rung.NONE
    assert watch.ladder.why == "the battery is at 8%"
    machine.battery("BAT0", "8", status="Charging")
    rungs = []
    for _ in range(60):
        now[0] += LOOK_EVERY_S
        rungs.append(_looked(watch))
    assert sorted(set(rungs), reverse=True) == [Rung.NONE, Rung.THRIFTY, Rung.NARROW, Rung.ALL]


def test_sensors_that_fail_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]

    def broken() -> MachineReading:
        raise OSError("the bus hangs")

    watch = MachineWatch(DraftLadder(), broken, lambda: now[0])
    for _ in range(3):
        now[0] += LOOK_EVERY_S
        assert _looked(watch) is Rung.ALL
    assert [record.getMessage() for record in caplog.records] == [
        "this machine's sensors cannot be read any more: the bus hangs"
    ]


def test_a_system_without_threads_ends_no_generation(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    now = [0.0]
    watch = MachineWatch(DraftLadder(), machine.sensors.read, lambda: now[0])
    machine.battery("BAT0", "8")
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", none_left)
        assert _looked(watch) is Rung.ALL
    now[0] += LOOK_EVERY_S
    assert _looked(watch) is Rung.NONE
    assert "can't start new thread" in caplog.text


async def test_an_agent_on_the_lowest_rung_gives_the_same_text(machine: FakeMachine) -> None:
    texts, statuses = [], []
    async with serving() as (address, _):
        for percent in ("90", "8"):
            machine.battery("BAT0", percent)
            watch = MachineWatch(DraftLadder(), machine.sensors.read)
            _looked(watch)
            config = AgentConfig(verifier=address, draft=DraftSection("toy"))
            async with build_agent(config) as without:
                # The verifier waits for drafts, unless the device says that none comes.
                options = replace(without.options, watch=watch, run_ahead=RunAhead.NEVER)
                agent = Agent(
                    without.transport,
                    without.drafter,
                    ToyTokenizer().encode,
                    ToyTokenizer().stream,
                    options,
                )
                texts.append([chunk.text async for chunk in agent.generate("on a rung", PARAMS)])
                statuses.append(StatusSource(agent, (address,)).snapshot().drafting)
                assert agent.stats is not None
                sent = agent.stats.counters.sent
                assert (sent > 0) == (percent == "90")
    assert "".join(texts[0]) == "".join(texts[1])
    assert [status.rung for status in statuses] == ["all", "none"]
    assert (statuses[1].worth, statuses[1].why) == (False, "drafting rests: the battery is at 8%")
