"""How many threads a draft has is measured once and kept. Oracle: what a stand-in's steps take, on
a clock that only they move; which counts it was loaded with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from edgespec.config import machine_key
from edgespec.core.ports import Cancelled, Candidate, ModelInfo, never_cancelled
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import thread_choice
from edgespec.device.thread_choice import best_count, kept_threads, load_with_best_threads


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.share = 1.0
        """Of its time that this process has the processor."""

    def read(self) -> float:
        return self.now


class TimedDrafter:
    """Its steps take ``step_s``; ``fails``: they raise."""

    def __init__(self, clock: Clock, step_s: float, *, fails: bool = False) -> None:
        self.info = ModelInfo("timed", "timed", 8, 1 << 16)
        self.closed = False
        self._clock, self._step_s, self._fails = clock, step_s, fails

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        pass

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        if self._fails:
            raise RuntimeError("head_size shall be a multiple of 16")
        self._clock.now += self._step_s * len(feed)
        return ()

    def close(self) -> None:
        self.closed = True


class Machine:
    """Loads drafters whose steps take ``step_s`` by their threads."""

    def __init__(self, graph: Path, clock: Clock) -> None:
        self.graph, self.step_s = graph, {0: 0.008, 1: 0.008, 2: 0.005, 4: 0.0049}
        self.loaded: list[int] = []
        self.said: list[str] = []
        self.fails = False
        self._clock, self._open = clock, list[TimedDrafter]()

    def load(self, threads: int) -> TimedDrafter:
        assert all(one.closed for one in self._open), "two drafts at once"
        self.loaded.append(threads)
        drafter = TimedDrafter(self._clock, self.step_s[threads], fails=self.fails)
        self._open.append(drafter)
        return drafter

    def start(self, *, tried: bool = True) -> tuple[list[int], list[str]]:
        """The counts of threads that were loaded, and what was said."""
        self.loaded, self.said = [], []
        drafter = load_with_best_threads(self.load, self.graph, self.said.append, tried=tried)
        assert not drafter.closed
        drafter.close()
        return self.loaded, [line.split("(")[0].strip() for line in self.said]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.read)
    monkeypatch.setattr(time, "process_time", lambda: clock.share * clock.now)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cores(4)(monkeypatch)
    graph = tmp_path / "model.onnx"
    graph.write_bytes(b"one")
    return Machine(graph, clock)


def cores(count: int) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (machine_key, thread_choice):
            monkeypatch.setattr(module, "usable_cores", lambda: count)

    return patch


MEASURED = ["timing a draft step with 1, 2 and 4 threads, once for this machine and model"]
MEASURED += ["draft threads: 2"]


def test_the_second_start_knows_what_the_first_measured(machine: Machine) -> None:
    assert machine.start() == ([1, 2, 4, 2], MEASURED)
    machine.step_s[1] = 0.001  # whatever it would be now
    assert machine.start() == ([2], [])
    assert kept_threads(machine.graph) == 2


def test_another_machine_or_model_is_measured_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.start()
    machine.graph.write_bytes(b"another")
    assert machine.start()[1] == MEASURED
    monkeypatch.setattr(machine_key, "_processor", lambda: "another processor")
    assert kept_threads(machine.graph) is None
    assert machine.start()[1] == MEASURED
    assert machine.start()[1] == []
    monkeypatch.setattr(machine_key, "_runtime", lambda: "another runtime")
    assert machine.start()[1] == MEASURED
    cores(2)(monkeypatch)
    assert machine.start()[0] == [1, 2, 2]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"threads": 3}', '{"threads": true}', '{"threads": "2"}', "\0"]
)
def test_a_damaged_file_is_measured_again(text: str, machine: Machine) -> None:
    machine.start()
    (path,) = path_of(machine)
    path.write_text(text)
    assert machine.start()[1] == MEASURED
    assert json.loads(path.read_text())["threads"] == 2


def path_of(machine: Machine) -> list[Path]:
    return list((machine.graph.parent / "cache" / "edgespec" / "threads").iterdir())


def test_nothing_is_tried_where_there_is_no_choice(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.start(tried=False) == ([0], [])
    cores(1)(monkeypatch)
    assert machine.start() == ([0], [])
    assert not (machine.graph.parent / "cache").exists()


def test_a_draft_that_fails_is_left_for_the_session_to_tell(machine: Machine) -> None:
    machine.fails = True
    assert machine.start()[0] == [1]
    assert kept_threads(machine.graph) is None


def test_a_machine_that_is_crowded_is_measured_another_time(machine: Machine) -> None:
    machine._clock.share = 0.5
    loaded, said = machine.start()
    assert loaded == [1, 0]
    assert "by the draft's size this time" in said[-1]
    assert kept_threads(machine.graph) is None
    machine._clock.share = 1.0
    assert machine.start() == ([1, 2, 4, 2], MEASURED)


def test_a_cache_that_cannot_be_written_costs_a_measurement(machine: Machine) -> None:
    (machine.graph.parent / "cache").write_text("in the way")
    assert machine.start() == ([1, 2, 4, 2], MEASURED)
    assert machine.start() == ([1, 2, 4, 2], MEASURED)


@pytest.mark.parametrize(
    ("step_s", "best"),
    [
        ({1: 8.0, 2: 7.5, 4: 7.0}, 2),
        ({1: 8.0, 2: 4.2, 4: 2.5}, 4),
        ({1: 8.0, 2: 9.0, 4: 20.0}, 1),
        ({1: 0.0, 2: 0.0}, 1),
    ],
)
def test_a_thread_more_has_to_save_a_tenth(step_s: dict[int, float], best: int) -> None:
    assert best_count(step_s) == best


def test_long_steps_are_timed_for_about_a_second(machine: Machine) -> None:
    machine.step_s = {1: 5.0, 2: 4.0, 4: 3.0}
    before_s = machine._clock.now
    machine.start()
    took_s = machine._clock.now - before_s
    assert took_s == pytest.approx((16 + 3) * (5.0 + 4.0 + 3.0))
