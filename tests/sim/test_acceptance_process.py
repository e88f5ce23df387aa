"""The acceptance process against the tapes it is fitted to, and against a coin.

Oracle: statistics of the tape itself, counted here. Where a coin of the same mean is tried beside
it, it must fail: else the test would not tell the process from what it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from edgespec.bench.arms import Arm, arm_settings
from edgespec.core.protocol.messages import Open
from edgespec.telemetry.match_tape import MatchTape, TapedGeneration
from edgespec_sim.token_sources.acceptance_process import AcceptanceLaw, fit
from edgespec_sim.token_sources.source import ProcessSource, TokenSource, tape_named
from tests.sim.one_session import alone

TAPES = ("bundled-greedy", "bundled-sampled")
GAMMA = 8
Ranks = Sequence[Sequence[int]]


@cache
def law_of(name: str) -> AcceptanceLaw:
    return fit(tape_named(name))


def coin(acceptance: float, ranks: int = 3) -> AcceptanceLaw:
    """Independent positions, all texts alike."""
    chances = (acceptance, *(0.0,) * (ranks - 1))
    return AcceptanceLaw(chances, chances, chances, 1.0, 1.0, 0.0, "a coin")


def texts_of(law: AcceptanceLaw, tape: MatchTape, repeats: int) -> Ranks:
    """Texts of the tape's lengths, so that their cut ends are alike."""
    lengths = [len(g.ranks) for g in tape.generations] * repeats
    return [law.ranks(n, np.random.default_rng([3, i])) for i, n in enumerate(lengths)]


def survival(texts: Ranks) -> list[float]:
    """Share of the runs of accepted tokens before a miss that are at least 1, 2, 4, 8 long."""
    runs: list[int] = []
    for ranks in texts:
        length = 0
        for rank in ranks:
            if rank == 0:
                length += 1
            else:
                runs.append(length)
                length = 0
    return [sum(run >= k for run in runs) / len(runs) for k in (1, 2, 4, 8)]


def share(texts: Ranks, rank: int) -> float:
    return sum(list(r).count(rank) for r in texts) / sum(map(len, texts))


@pytest.mark.parametrize("name", TAPES)
def test_a_fitted_process_has_the_statistics_of_its_tape(name: str) -> None:
    tape, law = tape_named(name), law_of(name)
    texts = texts_of(law, tape, 40)
    for rank, tolerance in ((0, 0.01), (1, 0.01), (2, 0.01)):
        assert law.acceptance(rank) == pytest.approx(tape.acceptance(rank), abs=tolerance)
        assert share(texts, rank) == pytest.approx(tape.acceptance(rank), abs=tolerance)
    taped = survival([g.ranks for g in tape.generations])
    tosses = survival(texts_of(coin(tape.acceptance()), tape, 40))
    process = survival(texts)
    # A tape of 24 texts has 300 to 800 runs: two standard errors are 0.03 to 0.06.
    assert process == pytest.approx(taped, abs=0.12)
    distance = np.abs(np.array([process, tosses]) - np.array(taped)).sum(axis=1)
    assert distance[0] < 0.55 * distance[1]


def passes_of(ranks: Sequence[int]) -> int:
    """Passes of stop-and-wait over one text: the prefill gives the first token, and each later
    pass commits up to GAMMA hits and one token more."""
    at = passes = 1
    while at < len(ranks):
        drafted = ranks[at : at + GAMMA]
        at += next((i for i, rank in enumerate(drafted) if rank != 0), len(drafted)) + 1
        passes += 1
    return passes


def played_passes(source: TokenSource, number: int, length: int) -> int:
    """Of stop-and-wait, played by the product's own sessions."""
    settings = arm_settings(Arm.VANILLA, GAMMA)
    wanted = source.request(number, 8, length)
    request = Open("a", "", "", wanted.prompt, (), wanted.sampling, settings.run_ahead)
    device = alone(source.target(), source.drafter(), request, settings.policy, 0.02, 0.008, 0.025)
    assert tuple(device.delivery.tokens) == tuple(source.expected(wanted, length))
    return device.session.counters.passes


@pytest.mark.parametrize("number", range(6))
def test_sessions_take_the_passes_that_the_ranks_say(number: int) -> None:
    law = law_of("bundled-greedy")
    ranks = law.ranks(160, np.random.default_rng([1, number, 1]))
    assert played_passes(ProcessSource(law, 1), number, 160) == passes_of(ranks)


@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.8, 0.97])
def test_a_law_moves_to_a_mean(acceptance: float) -> None:
    law = law_of("bundled-greedy").at(acceptance)
    assert law.acceptance() == pytest.approx(acceptance, abs=1e-6)
    texts = [law.ranks(400, np.random.default_rng([9, i])) for i in range(600)]
    assert share(texts, 0) == pytest.approx(acceptance, abs=0.015)
    assert share(texts, 1) == pytest.approx(law.acceptance(1), abs=0.01)


def test_a_fit_finds_a_planted_law() -> None:
    planted = AcceptanceLaw((0.98, 0.01), (0.5, 0.25), (0.6, 0.2), 2.0, 2.0, 0.85, "planted")
    generations = []
    for number in range(60):
        ranks = tuple(planted.ranks(200, np.random.default_rng([8, number])))
        generations.append(TapedGeneration(str(number), (number + 1,), (1,) * 200, ranks))
    found = fit(MatchTape("t", "d", 2, tuple(generations)))
    assert found.easy[0] == pytest.approx(0.98, abs=0.01)
    assert found.hard == pytest.approx((0.5, 0.25), abs=0.05)
    assert found.after_miss == pytest.approx((0.6, 0.2), abs=0.03)
    assert found.persistence == pytest.approx(0.85, abs=0.05)
