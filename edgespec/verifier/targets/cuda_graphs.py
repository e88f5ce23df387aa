"""Work on a GPU, recorded as a CUDA graph (torch.cuda.CUDAGraph).

Theory of operation. Work is first done once on a stream of its own, as torch asks for, and with
torch told to raise where it would wait for the GPU: what waits cannot be recorded, and an error is
easier to survive before a capture than in one. All graphs share a memory pool: they run one after
another, and what one leaves behind for others lies outside of it. A graph is captured only while
there is room for it twice over, since a capture that fails may leave torch's allocator in a state
that nothing repairs; whatever is left of such a one is kept, never freed, and never used.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from edgespec.verifier.targets.graphed_passes import RecorderFull

MEMORY_MAX = 1 << 30
"""What graphs may take where nobody has measured them."""
_MARGIN = 64 << 20


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: Any

    def replay(self) -> None:
        self.graph.replay()


@dataclass(slots=True)
class CudaRecorder:
    """``graphed_passes.Recorder``; its graphs take no more than about ``limit_bytes``."""

    device: torch.device
    limit_bytes: int = MEMORY_MAX
    used_bytes: int = 0
    """By how much the device's free memory has shrunk with each capture, in all."""
    largest_bytes: int = 0
    """Of one capture."""
    wrecked: bool = False
    """Whether a capture has failed: from then on nothing that has to do with graphs is freed."""
    _pool: Any = None
    _beside: Any = None
    _wreck: list[Any] = field(default_factory=list)

    def record(self, work: Callable[[], None]) -> _Graph:
        """As in the port."""
        if self.used_bytes >= self.limit_bytes:
            raise RecorderFull(
                f"CUDA graphs take {self.used_bytes >> 20} MiB, limit {self.limit_bytes >> 20} MiB"
            )
        with torch.cuda.device(self.device):
            before = self._free()
            if before < 2 * self.largest_bytes + _MARGIN:
                raise RecorderFull(f"{before >> 20} MiB are free on {self.device}")
            if self._pool is None:
                self._pool, self._beside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            self._do_once(work)
            graph = self._capture(work)
            taken = max(0, before - self._free())
        self.used_bytes += taken
        self.largest_bytes = max(self.largest_bytes, taken)
        return _Graph(graph)

    def _do_once(self, work: Callable[[], None]) -> None:
        current = torch.cuda.current_stream()
        self._beside.wait_stream(current)
        with torch.cuda.stream(self._beside), _no_waiting():
            work()
        current.wait_stream(self._beside)

    def _capture(self, work: Callable[[], None]) -> Any:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        collecting = gc.isenabled()
        gc.disable()  # freeing what uses the device is not allowed meanwhile
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._beside, capture_error_mode="thread_local"
            ):
                work()
        except BaseException:
            torch.cuda.set_stream(current)  # a capture that fails to end leaves its own
            self.wrecked = True
            self._wreck.append(graph)
            raise
        finally:
            if collecting:
                gc.enable()
        return graph

    def _free(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])


@contextmanager
def _no_waiting() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not find every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
