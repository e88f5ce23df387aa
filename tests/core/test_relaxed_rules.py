"""Relaxed acceptance rules: what each takes, and what none may touch.

Oracles: the toy's probabilities by a softmax written out here, and a walk that asks them node by
node; one line for each rule says what it accepts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from edgespec.core.device.events import TokenKind
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.protocol.work import NodeScore, PassRequest, TokenScore
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier import session_events as se
from edgespec.core.verifier.credential import ANYBODY
from edgespec.core.verifier.drafts import ExactRule
from edgespec.core.verifier.relaxed_rules import acceptance_rule, full_name, why_not_offered
from edgespec.core.verifier.served_drafts import ServedDraftsMaker
from edgespec.verifier.targets.toy import ToyTarget
from tests.core import draft_scripts, scenes
from tests.core.token_grammars import EOS, Automaton

MODEL = ToyModel(vocabulary_size=24, order=2, sharpness=1.5)
Takes = Callable[[float, float, int, float], bool]
# Of p, the chance of the token, that of the likeliest, how many are likelier, and the entropy.
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
    """Probabilities of the next token, by hand."""
    logits = [x / (params.temperature or 1.0) for x in MODEL.logits(path)]
    least = sorted(logits)[-params.top_k] if params.top_k else -math.inf
    weights = [math.exp(x) if x >= least else 0.0 for x in logits]
    return [weight / sum(weights) for weight in weights]


def random_tree(dice: random.Random, prompt: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Nodes and parents; siblings differ, and half of them are among the likeliest."""
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
    """What is committed, and at which places it is not the target's own."""
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
    dice, changed, taken = random.Random(rule), 0, acceptance_rule(rule)
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
    """With a rule that takes whatever can be, over all trees of a text that may go two ways."""
    automaton = Automaton(({1: 1, 2: 2}, {5: 0}, {6: 0}), frozenset({0}))
    target, model = ToyTarget(replace(MODEL, eos_token=EOS)), acceptance_rule("dsd:0")
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
    assert [full_name(one) for one in ("exact", "typical", "top-k:4", "dsd:.50")] == [
        *("exact", "typical:0.09,0.3", "top-k:4", "dsd:0.5")
    ]
    offered = ("exact", "typical", "dsd:0.5")
    for text in ("exact", "typical", "typical:0.2,0.2", "dsd:0.50"):
        assert why_not_offered(text, offered) is None
    for text in ("dsd:0.4", "margin:1"):
        said = f"the rule '{text}' is not offered by this verifier; offered: {', '.join(offered)}"
        assert why_not_offered(text, offered) == said


ASKED = replace(scenes.REQUEST, rule="dsd:0", logprobs=1)


def likely(*raw_logprobs: float) -> tuple[NodeScore, ...]:
    return tuple(NodeScore(-1.0, -0.5, 1, 1.0, one) for one in raw_logprobs)


def scored(*tokens: int) -> tuple[TokenScore, ...]:
    return tuple(TokenScore(-float(token), 0.5, ()) for token in tokens)


def test_a_commit_says_which_tokens_are_not_the_targets_and_says_it_again() -> None:
    session = scenes.new_session(ASKED)
    scenes.run_pass(session)
    session.handle(scenes.chain(session, 40, 12, 42, 43), 1.0)
    request = scenes.offer(session)
    assert request.node_scores
    # Places 0 and 2 are replaced; the last node is not to be taken, for its chance is 0.
    scores = (*likely(-7.0, -0.1, -8.0), NodeScore(-math.inf, -0.5, 9, 1.0, -9.0))
    done = se.PassDone((11, 12, 13, 14, 15), scored(11, 12, 13, 14, 15), node_scores=scores)
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
    session.handle(scenes.chain(session, 40, 12, 42), 1.0)
    scenes.offer(session)
    done = se.PassDone((11, 12, 13, 14), node_scores=likely(-1.0, -1.0, -1.0))
    commit = scenes.commit_in(session.handle(done, 1.0))
    assert (commit.tokens, commit.replaced) == ((40, 12), (0,))
    assert commit.finish is m.FinishReason.STOP


def test_a_guess_of_the_verifiers_own_replaces_nothing() -> None:
    request = replace(ASKED, prompt=(1, 2, 3, 4) * 6, logprobs=0)
    session = scenes.new_session(request, served=ServedDraftsMaker()(request, ANYBODY))
    asked = scenes.offer(session)
    count = len(asked.tokens)
    assert asked.served == count > 0
    assert not asked.node_scores
    done = se.PassDone((9,) * (1 + count), node_scores=likely(*[-0.1] * count))
    commit = scenes.commit_in(session.handle(done, 1.0))
    assert (commit.tokens, commit.replaced) == ((9,), ())


def test_an_exact_session_asks_for_nothing() -> None:
    session = scenes.new_session(scenes.REQUEST)
    session.handle(scenes.chain(session, 40), 1.0)
    assert not scenes.offer(session).node_scores
    walk = ExactRule().walk((40,), (-1,), (11, 12), likely(-0.1))
    assert (walk.tokens, walk.replaced) == ((11,), ())


def test_a_device_counts_what_was_replaced_once() -> None:
    session = draft_scripts.streaming()
    commit = m.Commit(2, (5, 6, 7), accepted=2, replaced=(1,))
    for again in (commit, commit):
        session.handle(again, 1.0)
    (delivered,) = draft_scripts.streaming().handle(commit, 1.0)[:1]
    kinds = TokenKind.ACCEPTED, TokenKind.REPLACED, TokenKind.DECODED
    assert delivered.kinds == kinds  # type: ignore[union-attr]
    counters = session.counters
    assert (counters.committed, counters.accepted, counters.replaced) == (3, 2, 1)
    counters.take_back(kinds[1:])
    assert (counters.committed, counters.accepted, counters.replaced) == (1, 1, 0)
