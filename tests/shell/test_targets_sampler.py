"""torch's noise and sampler against the scalar specification."""

from __future__ import annotations

import itertools
import math
import random

import pytest

pytest.importorskip("torch")

import torch

from edgespec.core.noise import gumbel
from edgespec.core.noise import noise_bits as scalar_bits
from edgespec.core.sampling import SamplingParams, choose, warp
from edgespec.targets.noise import gumbel_noise, noise_bits
from edgespec.targets.sampler import SampleRow, choose_tokens, warp_rows

CPU = torch.device("cpu")
SIZE = 61
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SEEDS = [0, 1, 0xFFFFFFFF, 1 << 32, (1 << 64) - 1, 0x123456789ABCDEF0]
POSITIONS = [0, 1, 1000, (1 << 20) + 3, 77, 5]


@pytest.mark.parametrize("device", DEVICES)
def test_noise_integers_are_those_of_the_specification(device: str) -> None:
    bits = noise_bits(SEEDS, POSITIONS, 500, torch.device(device)).tolist()
    for row, seed, position in zip(bits, SEEDS, POSITIONS, strict=True):
        assert row == [scalar_bits(seed, position, token) for token in range(500)]


def test_large_token_ids_do_not_overflow() -> None:
    row = noise_bits([3], [9], 300_000, CPU)[0]
    for token in (131_071, 131_072, 262_144, 299_999):
        assert int(row[token]) == scalar_bits(3, 9, token)


def test_gumbel_noise_is_float32_of_the_specification() -> None:
    noise = gumbel_noise([5, 6], [7, 8], 2000, CPU)
    assert noise.dtype == torch.float32
    assert bool(torch.isfinite(noise).all())
    for row, (seed, position) in zip(noise.tolist(), [(5, 7), (6, 8)], strict=True):
        expected = [gumbel(scalar_bits(seed, position, token)) for token in range(2000)]
        assert row == pytest.approx(expected, rel=2e-5, abs=2e-6)


def _all_parameters() -> list[SamplingParams]:
    choices = itertools.product(
        (0.0, 0.7, 1.3),
        (0, 1, 7, 1000),
        (1.0, 0.9, 0.3),
        (0.0, 0.1),
        ((1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (0.8, 0.4, -0.2), (1.0, 0.3, 0.5)),
        ({}, {3: 4.0, 7: -9.0, 4000: 1.0}),
    )
    return [
        SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=penalties[0],
            presence_penalty=penalties[1],
            frequency_penalty=penalties[2],
            logit_bias=bias,
            seed=seed,
        )
        for seed, (temperature, top_k, top_p, min_p, penalties, bias) in enumerate(choices)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_all_parameters_together_equal_the_specification(device: str) -> None:
    rng = random.Random(0)
    logits, rows = [], []
    for params in _all_parameters():
        prompt = [rng.randrange(SIZE) for _ in range(rng.randrange(6))]
        output = [rng.randrange(SIZE) for _ in range(rng.randrange(6))]
        rows.append(SampleRow(params, rng.randrange(5000), prompt, output))
        logits.append([float(torch.tensor(rng.gauss(0, 2))) for _ in range(SIZE)])
    table = torch.tensor(logits, device=device)
    before = table.clone()
    warped = warp_rows(table, rows).tolist()
    chosen = choose_tokens(table, rows)
    assert torch.equal(table, before)
    for row, line, scores, token in zip(rows, logits, warped, chosen, strict=True):
        expected = warp(line, row.params, row.prompt, row.output)
        if not row.params.greedy:
            assert [s == -math.inf for s in scores] == [s == -math.inf for s in expected]
        assert scores == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert token == choose(line, row.params, row.position, row.prompt, row.output)


def test_ties_go_to_the_lowest_id() -> None:
    table = torch.tensor([[1.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0]])
    plain = SampleRow(SamplingParams(), 0)
    biased = SampleRow(SamplingParams(logit_bias={0: 1.0}), 0)
    assert choose_tokens(table, [plain, plain]) == [1, 0]
    assert choose_tokens(table, [biased, plain]) == [0, 0]
    nucleus = SampleRow(SamplingParams(temperature=1.0, top_p=0.5), 0)
    assert [s > -math.inf for s in warp_rows(table[1:], [nucleus])[0].tolist()] == [
        True,
        True,
        False,
        False,
    ]


def test_sampling_is_float32_whatever_the_logits_are() -> None:
    row = SampleRow(SamplingParams(temperature=0.9, seed=4), 12)
    logits = torch.linspace(-1, 1, 300).to(torch.bfloat16)[None]
    assert warp_rows(logits, [row]).dtype == torch.float32
    assert choose_tokens(logits, [row]) == choose_tokens(logits.float(), [row])


def test_no_rows_is_no_work() -> None:
    assert choose_tokens(torch.empty((0, 9)), []) == []


@pytest.mark.parametrize("extra", [{}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_draws_follow_the_warped_softmax(extra: dict[str, float]) -> None:
    params = SamplingParams(temperature=0.8, seed=21, **extra)  # type: ignore[arg-type]
    draws, size = 40_000, 12
    line = [math.sin(3.0 * t) * 1.5 for t in range(size)]
    table = torch.tensor(line).expand(draws, size)
    chosen = choose_tokens(table, [SampleRow(params, position) for position in range(draws)])
    counts = torch.bincount(torch.tensor(chosen), minlength=size).tolist()
    expected = (torch.tensor(warp(line, params)).softmax(0) * draws).tolist()
    cells = [
        (count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True) if mean
    ]
    assert sum(counts[token] for token in range(size) if expected[token] == 0) == 0
    assert sum(cells) < len(cells) - 1 + 5 * math.sqrt(2 * len(cells))
