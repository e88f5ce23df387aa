"""Rows over large vocabularies: the same tokens as the dense way, bit for bit.

Oracle: ``sampler.py`` without ``large_rows.py``, which itself is held against the scalar
specification in ``test_targets_sampler.py``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.sampling import torch_large_rows as large_rows
from edgespec.sampling import torch_sampler as sampler
from edgespec.sampling.torch_sampler import SampleBlock, choose_tokens
from edgespec.sampling.torch_token_counts import TokenCounts

SIZES = (61, 1000, 5003, 20_000)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cut a tensor anywhere, and the dense way is then another in the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _line(dice: np.random.Generator, size: int) -> torch.Tensor:
    """Peaked, broad, flat, and on a coarse grid, so that many are equal; some with holes."""
    normal = dice.standard_normal(size).astype(np.float32)
    kind = dice.integers(5)
    if kind == 0:
        normal *= np.float32(2.5)
        normal[dice.integers(0, size, 20)] += 12
    elif kind == 1:
        normal *= np.float32(2)
    elif kind == 2:
        normal *= np.float32(1e-3)
    elif kind == 3:
        normal = np.round(normal * 4) / np.float32(2)
    else:
        normal[:] = dice.integers(-3, 3)
    if dice.random() < 0.3:
        normal[dice.random(size) < dice.choice([0.5, 0.99])] = -np.inf
        normal[dice.integers(size)] = 1.0
    return torch.from_numpy(normal)


def _params(rng: random.Random) -> SamplingParams:
    plain = rng.random() < 0.5
    return SamplingParams(
        temperature=rng.choice([0.0, 1e-5, 0.05, 0.7, 1.0, 1.0, 7.0, 100.0]),
        top_k=rng.choice([0, 0, 1, 5, 40, 300, 5000]),
        top_p=rng.choice([1.0, 1.0, 1e-320, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12]),
        min_p=rng.choice([0.0, 0.0, 1e-320, 0.05, 1.0]),
        repetition_penalty=1.0 if plain else rng.choice([1.0, 0.8, 1.3, 100.0]),
        presence_penalty=0.0 if plain else rng.choice([0.0, 0.5, -1.0]),
        frequency_penalty=0.0 if plain else rng.choice([0.0, 0.3, -0.2]),
        logit_bias={} if plain else rng.choice([{}, {3: 4.0, 7: -9.0, 40_000: 1.0}]),
        seed=rng.randrange(1 << 64),
    )


def _block(rng: random.Random, size: int, rows: int) -> SampleBlock:
    counts = TokenCounts(5)
    counts.follow([rng.randrange(size) for _ in range(30)], 0)
    nodes = tuple([rng.randrange(size) for _ in range(rows - 1)])
    before = counts.before(nodes, tuple(range(-1, rows - 2)))
    return SampleBlock("s", _params(rng), range(30, 30 + rows), before)


@pytest.mark.parametrize("size", SIZES)
def test_random_rows_get_the_tokens_of_the_dense_way(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, dice = random.Random(size), np.random.default_rng(size)
    doubtful = 0
    seen: list[int | None] = []

    def spied(row: large_rows.Row, params: SamplingParams, position: int) -> int | None:
        seen.append(large_rows.choose_in_row(row, params, position))
        return seen[-1]

    monkeypatch.setattr(sampler, "choose_in_row", spied)
    for _ in range(30):
        blocks = [_block(rng, size, rng.randrange(1, 4)) for _ in range(3)]
        rows = sum(len(block.positions) for block in blocks)
        table = torch.stack([_line(dice, size) for _ in range(rows)])
        if rng.random() < 0.2:
            table = table.bfloat16()
        before = table.clone()
        monkeypatch.setattr(sampler, "_LARGE_VOCABULARY", 1 << 30)
        wanted = choose_tokens(table, blocks)
        monkeypatch.setattr(sampler, "_LARGE_VOCABULARY", 1)
        seen.clear()
        assert choose_tokens(table, blocks) == wanted
        doubtful += seen.count(None)
        assert torch.equal(table, before)
    assert doubtful < 30  # of some 180 rows, so that the rest was really told row by row


def test_a_loud_token_far_behind_can_win() -> None:
    """All tokens but one are nearly hopeless: the bound must not be too tight."""
    params = SamplingParams(temperature=1.0, seed=9)
    row = np.zeros(50_000, dtype=np.float32)
    row[7] = 13.0
    winners = {large_rows.choose_in_row(row, params, position) for position in range(200)}
    dense = {
        sampler._draw(sampler._padded(torch.from_numpy(row)[None]), [params], [position])[0]
        for position in range(200)
    }
    assert winners == dense
    assert len(winners) > 2


def test_a_nucleus_that_rounding_would_decide_is_left_to_the_dense_way() -> None:
    row = np.zeros(1024, dtype=np.float32)
    assert large_rows.choose_in_row(row, SamplingParams(temperature=1.0, top_p=0.5), 3) is None
    told = large_rows.choose_in_row(row, SamplingParams(temperature=1.0, top_p=0.4999), 3)
    assert told is not None
