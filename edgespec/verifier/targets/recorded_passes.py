"""Records passes once and then repeats them: on a GPU, as CUDA graphs.

Theory of operation. A pass of a few rows is two thousand launches, each of which a GPU finishes
long before the host issues the next one. Repeated from a recording, all of them are one launch. A
recording repeats the same work on the same memory, so passes are put into buckets, each with its
own tensors, and a smaller pass is padded: rows of padding see nothing and write to block 0, tiles
without rows end at once, and their results are not read. A pass that fits no bucket, such as a long
prefill, runs without a recording. So does every pass once recording has failed; the reason is
logged, and no output changes.

Work is first done once on a separate stream, as torch requires, in a mode in which torch raises
where it would wait for the GPU. Work that waits cannot be recorded, and an error is easier to
recover from before a capture than within one. All graphs share a memory pool, because they run one
after another.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from edgespec.verifier.targets.kv_pool import BLOCK_SIZE, KvPool
from edgespec.verifier.targets.paged_attention import (
    Lines,
    PagedAttention,
    PagedLayout,
    Shape,
    find_lines,
    stage_copy,
)
from edgespec.verifier.targets.pass_batch import Indices
from edgespec.verifier.targets.pass_plan import BatchRows, PassPlan, sampled_rows, write_slots

logger = logging.getLogger(__name__)

ROWS = (64, 128, 256, 512)
_TILES = (8, 64, 256)
_KEYS = (256, 1024, 4096, 16_384)
_NODES = 64
MOST_RECORDINGS = 24
MEMORY_BYTES = 1 << 30
"""Memory that recordings may take. The last one may exceed it."""

Call = Callable[[PassPlan], torch.Tensor]
"""Computes the model over a plan and returns logits [sampled rows, vocabulary]."""
Record = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Does the work and returns a function that repeats it, and the result tensor, which every
repetition overwrites."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    rows: int
    sampled: int
    tiles: int
    most_keys: int


@dataclass(slots=True)
class _Recorded:
    shape: Shape
    wide: torch.Tensor
    """int64: tokens, positions, slots to write, sampled rows."""
    narrow: torch.Tensor
    """int32: the arrays of ``PagedLayout``."""
    plan: PassPlan
    repeat: Callable[[], None] | None = None
    logits: torch.Tensor | None = None


class RecordedPasses:
    """Recordings of one model's passes over ``pool``, whose memory must not move. Passes come one
    at a time."""

    def __init__(
        self, call: Call, pool: KvPool, attention: PagedAttention, record: Record | None = None
    ) -> None:
        self._call, self._pool, self._attention = call, pool, attention
        self._record: Record = CudaRecorder(pool.device) if record is None else record
        self._known: dict[_Bucket, _Recorded] = {}
        self.repeated = 0
        """The number of passes that were repeated from a recording."""
        self.off = ""
        """The reason why no more passes are recorded; empty while they are."""

    def run(self, rows: BatchRows) -> torch.Tensor | None:
        """Return logits [sampled rows, vocabulary], which are valid until the next pass. Return
        None, without any effect, for a pass that is not recorded."""
        sampled = sampled_rows(rows)
        lines = find_lines(rows, self._attention.tile_rows)
        bucket = _find_bucket(rows, len(sampled), lines)
        if bucket is None:
            return None
        found = self._known.get(bucket)
        if found is None:
            if self.off or len(self._known) >= MOST_RECORDINGS:
                return None
            found = self._prepared(bucket)
        _fill(found, rows, sampled, lines)
        self._pool.settle()
        if found.repeat is None:
            try:
                found.repeat, found.logits = self._record(lambda: self._call(found.plan))
            except Exception as error:  # what cannot be recorded may raise anything
                self.off = f"{type(error).__name__}: {error}"
                logger.warning("no more passes are recorded, so they are slower: %s", self.off)
                return None
            self._known[bucket] = found
        found.repeat()
        self.repeated += 1
        assert found.logits is not None
        return found.logits[: len(sampled)]

    def _prepared(self, bucket: _Bucket) -> _Recorded:
        """Allocate the inputs of a pass of this bucket's sizes. A recorded pass reads them at fixed
        addresses, so all index arrays are parts of two tensors, one for each width of integer."""
        device, tile_rows = self._pool.device, self._attention.tile_rows
        blocks = bucket.most_keys // BLOCK_SIZE
        shape = Shape(bucket.rows, bucket.tiles, bucket.tiles, blocks, _NODES, tile_rows)
        wide = torch.zeros(3 * bucket.rows + bucket.sampled, dtype=torch.int64, device=device)
        narrow = torch.zeros(sum(shape.sizes), dtype=torch.int32, device=device)
        tokens, positions, slots, sampled = wide.split([bucket.rows] * 3 + [bucket.sampled])
        layout = PagedLayout.of(self._attention.kernel, narrow, shape, bucket.most_keys)
        plan = PassPlan(
            pool=self._pool,
            row_count=bucket.rows,
            tokens=tokens[None],
            positions=positions[None],
            write_slots=slots,
            sampled_rows=sampled,
            sampled_count=bucket.sampled,
            attention=layout,
        )
        return _Recorded(shape, wide, narrow, plan)


def _find_bucket(rows: BatchRows, sampled: int, lines: Lines) -> _Bucket | None:
    """Return the smallest bucket that a pass fits into, or None."""
    row_count, tiles = _find_least(ROWS, rows.row_count), _find_least(_TILES, len(lines.tiles))
    most_keys = _find_least(_KEYS, int(rows.lengths.max()))
    shape = lines.shape
    if row_count is None or tiles is None or most_keys is None or not sampled:
        return None
    if shape.nodes > _NODES:
        return None
    return _Bucket(row_count, ROWS[0] if sampled <= ROWS[0] else row_count, tiles, most_keys)


def _fill(found: _Recorded, rows: BatchRows, sampled: Indices, lines: Lines) -> None:
    count, padded = rows.row_count, found.shape.rows
    wide = np.zeros(found.wide.numel(), dtype=np.int64)
    wide[:count] = rows.requests.tokens
    wide[padded : padded + count] = rows.positions
    wide[2 * padded : 2 * padded + count] = write_slots(rows)
    wide[3 * padded : 3 * padded + len(sampled)] = sampled
    stage_copy(wide, found.wide)
    stage_copy(lines.packed(found.shape), found.narrow)


def _find_least(sizes: tuple[int, ...], count: int) -> int | None:
    """Return the smallest of ``sizes`` that is not below ``count``, or None."""
    return next((size for size in sizes if size >= count), None)


class CudaRecorder:
    """Records work with ``torch.cuda.CUDAGraph``. Raises ``MemoryError`` once graphs have taken
    ``MEMORY_BYTES``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream(device)
        self._used = 0

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        if self._used >= MEMORY_BYTES:
            raise MemoryError(f"recorded passes take {self._used >> 20} MiB")
        with torch.cuda.device(self._device):
            before = torch.cuda.memory_reserved()
            current = torch.cuda.current_stream()
            self._beside.wait_stream(current)
            with torch.cuda.stream(self._beside), _no_waiting():
                work()
            current.wait_stream(self._beside)
            torch.cuda.synchronize()
            graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
            gc.disable()  # freeing what uses the device is not allowed meanwhile
            try:
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._beside, capture_error_mode="thread_local"
                ):
                    result = work()
            finally:
                torch.cuda.set_stream(current)  # a capture that fails to end leaves its own
                if collecting:
                    gc.enable()
            self._used += max(0, torch.cuda.memory_reserved() - before)

        def repeat() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return repeat, result


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
