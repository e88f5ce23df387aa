"""A pool of keys and values that is sized by memory.

Oracle: arithmetic by hand on made-up figures; a real target whose pool has what the budget pays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from edgespec.config.verifier import LimitsSection
from edgespec.core.device.memory import MachineMemory, parse_budget
from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.build import pool_budget
from edgespec.verifier.targets.checkpoints import UnsupportedModelError
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE
from edgespec.verifier.targets.pool_size import (
    MemoryFigures,
    PoolBudget,
    pool_tokens,
)
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell.tiny_checkpoints import write_checkpoint

MIB = 1 << 20
# 1 KiB a token in each of 4 layers: with the copy of one layer, 5 KiB.
FIGURES = MemoryFigures(
    total=1000 * MIB,
    free=600 * MIB,
    activations=100 * MIB,
    rows=64,
    token_bytes=4096,
    layer_count=4,
)
MANY = 1 << 30


def _machine() -> MachineMemory:
    return MachineMemory(total=1000 * MIB, available=600 * MIB, resident=100 * MIB)


def _budget(kv: str = "", gpu_share: float | None = None) -> PoolBudget:
    return PoolBudget(parse_budget(kv) if kv else None, gpu_share, rows=64, machine=_machine)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (_budget("512KiB"), "kv_budget is 512KiB: that leaves room for 128 cached tokens, but at"),
        (_budget(gpu_share=0.5), "gpu_memory_utilization is 0.5: that leaves room for 0 cached"),
        (
            _budget("410MiB"),
            r"104960 cached tokens take 0.40 GiB, but there is room for 102400 \(0.98 GiB of "
            r"memory, 0.59 GiB free beside the weights, a pass of 64 rows takes 0.10 GiB, keys and "
            r"values 4.0 KiB a token\)",
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused_with_all_figures(
    budget: PoolBudget, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        pool_tokens(budget, FIGURES, MANY)


@pytest.mark.parametrize("canonical", [None, False])
def test_a_target_measures_its_largest_pass_and_serves_from_the_pool_that_fits(
    tmp_path: Path, canonical: bool | None
) -> None:
    folder = write_checkpoint(tmp_path)
    asked: list[int] = []

    def machine() -> MachineMemory:
        asked.append(1)
        return MachineMemory(total=8 << 30, available=4 << 30, resident=0)

    def target(**options: Any) -> TorchTarget:
        return TorchTarget(
            str(folder), name="t", vocabulary="v", device="cpu", canonical=canonical, **options
        )

    budget = PoolBudget(parse_budget("1MiB"), None, rows=100, machine=machine)
    sized = target(pool_budget=budget)
    # 2 layers x 2 x 2 heads x 16 numbers of 4 bytes are 512 bytes a token.
    assert sized.cache.block_count * BLOCK_SIZE == sized.free_tokens == MIB // 512
    assert asked == [1]
    assert sized.mode.endswith(", 2048 cached tokens in 1 MiB")
    results = []
    for served in (sized, target()):
        served.open("s", 2, SamplingParams())
        results.append(served.forward([PassRequest("s", 0, (1, 2))]))
    assert results[0] == results[1]


def test_a_share_of_a_gpu_is_for_a_gpu(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    message = "gpu_memory_utilization is 0.9, but the model is on cpu; give --kv-budget instead"
    with pytest.raises(ValueError, match=message):
        TorchTarget(
            str(folder),
            name="t",
            vocabulary="v",
            device="cpu",
            pool_budget=_budget(gpu_share=0.9),
        )


@pytest.mark.gpu
def test_on_a_gpu_the_share_holds_after_the_pool_is_made(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    torch.cuda.empty_cache()
    budget = PoolBudget(None, 0.5, rows=64, machine=_machine)
    target = TorchTarget(
        str(folder), name="t", vocabulary="v", device="cuda", pool_budget=budget, max_sessions=8
    )
    assert target.free_tokens == 8 * 256
    free, total = torch.cuda.mem_get_info()
    assert total - free < 0.5 * total


def test_settings_become_a_budget_or_none() -> None:
    assert pool_budget(LimitsSection()) is None
    budget = pool_budget(LimitsSection(kv_budget="4GiB", max_rows_per_pass=7))
    assert budget is not None
    assert budget.kv is not None
    assert (budget.kv.bytes, budget.gpu_share, budget.rows) == (4 << 30, None, 7)
    assert budget.machine().total > 0
    share = pool_budget(LimitsSection(gpu_memory_utilization=0.8))
    assert share is not None
    assert (share.kv, share.gpu_share) == (None, 0.8)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 0\.8, but only one of them"):
        LimitsSection(kv_budget="1GiB", gpu_memory_utilization=0.8)
    with pytest.raises(ValueError, match="memory budget is '4': it lacks a unit"):
        LimitsSection(kv_budget="4")
