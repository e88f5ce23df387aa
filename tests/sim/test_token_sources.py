"""The three sources of tokens: their contract with worlds, and errors for misuse.

Oracle: ``expected`` of the source beside a plain decoding of its own target, one token per pass;
the ranks of a walk beside those of the script. For the acceptance process: statistics of its tape,
and Bayes' rule; a coin of the same mean must fail. For match tapes: the same world played with the
toy models themselves, whose tokens, times, kinds, passes, rows and counters must be identical.
Policies that use a draft's confidences are an exception: confidences off the text are on no tape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from edgespec.bench.arms import Arm, arm_settings
from edgespec.core.device.events import DraftCounters, TokenKind
from edgespec.core.device.goodput_policy import PolicyName, make_policy
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.ports import Drafter, PassRequest, TargetModel
from edgespec.core.protocol.messages import Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier import kept_drafts
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.token_sources import match_tape
from edgespec_sim.token_sources.acceptance_process import AcceptanceLaw, fit
from edgespec_sim.token_sources.match_tape import MISS, MatchTape, TapedGeneration, walk_along
from edgespec_sim.token_sources.source import (
    ProcessSource,
    ScriptedTarget,
    ScriptError,
    TapeSource,
    TokenRequest,
    TokenSource,
    ToySource,
    load_tape,
)
from tests.sim.faults.checks import target_stream
from tests.sim.one_session import play_alone

TOY = ToySource(ToyModel(64, order=3), 0.25, SamplingParams(temperature=0.7, seed=4))
LAW = fit(load_tape("bundled-greedy"))
PROCESS = ProcessSource(LAW.at(0.8), seed=3)
TAPE = TapeSource(load_tape("bundled-sampled"), seed=5)
SOURCES: dict[str, TokenSource] = {"toy": TOY, "process": PROCESS, "tape": TAPE}
every_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)


def decode_alone(target: TargetModel, request: TokenRequest) -> list[int]:
    """Decode one token per pass, with the prompt in pieces of 5."""
    tokens, cached = list(request.prompt), 0
    target.open("a", len(request.prompt), request.sampling)
    ends = target.info.eos_token_ids
    while len(tokens) - len(request.prompt) < request.sampling.max_tokens:
        feed = tuple(tokens[cached:][:5])
        sample = cached + len(feed) == len(tokens)
        (result,) = target.forward([PassRequest("a", cached, feed, sample=sample)])
        target.keep("a", ())
        cached += len(feed)
        if sample:
            tokens.append(result.targets[0])
            if tokens[-1] in ends:
                break
    target.close("a")
    return tokens[len(request.prompt) :]


def begin_request(drafter: Drafter, request: TokenRequest) -> Drafter:
    drafter.begin(len(request.prompt), request.sampling)
    return drafter


@every_source
def test_the_target_says_what_is_expected(source: TokenSource) -> None:
    for number in range(4):
        request = source.request(number, 13, 24)
        assert decode_alone(source.target(), request) == list(source.expected(request, 24))
        assert list(source.expected(request, 7)) == list(source.expected(request, 24))[:7]


def test_a_tape_is_walked_as_it_was_recorded() -> None:
    source = TapeSource(load_tape("bundled-greedy"))
    taped = {g.prompt: g for g in source.tape.generations}
    for number in range(len(taped)):
        for length in (0, 40):  # the recorded prompt, and one of the world's length
            request = source.request(number, length, 1000)
            tokens = source.expected(request, 1000)
            drafter = begin_request(source.drafter(), request)
            ranks = match_tape.walk_along(
                drafter.step, request.prompt, tokens, source.tape.width
            ).ranks
            if length == 0:
                assert ranks == taped[request.prompt].ranks
                assert tuple(tokens) == taped[request.prompt].tokens


def test_guesses_differ_and_only_the_right_one_is_right() -> None:
    request = PROCESS.request(2, 9, 200)
    text = PROCESS.expected(request, 200)
    drafter = begin_request(PROCESS.drafter(), request)
    drafter.step(0, request.prompt, 4)
    for at, token in enumerate(text[:-1]):
        guesses = [c.token for c in drafter.step(9 + at, (token,), 4)]
        assert len(set(guesses)) == 4
        rank = guesses.index(text[at + 1]) if text[at + 1] in guesses else match_tape.MISS
        # One token off the script, no candidate is the script's; back on it, all is as before.
        wrong = (text[at + 1] + 1) % 32_000
        off = [c.token for c in drafter.step(10 + at, (wrong,), 4)]
        assert at + 2 >= len(text) or text[at + 2] not in off
        again = [c.token for c in drafter.step(9 + at, (token,), 4)]
        assert again == guesses
        assert rank == match_tape.MISS or again[rank] == text[at + 1]


def test_the_cache_contract_is_checked() -> None:
    request = PROCESS.request(0, 9, 20)
    drafter, target = begin_request(PROCESS.drafter(), request), PROCESS.target()
    with pytest.raises(ScriptError, match="3 tokens kept, but 0 are cached"):
        drafter.step(3, (1,), 1)
    with pytest.raises(ScriptError, match="before the prompt is complete"):
        drafter.step(0, request.prompt[:4], 1)
    with pytest.raises(ScriptError, match="width is 9"):
        drafter.step(0, request.prompt, 9)
    with pytest.raises(ScriptError, match="'a' is not open"):
        target.forward([PassRequest("a", 0, request.prompt)])
    target.open("a", 9, request.sampling)
    with pytest.raises(ScriptError, match="already open"):
        target.open("a", 9, request.sampling)
    token = target.forward([PassRequest("a", 0, request.prompt, (5,), (-1,))])[0].targets[0]
    with pytest.raises(ScriptError, match="no path from the root"):
        target.keep("a", (1,))
    target.keep("a", ())
    with pytest.raises(ScriptError, match="not the target's own"):
        target.forward([PassRequest("a", 9, (token + 1,))])
    with pytest.raises(ScriptError, match="11 tokens kept, but 10 are cached"):
        target.forward([PassRequest("a", 11, (token,))])


def test_a_tape_by_name_by_file_and_by_neither(tmp_path: Path) -> None:
    generation = match_tape.TapedGeneration("g", (1, 2), (3, 4), (0, match_tape.MISS))
    tape = match_tape.MatchTape("t", "d", 1, (generation,), (4,), {"machine": "none"})
    match_tape.write_tape(tape, tmp_path / "mine.jsonl")
    assert load_tape("mine.jsonl", tmp_path) == tape
    assert match_tape.read_tape(tmp_path / "mine.jsonl") == tape
    assert load_tape("bundled-greedy", tmp_path).width >= 3
    with pytest.raises(
        match_tape.TapeError, match=r"bundled tapes are bundled-greedy, bundled-sampled"
    ):
        load_tape("yours.jsonl", tmp_path)


def test_a_text_ends_where_its_tape_does() -> None:
    """A text ends at its end token, whatever its length limit, or where the recording stopped."""
    ended = match_tape.TapedGeneration("g", (1, 2), (3, 4), (0, 0))
    stopped = match_tape.TapedGeneration("h", (1, 3), (3, 5, 6), (0, 0, 0))
    source = TapeSource(match_tape.MatchTape("t", "d", 1, (ended, stopped), (4,)))
    asked = {request.prompt: request for request in (source.request(n, 0, 50) for n in (0, 1))}
    assert asked[1, 2].sampling.max_tokens == 50
    assert asked[1, 3].sampling.max_tokens == 3
    assert [list(source.expected(asked[p], 50)) for p in asked] == [
        list(ended.tokens if p == (1, 2) else stopped.tokens) for p in asked
    ]


TAPES = ("bundled-greedy", "bundled-sampled")
Ranks = Sequence[Sequence[int]]


@cache
def law_of(name: str) -> AcceptanceLaw:
    return fit(load_tape(name))


def make_coin(acceptance: float, ranks: int = 3) -> AcceptanceLaw:
    """Return a law with independent positions, the same for all texts."""
    chances = (acceptance, *(0.0,) * (ranks - 1))
    return AcceptanceLaw(chances, chances, chances, 1.0, 1.0, 0.0, "a coin")


def draw_ranks(law: AcceptanceLaw, count: int, *seed: int) -> tuple[int, ...]:
    return law.text(count, np.random.default_rng(seed), np.random.default_rng(0)).ranks


def texts_of(law: AcceptanceLaw, tape: MatchTape, repeats: int) -> Ranks:
    """Draw texts with the tape's lengths, so that their cut ends are alike."""
    lengths = [len(g.ranks) for g in tape.generations] * repeats
    return [draw_ranks(law, n, 3, i) for i, n in enumerate(lengths)]


def measure_survival(texts: Ranks) -> list[float]:
    """Return the shares of the runs of accepted tokens before a miss that are at least 1, 2, 4, 8
    long."""
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


def measure_share(texts: Ranks, rank: int) -> float:
    return sum(list(r).count(rank) for r in texts) / sum(map(len, texts))


@pytest.mark.parametrize("name", TAPES)
def test_a_fitted_process_has_the_statistics_of_its_tape(name: str) -> None:
    tape, law = load_tape(name), law_of(name)
    texts = texts_of(law, tape, 40)
    for rank, tolerance in ((0, 0.01), (1, 0.01), (2, 0.01)):
        assert law.acceptance(rank) == pytest.approx(tape.acceptance(rank), abs=tolerance)
        assert measure_share(texts, rank) == pytest.approx(tape.acceptance(rank), abs=tolerance)
    taped = measure_survival([g.ranks for g in tape.generations])
    tosses = measure_survival(texts_of(make_coin(tape.acceptance()), tape, 40))
    process = measure_survival(texts)
    # A tape of 24 texts has 300 to 800 runs: two standard errors are 0.03 to 0.06.
    assert process == pytest.approx(taped, abs=0.12)
    distance = np.abs(np.array([process, tosses]) - np.array(taped)).sum(axis=1)
    assert distance[0] < 0.55 * distance[1]


@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.8, 0.97])
def test_a_law_moves_to_a_mean(acceptance: float) -> None:
    law = law_of("bundled-greedy").at(acceptance)
    assert law.acceptance() == pytest.approx(acceptance, abs=1e-6)
    texts = [draw_ranks(law, 400, 9, i) for i in range(600)]
    assert measure_share(texts, 0) == pytest.approx(acceptance, abs=0.015)
    assert measure_share(texts, 1) == pytest.approx(law.acceptance(1), abs=0.01)


Told = Sequence[tuple[int, float]]
"""For each place the rank, and the probability that the draft gave its first choice."""


def places_of_tape(name: str) -> Told:
    texts = load_tape(name).generations
    return [(r, math.exp(p)) for g in texts for r, p in zip(g.ranks, g.logprobs, strict=True)]


def draw_places(law: AcceptanceLaw, texts: int = 400) -> Told:
    dice = [[np.random.default_rng([7, i, j]) for j in range(2)] for i in range(texts)]
    drawn = [law.text(160, *pair) for pair in dice]
    return [(r, math.exp(p)) for d in drawn for r, p in zip(d.ranks, d.logprobs, strict=True)]


def right_by_bin(told: Told) -> list[tuple[float, float]]:
    """Return for each fifth of confidence the share of places in it, and the share of right ones
    there."""
    bins = [[rank == 0 for rank, sure in told if int(4.999 * sure) == n] for n in range(5)]
    return [(len(one) / len(told), sum(one) / len(one)) for one in bins]


@pytest.mark.parametrize("name", TAPES)
def test_confidences_are_as_often_right_as_on_the_tape(name: str) -> None:
    """Fifths of a tape have 200 to 1,400 places: two standard errors of a share are 0.07."""
    taped, drawn = right_by_bin(places_of_tape(name)), right_by_bin(draw_places(law_of(name)))
    assert np.array(drawn) == pytest.approx(np.array(taped), abs=0.07)
    assert taped[0][1] < taped[-1][1] - 0.3, "they tell right from wrong"
    kinds = [(MISS, -0.5, -1.5), (0, -0.1, -3.0), (1, -0.7, -0.8)]
    ranks, first, second = zip(*kinds, strict=True)
    named = TapedGeneration("t", (1,), (1,) * 3, ranks, first, second)
    law = fit(MatchTape("t", "d", 2, (named,)))
    drawn_once = law.text(300, np.random.default_rng(1), np.random.default_rng(2))
    assert {*zip(*drawn_once, strict=True)} == {*kinds}, "first and second belong together"


@pytest.mark.parametrize("acceptance", [0.3, 0.55, 0.9])
def test_a_law_moved_to_a_mean_keeps_what_confidences_tell(acceptance: float) -> None:
    """Oracle: Bayes. A draft of one state gives right choices a confidence of 0.9 three times in
    four and 0.3 otherwise, and wrong ones the other way round."""
    high, low = (math.log(0.9), math.log(0.05)), (math.log(0.3), math.log(0.2))
    right, wrong = (high,) * 3 + (low,), (low,) * 3 + (high,)
    kinds = tuple(one * 50 for one in (right, wrong, wrong))
    law = replace(make_coin(0.7), confidences=kinds * 3).at(acceptance)
    told = draw_places(law)
    for sure, odds in ((0.9, 3.0), (0.3, 1 / 3)):
        hits = [rank == 0 for rank, one in told if one == pytest.approx(sure)]
        expected = odds * acceptance / (odds * acceptance + 1 - acceptance)
        assert sum(hits) / len(hits) == pytest.approx(expected, abs=0.015)
    assert sum(rank == 0 for rank, _ in told) / len(told) == pytest.approx(acceptance, abs=0.01)


def test_a_tape_without_confidences_gives_a_law_without() -> None:
    tape = load_tape("bundled-greedy")
    bare = [replace(one, logprobs=(), second_logprobs=()) for one in tape.generations]
    law = fit(replace(tape, generations=tuple(bare)))
    assert replace(law_of("bundled-greedy"), confidences=()) == law
    drawn = law.text(9, np.random.default_rng(1), np.random.default_rng(2))
    assert (drawn.logprobs, drawn.second_logprobs) == ((), ())
    assert drawn.ranks == draw_ranks(law_of("bundled-greedy"), 9, 1)


def test_a_fit_finds_a_planted_law() -> None:
    planted = AcceptanceLaw((0.98, 0.01), (0.5, 0.25), (0.6, 0.2), 2.0, 2.0, 0.85, "planted")
    generations = []
    for number in range(60):
        drawn = draw_ranks(planted, 200, 8, number)
        generations.append(TapedGeneration(str(number), (number + 1,), (1,) * 200, drawn))
    found = fit(MatchTape("t", "d", 2, tuple(generations)))
    assert found.easy[0] == pytest.approx(0.98, abs=0.01)
    assert found.hard == pytest.approx((0.5, 0.25), abs=0.05)
    assert found.after_miss == pytest.approx((0.6, 0.2), abs=0.03)
    assert found.persistence == pytest.approx(0.85, abs=0.05)


WIDTH, TEXTS = 3, 3
BY_RANK = make_policy(PolicyName.WINDOWED)
"""The policy of the arm edgespec here, which reads nothing but what is on a tape."""
ENDS = ToyModel(24, order=3, sharpness=3.0, seed=5, eos_token=0, eos_probability=0.004)
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=90),
    "sampled": SamplingParams(temperature=1.0, seed=11, max_tokens=90),
    "cut": SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=17),
}


@dataclass(frozen=True, slots=True)
class Played:
    """All observable results of a generation."""

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
    policy, run_ahead = arm_settings(arm, gamma=3, policy=policy)
    request = Open("a", "", "", prompt, (), sampling, run_ahead, drafting=arm.drafts)
    device = play_alone(target, drafter, request, policy, rtt_ms / 1e3, 0.008, 0.025)
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
def make_tape(kind: str) -> MatchTape:
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


def replay_tape(
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


@pytest.fixture
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the verifier keep no text of drafts: tokens after a wrong guess are on no tape."""
    monkeypatch.setattr(kept_drafts, "MIN_RUN", 1 << 30)


@pytest.mark.usefixtures("nothing_is_kept")
@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("rtt_ms", [2, 30, 200])
@pytest.mark.parametrize("arm", Arm)
def test_a_tape_replays_the_models(arm: Arm, rtt_ms: float, kind: str) -> None:
    tape, sampling = make_tape(kind), SAMPLINGS[kind]
    for number in range(TEXTS):
        prompt = prompt_of(number)
        real = play(ToyTarget(ENDS), drafter(), prompt, sampling, arm, rtt_ms)
        assert real.tokens == tape.generations[number].tokens
        assert replay_tape(tape, number, arm, rtt_ms, sampling.max_tokens) == real


@pytest.mark.usefixtures("nothing_is_kept")
@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("rtt_ms", [2, 30, 200])
def test_by_confidence_a_tape_comes_near(rtt_ms: float, kind: str) -> None:
    """The draft's confidences after a wrong guess are on no tape, so a policy that reads them
    drafts differently now and then."""
    check_near(kind, rtt_ms, make_policy())


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_with_kept_drafts_a_tape_comes_near(kind: str) -> None:
    """The draft is quick and the verifier far away here, so messages have enough nodes for the
    verifier to keep their text, of which a tape knows only what is right."""
    check_near(kind, 200, BY_RANK)


def check_near(kind: str, rtt_ms: float, policy: DraftPolicy) -> None:
    """Assert that all texts together take the same time and as many rows from a tape, within a few
    percent."""
    tape, sampling = make_tape(kind), SAMPLINGS[kind]
    pairs = []
    for number in range(TEXTS):
        prompt = prompt_of(number)
        real = play(ToyTarget(ENDS), drafter(), prompt, sampling, Arm.EDGESPEC, rtt_ms, policy)
        again = replay_tape(tape, number, Arm.EDGESPEC, rtt_ms, sampling.max_tokens, policy)
        assert again.tokens == real.tokens
        pairs.append((again, real))
    again_s, real_s = (sum(side[i].times_s[-1] for side in pairs) for i in range(2))
    again_rows, real_rows = (sum(side[i].rows for side in pairs) for i in range(2))
    assert again_s == pytest.approx(real_s, rel=0.05)
    assert again_rows == pytest.approx(real_rows, rel=0.1)
