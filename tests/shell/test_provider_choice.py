"""On which provider a draft runs. Oracles: what stand-ins' steps take on a clock that only they
move, and the logits that they give; what was loaded and closed; and where OpenVINO is installed,
the CPU's own tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.config.setup_error import SetupError
from edgespec.core.ports import Cancelled, Candidate, ModelInfo, never_cancelled
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.runtime_session import Placement
from edgespec.device.provider_choice import (
    Finding,
    load_where_asked,
    load_where_quickest,
    quickest,
)

VOCABULARY_SIZE = 16


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.share = 1.0
        """Of its time that this process has the processor."""

    def read(self) -> float:
        return self.now


@dataclass
class Kind:
    """What a provider does to a draft."""

    step_s: float
    placement: Placement | None = None
    error: float = 0.0
    """Added to one of its logits behind a rollback."""
    unknown: bool = False
    """One of its logits there is no number."""
    fails_at: int = 10**9
    """The step that raises."""
    loads: bool = True


class Draft:
    """Logits are of the last token and its position alone."""

    def __init__(self, kind: Kind, clock: Clock) -> None:
        self.info = ModelInfo("draft", "draft", VOCABULARY_SIZE, 4096)
        self.placement = kind.placement
        self.logits: NDArray[np.float32] = np.zeros(VOCABULARY_SIZE, dtype=np.float32)
        self.closed = 0
        self._kind, self._clock = kind, clock
        self._length = self._steps = 0

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._length = 0

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        assert not self.closed
        self._steps += 1
        if self._steps >= self._kind.fails_at:
            raise RuntimeError("out of memory on the device")
        self._clock.now += self._kind.step_s * len(feed)
        rng = np.random.default_rng((keep_length + len(feed), feed[-1]))
        self.logits[:] = rng.standard_normal(VOCABULARY_SIZE)
        self.logits[-2:] = -np.inf
        if keep_length < self._length:
            self.logits[0] += self._kind.error
            self.logits[0] = np.nan if self._kind.unknown else self.logits[0]
        self._length = keep_length + len(feed)
        return ()

    def close(self) -> None:
        self.closed += 1


class Machine:
    """Loads drafts on ``kinds``, and remembers them."""

    def __init__(self, graph: Path, clock: Clock, **kinds: Kind) -> None:
        self.graph, self.kinds, self.clock = graph, kinds, clock
        self.made: list[tuple[str, Draft]] = []
        self.said: list[str] = []

    @property
    def loads(self) -> dict[str, Callable[[], Draft]]:
        return {name: partial(self._load, name) for name in self.kinds}

    def _load(self, name: str) -> Draft:
        assert all(one.closed for _, one in self.made), "two drafts at once"
        if not self.kinds[name].loads:
            raise ValueError("the driver is too old")
        made = Draft(self.kinds[name], self.clock)
        self.made.append((name, made))
        return made

    def auto(self) -> str:
        """Where the draft that is handed out runs."""
        return self._name(load_where_quickest(self.loads, self.graph, self.said.append))

    def asked(self, name: str) -> str:
        return self._name(load_where_asked(name, self.loads, self.graph, self.said.append))

    def _name(self, drafter: Draft) -> str:
        (name,) = [name for name, one in self.made if one is drafter]
        left = [one.closed for _, one in self.made if one is not drafter]
        assert (drafter.closed, left) == (0, [1] * len(left))
        drafter.close()
        return name


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "perf_counter", clock.read)
    monkeypatch.setattr(time, "process_time", lambda: clock.now * clock.share)
    (tmp_path / "model.onnx").write_bytes(b"a graph")
    return clock


@pytest.fixture
def machine(tmp_path: Path, clock: Clock) -> Callable[..., Machine]:
    def make(**kinds: Kind) -> Machine:
        return Machine(tmp_path / "model.onnx", clock, **kinds)

    return make


CPU = Kind(0.004)


# --- auto -----------------------------------------------------------------------------------


def test_auto_takes_what_is_quickest(machine: Callable[..., Machine]) -> None:
    some = machine(cpu=CPU, cuda=Kind(0.003), openvino=Kind(0.002, Placement(5, {"Gather": 1})))
    assert some.auto() == "openvino"
    assert some.said[0] == (
        "trying the draft on cpu and cuda and openvino, once for this machine and model"
    )
    assert some.said[1] == (
        "the draft runs on openvino (a step: cpu 4.00 ms, cuda 3.00 ms, openvino 2.00 ms):"
        " 5 of 6 nodes, on the CPU Gather (1)"
    )
    assert len(some.said) == 2


@pytest.mark.parametrize("step_s", [0.0041, 0.004, 9.0])
def test_auto_takes_nothing_that_is_no_quicker_than_the_cpu(
    step_s: float, machine: Callable[..., Machine]
) -> None:
    assert machine(cpu=CPU, openvino=Kind(step_s)).auto() == "cpu"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Kind(0.001, error=3.0), "its logits differ from the CPU's by 0."),
        (Kind(0.001, unknown=True), "its logits differ from the CPU's by inf"),
        (Kind(0.001, fails_at=40), "it does not run: out of memory on the device"),
        (Kind(0.001, loads=False), "it does not run: the driver is too old"),
        (Kind(0.001, Placement(0, {"MatMul": 7})), "it runs no node of the graph"),
    ],
    ids=["wrong", "nan", "raises", "absent", "idle"],
)
def test_what_is_of_no_use_is_left_out_and_refused_by_name(
    kind: Kind, why: str, machine: Callable[..., Machine]
) -> None:
    some = machine(cpu=CPU, cuda=kind)
    assert some.auto() == "cpu"
    assert some.said[-1].startswith(f"  cuda is left out: {why}")
    for again in (some, machine(cpu=CPU, cuda=kind)):
        with pytest.raises(
            SetupError, match=r"^provider cuda cannot be used with this draft: "
        ) as no:
            again.asked("cuda")
        assert why in str(no.value)


def test_small_differences_are_rounding(machine: Callable[..., Machine]) -> None:
    assert machine(cpu=CPU, cuda=Kind(0.001, error=0.02)).auto() == "cuda"


def test_what_was_found_is_kept(machine: Callable[..., Machine], tmp_path: Path) -> None:
    some = machine(cpu=CPU, cuda=Kind(0.001))
    assert some.auto() == "cuda"
    assert [name for name, _ in some.made] == ["cpu", "cuda"]  # the last one tried is handed out
    again = machine(cpu=CPU, cuda=Kind(0.001))
    assert again.auto() == "cuda"
    assert [name for name, _ in again.made] == ["cuda"]
    assert "trying" not in " ".join(again.said)
    (tmp_path / "model.onnx").write_bytes(b"another graph")
    other = machine(cpu=CPU, cuda=Kind(0.009))
    assert other.auto() == "cpu"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"cpu": {"why_not": "", "step_s": 0.004}}',
        b'{"cpu": {"why_not": "", "step_s": 0.1}, "cuda": {"why_not": 1, "step_s": 0.1}}',
        b'{"cpu": {"why_not": "", "step_s": 0.1}, "cuda": {"why_not": "", "step_s": -1.0}}',
        b'{"cpu": {"why_not": "", "step_s": 0.1}, "cuda": 3}',
    ],
)
def test_a_file_that_cannot_be_used_is_written_anew(
    content: bytes, machine: Callable[..., Machine], tmp_path: Path
) -> None:
    assert machine(cpu=CPU, cuda=Kind(0.001)).auto() == "cuda"
    (kept,) = (tmp_path / "cache/edgespec/providers").iterdir()
    good = kept.read_bytes()
    kept.write_bytes(content)
    assert machine(cpu=CPU, cuda=Kind(0.001)).auto() == "cuda"
    assert json.loads(kept.read_bytes()) == json.loads(good)


def test_while_other_programs_hold_the_cores_it_is_the_cpu_and_times_are_taken_later(
    machine: Callable[..., Machine], clock: Clock
) -> None:
    clock.share = 0.5
    some = machine(cpu=CPU, cuda=Kind(0.001))
    assert some.auto() == "cpu"
    assert some.said[-1] == "the draft runs on cpu (a step: cuda 1.00 ms)"
    asked = machine(cpu=CPU, cuda=Kind(0.001))
    assert asked.asked("cuda") == "cuda"
    assert asked.said == ["the draft runs on cuda"]  # its numbers are known to be right
    clock.share = 1.0
    assert machine(cpu=CPU, cuda=Kind(0.001)).auto() == "cuda"


def test_what_does_not_run_today_is_tried_again(machine: Callable[..., Machine]) -> None:
    assert machine(cpu=CPU, cuda=Kind(0.001, fails_at=3)).auto() == "cpu"
    assert machine(cpu=CPU, cuda=Kind(0.001)).auto() == "cuda"
    assert machine(cpu=CPU, cuda=Kind(0.001, fails_at=10**6)).asked("cuda") == "cuda"


def test_a_cpu_that_cannot_run_the_draft_is_no_provider_s_fault(
    machine: Callable[..., Machine],
) -> None:
    with pytest.raises(ValueError, match="the driver is too old"):
        machine(cpu=Kind(0.004, loads=False), cuda=Kind(0.001)).auto()


def test_quickest_is_never_in_doubt() -> None:
    assert quickest({"cpu": Finding(step_s=2.0)}) == "cpu"
    assert quickest({"cpu": Finding(step_s=None), "dml": Finding(step_s=1.0)}) == "cpu"
    assert quickest({"cpu": Finding(step_s=2.0), "dml": Finding("wrong", 1.0)}) == "cpu"
    assert quickest({"cpu": Finding(step_s=2.0), "dml": Finding(step_s=None)}) == "cpu"
    assert quickest({"cpu": Finding(step_s=2.0), "dml": Finding(step_s=1.0)}) == "dml"


# --- by name --------------------------------------------------------------------------------


def test_who_is_asked_for_runs_although_it_is_slower_and_that_is_said(
    machine: Callable[..., Machine],
) -> None:
    some = machine(cpu=CPU, openvino=Kind(0.005, Placement(3, {})))
    assert some.asked("openvino") == "openvino"
    assert some.said[1:] == [
        "the draft runs on openvino: 3 of 3 nodes",
        "  a step: cpu 4.00 ms, openvino 5.00 ms: --provider cpu would be quicker",
    ]
    quick = machine(cpu=CPU, dml=Kind(0.001))
    assert quick.asked("dml") == "dml"
    assert quick.said[1:] == ["the draft runs on dml"]


def test_no_cache_that_can_be_written_is_no_reason_to_fail(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert machine(cpu=CPU, cuda=Kind(0.001)).auto() == "cuda"
