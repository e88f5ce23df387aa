"""Constraints as a part of the sampling law, with automata over token ids whose texts can all be
written down.

Oracle: the scalar specification, one token after the other, with the mask of the automaton itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.ports import PassRequest, TargetModel
from edgespec.core.protocol import constraint as co
from edgespec.core.protocol.acceptance import ExactRule
from edgespec.core.protocol.constraint import Constraint, ConstraintKind, pack_mask
from edgespec.core.protocol.messages import FaultCode, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.protocol.work import ModelInfo
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.admission import refuse_open
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyTarget

EOS = 0


@dataclass(frozen=True, slots=True)
class Automaton:
    """An automaton over token ids: ``moves[state]`` maps each token to the next state; the first
    state is 0."""

    moves: tuple[Mapping[int, int], ...]
    ends: frozenset[int]

    def allowed(self, output: Sequence[int]) -> set[int]:
        """Return the tokens allowed after ``output`` by the scalar law, or the end token if no
        other is."""
        state = 0
        for token in output:
            state = self.moves[state][token]
        found = set(self.moves[state])
        return found | {EOS} if state in self.ends or not found else found

    def constraint(self) -> Constraint:
        return Constraint(ConstraintKind.GRAMMAR, repr(self), lambda: AutomatonMatcher(self))


class AutomatonMatcher:
    """A ``Matcher`` over an automaton that counts the tokens it consumed."""

    fed = 0

    def __init__(self, automaton: Automaton) -> None:
        self._automaton, self._states = automaton, [0]

    @property
    def can_end(self) -> bool:
        return self._states[-1] in self._automaton.ends

    def mask(self) -> bytes:
        return pack_mask(self._automaton.moves[self._states[-1]])

    def consume(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            AutomatonMatcher.fed += 1
            found = self._automaton.moves[self._states[-1]].get(token)
            if found is None:
                return count
            self._states.append(found)
        return len(tokens)

    def rollback(self, count: int) -> None:
        assert 0 < count < len(self._states)
        del self._states[len(self._states) - count :]


def lawful_text(
    model: ToyModel,
    prompt: Sequence[int],
    params: SamplingParams,
    mask: Callable[[Sequence[int]], bytes],
) -> list[int]:
    """Return the oracle's text: one token after the other, by the scalar specification. ``mask``
    maps the output so far to its mask."""
    output: list[int] = []
    while len(output) < params.max_tokens and output[-1:] != [EOS]:
        text = [*prompt, *output]
        row = model.logits(text)
        output.append(choose(row, params, len(text), prompt, output, mask(output)))
    return output


def drafted_text(
    target: TargetModel,
    prompt: Sequence[int],
    params: SamplingParams,
    guess: Callable[[Sequence[int], random.Random], int],
    seed: int,
    *,
    held: Sequence[int] = (),
    ends: Collection[int] = (EOS,),
) -> list[int]:
    """Return the text that a target commits when each pass has a random tree of ``guess``-ed nodes.

    The text starts with ``held`` and stops at a token of ``ends``. Now and then the target loses
    its cache.
    """
    dice = random.Random(seed)
    tokens, cached = [*prompt, *held], 0
    target.open("drafted", len(prompt), params, tuple(tokens))
    while True:
        nodes: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = []
        for node in range(dice.randrange(7)):
            parent = dice.randrange(-1, node)
            path = [*(paths[parent] if parent >= 0 else tokens[len(prompt) :])]
            nodes.append(guess(path, dice))
            parents.append(parent)
            paths.append([*path, nodes[-1]])
        request = PassRequest(
            "drafted", cached, tuple(tokens[cached:]), tuple(nodes), tuple(parents)
        )
        (result,) = target.forward([request])
        walk = ExactRule().walk(nodes, parents, result.targets)
        target.keep("drafted", walk.nodes)
        cached = len(tokens) + len(walk.nodes)
        for token in walk.tokens:
            tokens.append(token)
            if token in ends or len(tokens) - len(prompt) >= params.max_tokens:
                target.close("drafted")
                return tokens[len(prompt) :]
        cached = dice.choice((0, cached, cached, cached))


MODEL = ToyModel(vocabulary_size=8, order=2, seed=4, eos_token=EOS, eos_probability=0.1)
PROMPT = [1, 2, 3]
SAMPLED = SamplingParams(
    temperature=1.1, top_p=0.9, min_p=0.01, seed=9, presence_penalty=0.5, logit_bias={2: 3.0}
)
LAWS = (SamplingParams(), SAMPLED, replace(SAMPLED, top_k=3, top_p=1.0))


@st.composite
def automata(draw: st.DrawFn) -> Automaton:
    count = draw(st.integers(1, 4))
    states = st.integers(0, count - 1)
    moves = st.dictionaries(st.integers(1, 7), states, max_size=4)
    table = draw(st.lists(moves, min_size=count, max_size=count))
    return Automaton(tuple(table), frozenset(draw(st.sets(states, max_size=count))))


@given(automata(), st.sampled_from(LAWS), st.integers(0, 1 << 16))
def test_drafts_change_nothing_of_a_constrained_text(
    automaton: Automaton, law: SamplingParams, seed: int
) -> None:
    params = replace(law, constraint=automaton.constraint(), max_tokens=20)
    expected = lawful_text(MODEL, PROMPT, params, lambda out: co.pack_mask(automaton.allowed(out)))
    for token, output in ((t, expected[:at]) for at, t in enumerate(expected)):
        assert token in automaton.allowed(output)

    def guess(output: Sequence[int], dice: random.Random) -> int:
        right = expected[len(output)] if output == expected[: len(output)] != expected else EOS
        return dice.choice((right, right, dice.randrange(8)))

    target = ToyTarget(MODEL)
    assert drafted_text(target, PROMPT, params, guess, seed) == expected
    held = expected[: seed % len(expected)]
    assert drafted_text(target, PROMPT, params, guess, seed, held=held) == expected


@given(automata(), st.data())
def test_a_tree_has_the_masks_of_its_paths(automaton: Automaton, data: st.DataObject) -> None:
    """Oracle: a text of its own for each path."""
    constraint = automaton.constraint()
    nodes = data.draw(st.lists(st.integers(0, 7), max_size=8))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(nodes))]
    text = co.ConstrainedText(constraint, (EOS,))
    for _ in range(2):  # the second time starts at the state that the first one left
        found = text.masks(nodes, parents)
        paths: list[list[int]] = [[]]
        for token, parent in zip(nodes, parents, strict=True):
            paths.append([*paths[1 + parent], token])
        for path, mask in zip(paths, found, strict=True):
            alone = co.ConstrainedText(constraint, (EOS,))
            alone.follow(path)
            assert mask == alone.mask()


@given(automata(), st.lists(st.integers(0, 7), max_size=6), st.integers(0, 5))
def test_forced_tokens_are_those_without_a_choice(
    automaton: Automaton, output: list[int], most: int
) -> None:
    text = co.ConstrainedText(automaton.constraint(), (EOS,))
    expected: list[int] = []
    lawful = all(t in automaton.allowed(output[:at]) - {EOS} for at, t in enumerate(output))
    while lawful and len(expected) < most:
        allowed = automaton.allowed([*output, *expected])
        if len(allowed) > 1 or EOS in allowed:
            break
        expected += allowed
    assert text.forced(output, most) == expected


def test_a_text_is_followed_token_by_token_and_not_from_its_start() -> None:
    loop = Automaton(({1: 0, 2: 0},), frozenset({0}))
    text = co.ConstrainedText(loop.constraint(), (EOS,))
    before = AutomatonMatcher.fed
    output: list[int] = []
    for token in [1, 2] * 50:
        output.append(token)
        assert text.follow(output) == len(output)
    assert AutomatonMatcher.fed - before == 100
    assert text.follow([*output[:90], 2, 2]) == 92
    assert AutomatonMatcher.fed - before == 102


def test_what_is_not_in_the_grammar_is_not_taken() -> None:
    once = Automaton(({1: 1}, {}), frozenset({1}))
    text = co.ConstrainedText(once.constraint(), (EOS, 7))
    assert text.follow([EOS]) == 0
    assert text.mask() is None
    assert text.follow([1, 2]) == 1
    assert text.mask() is None
    assert text.follow([1, 7]) == 2  # an end token after a complete text belongs to it
    assert text.mask() is None
    assert text.follow([1]) == 1
    assert text.mask() == co.pack_mask((EOS, 7))


def test_a_dead_end_ends_the_text() -> None:
    stuck = Automaton(({1: 1}, {}), frozenset())
    params = SamplingParams(constraint=stuck.constraint())
    text = drafted_text(ToyTarget(MODEL), PROMPT, params, lambda *_: 1, 0)
    assert text == [1, EOS]


def test_a_draft_guesses_under_the_mask() -> None:
    only = Automaton(({5: 1}, {6: 0}), frozenset({1}))
    drafter = ToyDrafter(MODEL)
    drafter.begin(len(PROMPT), SamplingParams(constraint=only.constraint()))
    assert [one.token for one in drafter.step(0, PROMPT, 4)] == [5]
    assert {one.token for one in drafter.step(3, (5,), 4)} == {6, EOS}
    # these have no place in the grammar
    assert {one.token for one in drafter.step(3, (4,), 4)} != {6, EOS}
    drafter.begin(
        len(PROMPT), SamplingParams(constraint=co.Constraint(co.ConstraintKind.REGEX, "5"))
    )
    assert len(drafter.step(0, PROMPT, 4)) == 4  # no library reads the grammar here


def test_a_verifier_refuses_what_it_cannot_keep() -> None:
    constraint = Automaton(({},), frozenset()).constraint()
    model = ModelInfo("big", "", 8, 64, (EOS,))
    request = Open("s", "", "", (1,), sampling=SamplingParams(constraint=constraint))
    assert refuse_open(request, model, Limits(), frozenset({"exact"})) is None
    endless = refuse_open(request, replace(model, eos_token_ids=()), Limits(), frozenset({"exact"}))
    assert endless is not None
    assert "'big' has no end token" in endless.message
    unread = SamplingParams(constraint=replace(constraint, matcher=None))
    fault = refuse_open(replace(request, sampling=unread), model, Limits(), frozenset({"exact"}))
    assert fault is not None
    assert (fault.code, fault.message) == (
        FaultCode.INVALID,
        "this verifier does not support grammar constraints: "
        "send the request without it, or to another verifier",
    )
    with pytest.raises(co.ConstraintError, match="no grammar library is installed here"):
        ToyTarget(MODEL).open("s", 1, unread)
