"""A pass by column: what is right is let through, what is wrong is named, and nothing waits.

Oracle: ``request_checks.py``, which looks at each request by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edgespec.core.ports import CapacityError, ModelInfo, PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets import torch_target
from edgespec.verifier.targets.canonical_attention import CanonicalAttention, CanonicalLayout
from edgespec.verifier.targets.grouped_attention import GroupedAttention
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE, KvPool, Slots
from edgespec.verifier.targets.pass_batch import PassBatch
from edgespec.verifier.targets.pass_plan import PassPlan, plan_pass
from edgespec.verifier.targets.pass_requests import check_batch
from edgespec.verifier.targets.row_tiles import RowTiles
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell.random_schedules import random_tree
from tests.shell.tiny_checkpoints import write_checkpoint

INFO = ModelInfo("tiny", "v", 50, 60)


def _request(rng: random.Random, key: str, vocabulary_size: int) -> PassRequest:
    """Mostly right."""
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
        lengths = np.array([cached[request.key] for request in batch])
        try:
            check_batch(batch, _cached_lengths(cached), INFO)
        except (ValueError, RuntimeError):
            wanted = False
        else:
            wanted = True
        try:
            found = PassBatch.of(batch).surely_right(lengths, INFO)
        except (ValueError, OverflowError):
            found = False
        assert found == wanted, batch
        right += found
    assert 60 < right < 540


class _Waits(TorchDispatchMode):
    """Notes every operation that would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(part in name for part in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_the_model_never_waits_for_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks for packed sequences, or masks, by the values of tensors; not here."""
    target = TorchTarget(
        str(write_checkpoint(tmp_path / "tiny")),
        name="tiny",
        vocabulary="v",
        device="cpu",
        max_cached_tokens=256,
        canonical=False,
    )
    call, waits = torch_target._call_model, _Waits()

    def watched(*args: Any) -> Any:
        with waits:
            return call(*args)

    monkeypatch.setattr(torch_target, "_call_model", watched)
    for key in "ab":
        target.open(key, 3, SamplingParams(temperature=0.8))
    target.forward([PassRequest("a", 0, (1, 2, 3)), PassRequest("b", 0, (4,), sample=False)])
    target.forward([PassRequest("a", 3, (4,), (5, 6), (-1, -1)), PassRequest("b", 1, (5, 6))])
    assert waits.seen == []


GREEDY = SamplingParams()


def _pool(blocks: int) -> KvPool:
    return KvPool(2, 4, blocks * BLOCK_SIZE, torch.float32, torch.device("cpu"))


def _slots(pool: KvPool, key: str, stop: int) -> Slots:
    count = -(-stop // BLOCK_SIZE)
    starts = np.array(pool.sequence(key).blocks[:count], dtype=np.int64) * BLOCK_SIZE
    return (starts[:, None] + np.arange(BLOCK_SIZE)).reshape(-1)[:stop]


def _pass(pool: KvPool, request: PassRequest) -> None:
    """Reserve, write each row's token id as its key, commit: what a forward pass does."""
    pool.reserve([request])
    stop = request.cache_length + request.row_count
    slots = _slots(pool, request.key, stop)[request.cache_length :]
    tokens = torch.tensor([*request.feed, *request.tokens], dtype=torch.float32)
    pool.data[:, :, slots] = tokens[:, None].expand(2, 2, -1, 4)
    pool.commit(request)


def _keys(pool: KvPool, key: str) -> list[float]:
    sequence = pool.sequence(key)
    rows: list[float] = pool.data[1, 1, _slots(pool, key, sequence.length), 3].tolist()
    return rows


def test_random_passes_keep_what_they_should_and_leak_nothing() -> None:
    rng = random.Random(0)
    pool = _pool(40)
    texts: dict[str, list[int]] = {}
    for _ in range(400):
        key = f"s{rng.randrange(4)}"
        if key not in texts:
            pool.open(key, rng.randrange(1, 30), GREEDY)
            texts[key] = []
        text = texts[key]
        if len(text) > 100 or rng.random() < 0.03:
            pool.close(key)
            del texts[key]
            continue
        cache = len(text) - rng.choice([0, 0, 0, min(3, len(text))])
        feed = [*text[cache:], *(rng.randrange(1, 99) for _ in range(rng.randrange(1, 5)))]
        nodes = tuple(rng.randrange(1, 99) for _ in range(rng.randrange(8)))
        parents = tuple(rng.randrange(-1, i) for i in range(len(nodes)))
        _pass(pool, PassRequest(key, cache, tuple(feed), nodes, parents))
        text[cache:] = feed
        path: list[int] = []
        node = rng.randrange(-1, len(nodes))
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        if rng.random() < 0.7:
            pool.keep(key, path)
            text += [nodes[node] for node in path]
        assert pool.sequence(key).tokens == text
        assert _keys(pool, key) == [float(token) for token in text]
        assert not pool.data[:, :, :BLOCK_SIZE].any()  # the null block
    for key in texts:
        pool.close(key)
    assert pool.free_tokens == 40 * BLOCK_SIZE
    assert pool.session_count == 0


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((1,), "17 rows, but its blocks hold 16"),
        ((1, 5), "blocks 1 to 5, limit 4"),
        ((0, 1), "blocks 0 to 1, limit 4"),
    ],
)
def test_a_wrong_table_is_refused_before_anything_changes(
    blocks: tuple[int, ...], message: str
) -> None:
    pool = _pool(4)
    pool.open("a", 1, GREEDY)
    _pass(pool, PassRequest("a", 0, (1, 2), blocks=(3,)))
    with pytest.raises(ValueError, match=message):
        pool.reserve([PassRequest("a", 1, (5,) * 16, blocks=blocks)])
    assert _keys(pool, "a") == [1.0, 2.0]


def test_exhaustion_changes_nothing() -> None:
    pool = _pool(3)
    for key in "ab":
        pool.open(key, 1, GREEDY)
    _pass(pool, PassRequest("a", 0, (1, 2)))
    big = [PassRequest("a", 1, (5,) * 20), PassRequest("b", 0, (6,) * 20)]
    assert pool.missing_tokens(big) == BLOCK_SIZE
    with pytest.raises(CapacityError, match="needs 16 more cached tokens than the 32 free of 48"):
        pool.reserve(big)
    assert pool.sequence("a").tokens == [1, 2]
    assert _keys(pool, "a") == [1.0, 2.0]
    assert pool.missing_tokens(big[:1]) == 0
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
    with pytest.raises(ValueError, match="already open"):
        pool.open("a", 1, GREEDY)


#      0 - 2 - 5     a chain 0 2 5 with siblings 1, 3, 4 and 6,
#      |   |   6     and 1 - 7 - 8 as a second line
#      |   3 4
#      1 - 7 - 8
TREE = PassRequest("a", 3, (9, 9), tuple(range(10, 19)), (-1, -1, 0, 0, 0, 2, 2, 1, 7))


def _cached(canonical: bool) -> PassPlan:
    pool = _pool(4)
    pool.open("a", 1, GREEDY)
    _pass(pool, PassRequest("a", 0, (9, 9, 9)))
    pool.reserve([TREE])
    if canonical:
        plan = plan_pass(pool, [TREE], CanonicalAttention(RowTiles()), tiles=RowTiles())
    else:
        plan = plan_pass(pool, [TREE], GroupedAttention())
    assert plan.row_count == 11
    assert plan.positions[0, :11].tolist() == [3, 4, 5, 5, 6, 6, 6, 7, 7, 6, 7]
    assert plan.sampled_rows[: plan.sampled_count].tolist() == list(range(1, 11))
    slots = _slots(pool, "a", 14)
    assert plan.write_slots.tolist() == slots[3:].tolist()
    return plan


def test_a_canonical_row_sees_its_ancestors_at_their_positions() -> None:
    layout = _cached(canonical=True).attention
    assert isinstance(layout, CanonicalLayout)
    groups = layout.groups
    assert len(groups) == 2
    first_slot = BLOCK_SIZE
    seen: dict[int, list[int]] = {}
    for group in groups:
        for row, mask in zip(group.rows[: group.count].tolist(), group.masks[0], strict=False):
            assert row not in seen
            seen[row] = group.key_slots[0][mask == 0].tolist()
    line = {0: [], 1: [], 2: [0], 3: [0], 4: [0], 5: [0, 2], 6: [0, 2], 7: [1], 8: [1, 7]}
    expected = {0: [0, 1, 2], 1: [0, 1, 2, 3]}
    for node, ancestors in line.items():
        expected[2 + node] = [0, 1, 2, 3, 4, *(5 + other for other in ancestors)]
    assert seen == {row: [first_slot + k for k in keys] for row, keys in expected.items()}
