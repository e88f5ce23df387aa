"""Tests of the sampling law and its noise, on numpy arrays and on torch tensors.

Oracles: the scalar law in ``core/protocol/sampling``; for rows of a large vocabulary, the same law
with everything sorted and summed.

float32 and float64 may order two nearly equal scores differently. The examples draw logits on a
grid and noise from a hash, so such a tie would fail reproducibly and not at random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.ports import ModelOutputError
from edgespec.core.protocol.sampling import (
    SamplingParams,
    TokenCounts,
    choose,
    gumbel,
    noise_bits,
    warp,
)
from edgespec.sampling import tensors
from edgespec.sampling.arrays import Workspace, best_candidates, gumbel_noise
from edgespec.sampling.arrays import noise_bits as array_noise_bits

VOCABULARY_SIZE = 40
Values = np.ndarray[Any, np.dtype[np.float32]]
ROWS = st.lists(
    st.integers(-200, 200).map(lambda n: n / 16), min_size=VOCABULARY_SIZE, max_size=VOCABULARY_SIZE
)
IDS = st.integers(0, VOCABULARY_SIZE - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 3, 20, 40, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.dictionaries(IDS | st.just(10**6), st.sampled_from([-3.0, 2.5]), max_size=3),
    seed=st.integers(0, (1 << 64) - 1),
)


def row(values: list[float]) -> Values:
    return np.array(values, dtype=np.float32)


@given(ROWS, PARAMS, st.integers(0, 10**6), st.lists(IDS, max_size=9), st.lists(IDS, max_size=9))
def test_the_first_guess_is_the_scalar_choice(
    values: list[float], params: SamplingParams, position: int, prompt: list[int], output: list[int]
) -> None:
    logits = row(values)
    counts = TokenCounts.of(VOCABULARY_SIZE, prompt, output)
    for width in (1, 3):
        found = best_candidates(logits, params, position, width, counts)
        assert found[0].token == choose(values, params, position, prompt, output)
        assert len({candidate.token for candidate in found}) == width
    assert logits.tolist() == values


@given(ROWS, PARAMS, st.integers(0, 10**6), st.integers(1, VOCABULARY_SIZE))
def test_siblings_are_the_best_perturbed_scores_in_order(
    values: list[float], params: SamplingParams, position: int, width: int
) -> None:
    scores = warp(values, params)
    inside = {token for token, score in enumerate(scores) if score > -math.inf}
    found = best_candidates(row(values), params, position, width)
    tokens = [candidate.token for candidate in found]
    count = min(width, len(inside))
    assert set(tokens[:count]) <= inside
    assert not set(tokens[count:]) & inside

    def perturbed(token: int) -> float:
        noise = 0.0 if params.is_greedy else gumbel(noise_bits(params.seed, position, token))
        return scores[token] + noise

    kept = [perturbed(token) for token in tokens[:count]]
    assert kept == sorted(kept, reverse=True)
    rest = max((perturbed(token) for token in inside - set(tokens)), default=-math.inf)
    assert kept[-1] >= rest - 1e-4


@given(ROWS, PARAMS, st.integers(0, 10**6))
def test_logprobs_are_those_of_the_warped_distribution(
    values: list[float], params: SamplingParams, position: int
) -> None:
    scores = warp(values, params)
    total = math.log(math.fsum(math.exp(score) for score in scores if score > -math.inf))
    found = best_candidates(row(values), params, position, 5)
    inside = [candidate for candidate in found if scores[candidate.token] > -math.inf]
    for candidate in inside:
        assert candidate.logprob == pytest.approx(scores[candidate.token] - total, abs=1e-4)
    for candidate in found[len(inside) :]:
        assert math.isfinite(candidate.logprob)
        assert candidate.logprob <= min(known.logprob for known in inside) + 1e-5


@pytest.mark.parametrize("min_p", [5e-324, 1e-60])
@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_tiny_shares_and_extreme_penalties_warn_of_nothing(min_p: float, penalty: float) -> None:
    """A warning would fail the test, because this suite turns warnings into errors."""
    params = SamplingParams(
        temperature=1e-6, min_p=min_p, top_p=5e-324, repetition_penalty=penalty, seed=3
    )
    logits = row([60.0, -70.0, 65.0, 0.0])
    [best] = best_candidates(logits, params, 4, 1, TokenCounts.of(3, (0, 1), (2,)))
    assert best.token == choose(logits.tolist(), params, 4, (0, 1), (2,))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=rf"no finite scores: the largest is {bad}"):
        best_candidates(row([0.0, bad]), SamplingParams(), 4, 1)


def expected_ids(logits: Values, params: SamplingParams, position: int, width: int) -> list[int]:
    """Return token ids, best first, by sorting whole rows in the way that ``warp`` specifies."""
    scores = (logits - logits.max()) / np.float32(params.temperature)
    ranked = np.argsort(-scores, kind="stable")
    ranked = ranked[scores[ranked] > -np.inf]
    inside = ranked
    if 0 < params.top_k < inside.size:
        inside = inside[scores[inside] >= scores[inside[params.top_k - 1]]]
    if params.top_p < 1.0:
        mass = np.cumsum(np.exp(scores[inside]), dtype=np.float64)
        inside = inside[: int(np.searchsorted(mass, params.top_p * mass[-1])) + 1]
    if params.min_p > 0.0:
        inside = inside[scores[inside] >= np.float32(np.log(params.min_p))]
    perturbed = scores + gumbel_noise(params.seed, position, np.arange(scores.size))
    outside = np.setdiff1d(ranked, inside)

    def best(ids: np.ndarray[Any, np.dtype[np.intp]]) -> list[int]:
        ids = np.sort(ids)
        found: list[int] = ids[np.argsort(-perturbed[ids], kind="stable")].tolist()
        return found

    return (best(inside) + best(outside))[:width]


@pytest.mark.parametrize("seed", range(16))
def test_nothing_is_lost_of_any_row(seed: int) -> None:
    """The vectorised path must agree with whole sorts for row sizes that no part, probe or block
    divides. The rows hold a bulk, a few groups above it, ties, a peak over a plain, and impossible
    tokens."""
    dice, work = np.random.default_rng(seed), Workspace()
    for position in range(8):
        size = int(dice.integers(3_000, 90_000))
        logits = dice.standard_normal(size) * 10.0 ** dice.uniform(-2, 1.5)
        for _ in range(dice.integers(0, 4)):
            group = dice.integers(0, size, dice.integers(1, 1 + size // 10))
            logits[group] += dice.uniform(-10, 30)
        if dice.random() < 0.3:
            logits = np.round(logits, int(dice.integers(0, 2)))
        if dice.random() < 0.3:
            logits = np.sort(logits)
        if dice.random() < 0.2:
            logits[77] = logits.max() + 9.0
        if dice.random() < 0.2:
            logits[dice.random(size) < dice.choice([0.6, 0.9999])] = -np.inf
            logits[:3] = 1.0
        logits = logits.astype(np.float32)
        params = SamplingParams(
            temperature=float(dice.choice([0.3, 0.7, 1.0, 1.9])),
            top_k=int(dice.choice([0, 0, 2, 2000])),
            top_p=float(dice.choice([0.05, 0.5, 0.9, 0.9999, 1.0])),
            min_p=float(dice.choice([0.0, 0.0, 0.05])),
            seed=int(dice.integers(1 << 62)),
        )
        for width in (1, 4):
            found = best_candidates(logits, params, position, width, None, work)
            assert [one.token for one in found] == expected_ids(logits, params, position, width)


SEEDS = st.integers(0, (1 << 64) - 1)
POSITIONS = st.integers(0, 1 << 40)


@given(SEEDS, POSITIONS, st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=20))
def test_integers_agree_bit_for_bit(seed: int, position: int, tokens: list[int]) -> None:
    got = array_noise_bits(seed, position, np.array(tokens, dtype=np.int64))
    assert got.tolist() == [noise_bits(seed, position, token) for token in tokens]


# --- on tensors of torch --------------------------------------------------------------------------


SIZE = 61
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROW_SEEDS = [0, 1, 0xFFFFFFFF, 1 << 32, (1 << 64) - 1, 0x123456789ABCDEF0]
ROW_POSITIONS = [0, 1, 1000, (1 << 20) + 3, 77, 5]


def _block(
    params: SamplingParams,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    key: str = "s",
) -> tensors.SampleBlock:
    """Build one row, whose text so far is ``prompt`` and ``output``."""
    counts = tensors.TextOccurrences(len(prompt))
    counts.update([*prompt, *output], 0)
    return tensors.SampleBlock(key, params, (position,), counts.occurrences_before((), ()))


@pytest.mark.parametrize("device", DEVICES)
def test_noise_integers_are_those_of_the_specification(device: str) -> None:
    bits = tensors.noise_bits(ROW_SEEDS, ROW_POSITIONS, 500, torch.device(device)).tolist()
    for row, seed, position in zip(bits, ROW_SEEDS, ROW_POSITIONS, strict=True):
        assert row == [noise_bits(seed, position, token) for token in range(500)]


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
    """Texts, trees and parameters are random; logits lie on a coarse grid, so that many are equal.
    Rows over a large vocabulary use the array code."""
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
            counts = tensors.TextOccurrences(len(prompt))
            counts.update(prompt + output, 0)
            paths: list[list[int]] = [[]]
            for token, parent in zip(nodes, parents, strict=True):
                paths.append([*paths[1 + parent], token])
            positions = [first + len(path) for path in paths]
            before = counts.occurrences_before(nodes, parents)
            blocks.append(tensors.SampleBlock(f"s{session}", params, positions, before))
            # On a GPU sums of equal numbers may be cut elsewhere, so the grid has to be finer
            # there.
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
    counts, text = tensors.TextOccurrences(3), [3, 1, 4]
    for _ in range(200):
        kept = rng.randrange(max(0, len(text) - 9), len(text) + 1)
        del text[kept:]
        text += [rng.randrange(12) for _ in range(rng.randrange(1, 6))]
        counts.update(text, kept)
        fresh = tensors.TextOccurrences(3)
        fresh.update(text, 0)
        assert _table(counts) == _table(fresh)


def _table(counts: tensors.TextOccurrences) -> dict[int, tuple[bool, list[int]]]:
    found = counts.occurrences_before((7, 5), (-1, -1))
    rows = found.output_counts.T.tolist()
    entries = zip(found.tokens.tolist(), found.in_prompt.tolist(), rows, strict=True)
    return {token: (prompt, row) for token, prompt, row in entries if prompt or row[0]}
