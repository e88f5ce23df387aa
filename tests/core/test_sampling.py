"""Sampling of one token from a row of logits, with its score; the law of whole texts; and relaxed
acceptance rules.

Sampled texts, drawn through both sessions with a drafter, follow the target's own law. Oracle: the
exact joint law of the first two and three tokens, multiplied out of the target's conditional
probabilities, and Pearson's chi-square against it; and the texts themselves, one token after the
other by the scalar specification. Oracle of rules: the toy's probabilities by a softmax written out
here, and a walk that looks them up node by node; for each rule one line states what it accepts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.device.comparison_policies import WindowedPolicy
from edgespec.core.device.events import DraftCounters, TokenKind
from edgespec.core.device.session import CommitBounds
from edgespec.core.ports import Drafter
from edgespec.core.protocol import messages as m
from edgespec.core.protocol import sampling as sa
from edgespec.core.protocol.acceptance import (
    ExactRule,
    explain_rule_refusal,
    full_rule_name,
    make_rule,
)
from edgespec.core.protocol.credential import ANYBODY
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.protocol.work import (
    MAX_LOGPROBS,
    MIN_LOGPROB,
    NodeScore,
    PassRequest,
    TokenScore,
    score_token,
)
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier import session_events as se
from edgespec.core.verifier.server_drafts import ServerDraftsFactory
from edgespec.device.drafters.toy import RandomDrafter, ToyDrafter, toy_info
from edgespec.verifier.targets.toy import ToyTarget
from edgespec.wire.codec import decode_downlink, encode_downlink, payload_bytes
from edgespec_sim.message_sizes import message_bytes
from tests.adversarial import AdversarialDrafter
from tests.core import draft_scripts, scenes
from tests.core.scenes import REQUEST, commit_in, new_session, offer
from tests.core.test_constraints import EOS, Automaton
from tests.sim.one_session import play_alone

ROWS = st.lists(st.floats(-20, 20), min_size=1, max_size=24)


def find_kept(scores: list[float]) -> set[int]:
    return {token for token, score in enumerate(scores) if score > -math.inf}


def _probabilities(scores: list[float]) -> list[float]:
    weights = [math.exp(s - max(scores)) for s in scores]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 9.9e-7])
def test_a_temperature_below_the_least_is_greedy(temperature: float) -> None:
    params = sa.SamplingParams(temperature=temperature, top_p=0.5, seed=4)
    assert params.is_greedy
    assert not sa.SamplingParams(temperature=1e-6).is_greedy
    for logits in ([1.0, 3.0, 3.0, 2.0], [1e30, 2e30, 2e30, 0.0]):
        assert [sa.choose(logits, params, position) for position in range(9)] == [1] * 9


@given(ROWS, st.floats(0.01, 1.0))
def test_top_p_reaches_its_mass_and_no_smaller_set_does(row: list[float], p: float) -> None:
    kept = find_kept(sa.warp(row, sa.SamplingParams(temperature=1.0, top_p=p)))
    probabilities = _probabilities(row)
    mass = sum(probabilities[token] for token in kept)
    assert mass >= p - 1e-9
    assert mass - min(probabilities[token] for token in kept) < p + 1e-9


@given(ROWS, st.integers(1, 30))
def test_top_k_keeps_k_tokens_and_ties(row: list[float], k: int) -> None:
    kept = find_kept(sa.warp(row, sa.SamplingParams(temperature=1.0, top_k=k)))
    assert len(kept) >= min(k, len(row))
    assert min(row[t] for t in kept) >= max([row[t] for t in set(range(len(row))) - kept] or [-99])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"temperature": 1.0, "min_p": 0.2}, (0, 1)),
        ({"temperature": 1.0, "top_p": 0.7}, (0, 1)),
        # The temperature applies first.
        ({"temperature": 0.5, "top_p": 0.7}, (0,)),
    ],
)
def test_min_p_is_a_share_of_the_best(sampling: dict[str, Any], kept: tuple[int, ...]) -> None:
    logits = [math.log(p) for p in (0.6, 0.25, 0.1, 0.05)]
    assert find_kept(sa.warp(logits, sa.SamplingParams(**sampling))) == {*kept}


def test_repetition_counts_prompt_and_output_the_others_output_only() -> None:
    row = [2.0, -2.0, 2.0, -2.0]
    repetition = sa.SamplingParams(repetition_penalty=2.0)
    assert sa.warp(row, repetition, [0], [1, 1]) == [1.0, -4.0, 2.0, -2.0]
    additive = sa.SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert sa.warp(row, additive, [0], [1, 1, 2]) == [2.0, -3.0, 1.25, -2.0]
    # The bias applies first, and ids outside the vocabulary are ignored.
    biased = sa.SamplingParams(logit_bias={1: 5.0, 99: 5.0}, repetition_penalty=2.0)
    assert sa.warp([1.0, 1.0], biased, [1]) == [1.0, 3.0]
    assert sa.choose([1.0, 0.0], biased, 0) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
    ],
)
def test_draws_follow_the_warped_softmax(sampling: dict[str, Any]) -> None:
    params = sa.SamplingParams(**sampling)
    row = [1.5, 0.2, -0.3, 2.0, 0.9, 0.0, 1.1, -1.0]
    seeds, positions = range(10), range(1000)
    counts = Counter(
        sa.choose(row, replace(params, seed=seed), position)
        for seed in seeds
        for position in positions
    )
    draws = len(seeds) * len(positions)
    expected = [draws * p for p in _probabilities(sa.warp(row, params))]
    assert set(counts) <= {token for token, mean in enumerate(expected) if mean > 0}
    cells = [(counts[token] - mean) ** 2 / mean for token, mean in enumerate(expected) if mean]
    # The mean is k - 1 and the variance 2 (k - 1): the bound is five deviations, with fixed seeds.
    assert sum(cells) < len(cells) - 1 + 5 * math.sqrt(2 * len(cells))


def test_golden_bits() -> None:
    """Both ends of a link must agree on these bits for ever: a change is a new protocol version."""
    small = [sa.noise_bits(0, 0, 0), sa.noise_bits(0, 0, 1), sa.noise_bits(0, 1, 0)]
    assert small == [477780777, 792694223, 1930745897]
    assert sa.noise_bits((1 << 64) - 1, 1 << 20, 151_935) == 3153832169
    low, high = sa.gumbel(0), sa.gumbel(sa.MASK_32)  # finite at both ends
    assert low == pytest.approx(-math.log(math.log(2.0**24)))
    assert 16.0 < high < 17.0


@pytest.mark.parametrize("shift", [1, 2, 7])
def test_positions_are_not_shifted_copies_of_each_other(shift: int) -> None:
    size = 4000
    here = [sa.noise_bits(5, 10, t) for t in range(size)]
    there = [sa.noise_bits(5, 10 + shift, t) for t in range(size)]
    assert len(set(here) & set(there)) < 5
    x = [b / 2**32 - 0.5 for b in here]
    for lag in (0, 1, shift):
        y = [b / 2**32 - 0.5 for b in there[lag:]]
        correlation = 12 * sum(a * b for a, b in zip(x, y, strict=False)) / len(y)
        assert abs(correlation) < 4 / math.sqrt(len(y))
    seeds = [low + (high << 32) for low in range(50) for high in range(50)]  # both halves count
    assert len({sa.noise_bits(seed, 3, shift) for seed in seeds}) == len(seeds)


LAW = ToyModel(vocabulary_size=4, order=2, seed=5, sharpness=1.0)
PROMPT = (1, 2)
LENGTH = 4
TEXTS, MANY_TEXTS = 600, 2500
# A standard normal variate exceeds this with a chance of 3e-5.
CRITICAL = 4.0
SIZES = [TEXTS, pytest.param(MANY_TEXTS, marks=pytest.mark.slow)]
Text = tuple[int, ...]
DrafterOf = Callable[[int], Drafter]


def make_good_drafter(seed: int) -> Drafter:
    return ToyDrafter(LAW.perturbed(0.3))


def make_blind_drafter(seed: int) -> Drafter:
    return RandomDrafter(toy_info(LAW), seed)


def make_hostile_drafter(seed: int) -> Drafter:
    return AdversarialDrafter(ToyDrafter(LAW), seed)


def _params(top_p: float, seed: int) -> sa.SamplingParams:
    return sa.SamplingParams(temperature=0.9, top_p=top_p, seed=seed, max_tokens=LENGTH)


def _draw(seed: int, top_p: float, drafter: Drafter, width: int) -> tuple[Text, DraftCounters]:
    """Draw one text through both sessions. The prompt's own pass yields its first token, so no
    draft counts there."""
    request = m.Open("s", "", "", PROMPT, (), _params(top_p, seed), m.RunAhead.NEVER)
    policy = WindowedPolicy(width)
    device = play_alone(ToyTarget(LAW), drafter, request, policy, 0.002, 0.002, 0.02)
    return tuple(device.delivery.tokens), device.session.counters


@cache
def _sample(
    drafter_of: DrafterOf, width: int, top_p: float, size: int = TEXTS
) -> tuple[list[Text], Counter[str]]:
    """Draw texts and count draft nodes.

    ``rows`` counts the draft nodes in passes and ``accepted`` the accepted ones. ``tried`` counts
    positions decided while the draft had a guess, and ``hits`` those won by its first choice.
    """
    drawn = [_draw(seed, top_p, drafter_of(seed), width) for seed in range(size)]
    counts = Counter[str]()
    for _, one in drawn:
        counts.update(rows=one.rows, accepted=one.accepted, tried=one.tried, hits=one.hits)
    return [text for text, _ in drawn], counts


def _generate_directly(seed: int, top_p: float) -> Text:
    """Return the text of this seed without sessions, drafts or links."""
    tokens = list(PROMPT)
    for position in range(len(PROMPT), len(PROMPT) + LENGTH):
        output = tokens[len(PROMPT) :]
        tokens.append(sa.choose(LAW.logits(tokens), _params(top_p, seed), position, PROMPT, output))
    return tuple(tokens[len(PROMPT) :])


@cache
def _exact_law(length: int, top_p: float) -> dict[Text, float]:
    """Return the exact probability of every beginning of this length."""
    params = _params(top_p, 0)
    law: dict[Text, float] = {}
    for text in itertools.product(range(LAW.vocabulary_size), repeat=length):
        chance = 1.0
        for index, token in enumerate(text):
            scores = sa.warp(LAW.logits((*PROMPT, *text[:index])), params)
            weights = [math.exp(score) for score in scores]
            chance *= weights[token] / sum(weights)
        law[text] = chance
    return law


def _compute_excess(texts: Sequence[Text], law: dict[Text, float]) -> float:
    """Return Pearson's chi-square as a standard normal variate (Wilson and Hilferty 1931).

    Outcomes that are expected less than five times are merged into one. An impossible outcome is
    infinitely bad.
    """
    counts = Counter(texts)
    if any(law[text] == 0.0 for text in counts):
        return math.inf
    cells = [(counts[text], len(texts) * chance) for text, chance in law.items()]
    large = [cell for cell in cells if cell[1] >= 5.0]
    small = [cell for cell in cells if 0.0 < cell[1] < 5.0]
    pooled = (sum(count for count, _ in small), sum(expected for _, expected in small))
    large += [pooled] if pooled[1] >= 5.0 else []
    statistic = sum((count - expected) ** 2 / expected for count, expected in large)
    degrees = len(large) - 1
    spread = 2.0 / (9.0 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1.0 - spread)) / math.sqrt(spread))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize(
    ("drafter_of", "width"),
    [(make_good_drafter, 1), (make_blind_drafter, 2), (make_hostile_drafter, 1)],
    ids=["good", "blind", "hostile"],
)
def test_the_joint_law_is_the_targets(
    drafter_of: DrafterOf, width: int, top_p: float, size: int
) -> None:
    texts, counts = _sample(drafter_of, width, top_p, size)
    assert counts["rows"] > size
    assert texts == [_generate_directly(seed, top_p) for seed in range(size)]
    for length in (2, 3, 4):
        beginnings = [text[:length] for text in texts]
        assert abs(_compute_excess(beginnings, _exact_law(length, top_p))) < CRITICAL, length


def test_acceptance_is_earned() -> None:
    """A blind first choice is right by chance, a hostile one never, a good one often."""
    _, by_chance = _sample(make_blind_drafter, 2, 1.0)
    share, chance = by_chance["hits"] / by_chance["tried"], 1 / LAW.vocabulary_size
    assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / by_chance["tried"])
    _, never = _sample(make_hostile_drafter, 1, 1.0)
    assert (never["hits"], never["accepted"]) == (0, 0)
    _, often = _sample(make_good_drafter, 1, 1.0)
    assert often["accepted"] > 0.8 * often["rows"]


ASKING = replace(REQUEST, logprobs=2)


def scores(*numbers: int) -> tuple[TokenScore, ...]:
    """Return scores that each identify their row, exact in 32 bits."""
    return tuple(TokenScore(-float(n), 0.5, ((n, -0.25), (7, -2.0))) for n in numbers)


def test_a_score_is_the_log_of_the_softmax() -> None:
    logits = [0.3, -1.0, 2.5, 2.0, 0.0]
    norm = math.log(sum(math.exp(logit) for logit in logits))
    found = score_token(logits, 1, 3)
    assert math.isclose(found.logprob, -1.0 - norm)
    assert [token for token, _ in found.top] == [2, 3, 0]
    assert all(math.isclose(logprob, logits[token] - norm) for token, logprob in found.top)
    assert found.margin == 0.5
    everything = score_token(logits, 2, MAX_LOGPROBS).top
    assert math.isclose(sum(math.exp(logprob) for _, logprob in everything), 1.0)


def test_what_cannot_be_has_a_finite_score_and_equals_go_by_id() -> None:
    found = score_token([1.0, -math.inf, 1.0], 1, 3)
    assert found.logprob == MIN_LOGPROB
    assert [token for token, _ in found.top] == [0, 2, 1]
    assert (found.margin, found.top[2][1]) == (0.0, MIN_LOGPROB)
    assert score_token([5.0], 0, 2) == TokenScore(0.0, -MIN_LOGPROB, ((0, 0.0),))


def test_a_session_that_asks_gets_the_score_of_each_token_it_commits() -> None:
    session = new_session(ASKING)
    first = offer(session)
    assert first.logprobs == 2
    commit = commit_in(session.handle(se.PassDone((10,), scores(0)), 1.0))
    assert commit.logprobs == scores(0)
    base = session.prefix.hash_at(3)
    session.handle(m.Draft(1, (0, 0, 1, 2, 2, 4), (40, 11, 12, 41, 12, 13), 3, base), 1.0)
    offer(session)
    done = se.PassDone((11, 40, 12, 41, 41, 13, 14), scores(0, 1, 2, 3, 4, 5, 6))
    commit = commit_in(session.handle(done, 1.0))
    assert commit.tokens == (11, 12, 13)
    assert commit.logprobs == scores(0, 2, 5)  # after the root, node 1 and node 4


def test_a_device_that_comes_back_is_told_the_scores_it_missed() -> None:
    session = new_session(ASKING)
    for token in (10, 11, 12):
        offer(session)
        session.handle(se.PassDone((token,), scores(token)), 1.0)
    session.handle(m.Received(3, 0), 1.0)
    for held, told in (((10, 11), scores(12)), ((10,), scores(11, 12)), ((), ())):
        session.handle(se.Detach(), 2.0)
        sent = session.handle(se.Attach(replace(ASKING, committed=held)), 3.0)
        (commit,) = [
            one.message
            for one in sent
            if isinstance(one, se.Send) and isinstance(one.message, m.Commit)
        ]
        assert commit.tokens == (10, 11, 12)[len(held) :]
        assert commit.logprobs == told  # the first commit was acknowledged, so its score is dropped


def test_a_device_cuts_scores_with_the_tokens_it_refuses() -> None:
    bounds = CommitBounds(2, 3)
    commit, wrong = bounds.cut_to_bounds(m.Commit(2, (1, 2, 3, 4), logprobs=scores(1, 2, 3, 4)))
    assert wrong is not None
    assert (commit.tokens, commit.logprobs) == ((1, 2, 3), scores(1, 2, 3))


@pytest.mark.parametrize(
    "told",
    [
        scores(1, 300),
        (TokenScore(0.0, 0.0, ()), TokenScore(-0.5, 0.0, ((70_000, MIN_LOGPROB),) * 20)),
    ],
)
def test_scores_travel_and_are_weighed(told: tuple[TokenScore, ...]) -> None:
    commit = m.Commit(5, (1, 2), logprobs=told)
    assert decode_downlink(encode_downlink(commit)) == commit
    assert message_bytes(commit) == payload_bytes(commit)
    asking = m.Open("s", "", "", (1,), logprobs=20)
    assert payload_bytes(asking) - payload_bytes(replace(asking, logprobs=0)) == 3


# --- relaxed acceptance rules: what each accepts, and what none may affect ------------------------


MODEL = ToyModel(vocabulary_size=24, order=2, sharpness=1.5)
Takes = Callable[[float, float, int, float], bool]
# Arguments: p (the token's probability), that of the best token, the number of likelier tokens, and
# the entropy.
RULES: dict[str, Takes] = {
    "exact": lambda p, best, rank, entropy: False,
    "typical": lambda p, best, rank, entropy: p > min(0.09, 0.3 * math.exp(-entropy)),
    "typical:0.5,0.9": lambda p, best, rank, entropy: p > min(0.5, 0.9 * math.exp(-entropy)),
    "top-k:3": lambda p, best, rank, entropy: rank < 3,
    "margin:1.5": lambda p, best, rank, entropy: math.log(best / p) <= 1.5,
    "dsd:0": lambda p, best, rank, entropy: True,
    "dsd:0.3": lambda p, best, rank, entropy: p >= 0.3 * best,
    "dsd:1": lambda p, best, rank, entropy: p == best,
    "bild:2": lambda p, best, rank, entropy: -math.log(p) <= 2.0,
}
ENDS = frozenset((3, 4))


def law(path: Sequence[int], params: SamplingParams) -> list[float]:
    """Return the probabilities of the next token, computed by hand."""
    logits = [x / (params.temperature or 1.0) for x in MODEL.logits(path)]
    least = sorted(logits)[-params.top_k] if params.top_k else -math.inf
    weights = [math.exp(x) if x >= least else 0.0 for x in logits]
    return [weight / sum(weights) for weight in weights]


def random_tree(dice: random.Random, prompt: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return nodes and parents; siblings differ, and half of the nodes are among the likeliest."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[tuple[int, ...]] = []
    for node in range(10):
        parent = dice.randrange(-1, node)
        path = prompt if parent < 0 else paths[parent]
        taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        free = [token for token in range(24) if token not in taken]
        likely = sorted(free, key=MODEL.logits(path).__getitem__)[-4:]
        tokens.append(dice.choice(dice.choice((free, likely))))
        parents.append(parent)
        paths.append((*path, tokens[-1]))
    return tokens, parents


def walk_by_hand(
    takes: Takes,
    params: SamplingParams,
    prompt: tuple[int, ...],
    tokens: Sequence[int],
    parents: Sequence[int],
    judged: int,
) -> tuple[list[int], list[int]]:
    """Return the committed tokens, and the places where they differ from the target's own."""
    text, at, committed, replaced = prompt, -1, list[int](), list[int]()
    while True:
        chances = law(text, params)
        own = choose(MODEL.logits(text), params, len(text))
        entropy = -sum(p * math.log(p) for p in chances if p)
        best = max(chances)
        drafted = {tokens[node]: node for node, parent in enumerate(parents) if parent == at}
        good = {
            token: chances[token]
            for token, node in drafted.items()
            if node < judged and chances[token] and not ENDS & {token, own}
            if takes(chances[token], best, sum(p > chances[token] for p in chances), entropy)
        }
        if own not in drafted and not good:
            return [*committed, own], replaced
        token = own if own in drafted else max(good, key=good.__getitem__)
        replaced += [len(committed)] if token != own else []
        committed.append(token)
        text, at = (*text, token), drafted[token]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.8), SamplingParams(1.2, 6)])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_takes_what_its_line_says(rule: str, params: SamplingParams) -> None:
    dice, changed, taken = random.Random(rule), 0, make_rule(rule)
    for number in range(60):
        target, prompt = ToyTarget(MODEL), (dice.randrange(24), dice.randrange(24))
        tokens, parents = random_tree(dice, prompt)
        target.open("t", len(prompt), params)
        nodes = tuple(tokens), tuple(parents)
        (result,) = target.forward([PassRequest("t", 0, prompt, *nodes, node_scores=True)])
        judged = 10 if number % 2 else 6
        walk = taken.walk(*nodes, result.targets, result.node_scores[:judged], ENDS)
        expected, replaced = walk_by_hand(RULES[rule], params, prompt, tokens, parents, judged)
        assert list(walk.tokens) == expected
        assert list(walk.replaced) == replaced
        assert [tokens[node] for node in walk.nodes] == expected[:-1]
        changed += len(replaced)
    assert bool(changed) == (rule != "exact" and (rule != "dsd:1" or params.temperature > 0.0))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.8, 6)])
def test_a_pass_says_of_a_node_what_the_law_says(params: SamplingParams) -> None:
    target, tokens = ToyTarget(MODEL), tuple(range(24))
    target.open("t", 2, params)
    request = PassRequest("t", 0, (1, 2), tokens, (-1,) * 24, node_scores=True)
    (result,) = target.forward([request])
    chances, raw = law((1, 2), params), law((1, 2), SamplingParams())
    entropy = -sum(p * math.log(p) for p in chances if p)
    for one, p, its_raw in zip(result.node_scores, chances, raw, strict=True):
        found = math.exp(one.logprob), math.exp(one.best_logprob), one.entropy
        assert found == pytest.approx((p, max(chances), entropy))
        assert one.rank == sum(other > p for other in chances)
        assert math.exp(one.raw_logprob) == pytest.approx(its_raw)
    (silent,) = target.forward([replace(request, node_scores=False)])
    assert silent == replace(result, node_scores=())


def test_what_a_grammar_forbids_is_never_taken() -> None:
    """The rule accepts whatever it can, over all trees of a text that has two valid
    continuations."""
    automaton = Automaton(({1: 1, 2: 2}, {5: 0}, {6: 0}), frozenset({0}))
    target, model = ToyTarget(replace(MODEL, eos_token=EOS)), make_rule("dsd:0")
    params = SamplingParams(constraint=automaton.constraint())
    replaced = 0
    for first in range(1, 24):
        for second in range(1, 24):
            target.open("t", 1, params)
            nodes = (first, second), (-1, 0)
            (result,) = target.forward([PassRequest("t", 0, (7,), *nodes, node_scores=True)])
            target.close("t")
            walk = model.walk(*nodes, result.targets, result.node_scores, frozenset({EOS}))
            for place, token in enumerate(walk.tokens):
                assert token in automaton.allowed(walk.tokens[:place])
            replaced += len(walk.replaced)
    assert replaced


def test_what_is_offered() -> None:
    assert [full_rule_name(one) for one in ("exact", "typical", "top-k:4", "dsd:.50")] == [
        *("exact", "typical:0.09,0.3", "top-k:4", "dsd:0.5")
    ]
    offered = ("exact", "typical", "dsd:0.5")
    for text in ("exact", "typical", "typical:0.2,0.2", "dsd:0.50"):
        assert explain_rule_refusal(text, offered) is None
    for text in ("dsd:0.4", "margin:1"):
        said = f"the rule '{text}' is not offered by this verifier; offered: {', '.join(offered)}"
        assert explain_rule_refusal(text, offered) == said


ASKED = replace(scenes.REQUEST, rule="dsd:0", logprobs=1)


def make_node_scores(*raw_logprobs: float) -> tuple[NodeScore, ...]:
    return tuple(NodeScore(-1.0, -0.5, 1, 1.0, one) for one in raw_logprobs)


def draw_scores(*tokens: int) -> tuple[TokenScore, ...]:
    return tuple(TokenScore(-float(token), 0.5, ()) for token in tokens)


def test_a_commit_says_which_tokens_are_not_the_targets_and_says_it_again() -> None:
    session = scenes.new_session(ASKED)
    scenes.run_pass(session)
    session.handle(scenes.chain_draft(session, 40, 12, 42, 43), 1.0)
    request = scenes.offer(session)
    assert request.node_scores
    # Places 0 and 2 are replaced; the last node cannot be accepted, because its probability is 0.
    scores = (*make_node_scores(-7.0, -0.1, -8.0), NodeScore(-math.inf, -0.5, 9, 1.0, -9.0))
    done = se.PassDone((11, 12, 13, 14, 15), draw_scores(11, 12, 13, 14, 15), node_scores=scores)
    commit = scenes.commit_in(session.handle(done, 1.0))
    assert (commit.tokens, commit.accepted, commit.replaced) == ((40, 12, 42, 14), 3, (0, 2))
    assert [one.logprob for one in commit.logprobs] == [-7.0, -12.0, -8.0, -14.0]
    for held, tokens, places in (((10,), commit.tokens, (0, 2)), ((10, 40, 12), (42, 14), (0,))):
        session.handle(se.Detach(), 2.0)
        _, sent = session.handle(se.Attach(replace(ASKED, committed=held)), 3.0)
        assert isinstance(sent, se.Send)
        assert isinstance(sent.message, m.Commit)
        assert (sent.message.tokens, sent.message.replaced) == (tokens, places)


def test_behind_the_end_of_a_text_nothing_counts() -> None:
    session = scenes.new_session(
        replace(ASKED, sampling=SamplingParams(stop_token_ids=(12,)), logprobs=0)
    )
    session.handle(scenes.chain_draft(session, 40, 12, 42), 1.0)
    scenes.offer(session)
    done = se.PassDone((11, 12, 13, 14), node_scores=make_node_scores(-1.0, -1.0, -1.0))
    commit = scenes.commit_in(session.handle(done, 1.0))
    assert (commit.tokens, commit.replaced) == ((40, 12), (0,))
    assert commit.finish is m.FinishReason.STOP


def test_a_guess_of_the_verifiers_own_replaces_nothing() -> None:
    request = replace(ASKED, prompt=(1, 2, 3, 4) * 6, logprobs=0)
    session = scenes.new_session(request, server_drafts=ServerDraftsFactory()(request, ANYBODY))
    asked = scenes.offer(session)
    count = len(asked.tokens)
    assert asked.server_nodes == count > 0
    assert not asked.node_scores
    done = se.PassDone((9,) * (1 + count), node_scores=make_node_scores(*[-0.1] * count))
    commit = scenes.commit_in(session.handle(done, 1.0))
    assert (commit.tokens, commit.replaced) == ((9,), ())


def test_an_exact_session_asks_for_nothing() -> None:
    session = scenes.new_session(scenes.REQUEST)
    session.handle(scenes.chain_draft(session, 40), 1.0)
    assert not scenes.offer(session).node_scores
    walk = ExactRule().walk((40,), (-1,), (11, 12), make_node_scores(-0.1))
    assert (walk.tokens, walk.replaced) == ((11,), ())


def test_a_device_counts_what_was_replaced_once() -> None:
    session = draft_scripts.new_streaming_session()
    commit = m.Commit(2, (5, 6, 7), accepted=2, replaced=(1,))
    for again in (commit, commit):
        session.handle(again, 1.0)
    (delivered,) = draft_scripts.new_streaming_session().handle(commit, 1.0)[:1]
    kinds = TokenKind.ACCEPTED, TokenKind.REPLACED, TokenKind.DECODED
    assert delivered.kinds == kinds  # type: ignore[union-attr]
    counters = session.counters
    assert (counters.committed, counters.accepted, counters.replaced) == (3, 2, 1)
    counters.subtract_undelivered(kinds[1:])
    assert (counters.committed, counters.accepted, counters.replaced) == (1, 1, 0)
