"""A match tape replays a pair of models exactly: every arm, every round trip, to the last row.

Oracle: the same world played with the toy models themselves. Committed tokens with their times and
kinds, passes, rows and all counters must be identical; a tape with one wrong rank must not be.
Policies that go by a draft's confidences are an exception: those off the text are on no tape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest

from edgespec.bench.arms import Arm, arm_settings
from edgespec.core.device.events import DraftCounters, TokenKind
from edgespec.core.device.goodput_policy import PolicyName, named_policy
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.ports import Drafter
from edgespec.core.protocol.messages import Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.telemetry.match_tape import MISS, MatchTape, TapedGeneration, walk_along
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.token_sources.source import ScriptedTarget, TapeSource
from tests.sim.faults.checks import target_stream
from tests.sim.one_session import alone

WIDTH, TEXTS = 3, 3
BY_RANK = named_policy(PolicyName.WINDOWED)
"""Of the arm edgespec here: all that it looks at is on a tape."""
ENDS = ToyModel(24, order=3, sharpness=3.0, seed=5, eos_token=0, eos_probability=0.004)
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=90),
    "sampled": SamplingParams(temperature=1.0, seed=11, max_tokens=90),
    "cut": SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=17),
}


@dataclass(frozen=True, slots=True)
class Played:
    """All there is to see of a generation."""

    tokens: tuple[int, ...]
    times_s: tuple[float, ...]
    kinds: tuple[TokenKind, ...]
    counters: DraftCounters
    passes: int
    rows: int


def play(
    target: ToyTarget | ScriptedTarget,
    drafter: Drafter,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    arm: Arm,
    rtt_ms: float,
    policy: DraftPolicy = BY_RANK,
) -> Played:
    settings = arm_settings(arm, gamma=3, policy=policy)
    request = Open("a", "", "", prompt, (), sampling, settings.run_ahead, drafting=arm.drafts)
    device = alone(target, drafter, request, settings.policy, rtt_ms / 1e3, 0.008, 0.025)
    seen = device.delivery
    return Played(
        tuple(seen.tokens),
        tuple(seen.times_s),
        tuple(seen.kinds),
        device.session.counters,
        target.passes,
        target.rows,
    )


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple((7 * number + 5 * i) % 23 + 1 for i in range(6 + number))


def drafter() -> ToyDrafter:
    return ToyDrafter(ENDS.perturbed(0.3))


@cache
def taped(kind: str) -> MatchTape:
    sampling = SAMPLINGS[kind]
    generations = []
    for number in range(TEXTS):
        prompt = prompt_of(number)
        tokens = target_stream(ENDS, prompt, sampling, 4096).tokens
        walker = drafter()
        walker.begin(len(prompt), sampling)
        walk = walk_along(walker.step, prompt, tokens, WIDTH)
        generations.append(TapedGeneration(f"text {number}", prompt, tokens, *walk))
    return MatchTape("toy", "toy draft", WIDTH, tuple(generations), (0,))


def replayed(
    tape: MatchTape,
    number: int,
    arm: Arm,
    rtt_ms: float,
    max_tokens: int,
    policy: DraftPolicy = BY_RANK,
) -> Played:
    source = TapeSource(tape)
    numbers = range(len(tape.generations))
    wanted = tape.generations[number].prompt
    request = next(
        request
        for request in (source.request(n, 0, max_tokens) for n in numbers)
        if request.prompt == wanted
    )
    return play(source.target(), source.drafter(), wanted, request.sampling, arm, rtt_ms, policy)


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("rtt_ms", [2, 30, 200])
@pytest.mark.parametrize("arm", Arm)
def test_a_tape_replays_the_models(arm: Arm, rtt_ms: float, kind: str) -> None:
    tape, sampling = taped(kind), SAMPLINGS[kind]
    for number in range(TEXTS):
        prompt = prompt_of(number)
        real = play(ToyTarget(ENDS), drafter(), prompt, sampling, arm, rtt_ms)
        assert real.tokens == tape.generations[number].tokens
        assert replayed(tape, number, arm, rtt_ms, sampling.max_tokens) == real


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("rtt_ms", [2, 30, 200])
def test_by_confidence_a_tape_comes_near(rtt_ms: float, kind: str) -> None:
    """What the draft would have thought behind a wrong guess is on no tape, so a policy that looks
    at it draws elsewhere now and then: all texts together take the same time to a few percent, and
    as many rows."""
    tape, sampling, policy = taped(kind), SAMPLINGS[kind], named_policy()
    pairs = []
    for number in range(TEXTS):
        prompt = prompt_of(number)
        real = play(ToyTarget(ENDS), drafter(), prompt, sampling, Arm.EDGESPEC, rtt_ms, policy)
        again = replayed(tape, number, Arm.EDGESPEC, rtt_ms, sampling.max_tokens, policy)
        assert again.tokens == real.tokens
        pairs.append((again, real))
    again_s, real_s = (sum(side[i].times_s[-1] for side in pairs) for i in range(2))
    again_rows, real_rows = (sum(side[i].rows for side in pairs) for i in range(2))
    assert again_s == pytest.approx(real_s, rel=0.05)
    assert again_rows == pytest.approx(real_rows, rel=0.1)


def test_the_texts_hold_what_can_go_wrong() -> None:
    """Ends before and at max_tokens, hits, misses and near misses."""
    tapes = [taped(kind) for kind in SAMPLINGS]
    lengths = {
        len(g.tokens) == s.max_tokens
        for tape, s in zip(tapes, SAMPLINGS.values(), strict=True)
        for g in tape.generations
    }
    assert lengths == {True, False}
    ranks = {rank for tape in tapes for g in tape.generations for rank in g.ranks}
    assert ranks == {MISS, *range(WIDTH)}


@pytest.mark.parametrize("arm", [arm for arm in Arm if arm.drafts])
def test_one_wrong_rank_gives_another_run(arm: Arm) -> None:
    tape = taped("sampled")
    first = tape.generations[0]
    at = first.ranks.index(0, 8)
    ranks = (*first.ranks[:at], MISS, *first.ranks[at + 1 :])
    wrong = replace(tape, generations=(replace(first, ranks=ranks), *tape.generations[1:]))
    one, other = (replayed(t, 0, arm, 20, 90) for t in (tape, wrong))
    assert one.tokens == other.tokens
    assert one != other
