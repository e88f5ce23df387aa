"""Memory sizing: how many cached tokens fit beside the weights and the largest pass.

A verifier with a memory budget instead of a number of tokens loads its weights, measures the peak
memory of its largest pass, and uses what is left for the pool, less a copy of one layer's keys
and values. A share of a GPU includes what other programs have there. A draft model that is loaded
afterwards gets a pool of as many tokens out of the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.core.device.memory import AUTO, AUTO_SHARE, MemoryBudget
from edgespec.core.ports import PassRequest, UnsupportedModelError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.operating_system import peak_resident_bytes
from edgespec.telemetry.process_memory import machine_memory, resident_bytes
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE, KvPool

TOKENS_NEEDED = 160
"""Room for the self-test's longest schedule: a prompt and siblings in whole blocks, and another
session."""
USUAL_TOKENS = 65_536
"""Most tokens of a pool that the operator does not size."""
_LEAST_CPU_TOKENS = 8192
"""Least tokens of such a pool on a CPU, if a quarter of the free memory holds them."""
_CPU_SHARE = 0.25
"""Share of a machine's free memory that such a pool may take."""
SESSION_ROWS = 16
"""Rows of each session in the measured pass: a fed token and a chain of nodes."""

# The measured pass has at most this many rows on a CPU, and its memory is scaled up: a larger one
# would take a minute.
_MOST_CPU_ROWS = 256
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Memory of a draft model beside the target, in bytes."""

    weights: int = 0
    token_bytes: int = 0
    """Keys and values of a token, all layers."""

    def __str__(self) -> str:
        return (
            f"the draft model's weights take {_show_gib(self.weights)}, its keys and values "
            f"{self.token_bytes / 1024:.1f} KiB a token"
        )


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """Memory for keys and values that the operator grants. Exactly one of ``kv`` and ``gpu_share``
    is given."""

    kv: MemoryBudget | None
    """The budget of the pool alone. A share counts the machine's or the GPU's memory."""
    gpu_share: float | None
    """The share of a GPU's memory for everything on it: weights, pool, passes, other programs."""
    rows: int
    """Rows of the largest pass."""
    draft: DraftMemory = DraftMemory()
    """Memory of the draft model that will be loaded beside the target."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory figures that are known before the pool is made, in bytes."""

    total: int
    free: int
    """Free memory with the weights loaded, between passes."""
    activations: int
    """Peak memory of the largest pass."""
    rows: int
    """Rows of the largest pass."""
    token_bytes: int
    """Keys and values of a token, all layers."""
    layer_count: int

    def __str__(self) -> str:
        return (
            f"{_show_gib(self.total)} of memory, {_show_gib(self.free)} free beside the weights, a "
            f"pass of {self.rows} rows takes {_show_gib(self.activations)}, keys and values "
            f"{self.token_bytes / 1024:.1f} KiB a token"
        )


def pool_tokens(budget: PoolBudget, figures: MemoryFigures, most_tokens: int) -> int:
    """Return how many tokens the pool may hold, in whole blocks.

    With a share of a GPU, or ``auto``, they are at most ``most_tokens``, which all sessions
    together can fill. Raises ``UnsupportedModelError`` with all figures where the pool would be too
    small to serve, or larger than what is free."""
    # A pass makes a copy of one layer's keys and values, so one more layer is counted.
    with_copy = figures.token_bytes * (figures.layer_count + 1) / figures.layer_count
    draft, stated = budget.draft, str(figures)
    if draft.weights:
        stated += f", {draft}"
    token_bytes, with_copy = figures.token_bytes + draft.token_bytes, with_copy + draft.token_bytes
    free = figures.free - draft.weights
    room = free - figures.activations
    if budget.kv is None:
        assert budget.gpu_share is not None
        named = f"gpu_memory_utilization is {budget.gpu_share:g}"
        left = budget.gpu_share * figures.total - (figures.total - free)
    else:
        named, left = f"kv_budget is {budget.kv.text}", AUTO_SHARE * free
    if budget.kv is None or budget.kv.text == AUTO:
        tokens = min((left - figures.activations) / with_copy, most_tokens)
    else:
        granted = budget.kv.bytes or int((budget.kv.share or 0.0) * figures.total)
        tokens = granted / token_bytes
    whole = int(max(0.0, tokens)) // BLOCK_SIZE * BLOCK_SIZE
    if whole < TOKENS_NEEDED:
        raise UnsupportedModelError(
            f"{named}: that leaves room for {whole} cached tokens, but at least {TOKENS_NEEDED} "
            f"are needed ({stated})"
        )
    if whole * with_copy > room:
        fits = int(max(0.0, room) / with_copy) // BLOCK_SIZE * BLOCK_SIZE
        raise UnsupportedModelError(
            f"{named}: {whole} cached tokens take {_show_gib(whole * token_bytes)}, but there "
            f"is room for {fits} ({stated})"
        )
    return whole


def default_tokens(context_length: int, token_bytes: int, device: torch.device) -> int:
    """Return how many tokens, in whole blocks, the pool holds if the operator sizes it in no way.

    A GPU is there to serve many sessions: ``USUAL_TOKENS``, if they fit. On a CPU the pool lies in
    the memory of everything else, and few sessions run at a time: one context of the model, at
    least ``_LEAST_CPU_TOKENS``, within a quarter of the free memory. ``token_bytes`` are the keys
    and values of a token."""
    on_cpu = device.type == "cpu"
    wanted = min(USUAL_TOKENS, max(context_length, _LEAST_CPU_TOKENS)) if on_cpu else USUAL_TOKENS
    free, _ = _free_and_total(device)
    room = int((_CPU_SHARE if on_cpu else AUTO_SHARE) * free / token_bytes)
    return max(TOKENS_NEEDED, min(wanted, room) // BLOCK_SIZE * BLOCK_SIZE)


def check_draft_fits(draft: DraftMemory, tokens: int, device: torch.device) -> None:
    """Raise ``UnsupportedModelError`` with all figures when a draft model with a pool of ``tokens``
    does not fit beside what is loaded."""
    free, _ = _free_and_total(device)
    needed = draft.weights + tokens * draft.token_bytes
    if needed > free:
        raise UnsupportedModelError(
            f"the draft model takes {_show_gib(needed)} with {tokens} cached tokens, as many as "
            f"the target has, but {_show_gib(free)} are free beside the target ({draft}); give a "
            "smaller draft, or fewer limits.max_cached_tokens"
        )


def starting_tokens(budget: PoolBudget, device: torch.device) -> int:
    """Return the tokens that the self-test and the measured pass need. Raises ``ValueError`` for a
    share of a GPU on another device."""
    if budget.gpu_share is not None and device.type != "cuda":
        raise ValueError(
            f"gpu_memory_utilization is {budget.gpu_share:g}, but the model is on {device}; give "
            "--kv-budget instead"
        )
    rows = measured_rows(budget.rows, device)
    return max(TOKENS_NEEDED, -(-rows // SESSION_ROWS) * SESSION_ROWS)


def measured_rows(rows: int, device: torch.device) -> int:
    """Return how many rows the measured pass has when the largest has ``rows``."""
    return rows if device.type == "cuda" else min(rows, _MOST_CPU_ROWS)


def memory_figures(
    budget: PoolBudget,
    run: Callable[[Sequence[PassRequest]], object],
    pool: KvPool,
    vocabulary_size: int,
) -> MemoryFigures:
    """Measure ``run``, a pass over ``pool`` of ``measured_rows`` rows (rounded up to whole
    sessions), each sampled, and the memory beside it."""
    device, layer_count = pool.device, pool.data.shape[1]
    rows = measured_rows(budget.rows, device)
    chain = tuple(range(-1, SESSION_ROWS - 2))
    tokens = (1 % vocabulary_size,) * len(chain)
    keys = [f"\0measured {index}" for index in range(-(-rows // SESSION_ROWS))]
    batch = [PassRequest(key, 0, (0,), tokens, chain) for key in keys]
    for key in keys:
        pool.open(key, 1, SamplingParams(temperature=1.0, top_p=0.9))
    try:
        measured = _cuda_peak if device.type == "cuda" else _resident_peak
        peak = measured(lambda: run(batch), device)
    finally:
        for key in keys:
            pool.close(key)
    free, total = _free_and_total(device)
    activations = int(peak * (budget.rows / rows))
    return MemoryFigures(total, free, activations, budget.rows, pool.token_bytes, layer_count)


def _free_and_total(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)
    machine = machine_memory()
    return machine.available, machine.total


def _cuda_peak(run: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _resident_peak(run: Callable[[], object], _: torch.device) -> int:
    """Bytes by which the process grows while ``run`` runs, or by its earlier peak if that stays."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    before = resident_bytes()
    run()
    try:
        status = Path("/proc/self/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        peak = peak_resident_bytes() or resident_bytes()
    return max(0, peak - before)


def _show_gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.2f} GiB"
