"""How many tokens of keys and values fit beside the weights and the largest pass.

A verifier that is given memory instead of a number of tokens loads its weights, measures what its
largest pass takes for a moment, and fills what is left; a copy of one layer's keys and values,
which plain mode gathers, is counted too. A share of a GPU holds all of it, what other programs have
there included; a pool with a budget of its own is refused when the rest does not fit.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.core.device.memory import AUTO, AUTO_SHARE, MachineMemory, MemoryBudget
from edgespec.core.ports import PassRequest
from edgespec.verifier.targets.canonical_mode import TOKENS_NEEDED
from edgespec.verifier.targets.checkpoints import UnsupportedModelError
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE

SESSION_ROWS = 16
"""Rows of each session in the measured pass: a fed token and a chain of nodes."""
# A CPU is not kept busy for a minute at its start: what so many rows take is scaled up.
_MOST_CPU_ROWS = 256
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """Memory for keys and values, as the operator grants it; exactly one of the first two."""

    kv: MemoryBudget | None
    """Of the pool alone; a share is one of the machine's or the GPU's memory."""
    gpu_share: float | None
    """Of a GPU's memory, for all there is on it: weights, pool, passes, other programs."""
    rows: int
    """Of the largest pass."""
    machine: Callable[[], MachineMemory]


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """What is known before the pool is made, in bytes."""

    total: int
    free: int
    """With the weights loaded, between passes."""
    activations: int
    """What the largest pass takes for a moment."""
    rows: int
    """Of that pass."""
    token_bytes: int
    """Keys and values of a token, all layers."""
    layer_count: int

    def __str__(self) -> str:
        return (
            f"{_gib(self.total)} of memory, {_gib(self.free)} free beside the weights, a pass of "
            f"{self.rows} rows takes {_gib(self.activations)}, keys and values "
            f"{self.token_bytes / 1024:.1f} KiB a token"
        )


def pool_tokens(budget: PoolBudget, figures: MemoryFigures, most_tokens: int) -> int:
    """The tokens that the pool may hold, in whole blocks; of a share of a GPU and of ``auto`` at
    most ``most_tokens``, what all sessions can fill. Raises ``UnsupportedModelError`` with all
    figures where it would be too small to serve, or larger than what is free."""
    # One more layer for the copy of a layer that a pass makes.
    with_copy = figures.token_bytes * (figures.layer_count + 1) / figures.layer_count
    room = figures.free - figures.activations
    if budget.gpu_share is not None:
        named = f"gpu_memory_utilization is {budget.gpu_share:g}"
        used = figures.total - figures.free
        tokens = (budget.gpu_share * figures.total - used - figures.activations) / with_copy
        tokens = min(tokens, most_tokens)
    else:
        assert budget.kv is not None
        named = f"kv_budget is {budget.kv.text}"
        if budget.kv.text == AUTO:
            tokens = (AUTO_SHARE * figures.free - figures.activations) / with_copy
            tokens = min(tokens, most_tokens)
        else:
            granted = budget.kv.bytes or int((budget.kv.share or 0.0) * figures.total)
            tokens = granted / figures.token_bytes
    whole = int(max(0.0, tokens)) // BLOCK_SIZE * BLOCK_SIZE
    if whole < TOKENS_NEEDED:
        raise UnsupportedModelError(
            f"{named}: that leaves room for {whole} cached tokens, but at least {TOKENS_NEEDED} "
            f"are needed ({figures})"
        )
    if whole * with_copy > room:
        fits = int(max(0.0, room) / with_copy) // BLOCK_SIZE * BLOCK_SIZE
        raise UnsupportedModelError(
            f"{named}: {whole} cached tokens take {_gib(whole * figures.token_bytes)}, but there "
            f"is room for {fits} ({figures})"
        )
    return whole


def check_budget(budget: PoolBudget, device: torch.device) -> None:
    """Raises ``ValueError`` for a share of a GPU on another device."""
    if budget.gpu_share is not None and device.type != "cuda":
        raise ValueError(
            f"gpu_memory_utilization is {budget.gpu_share:g}, but the model is on {device}; give "
            "--kv-budget instead"
        )


def starting_tokens(budget: PoolBudget, device: torch.device) -> int:
    """The pool that the self-test and the measured pass need, in tokens."""
    rows = measured_rows(budget.rows, device)
    return max(TOKENS_NEEDED, -(-rows // SESSION_ROWS) * SESSION_ROWS)


def largest_pass(rows: int, vocabulary_size: int) -> list[PassRequest]:
    """Requests of ``rows`` rows in all, rounded up to whole sessions, each sampled everywhere."""
    chain = tuple(range(-1, SESSION_ROWS - 2))
    tokens = tuple(1 % vocabulary_size for _ in chain)
    return [
        PassRequest(f"\0measured {index}", 0, (0,), tokens, chain)
        for index in range(-(-rows // SESSION_ROWS))
    ]


def measured_rows(rows: int, device: torch.device) -> int:
    """How many rows the measured pass has when the largest has ``rows``."""
    return rows if device.type == "cuda" else min(rows, _MOST_CPU_ROWS)


def memory_figures(
    budget: PoolBudget,
    run: Callable[[], object],
    *,
    token_bytes: int,
    layer_count: int,
    device: torch.device,
) -> MemoryFigures:
    """Measure ``run``, a pass of ``measured_rows`` rows, and the memory beside it."""
    scale = budget.rows / measured_rows(budget.rows, device)
    peak = _cuda_peak(run, device) if device.type == "cuda" else _resident_peak(run)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
    else:
        machine = budget.machine()
        free, total = machine.available, machine.total
    return MemoryFigures(total, free, int(peak * scale), budget.rows, token_bytes, layer_count)


def _cuda_peak(run: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _resident_peak(run: Callable[[], object]) -> int:
    """By how much the process grows while ``run`` runs, in bytes. Where the peak cannot be reset,
    one of earlier counts."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    except OSError:
        pass
    before = _status_bytes("VmRSS")
    run()
    peak = _status_bytes("VmHWM")
    if peak == 0:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return max(0, peak - before)


def _status_bytes(field: str) -> int:
    """A size of this process; 0 where the system has no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith(f"{field}:")), 0)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.2f} GiB"
