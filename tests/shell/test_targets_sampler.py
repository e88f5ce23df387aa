"""torch's noise and sampler against the scalar specification."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

import torch

from edgespec.core.ports import ModelOutputError
from edgespec.core.protocol.sampling import SamplingParams, choose, warp
from edgespec.core.protocol.sampling import noise_bits as scalar_bits
from edgespec.sampling import tensors

SIZE = 61
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SEEDS = [0, 1, 0xFFFFFFFF, 1 << 32, (1 << 64) - 1, 0x123456789ABCDEF0]
POSITIONS = [0, 1, 1000, (1 << 20) + 3, 77, 5]


def _block(
    params: SamplingParams,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    key: str = "s",
) -> tensors.SampleBlock:
    """One row, whose text so far is ``prompt`` and ``output``."""
    counts = tensors.TextCounts(len(prompt))
    counts.follow([*prompt, *output], 0)
    return tensors.SampleBlock(key, params, (position,), counts.before((), ()))


@pytest.mark.parametrize("device", DEVICES)
def test_noise_integers_are_those_of_the_specification(device: str) -> None:
    bits = tensors.noise_bits(SEEDS, POSITIONS, 500, torch.device(device)).tolist()
    for row, seed, position in zip(bits, SEEDS, POSITIONS, strict=True):
        assert row == [scalar_bits(seed, position, token) for token in range(500)]


def test_sampling_is_float32_whatever_the_logits_are() -> None:
    row = _block(SamplingParams(temperature=0.9, seed=4), 12)
    logits = torch.linspace(-1, 1, 300).to(torch.bfloat16)[None]
    assert tensors.warp_rows(logits, [row]).dtype == torch.float32
    assert tensors.choose_tokens(logits, [row]) == tensors.choose_tokens(logits.float(), [row])


def _random_params(rng: random.Random, extreme: bool) -> SamplingParams:
    def one_of(usual: Sequence[float], extremes: Sequence[float] = ()) -> float:
        return rng.choice([*usual, *(extremes if extreme else ())])

    return SamplingParams(
        temperature=one_of((0.0, 0.7, 1.0, 3.0), (1e-7, 1e-3)),
        top_k=rng.choice([0, 0, 1, 5, 40, 300, 5000]),
        top_p=one_of((1.0, 0.1, 0.5, 0.9, 0.999), (1e-320,)),
        min_p=one_of((0.0, 0.05, 1.0), (1e-320,)),
        repetition_penalty=one_of((1.0, 0.8, 1.3), (0.01, 100.0)),
        presence_penalty=rng.choice([0.0, 0.5, -1.0]),
        frequency_penalty=rng.choice([0.0, 0.3, -0.2]),
        logit_bias=rng.choice([{}, {3: 4.0, 7: -9.0, 4000: 1.0}]),
        seed=rng.randrange(1 << 64),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("size", [61, 320, 1000])
def test_a_row_is_that_of_the_specification_whatever_stands_beside_it(
    size: int, large: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random texts, trees and parameters; logits on a coarse grid, so that many are equal. Rows
    over a large vocabulary go by arrays."""
    if large:
        monkeypatch.setattr(tensors, "_LARGE_VOCABULARY", 1)
    rng = random.Random(size)
    for _ in range(12):
        blocks, lines, wanted, scores = [], [], [], []
        for session in range(rng.randrange(1, 5)):
            prompt = [rng.randrange(size) for _ in range(rng.randrange(1, 30))]
            output = [rng.randrange(size) for _ in range(rng.randrange(30))]
            nodes = tuple(rng.randrange(size) for _ in range(rng.randrange(5)))
            parents = tuple(rng.randrange(-1, node) if node else -1 for node in range(len(nodes)))
            params, first = _random_params(rng, device == "cpu"), len(prompt) + len(output)
            counts = tensors.TextCounts(len(prompt))
            counts.follow(prompt + output, 0)
            paths: list[list[int]] = [[]]
            for token, parent in zip(nodes, parents, strict=True):
                paths.append([*paths[1 + parent], token])
            positions = [first + len(path) for path in paths]
            before = counts.before(nodes, parents)
            blocks.append(tensors.SampleBlock(f"s{session}", params, positions, before))
            # On a GPU sums of equal numbers may be cut elsewhere.
            step = rng.choice([0.25, 1e-3]) if device == "cpu" else 1e-6
            for path, position in zip(paths, positions, strict=True):
                line = [round(rng.gauss(0, 3) / step) * step for _ in range(size)]
                lines.append(torch.tensor(line).tolist())
                wanted.append(choose(lines[-1], params, position, prompt, output + path))
                scores.append(warp(lines[-1], params, prompt, output + path))
        table = torch.tensor(lines, device=device)
        untouched = table.clone()
        assert tensors.choose_tokens(table, blocks) == wanted
        together, first = tensors.warp_rows(table, blocks), 0
        assert torch.equal(table, untouched)
        for row, expected in zip(together.tolist(), scores, strict=True):
            assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
        for block in blocks if device == "cpu" else ():
            stop = first + len(block.positions)
            assert torch.equal(tensors.warp_rows(table[first:stop], [block]), together[first:stop])
            first = stop


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)])
def test_logits_that_are_no_numbers_name_their_session(
    value: float, params: SamplingParams
) -> None:
    table = torch.zeros((3, 70))
    table[2, 69] = value
    blocks = [tensors.SampleBlock("good", params, (4,)), tensors.SampleBlock("bad", params, (7, 8))]
    with pytest.raises(ModelOutputError, match="'bad': the largest logit at position 8 is") as info:
        tensors.choose_tokens(table, blocks)
    assert info.value.key == "bad"
    table[2] = -math.inf
    with pytest.raises(ModelOutputError, match="'bad': the largest logit at position 8 is -inf"):
        tensors.choose_tokens(table, blocks)


def _operations(text_length: int, sessions: int) -> int:
    params = SamplingParams(
        temperature=1.0, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1, seed=1
    )
    text = [token % 97 for token in range(text_length)]
    blocks = [_block(params, text_length, text[:9], text[9:]) for _ in range(sessions)]
    table = torch.randn((sessions, 200), generator=torch.Generator().manual_seed(1))
    with torch.profiler.profile() as profile:
        tensors.choose_tokens(table, blocks)
    return sum(event.count for event in profile.key_averages() if event.key.startswith("aten::"))


def test_operations_of_a_pass_depend_neither_on_its_rows_nor_on_its_texts() -> None:
    assert abs(_operations(20, 8) - _operations(800, 8)) < 20
    assert _operations(100, 16) < _operations(100, 2) + 40
    assert _operations(500, 8) < 300


def test_counts_follow_a_text_that_is_cut_back_and_grows() -> None:
    rng = random.Random(8)
    cache, text = tensors.TextCountsCache(1), [3, 1, 4]
    for _ in range(200):
        kept = rng.randrange(max(0, len(text) - 9), len(text) + 1)
        del text[kept:]
        text += [rng.randrange(12) for _ in range(rng.randrange(1, 6))]
        counts = cache.of("a", text, 3, kept)
        fresh = tensors.TextCounts(3)
        fresh.follow(text, 0)
        assert _table(counts) == _table(fresh)
        if rng.random() < 0.3:
            cache.of("b", [1], 1, 0)  # takes the only place: "a" is counted anew
    other = [7, 7, 7, 7]
    assert _table(cache.of("a", other, 3, 2)) == {7: (True, [1, 2, 1])}


def _table(counts: tensors.TextCounts) -> dict[int, tuple[bool, list[int]]]:
    found = counts.before((7, 5), (-1, -1))
    rows = found.output_counts.T.tolist()
    entries = zip(found.tokens.tolist(), found.in_prompt.tolist(), rows, strict=True)
    return {token: (prompt, row) for token, prompt, row in entries if prompt or row[0]}
