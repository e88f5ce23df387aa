"""The pool of keys and values: its blocks, a pass over it by column, and its size by memory; the
toy target's check of its cache, and the paced target's clock.

Oracles: checks that look at each request by itself; arithmetic by hand on made-up figures, and a
real target whose pool has the size that the budget allows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edgespec.config import VerifierConfig
from edgespec.config.verifier import LimitsSection
from edgespec.core.device.memory import MachineMemory, parse_budget
from edgespec.core.ports import (
    CapacityError,
    ModelInfo,
    PassRequest,
    PassResult,
    TargetModel,
    UnsupportedModelError,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape
from edgespec.core.toy_model import ToyModel
from edgespec.verifier.build import pool_budget
from edgespec.verifier.targets import kv_pool, memory_sizing
from edgespec.verifier.targets import torch_target as target_module
from edgespec.verifier.targets.paced import PacedTarget
from edgespec.verifier.targets.pass_batch import PassBatch
from edgespec.verifier.targets.pass_requests import check_batch
from edgespec.verifier.targets.toy import ToyTarget
from tests.kit.live_verifier import toy_text
from tests.kit.tiny_checkpoints import write_checkpoint
from tests.present import require
from tests.verifier.torch_schedules import GREEDY, decode_beside, random_tree, torch_target

INFO = ModelInfo("tiny", "v", 50, 60)


def _request(rng: random.Random, key: str, vocabulary_size: int) -> PassRequest:
    """Return a random request that is usually right."""
    tokens, parents = random_tree(rng, rng.choice([0, 0, 3]), vocabulary_size)
    if rng.random() < 0.05:
        parents = (*parents, rng.choice([-2, 0, 9]))
    feed = tuple(rng.choices(range(rng.choice([0, 0, 0, -1]), vocabulary_size), k=rng.randrange(4)))
    if rng.random() < 0.9:
        feed = feed or (1,)
    if rng.random() < 0.05:
        feed = (*feed, rng.choice([vocabulary_size, 1 << 63, 1 << 70]))
    cached = rng.choice([-1, 0, 0, 9, 20, 56])
    return PassRequest(
        key, max(cached, -(rng.random() < 0.1)), feed, tokens, parents, rng.random() < 0.9
    )


def _cached_lengths(cached: dict[str, int]) -> Callable[[PassRequest], int]:
    return lambda request: cached[request.key]


def test_what_columns_let_through_the_checks_let_through_and_the_other_way_round() -> None:
    rng, right = random.Random(2), 0
    for _ in range(600):
        keys = [rng.choice("abcdefgh") for _ in range(rng.randrange(1, 4))]
        batch = [_request(rng, key, INFO.vocabulary_size) for key in keys]
        cached = {key: rng.choice([0, 20, 56]) for key in keys}
        lengths = np.array([cached[key] for key in keys])
        try:
            check_batch(batch, _cached_lengths(cached), INFO)
        except (ValueError, RuntimeError):
            wanted = False
        else:
            wanted = True
        try:
            found = PassBatch.of(batch).is_surely_valid(lengths, INFO)
        except (ValueError, OverflowError):
            found = False
        assert found == wanted, batch
        right += found
    assert 60 < right < 540


class _Waits(TorchDispatchMode):
    """A mode that records every operation that would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(part in name for part in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_the_model_never_waits_for_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers searches for packed sequences, or masks, by the values of tensors; it must not
    do so here."""
    target = torch_target(write_checkpoint(tmp_path), max_cached_tokens=256, canonical=False)
    call, waits = target_module._call_model, _Waits()

    def watched(*args: Any) -> Any:
        with waits:
            return call(*args)

    monkeypatch.setattr(target_module, "_call_model", watched)
    for key in "ab":
        target.open(key, 3, SamplingParams(temperature=0.8))
    target.forward([PassRequest("a", 0, (1, 2, 3)), PassRequest("b", 0, (4,), sample=False)])
    target.forward([PassRequest("a", 3, (4,), (5, 6), (-1, -1)), PassRequest("b", 1, (5, 6))])
    assert waits.seen == []


def _pool(blocks: int) -> kv_pool.KvPool:
    return kv_pool.KvPool(2, 4, blocks * kv_pool.BLOCK_SIZE, torch.float32, torch.device("cpu"))


def _pass(pool: kv_pool.KvPool, request: PassRequest) -> None:
    pool.reserve([request])
    pool.commit(request)


def test_a_wrong_table_is_refused_before_anything_changes() -> None:
    pool = _pool(4)
    pool.open("a", 1, GREEDY)
    _pass(pool, PassRequest("a", 0, (1, 2), blocks=(3,)))
    for blocks, message in (
        ((1,), "17 rows, but its blocks hold 16"),
        ((1, 5), "blocks 1 to 5, limit 4"),
        ((0, 1), "blocks 0 to 1, limit 4"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.reserve([PassRequest("a", 1, (5,) * 16, blocks=blocks)])
        assert (pool.sequence("a").tokens, pool.free_tokens) == ([1, 2], 64)


def test_exhaustion_changes_nothing() -> None:
    pool = _pool(3)
    for key in "ab":
        pool.open(key, 1, GREEDY)
    _pass(pool, PassRequest("a", 0, (1, 2)))
    big = [PassRequest("a", 1, (5,) * 20), PassRequest("b", 0, (6,) * 20)]
    with pytest.raises(CapacityError, match="needs 16 more cached tokens than the 32 free of 48"):
        pool.reserve(big)
    assert (pool.sequence("a").tokens, pool.free_tokens) == ([1, 2], 32)
    _pass(pool, big[0])
    assert pool.sequence("a").tokens == [1, *[5] * 20]


def test_nodes_of_a_dropped_tree_cannot_be_kept() -> None:
    pool = _pool(2)
    pool.open("a", 1, GREEDY)
    _pass(pool, PassRequest("a", 0, (1,), (2, 3), (-1, 0)))
    with pytest.raises(ValueError, match=r"nodes \[1\] of 'a' are not a path"):
        pool.keep("a", [1])
    pool.keep("a", [0, 1])
    with pytest.raises(ValueError, match="not a path"):
        pool.keep("a", [0])
    with pytest.raises(ValueError, match="'b' is not open"):
        pool.keep("b", [])


MIB = 1 << 20
# Each of 4 layers takes 1 KiB per token; with the copy of one layer, 5 KiB.
FIGURES = memory_sizing.MemoryFigures(
    total=1000 * MIB,
    free=600 * MIB,
    activations=100 * MIB,
    rows=64,
    token_bytes=4096,
    layer_count=4,
)


def _budget(kv: str = "", gpu_share: float | None = None) -> memory_sizing.PoolBudget:
    return memory_sizing.PoolBudget(parse_budget(kv) if kv else None, gpu_share, rows=64)


@pytest.mark.parametrize(
    ("kv", "gpu_share", "message"),
    [
        ("512KiB", None, "kv_budget is 512KiB: that leaves room for 128 cached tokens, but at"),
        ("", 0.5, "gpu_memory_utilization is 0.5: that leaves room for 0 cached"),
        (
            "410MiB",
            None,
            (
                "104960 cached tokens take 0.40 GiB, but there is room for 102400 "
                "\\(0.98 GiB of memory, 0.59 GiB free beside the weights, a pass of "
                "64 rows takes 0.10 GiB, keys and values 4.0 KiB a token\\)"
            ),
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused_with_all_figures(
    kv: str, gpu_share: float | None, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        memory_sizing.pool_tokens(_budget(kv, gpu_share), FIGURES, 1 << 30)


@pytest.mark.parametrize("canonical", [None, False])
def test_a_target_measures_its_largest_pass_and_serves_from_the_pool_that_fits(
    tmp_path: Path, canonical: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path)
    asked: list[int] = []

    def machine() -> MachineMemory:
        asked.append(1)
        return MachineMemory(total=8 << 30, available=4 << 30, resident=0)

    budget = memory_sizing.PoolBudget(parse_budget("1MiB"), None, rows=100)
    monkeypatch.setattr(memory_sizing, "machine_memory", machine)
    sized = torch_target(folder, canonical=canonical, pool_budget=budget)
    # 2 layers x 2 x 2 heads x 16 numbers of 4 bytes are 512 bytes per token.
    assert sized.cache.block_count * kv_pool.BLOCK_SIZE == sized._pool.free_tokens == MIB // 512
    assert asked == [1]
    assert sized.mode.endswith(", 2048 cached tokens in 1 MiB")
    results = []
    for served in (sized, torch_target(folder, canonical=canonical)):
        served.open("s", 2, SamplingParams())
        results.append(served.forward([PassRequest("s", 0, (1, 2))]))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("device", "context", "token_bytes", "free", "tokens"),
    [
        pytest.param("cpu", 8192, 46_080, 16 << 30, 8192, id="one context"),
        pytest.param("cpu", 512, 512, 16 << 30, 8192, id="a short context"),
        pytest.param("cpu", 131_072, 1024, 16 << 30, 65_536, id="a long context"),
        pytest.param("cpu", 40_960, 229_376, 8 << 30, 9360, id="a quarter of the free memory"),
        pytest.param("cpu", 40_960, 1 << 20, 1 << 20, 160, id="no memory"),
        pytest.param("cuda", 8192, 23_040, 40 << 30, 65_536, id="a gpu"),
        pytest.param("cuda", 8192, 1 << 20, 8 << 30, 7360, id="a full gpu"),
    ],
)
def test_a_pool_that_nobody_sizes_fits_the_machine(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    context: int,
    token_bytes: int,
    free: int,
    tokens: int,
) -> None:
    """Whole blocks of 16 tokens; nine tenths of what is free on a GPU."""
    monkeypatch.setattr(memory_sizing, "_free_and_total", lambda device: (free, 64 << 30))
    assert memory_sizing.default_tokens(context, token_bytes, torch.device(device)) == tokens


def test_a_target_that_nobody_sizes_shows_its_pool(tmp_path: Path) -> None:
    target = torch_target(write_checkpoint(tmp_path), canonical=False, max_cached_tokens=None)
    assert target.cache.tokens == 8192
    assert target.mode.endswith(", 8192 cached tokens in 4 MiB")


def test_a_share_of_a_gpu_is_for_a_gpu(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    message = "gpu_memory_utilization is 0.9, but the model is on cpu; give --kv-budget instead"
    with pytest.raises(ValueError, match=message):
        torch_target(folder, pool_budget=_budget(gpu_share=0.9))


@pytest.mark.gpu
def test_on_a_gpu_the_share_holds_after_the_pool_is_made(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    torch.cuda.empty_cache()
    budget = memory_sizing.PoolBudget(None, 0.5, rows=64)
    target = torch_target(folder, device="cuda", pool_budget=budget, max_sessions=8)
    assert target._pool.free_tokens == 8 * 256
    free, total = torch.cuda.mem_get_info()
    assert total - free < 0.5 * total


def test_settings_become_a_budget_or_none() -> None:
    assert pool_budget(VerifierConfig()) is None
    limits = LimitsSection(kv_budget="4GiB", max_rows_per_pass=7)
    budget = require(pool_budget(VerifierConfig(limits=limits)))
    assert (require(budget.kv).bytes, budget.gpu_share, budget.rows) == (4 << 30, None, 7)
    limits = LimitsSection(gpu_memory_utilization=0.8)
    share = require(pool_budget(VerifierConfig(limits=limits)))
    assert (share.kv, share.gpu_share) == (None, 0.8)


SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, presence_penalty=0.4)
TEXT = tuple(range(1, 10))


def test_any_schedule_gives_the_specified_text() -> None:
    model, prompts = ToyModel(seed=2), [[3, 1, 4, 1, 5], list(range(12))]
    every = [SamplingParams(max_tokens=60), SAMPLED]
    texts = [toy_text(prompt, one, model) for prompt, one in zip(prompts, every, strict=True)]
    assert decode_beside(ToyTarget(model), prompts, texts, every) == texts


def _make_opened_target(**options: int) -> ToyTarget:
    target = ToyTarget(**options)  # type: ignore[arg-type]
    target.open("s", 3, SamplingParams())
    target.forward([PassRequest("s", 0, (1, 2, 3), (4, 5, 6), (-1, 0, 0))])
    return target


def test_what_the_cache_does_not_hold_is_an_error() -> None:
    target = _make_opened_target()
    with pytest.raises(ValueError, match="cache_length is 4, but 3 tokens are cached"):
        target.forward([PassRequest("s", 4, (7,))])
    for nodes in ([1], [0, 0], [1, 0], [3]):
        with pytest.raises(ValueError, match="not a path"):
            _make_opened_target().keep("s", nodes)
    target.keep("s", [0, 2])
    assert target._sequence("s").tokens == [1, 2, 3, 4, 6]
    target.forward([PassRequest("s", 3, (4, 6, 7))])
    with pytest.raises(ValueError, match="differ from the committed"):
        target.forward([PassRequest("s", 3, (4, 5))])


def _make_sharing_target() -> ToyTarget:
    """Return a target with two sequences of one text; the first one has filled blocks 1 to 3 of
    four rows each."""
    target = ToyTarget(ToyModel(vocabulary_size=32, order=2), cache=CacheShape(8, 4))
    penalised = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.4)
    for key in ("first", "second"):
        target.open(key, len(TEXT), penalised, TEXT)
    target.forward([PassRequest("first", 0, TEXT, blocks=(1, 2, 3))])
    return target


def test_a_block_of_another_text_is_refused_though_its_tokens_are_the_same() -> None:
    target = _make_sharing_target()
    other = (9, *TEXT[1:])
    target.open("other", len(other), SamplingParams(), other)
    target.forward([PassRequest("other", 0, other[:4], sample=False, blocks=(5,))])
    with pytest.raises(ValueError, match="position 4 holds another token"):
        target.forward([PassRequest("other", 8, other[8:], blocks=(5, 2, 6))])


def test_a_block_that_another_request_reads_is_not_written() -> None:
    target = _make_sharing_target()
    reads = PassRequest("first", 8, TEXT[8:], blocks=(1, 2, 3))
    writes = PassRequest("second", 4, TEXT[4:], blocks=(1, 2, 4))
    for batch in ([reads, writes], [writes, reads]):
        with pytest.raises(ValueError, match="a block that is written is another's too"):
            target.forward(batch)


class SlowTarget(ToyTarget):
    """A target that takes 20 ms per pass, on a clock that only moves during sleeps, and
    oversleeps."""

    now_s, naps = 100.0, 0

    def nap(self, seconds: float) -> None:
        self.naps += 1
        self.now_s += seconds + 2e-5

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        self.now_s += 0.02
        return super().forward(batch)


@pytest.mark.parametrize(
    ("sample", "rows", "expected_s"), [(True, 5, 0.060), (False, 5, 0.020), (True, 1, 0.044)]
)
def test_a_paced_pass_takes_its_time_in_all(sample: bool, rows: int, expected_s: float) -> None:
    inner = SlowTarget()
    port: TargetModel = PacedTarget(inner, 40.0, 4.0, inner.nap, lambda: inner.now_s)
    port.open("s", 1, SamplingParams())
    [result] = port.forward([PassRequest("s", 0, (1,) * rows, sample=sample)])
    assert inner.now_s - 100.0 == pytest.approx(expected_s, abs=2e-4)
    assert inner.naps < 40
    assert len(result.targets) == sample
    port.keep("s", [])
    port.close("s")
    assert port.info == inner.info
