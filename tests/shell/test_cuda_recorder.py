"""The recorder of CUDA graphs, without a GPU: what torch is asked for, and what failing leaves.

Oracle: the calls that a stand-in for ``torch.cuda`` has seen. That graphs compute the right things
is for ``test_graph_choice.py`` on a GPU, and for the self-test at every start.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from edgespec.verifier.targets.cuda_graphs import CudaRecorder
from edgespec.verifier.targets.graphed_passes import RecorderFull

DEVICE = torch.device("cuda", 1)
MIB = 1 << 20


class _Stream:
    def __init__(self, calls: list[str], name: str) -> None:
        self._calls, self.name = calls, name

    def wait_stream(self, other: _Stream) -> None:
        self._calls.append(f"{self.name} waits for {other.name}")


class _Cuda:
    """What of ``torch.cuda`` is used; a capture takes ``taken`` bytes, and may fail to end."""

    def __init__(self, free: int, taken: int, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.free, self.taken, self.fails = free, taken, fails
        self.mode = 0
        self.current = _Stream(self.calls, "the current one")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graph: Callable[..., Any] = self.graph
        stands_for = {
            "device": lambda device: nullcontext(),
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device: (self.free, 1 << 40),
            "graph_pool_handle": lambda: (0, 1),
            "Stream": lambda: _Stream(self.calls, "another"),
            "current_stream": lambda: self.current,
            "set_stream": lambda stream: self.calls.append(f"back on {stream.name}"),
            "stream": lambda stream: nullcontext(),
            "CUDAGraph": lambda: self,
            "graph": graph,
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": self.set_mode,
        }
        for name, stand_in in stands_for.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def set_mode(self, mode: int | str) -> None:
        self.mode = {"error": 2}.get(str(mode), 0)

    @contextmanager
    def graph(self, graph: object, **options: Any) -> Iterator[None]:
        assert graph is self
        assert (options["pool"], options["capture_error_mode"]) == ((0, 1), "thread_local")
        assert not gc.isenabled()
        self.calls.append(f"capture on {options['stream'].name}")
        yield
        self.free -= self.taken
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.calls.append("replay")


def test_work_is_done_once_beside_and_then_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(free=1 << 30, taken=3 * MIB)
    cuda.install(monkeypatch)
    recorder = CudaRecorder(DEVICE, 8 * MIB)
    modes = []

    def work() -> None:
        modes.append(cuda.mode)
        cuda.calls.append("work")

    recordings = [recorder.record(work) for _ in range(3)]
    assert cuda.calls[:5] == [
        "another waits for the current one",
        "work",
        "the current one waits for another",
        "capture on another",
        "work",
    ]
    assert modes == [2, 0] * 3  # what waits raises before there is a capture to spoil
    assert (recorder.used_bytes, recorder.largest_bytes) == (9 * MIB, 3 * MIB)
    recordings[0].replay()
    assert cuda.calls[-1] == "replay"
    with pytest.raises(RecorderFull, match="CUDA graphs take 9 MiB, limit 8 MiB"):
        recorder.record(work)
    assert gc.isenabled()


def test_nothing_is_captured_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(free=63 * MIB, taken=0)
    cuda.install(monkeypatch)
    with pytest.raises(RecorderFull, match="63 MiB are free on cuda:1"):
        CudaRecorder(DEVICE).record(lambda: cuda.calls.append("work"))
    assert cuda.calls == []


def test_a_capture_that_fails_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(free=1 << 30, taken=0, fails=True)
    cuda.install(monkeypatch)
    recorder = CudaRecorder(DEVICE)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorder.record(lambda: None)
    assert cuda.calls[-1] == "back on the current one"
    assert recorder.wrecked
    assert recorder._wreck == [cuda]
    assert gc.isenabled()


def test_what_waits_is_found_before_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(free=1 << 30, taken=0)
    cuda.install(monkeypatch)
    recorder = CudaRecorder(DEVICE)

    def waits() -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        recorder.record(waits)
    assert not any("capture" in call for call in cuda.calls)
    assert (recorder.wrecked, cuda.mode) == (False, 0)
