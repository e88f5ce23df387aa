"""The block pool's account, and the layout of a pass. No model."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from edgespec.core.ports import CapacityError, PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.canonical_attention import CanonicalAttention, CanonicalLayout
from edgespec.verifier.targets.grouped_attention import GroupedAttention, GroupedLayout
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE, BlockTables, KvPool
from edgespec.verifier.targets.pass_plan import PassPlan, plan_pass
from edgespec.verifier.targets.row_tiles import RowTiles

GREEDY = SamplingParams()


def _pool(blocks: int) -> KvPool:
    return KvPool(2, 4, blocks * BLOCK_SIZE, torch.float32, torch.device("cpu"))


def _pass(pool: KvPool, request: PassRequest) -> None:
    """Reserve, write each row's token id as its key, commit: what a forward pass does."""
    pool.reserve([request])
    stop = request.cache_length + request.row_count
    slots = pool.sequence(request.key).slots(stop)[request.cache_length :]
    tokens = torch.tensor([*request.feed, *request.tokens], dtype=torch.float32)
    pool.data[:, :, slots] = tokens[:, None].expand(2, 2, -1, 4)
    pool.commit(request)


def _keys(pool: KvPool, key: str) -> list[float]:
    sequence = pool.sequence(key)
    rows: list[float] = pool.data[1, 1, sequence.slots(sequence.length), 3].tolist()
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


def test_tables_of_requests_are_used_as_they_are() -> None:
    pool = _pool(4)
    for key in "ab":
        pool.open(key, 1, GREEDY)
    _pass(pool, PassRequest("a", 0, (7,) * 20, blocks=(4, 2)))
    _pass(pool, PassRequest("b", 0, (8,) * 5, (9, 6), (-1, -1), blocks=(1,)))
    pool.keep("b", [1])
    assert _keys(pool, "a") == [7.0] * 20
    assert _keys(pool, "b") == [8.0] * 5 + [6.0]
    assert pool.data[0, 0, 4 * BLOCK_SIZE, 0] == 7.0
    _pass(pool, PassRequest("a", 0, (5,) * 3, blocks=(3,)))  # evicted, and computed again
    assert _keys(pool, "a") == [5.0] * 3
    assert pool.free_tokens == 4 * BLOCK_SIZE


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


def test_a_pool_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="max_cached_tokens is 15, but must be >= 16"):
        KvPool(1, 1, 15, torch.float32, torch.device("cpu"))


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
    slots = pool.sequence("a").slots(14)
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


def test_a_plain_row_sees_its_ancestors_and_itself() -> None:
    layout = _cached(canonical=False).attention
    assert isinstance(layout, GroupedLayout)
    [group] = layout.groups
    seen = group.seen()
    assert seen is not None
    mask = seen[0]
    assert mask[0].nonzero()[0].tolist() == [0, 1, 2, 3]
    assert mask[10].nonzero()[0].tolist() == [0, 1, 2, 3, 4, 6, 12, 13]
    assert mask[8].nonzero()[0].tolist() == [0, 1, 2, 3, 4, 5, 7, 11]


def test_block_tables_grow_and_rows_are_given_out_again() -> None:
    tables = BlockTables()
    rows = [tables.take() for _ in range(20)]
    for row in rows:
        tables.write(row, tuple(range(row, row + 40)))
    starts = tables.slots_of(np.array(rows), np.array([16 * 39] * 20))
    assert starts.tolist() == [16 * (row + 39) for row in rows]
    tables.give_back(3)
    assert tables.take() == 3
    tables.write(3, (7, 9))
    assert tables.slots_of(np.array([3, 3]), np.array([0, 17])).tolist() == [7 * 16, 9 * 16 + 1]


def test_key_slots_follow_tables_that_grow_shrink_and_change() -> None:
    """Oracle: the slots made of the table itself, and 0 behind the last key."""
    rng = random.Random(4)
    tables = BlockTables()
    held: dict[int, tuple[int, ...]] = {}
    for _ in range(300):
        if len(held) < 12 and rng.random() < 0.3:
            held[tables.take()] = ()
        if held and rng.random() < 0.1:
            row = rng.choice(list(held))
            tables.give_back(row)
            del held[row]
        for row in rng.sample(list(held), rng.randrange(len(held) + 1)):
            blocks = held[row][: rng.randrange(30)] if rng.random() < 0.3 else held[row]
            held[row] = blocks + tuple(rng.choices(range(1, 99), k=rng.randrange(1, 4)))
            tables.write(row, held[row])
        rows = [row for row in held if held[row] and rng.random() < 0.7]
        if not rows:
            continue
        ends = [rng.randrange(1, BLOCK_SIZE * len(held[row]) + 1) for row in rows]
        tables.extend(np.array(rows), np.array(ends))
        found = tables.key_slots(np.array(rows), max(ends)).tolist()
        for row, end, slots in zip(rows, ends, found, strict=True):
            wanted = [
                held[row][key // BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE for key in range(end)
            ]
            assert slots == wanted + [0] * (max(ends) - end)
