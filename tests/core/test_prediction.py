"""Drafts from a prediction: where the output stands in it, and the session that drafts from it.

Oracle: outputs that are edits of the prediction, with the number of tokens that no candidate can
name counted by hand; the session's own messages; a tree that is checked after every event.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from edgespec.core.device import events as ev
from edgespec.core.device.device_prediction import (
    MIN_FAR_CHANCE,
    RESERVED_NODES,
    DevicePrediction,
)
from edgespec.core.device.estimates import DraftEstimates, KeptEstimates
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.policy import DraftPolicy, DraftView
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.draft_source import SourceKind
from edgespec.core.protocol.messages import Commit, Draft, Limits, Open, Opened
from edgespec.core.protocol.predicted_text import (
    INITIAL_CHANCES,
    MAX_CANDIDATES,
    MAX_PREDICTION_TOKENS,
    PredictedText,
    ReadingState,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import EarlierTexts, TextTables
from edgespec.core.protocol.tree import NO_CELL, ROOT, CommittedPrefix, SpeculationTree
from edgespec.core.protocol.work import Candidate
from tests.core.draft_scripts import GREETING, RECONNECT, messages_in
from tests.present import require
from tests.sim.faults.checks import check_tree

# --- places in the prediction ---------------------------------------------------------------------

TEXT = (
    "the cat sat on a mat . it saw one dog and ran off . the dog barked at it twice , then slept"
    " under an old oak tree until noon came . nobody minded either of them at all ."
).split()
NUMBERS: dict[str, int] = {}


def ids(words: Sequence[str]) -> list[int]:
    return [NUMBERS.setdefault(word, len(NUMBERS) + 1) for word in words]


def count_unnamed(prediction: Sequence[int], output: Sequence[int]) -> int:
    """Return at how many places of ``output`` no candidate is the right token."""
    text = PredictedText(prediction, INITIAL_CHANCES)
    state, unnamed = text.begin(), 0
    for position, token in enumerate(output):
        candidates = text.candidates(state)
        assert len(candidates) <= MAX_CANDIDATES
        assert len({candidate for _, candidate in candidates}) == len(candidates)
        unnamed += token not in [candidate for _, candidate in candidates]
        state = text.commit(state, token, output, position)
    return unnamed


REPEATED = "a foo b c d foo d e f foo ( x z foo ) y y foo , z w w foo".split()
EDITS = {
    "the same": (TEXT, TEXT, 0),
    "one word replaced": (TEXT, [*TEXT[:9], "zebra", *TEXT[10:]], 1),
    "the first word replaced": (TEXT, ["A", *TEXT[1:]], 1),
    "two replaced by two": (TEXT, [*TEXT[:9], "big", "zebra", *TEXT[11:]], 2),
    # The place is known once a word of it has come behind the new ones.
    "two replaced by three": (TEXT, [*TEXT[:9], "very", "big", "zebra", *TEXT[11:]], 4),
    "three inserted": (TEXT, [*TEXT[:9], "very", "big", "zebra", *TEXT[9:]], 3),
    "a word deleted": (TEXT, [*TEXT[:9], *TEXT[10:]], 1),
    "five deleted": (TEXT, [*TEXT[:9], *TEXT[14:]], 1),
    "an end that is new": (TEXT, [*TEXT, "and", "so", "on"], 3),
    "an end that is missing": (TEXT, TEXT[:20], 0),
    # The first word behind each of the three borders, and at the second one a common word before.
    "a moved block": (TEXT, [*TEXT[:6], *TEXT[16:28], *TEXT[6:16], *TEXT[28:]], 4),
    "a word renamed five times": (REPEATED, [{"foo": "bar"}.get(w, w) for w in REPEATED], 1),
    "a word renamed to three": (REPEATED, " ".join(REPEATED).replace("foo", "my . bar").split(), 4),
    "a repeated deletion": (REPEATED, [w for w in REPEATED if w != "foo"], 1),
    "a repeated insertion": (REPEATED, " ".join(REPEATED).replace("foo", "foo :").split(), 1),
    "nothing of it": (TEXT, "no word is in that other text here".split(), 8),
    "nothing predicted": ([], TEXT, len(TEXT)),
}


@pytest.mark.parametrize(("prediction", "output", "unnamed"), EDITS.values(), ids=EDITS)
def test_an_edit_costs_what_is_new_in_it(
    prediction: Sequence[str], output: Sequence[str], unnamed: int
) -> None:
    assert count_unnamed(ids(prediction), ids(output)) <= unnamed


def test_a_sure_place_has_one_candidate_and_the_rest_of_the_text_behind_it() -> None:
    tokens = ids(TEXT)
    text = PredictedText(tokens, INITIAL_CHANCES)
    state, ahead = text.begin(), []
    while candidates := text.candidates(state):
        ((_, token),) = candidates
        ahead.append(token)
        state = text.advance(state, token)
    assert ahead == tokens


@pytest.mark.parametrize("seed", range(20))
def test_any_output_is_followed_within_the_bounds(seed: int) -> None:
    """Few different tokens make matches by chance everywhere. Looking ahead changes nothing: the
    state is the same whether a token was looked ahead to before or not."""
    dice = random.Random(seed)
    size = dice.choice((2, 3, 9))
    prediction = [dice.randrange(size) for _ in range(dice.choice((0, 1, 2, 40)))]
    output = [dice.randrange(size) for _ in range(120)]
    text = PredictedText(prediction, INITIAL_CHANCES)
    state = text.begin()
    for position, token in enumerate(output):
        ahead = state
        for _ in range(5):
            candidates = text.candidates(ahead)
            assert len({candidate for _, candidate in candidates}) == len(candidates)
            assert all(0 <= cell < len(INITIAL_CHANCES) for cell, _ in candidates)
            ahead = text.advance(ahead, dice.randrange(size))
        before: ReadingState = text.advance(state, token)
        state = text.commit(state, token, output, position)
        assert state == before
        assert all(0 < anchor.next_index <= len(prediction) for anchor in state.anchors)


def test_too_long_a_prediction_is_refused_by_its_length() -> None:
    PredictedText([1] * MAX_PREDICTION_TOKENS, INITIAL_CHANCES)
    with pytest.raises(ValueError, match=r"has 65,537 tokens, but may have at most 65,536"):
        PredictedText([1] * (MAX_PREDICTION_TOKENS + 1), INITIAL_CHANCES)


# --- nodes of the tree ----------------------------------------------------------------------------


def view_of(tree: SpeculationTree, estimates: DraftEstimates, room: int = 256) -> DraftView:
    return DraftView(tree, 0, 0, room, 1 << 20, estimates)


@pytest.mark.parametrize("room", [0, 1, RESERVED_NODES, 20, 1000])
def test_the_chain_ends_with_the_room(room: int) -> None:
    tree, estimates = SpeculationTree(CommittedPrefix((7,))), DraftEstimates()
    source = DevicePrediction(tree, range(100, 200), estimates)
    for _ in range(2):
        source.add_nodes(view_of(tree, estimates, room - len(tree.nodes)))
    tokens = [node.token for node in tree.nodes.values()]
    assert tokens == list(range(100, 100 + len(tokens)))
    assert len(tokens) == max(0, min(room - RESERVED_NODES, 100))
    assert source.has_unsent == bool(tokens)


def test_a_price_of_a_row_keeps_out_what_begins_unlikely() -> None:
    """The first candidate has a chance of 0.6. What follows it is text for later passes, of which
    the verifier takes the rows that pay."""
    lengths = []
    for price in (0.0, 0.3, 0.7):
        tree, estimates = SpeculationTree(CommittedPrefix((7,))), DraftEstimates()
        estimates.price.least_chance = price
        source = DevicePrediction(tree, range(100, 800), estimates)
        source.add_nodes(view_of(tree, estimates, 1000))
        reach = {ROOT: 1.0}
        for node in tree.nodes.values():
            reach[node.id] = reach[node.parent] * node.chance
            assert reach[node.id] >= MIN_FAR_CHANCE
        lengths.append(len(tree.nodes))
    assert lengths[0] == lengths[1] > 300
    assert lengths[2] == 0


def test_far_nodes_need_a_likely_beginning() -> None:
    """Less is sent where the output has left the prediction, since that may go on anywhere."""
    tree, estimates = SpeculationTree(CommittedPrefix((7,))), DraftEstimates()
    source = DevicePrediction(tree, range(100, 800), estimates)
    tree.commit((100, 5, 6, 7))  # three tokens that stand nowhere
    source.add_nodes(view_of(tree, estimates, 1000))
    assert 0 < len(tree.nodes) < 40


def test_tokens_beyond_the_vocabulary_are_left_out() -> None:
    tree, estimates = SpeculationTree(CommittedPrefix((7,))), DraftEstimates()
    source = DevicePrediction(tree, (5, 50, -1, 6, 1 << 30, 8), estimates, vocabulary_size=50)
    source.add_nodes(view_of(tree, estimates))
    assert [node.token for node in tree.nodes.values()] == [5, 6, 8]


def follow_found_text(tables: TextTables, output: Sequence[int]) -> list[int]:
    """Return the tokens that are drafted behind ``output``, where a text has to be found."""
    tree, estimates = SpeculationTree(CommittedPrefix((7,))), DraftEstimates()
    source = DevicePrediction(tree, (), estimates, tables=tables)
    assert source.kind is SourceKind.DEVICE_LOOKUP
    for token in output:
        source.add_nodes(view_of(tree, estimates))
        tree.commit((token,))
    source.add_nodes(view_of(tree, estimates))
    assert all(node.prediction_cell != NO_CELL for node in tree.nodes.values())
    return [node.token for node in tree.nodes.values()]


OLD = [*range(100, 200)]
FOUND = {
    "too short": ([*OLD[30:37]], []),
    "a part": ([*OLD[30:38]], OLD[38:]),
    "a part behind other tokens": ([5, 6, 7, *OLD[30:42]], OLD[42:]),
    "behind a replaced token": ([*OLD[30:42], 5, *OLD[43:46]], OLD[46:]),
    "behind a moved part": ([*OLD[30:42], *OLD[60:66]], OLD[66:]),
    "nothing of it": ([*range(300, 330)], []),
}


@pytest.mark.parametrize(("output", "ahead"), FOUND.values(), ids=FOUND)
def test_a_text_of_the_device_is_followed_like_a_prediction(
    output: Sequence[int], ahead: Sequence[int]
) -> None:
    tables = TextTables(ngrams=True, earlier=EarlierTexts())
    assert tables.earlier is not None
    tables.earlier.add((1, 2, *OLD))
    drafted = follow_found_text(tables, output)
    assert drafted[: len(ahead)] == list(ahead)
    assert bool(drafted) == bool(ahead)


def test_a_text_that_is_lost_gives_way_to_another() -> None:
    tables, other = TextTables(ngrams=True, earlier=EarlierTexts()), [*range(300, 400)]
    assert tables.earlier is not None
    tables.earlier.add(OLD)
    tables.earlier.add(other)
    assert follow_found_text(tables, [*OLD[:20], *other[40:50]])[:5] != other[50:55]
    assert follow_found_text(tables, [*OLD[:20], *other[40:60]])[:30] == other[60:90]


def test_equally_frequent_continuations_are_no_text() -> None:
    tables = TextTables(ngrams=True, earlier=EarlierTexts())
    assert tables.earlier is not None
    tables.earlier.add((*OLD[:20], 1, 2, 3, 4))
    tables.earlier.add((*OLD[:20], 5, 6, 7, 8))
    assert tables.find_text(tuple(OLD[4:20]), 8) is None
    tables.earlier.add((*OLD[:20], 5, 6, 7, 8))
    found, length = require(tables.find_text(tuple(OLD[4:20]), 8))
    assert (found.tokens[found.next_index], length) == (5, 16)


def test_a_prediction_that_is_all_wrong_soon_has_no_row() -> None:
    """Prose of other words: the price of 0.05 then keeps nearly all of it out."""
    dice = random.Random(1)
    tree, estimates = SpeculationTree(CommittedPrefix((7,))), DraftEstimates()
    estimates.price.least_chance = 0.05
    prediction = [dice.randrange(40) for _ in range(600)]
    source = DevicePrediction(tree, prediction, estimates)
    added = []
    for _ in range(400):
        last = tree.last_id
        source.add_nodes(view_of(tree, estimates))
        added.append(tree.last_id - last)
        tree.commit((1000 + dice.randrange(40),))
    assert sum(added[40:]) < 0.05 * len(added)


def test_a_prediction_that_is_right_again_is_followed_at_once() -> None:
    """100 tokens of it are wrong; then the output goes on in its middle."""
    tree, estimates = SpeculationTree(CommittedPrefix((7,))), DraftEstimates()
    source = DevicePrediction(tree, range(100, 400), estimates)
    for token in (*range(1000, 1100), *range(250, 256)):
        source.add_nodes(view_of(tree, estimates))
        tree.commit((token,))
    source.add_nodes(view_of(tree, estimates))
    assert [node.token for node in tree.roots] == [256]
    assert len(tree.nodes) > 8


def test_the_model_confirms_or_contradicts_the_prediction() -> None:
    """A node that both offer is one node, likelier than by the model alone; one that the model does
    not offer is less likely than before."""
    for confirmed in (True, False):
        session, _ = open_session((5, 6, 7), prediction=range(100, 130), context_length=1000)
        (before,) = session.tree.roots
        chance = before.chance
        token = 100 if confirmed else 50
        session.handle(ev.StepDone((Candidate(token, -0.1), Candidate(60, -3.0))), 0.01)
        nodes = {node.token: node for node in session.tree.roots}
        assert set(nodes) == {100, token, 60}
        assert nodes[100].prediction_cell != NO_CELL == nodes[60].prediction_cell
        assert (nodes[100].chance >= chance) is confirmed


# --- the session ----------------------------------------------------------------------------------


def open_session(
    prompt: Sequence[int],
    prediction: Sequence[int],
    *,
    policy: DraftPolicy | None = None,
    context_length: int = 0,
    limits: Limits | None = None,
    learned: KeptEstimates | None = None,
    text: TextTables | None = None,
    max_tokens: int = 400,
) -> tuple[DraftSession, list[Draft]]:
    """Return a session that streams, and the drafts that it has sent. Without a context length it
    has no draft model."""
    request = Open("s", "", "", tuple(prompt), sampling=SamplingParams(max_tokens=max_tokens))
    session = DraftSession(
        request,
        policy or GoodputPolicy(2),
        RECONNECT,
        context_length,
        vocabulary_size=1000,
        learned=learned,
        text=text,
        prediction=prediction,
    )
    greeting = Opened(limits or Limits(), GREETING.model, len(prompt))
    actions = session.handle(ev.Start(), 0.0)
    actions += session.handle(ev.Connected(), 0.0) + session.handle(greeting, 0.0)
    return session, drafts_in(actions)


def drafts_in(actions: tuple[ev.DraftAction, ...]) -> list[Draft]:
    return [message for message in messages_in(actions) if isinstance(message, Draft)]


def tokens_of(drafts: Sequence[Draft]) -> list[int]:
    return [token for draft in drafts for token in draft.tokens]


def test_the_chain_is_sent_with_the_request_and_no_step_runs() -> None:
    session, sent = open_session((5, 6), prediction=range(100, 130))
    assert tokens_of(sent) == list(range(100, 130))
    actions = session.handle(Commit(2, (*range(100, 110), 9), accepted=10, verify_us=9), 0.1)
    assert not [one for one in actions if isinstance(one, ev.StartStep)]
    (delivered,) = [one for one in actions if isinstance(one, ev.Deliver)]
    assert delivered.predicted == tuple(range(10))
    counters = session.counters
    assert (counters.predicted_right, counters.predicted_accepted) == (10, 10)
    assert counters.predicted_sent == counters.sent
    assert counters.predicted_wrong == counters.sent - 10
    first, chain = session.tree.roots[0], []
    while first.children:
        chain.append(first.token)
        first = first.children[0]
    assert chain[:3] == [111, 112, 113], "one word of it was replaced"
    assert set(chain) <= set(tokens_of(drafts_in(actions)))


def test_what_is_sent_again_counts_once_and_what_came_late_is_no_error() -> None:
    session, sent = open_session((5, 6), prediction=range(100, 120))
    session.handle(ev.LinkDown("cut"), 0.1)
    session.handle(ev.Tick(), 2.0)
    again = drafts_in(session.handle(ev.Connected(), 2.0))
    assert tokens_of(again) == tokens_of(sent) == list(range(100, 120))
    assert session.counters.predicted_sent == 20 < session.counters.sent
    session.handle(Commit(2, (100, 101), verify_us=9), 2.1)  # the verifier decoded them itself
    assert (session.counters.predicted_right, session.counters.predicted_accepted) == (2, 0)
    assert session.counters.predicted_wrong == 18


def test_tokens_behind_a_stop_string_are_not_counted() -> None:
    counters = ev.DraftCounters(committed=9, accepted=8, predicted_accepted=7)
    kinds = (ev.TokenKind.ACCEPTED, ev.TokenKind.ACCEPTED, ev.TokenKind.DECODED)
    counters.subtract_undelivered(kinds, predicted=1)
    assert (counters.committed, counters.accepted, counters.predicted_accepted) == (6, 6, 6)


def test_a_model_that_fails_leaves_the_prediction() -> None:
    session, _ = open_session((5, 6, 7), prediction=range(100, 400), context_length=1000)
    session.handle(ev.StepFailed("no memory"), 0.1)
    actions = session.handle(Commit(3, (100, 101), accepted=2, verify_us=9), 0.2)
    assert session.drafting
    assert not [one for one in actions if isinstance(one, ev.StartStep)]
    assert drafts_in(actions)


def test_no_node_stands_behind_the_end_of_the_output() -> None:
    """The last token of a pass is the target's own, so a node at the last position is of no use."""
    session, sent = open_session((5, 6), prediction=range(100, 200), max_tokens=8)
    assert tokens_of(sent) == list(range(100, 107))
    assert max(node.position for node in session.tree.nodes.values()) == 2 + 8 - 2


WRONG = {
    "random": lambda dice: [dice.randrange(9) for _ in range(60)],
    "shifted": lambda dice: list(range(3, 9)) * 10,
    "of one token": lambda dice: [4] * 60,
    "beyond the vocabulary": lambda dice: [dice.choice((3, 1000, 1 << 30, -5)) for _ in range(60)],
    "huge": lambda dice: [dice.randrange(9) for _ in range(5000)],
    "one token": lambda dice: [3],
    "right": lambda dice: list(range(9)) * 40,
}


@pytest.mark.parametrize("context_length", [0, 1000], ids=["alone", "with a model"])
@pytest.mark.parametrize("predict", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("seed", range(3))
def test_any_prediction_keeps_tree_and_counters_sound(
    predict: object, seed: int, context_length: int
) -> None:
    """The output counts up to 8 again and again, with other tokens now and then. Commits of any
    length arrive, and candidates of the model, of which some are right."""
    assert callable(predict)
    dice = random.Random(seed)
    limits = Limits(max_nodes_outstanding=dice.choice((3, 16, 256)))
    session, _ = open_session(
        (1, 2, 3),
        predict(dice),
        context_length=context_length,
        limits=limits,
        text=TextTables(ngrams=True) if seed else None,
    )
    output, now = [1, 2, 3], 0.0
    starts = 0
    while len(output) < 300:
        now += dice.uniform(0.0, 0.03)
        tree, actions = session.tree, tuple[ev.DraftAction, ...]()
        if context_length and starts and dice.random() < 0.5:
            tokens = dice.sample(range(9), dice.randrange(3))
            found = tuple(Candidate(token, -1.0 - rank) for rank, token in enumerate(tokens))
            starts -= 1
            actions = session.handle(ev.StepDone(found), now)
        else:
            start = session.prefix.length
            tokens, children, accepted = list[int](), tree.roots, 0
            for _ in range(dice.choice((1, 1, 2, 9))):
                last = (output + tokens)[-1]
                tokens.append((last + 1) % 9 if dice.random() < 0.9 else dice.randrange(9))
                node = next((one for one in children if one.token == tokens[-1]), None)
                if node is not None and accepted == len(tokens) - 1:
                    accepted, children = len(tokens), node.children
            output += tokens
            actions = session.handle(
                Commit(start, tuple(tokens), accepted=accepted, verify_us=9), now
            )
        running = sum(isinstance(one, ev.StartStep) for one in actions)
        assert context_length or not running
        starts += running if context_length and not session._model.is_running else 0
        starts = int(session._model.is_running)
        check_tree(tree, "device")
        counters = session.counters
        assert session.prefix.tokens == output
        assert counters.predicted_accepted <= counters.predicted_right
        assert counters.predicted_right <= counters.predicted_sent <= counters.sent
        assert all(0 <= node.token < 1000 for node in tree.nodes.values())


def test_counts_of_one_generation_help_the_next() -> None:
    """Two predictions are all wrong, so the beginning of the third is less likely."""
    learned, chances = KeptEstimates(), []
    for _ in range(3):
        session, _ = open_session((5,), range(100, 200), learned=learned)
        chances.append(session.tree.roots[0].chance)
        for position in range(1, 200):
            session.handle(Commit(position, (900 + position % 7,), verify_us=9), 0.1 * position)
    assert chances[2] < chances[1] < chances[0]
