"""Guesses from the text in a session's own tree, beside those of its draft.

Oracle: texts whose next tokens are known, chances by hand, and for what is in flight the session's
own messages.
"""

from __future__ import annotations

import random
import tracemalloc

import pytest

from edgespec.core.device import events as ev
from edgespec.core.device.estimates import DraftEstimates, Learned
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.policy import DraftView
from edgespec.core.device.session import DraftSession
from edgespec.core.device.text_drafts import LEAST_CHANCE, MOST_NODES, TextDrafts
from edgespec.core.protocol.messages import Commit, Draft, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_guesses import TextChances, TextReader, TextTables
from edgespec.core.protocol.tree import ROOT, UNRANKED, CommittedPrefix, SpeculationTree
from edgespec.core.protocol.work import Candidate
from tests.core.draft_scripts import GREETING, RECONNECT, messages
from tests.present import present

LOOP = (5, 6, 7, 8, 9)


def tables() -> TextTables:
    return TextTables(ngrams=True, most_leaders=4096)


def reading(
    *prompt: int, said: TextTables | None = None, learned: Learned | None = None
) -> tuple[DraftSession, list[object]]:
    """A session that streams, and what it has sent behind its request."""
    request = Open("s", "", "", prompt, sampling=SamplingParams(max_tokens=400))
    session = DraftSession(
        request, GoodputPolicy(2), RECONNECT, 1000, learned=learned, text=said or tables()
    )
    session.handle(ev.Start(), 0.0)
    actions = session.handle(ev.Connected(), 0.0) + session.handle(GREETING, 0.0)
    return session, messages(actions)[1:]


def chain(session: DraftSession) -> list[int]:
    """The first guesses from the root on."""
    found, children = [], session.tree.roots
    while children:
        found.append(children[0].token)
        children = children[0].children
    return found


def test_a_loop_is_in_flight_before_the_draft_has_said_a_word() -> None:
    session, sent = reading(*LOOP, *LOOP, 5, 6)
    assert isinstance(sent[0], Draft)
    assert sent[0].tokens[:6] == (7, 8, 9, 5, 6, 7)
    assert chain(session)[:6] == [7, 8, 9, 5, 6, 7]
    assert all(node.rank == UNRANKED for node in session.tree.nodes.values())
    assert len(session.tree.nodes) <= MOST_NODES
    # The first step began before the text was there; its late answer confirms a guess.
    session.handle(ev.StepDone((Candidate(7, -0.1), Candidate(30, -3.0))), 0.01)
    first, second = session.tree.roots
    assert (first.token, first.rank, second.token, second.rank) == (7, 0, 30, 1)
    assert first.named_by >= 0 > second.named_by


def test_what_the_draft_denies_is_hardly_likely_any_more() -> None:
    session, _ = reading(*LOOP, 5, 6)
    (text,) = session.tree.roots
    before = text.chance
    session.handle(ev.StepDone((Candidate(20, -0.1), Candidate(30, -3.0))), 0.01)
    assert [node.token for node in session.tree.roots] == [7, 20, 30]
    assert text.chance == pytest.approx(before / 4)


def test_a_step_behind_a_dead_branch_changes_nothing() -> None:
    session, _ = reading(*LOOP, 5, 6)
    session.handle(ev.StepDone((Candidate(40, -0.1),)), 0.01)  # begins one behind 40 or 7
    step = present(session._step)
    assert step.parent != ROOT
    session.handle(Commit(7, (50,)), 0.02)
    before = {node.id: (node.rank, node.chance) for node in session.tree.nodes.values()}
    session.handle(ev.StepDone((Candidate(5, -0.1), Candidate(6, -0.2))), 0.03)
    assert {i: (n.rank, n.chance) for i, n in session.tree.nodes.items() if i in before} == before


def test_what_was_said_outlives_a_generation() -> None:
    dice = random.Random(2)
    said, known, learned = [dice.randrange(900) for _ in range(60)], tables(), Learned()
    hits = []
    for prompt in (901, 902):
        session, _ = reading(prompt, said=known, learned=learned)
        hits.append(0)
        for at, token in enumerate(said):
            hits[-1] += bool(session.tree.roots) and session.tree.roots[0].token == token
            session.handle(Commit(1 + at, (token,)), 0.02 * at)
    assert hits[0] == 0
    assert hits[1] > 50


class Phrases:
    """A corpus of what follows the last so many tokens."""

    def __init__(self, length: int, *named: tuple[int, float]) -> None:
        self.after = lambda end: (length, named)


def test_the_likelier_is_named_first_and_nothing_twice() -> None:
    """The text itself goes on with 7 behind an end of three tokens, by a chance of 0.6."""
    for phrases, named in (
        (Phrases(0), [7]),
        (Phrases(3, (20, 0.6), (30, 0.3)), [7, 20]),
        (Phrases(16, (20, 1.0), (30, 0.1)), [7, 20]),  # the chances are equal
        (Phrases(16, (7, 1.0)), [7]),
        (Phrases(2, (7, 0.9), (20, 0.1)), [7, 20]),
    ):
        said = tables()
        said.corpus = phrases
        reader, tokens = TextReader(said, TextChances()), (4, 5, 6, 7, 40, 4, 5, 6)
        reader.lookup.load(tokens, len(tokens))
        guesses, place = reader.guesses(tokens, reader.end(tokens))
        assert [token for _, token in guesses] == named
        assert len({cell for cell, _ in guesses}) == len(guesses)
        assert [token for _, token in reader.guesses(tokens, place)[0]] == named


def test_a_corpus_that_is_right_comes_first_though_it_was_not_named() -> None:
    """It is judged all the same: its 9 is right each time, what the text says (7 or 8) never is."""
    said, chances = tables(), TextChances()
    said.corpus = Phrases(2, (9, 0.2))
    reader, tokens = TextReader(said, chances), [1, 2, 7, 1, 2, 8, 1, 2]
    reader.lookup.load(tokens, len(tokens))
    assert 9 not in [token for _, token in reader.guesses(tokens, reader.end(tokens))[0][:1]]
    for number in range(12):
        tokens += [9, 30 + number, 1, 2]
        said.recycled.add(2, 50 + number)
        reader.learn(tokens)
    assert reader.guesses(tokens, reader.end(tokens))[0][0][1] == 9


def test_a_corpus_is_followed_and_judged() -> None:
    """Right at first: a chain of it is in flight. Then always wrong, and it is named no more."""
    said, learned = tables(), Learned()
    said.corpus = Phrases(5, (7, 1.0))
    session, sent = reading(1, 2, said=said, learned=learned)
    assert isinstance(sent[0], Draft)
    assert sent[0].tokens[:3] == (7, 7, 7)
    dice = random.Random(3)
    for at in range(2, 80):
        session.handle(Commit(at, (dice.randrange(100, 1000),)), 0.02 * at)
    assert all(node.token != 7 for node in session.tree.roots)


def test_guesses_are_judged_whether_they_were_made_or_not() -> None:
    """The text never goes on as it did: soon nothing is named any more."""
    session, _ = reading(1)
    dice, last = random.Random(0), 1
    for at in range(1, 300):
        last = dice.choice([token for token in range(6) if token != last])
        session.handle(Commit(at, (last,)), 0.02 * at)
    chances = session.estimates.guesses.text.of
    assert chances[0] == pytest.approx(0.2, abs=0.12)  # a match of two among five that may come


def view_of(tree: SpeculationTree, estimates: DraftEstimates, room: int = 128) -> DraftView:
    return DraftView(tree, 0, 0, room, 1000, estimates)


@pytest.mark.parametrize("room", [0, 1, 7, 40, 128, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_added_is_worth_it_and_within_bounds(seed: int, room: int) -> None:
    dice = random.Random(seed)
    text = [dice.randrange(4) for _ in range(80)]
    tree, estimates = SpeculationTree(CommittedPrefix(text)), DraftEstimates()
    drafts = TextDrafts(tree, tables(), estimates)
    drafts.grow(view_of(tree, estimates, room))
    assert not tree.nodes  # nothing is known of the text yet
    drafts.learn()
    for _ in range(3):
        drafts.grow(view_of(tree, estimates, room))
    reached = {ROOT: 1.0}
    for node in tree.nodes.values():
        reached[node.id] = reached[node.parent] * node.chance
        assert reached[node.id] >= LEAST_CHANCE
        siblings = [child.token for child in tree.children(node.parent)]
        assert len(set(siblings)) == len(siblings)
    assert len(tree.nodes) <= min(MOST_NODES, 3 * (room // 2))


@pytest.mark.parametrize(("chance", "leaf"), [(0.95, 3), (0.4, ROOT)])
def test_a_sure_guess_saves_a_step_of_the_draft(chance: float, leaf: int) -> None:
    """Three guesses of the text in a row. Where they are sure the draft goes on behind them; where
    they are not it is asked first."""
    tree, estimates = SpeculationTree(CommittedPrefix((1, 2))), DraftEstimates()
    for node in range(3):
        tree.grow(1 + node, node, 10 + node, 2, UNRANKED, 0.0, chance, 0)
    assert GoodputPolicy(2).extend(view_of(tree, estimates)) == leaf


def test_guesses_of_the_text_leave_room_for_the_drafts_own() -> None:
    session, _ = reading(*LOOP * 20, 5, 6)
    limits = Limits()
    alive = len(session.tree.nodes)
    assert alive <= limits.max_nodes_outstanding // 2
    session.handle(ev.StepDone((Candidate(99, -0.1), Candidate(30, -3.0))), 0.01)
    assert session._step is not None  # and so on


def test_the_tables_are_bounded() -> None:
    dice, said = random.Random(0), tables()
    tree, estimates = SpeculationTree(CommittedPrefix((1, 2))), DraftEstimates()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        drafts = TextDrafts(tree, said, estimates)
        for _ in range(12_000):
            tree.commit((dice.randrange(1 << 20),))
            drafts.learn()
            drafts.grow(view_of(tree, estimates))
        del drafts
        tree.prefix.tokens.clear()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 200_000 < grown < 2 << 20
