"""What stands for a GPU in tests of recorded passes: a tape of torch's operations, and the paged
kernel in torch.

A CUDA graph repeats launches on the memory that they were recorded with, and no Python runs then.
So does the tape: of each operation it keeps the function and the very tensors that went in and came
out; a replay calls the functions again and puts what comes out where it came out before. Whatever a
pass would decide in Python, or put into a tensor of its own, is that of the recorded pass, and
wrong. What waits for a value cannot be taped, as it cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgespec.verifier.targets import torch_target
from edgespec.verifier.targets.graphed_passes import GraphedPasses, RecorderFull
from edgespec.verifier.targets.paged_attention import PagedAttention
from edgespec.verifier.targets.pass_plan import PassPlan
from edgespec.verifier.targets.torch_target import TorchTarget

_WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "aten.equal")
Step = Callable[[], None]


@dataclass(slots=True)
class Tape:
    """``Recording``."""

    steps: list[Step] = field(default_factory=list)

    def replay(self) -> None:
        for step in self.steps:
            step()


class _Taping(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(part in str(func) for part in _WAITS):
            raise RuntimeError(f"{func} waits for a value")
        options = kwargs or {}
        result = func(*args, **options)
        inputs = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        held = {one.untyped_storage().data_ptr() for one in inputs if one.numel()}
        fresh = [
            place
            for place, one in enumerate(outputs)
            if one.numel() and one.untyped_storage().data_ptr() not in held
        ]
        mutable = func._schema.is_mutable
        if fresh or mutable:  # else a view: it shows what is there

            def again() -> None:
                found = tree_leaves(func(*args, **options))
                made = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
                for place in fresh:
                    outputs[place].copy_(made[place])

            self._tape.steps.append(again)
        return result


@dataclass(slots=True)
class TapeRecorder:
    """``Recorder`` with room for ``limit`` tapes, whose ``fail``-th record raises."""

    limit: int = 1 << 30
    fail: int = 0
    made: int = 0
    used_bytes: int = 0
    wrecked: bool = False
    kernel: TorchKernel | None = None
    """Whose launches are taped as well; torch's own operations in it are not."""

    def record(self, work: Step) -> Tape:
        self.made += 1
        if self.made > self.limit:
            raise RecorderFull(f"{self.limit} tapes")
        work()
        if self.made == self.fail:
            raise RuntimeError("operation not permitted when stream is capturing")
        tape = Tape()
        if self.kernel is not None:
            self.kernel.tape = tape
        try:
            with _Taping(tape):
                work()
        finally:
            if self.kernel is not None:
                self.kernel.tape = None
        self.used_bytes += 1 << 20
        return tape


class TorchKernel:
    """What ``paged_kernel.py`` computes, launched like it, in dense torch: as many programs as the
    grid says, and nothing of the pass but what is handed over."""

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.attend = _Launched(self, _attend)
        self.combine = _Launched(self, _combine)


class TritonKernel(TorchKernel):
    """The paged kernel itself, whose launches are taped; on a CPU in Triton's interpreter. Raises
    ``ImportError`` without Triton."""

    def __init__(self) -> None:
        super().__init__()
        from edgespec.verifier.targets import paged_kernel

        def attend(grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
            paged_kernel.attend[grid](*args, **constants)

        def combine(grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
            paged_kernel.combine[grid](*args, **constants)

        self.attend, self.combine = _Launched(self, attend), _Launched(self, combine)


@dataclass(slots=True)
class _Launched:
    kernel: TorchKernel
    function: Callable[..., None]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            def step() -> None:
                with torch.utils._python_dispatch._disable_current_modes():
                    self.function(grid, *args, **constants)

            step()
            if self.kernel.tape is not None:
                self.kernel.tape.steps.append(step)

        return launch


def _attend(
    grid: tuple[int, int, int],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    partial: torch.Tensor,
    best: torch.Tensor,
    total: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    sessions: torch.Tensor,
    own_keys: torch.Tensor,
    positions: torch.Tensor,
    lines: torch.Tensor,
    table_width: int,
    line_width: int,
    row_width: int,
    query_row_stride: int,
    query_head_stride: int,
    row_count: int,
    head_count: int,
    scale: float,
    soft_cap: float,
    window: int,
    **constants: Any,
) -> None:
    """Keys by one share alone: the other shares are empty."""
    tile_count, kv_heads, splits = grid
    head_dim, share, block = (constants[name] for name in ("HEAD_DIM", "SHARE", "BLOCK_SIZE"))
    assert (splits, table_width) == (constants["SPLITS"], tables.shape[1])
    assert (query.stride(1), query.stride(0)) == (query_row_stride, query_head_stride)
    best[1:], total[1:], partial[1:] = -torch.inf, 0.0, 0.0
    seen_by_row = lines.view(row_count, line_width)
    for tile in range(tile_count):
        session, first, count = tiles[3 * tile : 3 * tile + 3].tolist()
        assert count * share <= constants["ROWS"]
        table, first_row, base, length = sessions[4 * session : 4 * session + 4].tolist()
        cached = int(own_keys[first_row])
        key = torch.arange(length)
        slots = tables[table, key // block].long() * block + key % block
        assert row_width == keys.shape[1]
        k = keys[slots].float().view(length, kv_heads, head_dim)
        v = values[slots].float().view(length, kv_heads, head_dim)
        key_positions = key.clone()
        nodes = range(base, length) if count else range(0)
        for node in nodes:
            key_positions[node] = positions[first_row + node - cached]
        for row in range(first, first + count):
            own = int(own_keys[row])
            seen = key < min(own + 1, base)
            if own >= base:
                seen[base:] |= seen_by_row[row, : length - base] != 0
            if constants["HAS_WINDOW"]:
                seen &= positions[row] - key_positions < window
            scores = torch.einsum(
                "hsd,khd->hsk", query[:, row].float().view(kv_heads, share, head_dim), k
            )
            scores = (scores * scale).reshape(head_count, length)
            if constants["HAS_CAP"]:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            scores = scores.masked_fill(~seen, -torch.inf)
            most = scores.amax(dim=-1)
            weights = (scores - most[:, None]).exp()
            best[0, row], total[0, row] = most, weights.sum(dim=-1)
            by_key_head = weights.view(kv_heads, share, length)
            partial[0, row] = torch.einsum("hsk,khd->hsd", by_key_head, v).reshape(
                head_count, head_dim
            )


def _combine(
    grid: tuple[int],
    partial: torch.Tensor,
    best: torch.Tensor,
    total: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    count: int,
    head_count: int,
    **constants: Any,
) -> None:
    assert grid == (count,)
    most = best.amax(dim=0)
    if constants["HAS_SINKS"]:
        most = torch.maximum(most, sinks.float())
    fade = (best - most).exp()
    sums = (fade * total).sum(dim=0)
    if constants["HAS_SINKS"]:
        sums = sums + (sinks.float() - most).exp()
    whole = (fade[..., None] * partial).sum(dim=0) / sums[..., None]
    out.copy_(whole)


def plain_target(folder: Path, **options: Any) -> TorchTarget:
    """A target in plain mode on a CPU, unless ``options`` say otherwise."""
    settings = {"device": "cpu", "canonical": False, "max_cached_tokens": 2560, **options}
    return TorchTarget(str(folder), name="tiny", vocabulary="v", **settings)


def taped(
    target: TorchTarget, recorder: TapeRecorder | None = None, kernel: TorchKernel | None = None
) -> GraphedPasses:
    """``target`` serves with recorded passes from now on."""
    kernel, config = kernel or TorchKernel(), target._model.config
    attention = PagedAttention(
        config.num_attention_heads, config.num_key_value_heads, torch.device("cpu"), kernel
    )
    recorder = recorder or TapeRecorder()
    recorder.kernel = kernel

    def call(plan: PassPlan) -> torch.Tensor:
        return torch_target._call_model(target._model, plan, target.info.vocabulary_size)

    target._attention = attention
    target._graphs = GraphedPasses(call, target._pool, attention, recorder)
    return target._graphs
