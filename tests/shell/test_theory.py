"""``edgespec bench --theory``. Oracle: sums over every token and every pair of tokens of laws that
are small enough, and many draws with the scalar noise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any, cast

import numpy as np
import pytest

from edgespec.bench import theory
from edgespec.bench.prompts import Workload
from edgespec.core.ports import Candidate, Drafter
from edgespec.core.protocol.sampling import SamplingParams, gumbel, noise_bits, warp
from edgespec.models.toy import toy_info
from edgespec.sampling.arrays import best_candidates, law
from edgespec_sim.commands.record_tape import record_tape
from tests.shell.live_verifier import call


def laws(dice: random.Random, size: int) -> tuple[list[float], list[float]]:
    """Two laws of one vocabulary; some tokens have no chance in one of them, or in both."""
    found = []
    for _ in range(2):
        weights = [dice.expovariate(1.0) ** 3 * (dice.random() < 0.8) for _ in range(size)]
        weights[dice.randrange(size)] += 0.1
        found.append([weight / sum(weights) for weight in weights])
    return found[0], found[1]


def same_draw(p: list[float], q: list[float]) -> float:
    """The formula of arXiv 2408.07978, word for word."""
    both = [x for x in range(len(p)) if p[x] and q[x]]
    return sum(1.0 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(len(p))) for x in both)


def missed_by_two(q: list[float], wanted: set[int], *, replaced: bool) -> float:
    """The chance that two draws from q have none of ``wanted``."""
    others = [x for x in range(len(q)) if x not in wanted]
    if replaced:
        return sum(q[x] for x in others) ** 2
    left = {x: 1.0 - q[x] for x in others}
    return sum(q[x] * q[y] / left[x] for x, y in permutations(others, 2) if left[x] > 1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_a_place_is_what_sums_over_all_sets_say(seed: int) -> None:
    dice = random.Random(seed)
    p, q = laws(dice, dice.randrange(2, 7))
    found, size = theory.compared(np.array(p), np.array(q)), len(p)
    variation = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    assert found.variation == pytest.approx(variation)
    assert found.expected == pytest.approx(same_draw(p, q))
    assert found.bound - 1e-12 <= found.expected <= found.ideal + 1e-12
    for ideal, replaced in ((found.pair_ideal, False), (found.independent_ideal, True)):
        least = min(
            1.0 - sum(p[x] for x in wanted) + 1.0 - missed_by_two(q, set(wanted), replaced=replaced)
            for count in range(size + 1)
            for wanted in combinations(range(size), count)
        )
        # No set is worse than all of them, and none that was tried is left out.
        assert ideal >= min(1.0, least) - 1e-9
        ranked = sorted(range(size), key=lambda x: -(p[x] / q[x] if q[x] else p[x] and np.inf))
        tried = min(
            1.0
            - sum(p[x] for x in ranked[:count])
            + 1.0
            - missed_by_two(q, set(ranked[:count]), replaced=replaced)
            for count in range(size + 1)
        )
        assert ideal == pytest.approx(min(1.0, tried), abs=1e-7)
    assert found.ideal - 1e-9 <= found.independent_ideal <= found.pair_ideal + 1e-9


def test_noise_that_is_shared_agrees_as_often_as_is_expected() -> None:
    """And two siblings cover what one of them and the other draw, never more than is possible."""
    p, q = laws(random.Random(5), 6)
    found, count, same, covered = theory.compared(np.array(p), np.array(q)), 4000, 0, 0
    with np.errstate(divide="ignore"):
        scores = np.log(p), np.log(q)
    for position in range(count):
        noise = np.array([gumbel(noise_bits(7, position, token)) for token in range(6)])
        target = int((scores[0] + noise).argmax())
        siblings = np.argsort(-(scores[1] + noise))[:2]
        same += target == siblings[0]
        covered += target in siblings
    assert same / count == pytest.approx(found.expected, abs=0.025)  # three deviations
    assert found.expected < covered / count < found.pair_ideal + 0.025


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(0.7),
        SamplingParams(1.3, top_k=5, logit_bias={3: 2.0}),
        SamplingParams(1.0, top_p=0.6),
        SamplingParams(0.8, min_p=0.2),
    ],
)
def test_a_law_is_the_scalar_one(params: SamplingParams) -> None:
    logits = [random.Random(seed).gauss(0.0, 2.0) for seed in range(30)]
    found = law(np.array(logits, np.float32), params)
    scores = warp(logits, params, (), ())
    if params.greedy:
        expected = [float(token == int(np.argmax(scores))) for token in range(30)]
    else:
        weights = np.exp(np.array(scores) - max(scores))
        expected = list(weights / weights.sum())
    assert list(found) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("miss", "hit"), [(0.5, 0.8), (0.9, 0.9), (0.7, 0.2), (0.0, 0.5)])
def test_chains_bring_what_a_long_replay_brings(miss: float, hit: float) -> None:
    dice, hits = random.Random(1), [False]
    for _ in range(200_000):
        hits.append(dice.random() < (hit if hits[-1] else miss))
    for gamma in (1, 2, 4, 8):
        assert theory.replayed_tokens(hits, gamma) == pytest.approx(
            theory.chain_tokens(miss, hit, gamma), rel=0.01
        )
        alone = sum(miss**k for k in range(gamma + 1))
        assert theory.chain_tokens(miss, miss, gamma) == pytest.approx(alone)
    assert theory.chain_tokens(1.0, 1.0, 4) == pytest.approx(5.0)


def texts(rank: int, variation: float, count: int = 8) -> list[theory.ComparedText]:
    place = theory.Place(variation, 1.0 - 1.3 * variation, 1.0 - variation / 2, 1.0, rank)
    return [theory.ComparedText(str(number), (place,) * 20) for number in range(count)]


def test_what_cannot_be_is_said() -> None:
    for found, said in (
        (texts(0, 0.4), ["the first guess is right 0.400", "a guess of two is right 0.200"]),
        (texts(1, 0.4), ["a guess of two is right 0.200", "(1 - TV) / (1 + TV) lies 0.429"]),
        (texts(0, 0.0), []),
        (texts(0, 0.4, 4), []),  # four texts say nothing
    ):
        lines = [
            line
            for line in theory.theory_lines(theory.beside_theory(found))
            if "impossible" in line
        ]
        assert [
            line[: len(f"impossible: {one}")] for line, one in zip(lines, said, strict=True)
        ] == [f"impossible: {one}" for one in said]


class Rows:
    """Both models: logits by the last token."""

    info = replace(toy_info(), name="rows", context_length=6)

    def __init__(self, rows: dict[int, list[float]]) -> None:
        self._rows, self.last, self.opened = rows, 1, 0
        self._sampling = SamplingParams()

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._sampling = sampling

    def step(self, keep: int, feed: Sequence[int], width: int) -> tuple[Candidate, ...]:
        self.last = feed[-1]
        return best_candidates(self.logits, self._sampling, keep + len(feed), width)

    def open(self, *_: object) -> None:
        self.opened += 1

    def close(self, *_: object) -> None:
        self.opened -= 1

    def run_pass(self, batch: Any) -> Any:
        import torch

        (request,) = batch
        assert request.parents == tuple(range(-1, len(request.tokens) - 1))
        fed = (request.feed[-1], *request.tokens)
        return torch.tensor([self._rows[token] for token in fed], dtype=torch.bfloat16)

    @property
    def logits(self) -> Any:
        return np.array(self._rows[self.last], np.float32)


async def test_laws_are_compared_along_the_text() -> None:
    """The draft has one token more, which the target does not know, and room for four tokens of
    the first text."""
    target = Rows({1: [0.0, 0.0, 1.0], 2: [3.0, 0.0, 0.0]})
    draft = Rows({1: [0.0, 0.0, 1.0, -np.inf], 2: [0.0, 3.0, 0.0, 2.0]})
    params = SamplingParams(1.0)
    recorder = theory.TheoryRecorder(cast("Any", target), cast("Any", draft), params)
    prompts = Workload(("one", "none", "two"), ((2, 1), (1,), (2,)), frozenset())
    texts = (2, 1, 2, 1, 2), (), (1,)
    tape = await record_tape(
        *(cast("Drafter", draft), "rows", prompts, texts, params, lambda text: None),
        about={},
        recorder=recorder,
    )
    assert target.opened == 0
    found = [[place.variation for place in text.places] for text in recorder.texts]
    p, q = np.exp([3.0, 0.0, 0.0, -np.inf]), np.exp([0.0, 3.0, 0.0, 2.0])
    apart = np.abs(p / p.sum() - q / q.sum()).sum() / 2
    assert found == [pytest.approx([0.0, apart] * 2, abs=1e-6), pytest.approx([apart])]
    for text, generation in zip(recorder.texts, tape.generations, strict=True):
        assert text.name == generation.name
        assert [place.rank for place in text.places] == list(generation.ranks)


def test_a_target_that_shows_no_logits_is_refused() -> None:
    result = call("bench", "--theory", "--model", "toy", "--draft", "toy", "-t", "0.7")
    assert result.exit_code == 1
    assert "--theory: the target shows no logits (ToyTarget)" in result.stderr
