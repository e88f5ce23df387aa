"""Kept drafts: a verifier goes on in text that its device has sent, where the output differs.

Oracle: texts of which every token is another one, with the nodes of each pass written down by
hand; and the output itself, which is an edit of the text, with the passes counted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from edgespec.core.protocol.draft_source import SourceKind
from edgespec.core.protocol.messages import Draft, Limits
from edgespec.core.protocol.predicted_text import INITIAL_CHANCES, PredictedText
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier import kept_drafts
from edgespec.core.verifier.draft_inbox import DraftInbox
from edgespec.core.verifier.kept_drafts import MAX_TEXT_TOKENS, MIN_RUN
from edgespec.core.verifier.pass_tree import PassTree, PassVerdict, PassView

PROMPT = (1, 2, 3)
TEXT = tuple(range(100, 180))
SIZE = 1000


class Verifier:
    """The inbox of one session, whose target commits what the test says."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.prefix = CommittedPrefix(PROMPT)
        self.inbox = DraftInbox(self.prefix, SIZE, limits or Limits())
        self.last_id = 0
        self.passes = 0

    def receive(self, tokens: Sequence[int], parent: int = 0, base: int | None = None) -> None:
        """Receive a chain behind ``parent``, made when ``base`` tokens were committed."""
        base = self.prefix.length if base is None else base
        first = self.last_id + 1
        parents = (parent, *range(first, first + len(tokens) - 1))
        self.last_id += len(tokens)
        draft = Draft(first, parents, tuple(tokens), base, self.prefix.hash_at(base))
        assert self.inbox.receive(draft, 0.0) is None

    def look(self, room: int = 64) -> list[int]:
        """Return the tokens of the likeliest path that the next pass would verify, once candidates
        of every kind were right often."""
        self.trust()
        tree = self.fill(room)
        return [tree.tokens[node] for node in tree.likeliest_path()]

    def verifies(self, tokens: Sequence[int]) -> bool:
        """Return whether the next pass would verify all these tokens, in their order."""
        self.trust()
        tree, node = self.fill(), -1
        for token in tokens:
            behind = zip(tree.parents, tree.tokens, strict=True)
            found = [at for at, one in enumerate(behind) if one == (node, token)]
            if not found:
                return False
            node = found[0]
        return True

    def trust(self) -> None:
        """Let every candidate that follows a text be likely."""
        chances = self.inbox.kept._chances
        if chances is not None:
            agreed = range(8)  # the cells of tokens that follow others that agreed
            for cell in agreed:
                chances.by_cell[cell] = 0.99

    def fill(self, room: int = 64) -> PassTree:
        tree = PassTree(room)
        self.inbox.add_nodes(PassView(tree, self.prefix.tokens, 1 << 20, 0.0, 0.0))
        assert set(tree.sources) <= {SourceKind.DEVICE}
        return tree

    def commit(self, *tokens: int) -> None:
        """Commit tokens, as a pass would."""
        request = PassRequest("s", 0, (1,))
        self.inbox.learn(PassVerdict(request, (), (), (), tokens, 0.0))

    def write(self, output: Sequence[int], room: int = 64) -> int:
        """Let the target write all of ``output``, and return the number of passes."""
        done, passes = len(self.prefix.output), 0
        while done < len(output):
            tree, passes = self.fill(room), passes + 1
            node, count = -1, 0
            while done + count < len(output):
                behind = [
                    child
                    for child, parent in enumerate(tree.parents)
                    if parent == node and tree.tokens[child] == output[done + count]
                ]
                count += 1
                if not behind:
                    break
                node = behind[0]
            self.commit(*output[done : done + count])
            done += count
        return passes


DIFFERENCES = {
    "replaced": ((*TEXT[:20], 7), TEXT[21:]),
    "two replaced": ((*TEXT[:20], 7, 8), TEXT[22:]),
    "inserted": ((*TEXT[:20], 7, TEXT[20]), TEXT[21:]),
    "deleted": ((*TEXT[:20], TEXT[25]), TEXT[26:]),
    "the first one replaced": ((7,), TEXT[1:]),
}


@pytest.mark.parametrize(("written", "rest"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_behind_a_difference_the_verifier_goes_on_without_a_message(
    written: Sequence[int], rest: Sequence[int]
) -> None:
    verifier = Verifier()
    verifier.receive(TEXT)
    assert verifier.look(40) == list(TEXT[:40])
    verifier.commit(*written)
    assert not verifier.inbox.tree.nodes, "the device's nodes are dead"
    assert verifier.verifies(rest[:12])


def test_nodes_that_arrive_behind_a_difference_are_kept_as_well() -> None:
    verifier = Verifier()
    verifier.receive(TEXT[:20])
    verifier.commit(TEXT[0], 7)
    for start in range(20, 80, 20):  # behind what was sent last, which is dead
        verifier.receive(TEXT[start : start + 20], parent=verifier.last_id)
    assert not verifier.inbox.tree.nodes
    assert verifier.look(80)[:60] == list(TEXT[2:62])


def test_a_chain_that_repeats_the_text_adds_what_is_new() -> None:
    """The device has read the difference meanwhile, and sends the rest of its text again."""
    verifier = Verifier()
    verifier.receive(TEXT[:40])
    verifier.commit(*TEXT[:9], 7)
    verifier.receive(TEXT[10:70])
    text = verifier.inbox.kept._text
    assert text is not None
    assert tuple(text.tokens) == TEXT[:70]


def test_a_chain_from_before_the_last_commit_is_found_in_the_text() -> None:
    verifier = Verifier()
    verifier.receive(TEXT[:40])
    verifier.commit(*TEXT[:9], 7)
    base = verifier.prefix.length
    verifier.commit(*TEXT[10:14], 8)  # of which the device has not heard
    verifier.receive(TEXT[10:60], base=base)
    assert not verifier.inbox.tree.nodes
    text = verifier.inbox.kept._text
    assert text is not None
    assert tuple(text.tokens) == TEXT[:60]
    assert verifier.look()[:40] == list(TEXT[15:55])


def test_text_from_elsewhere_is_another_part() -> None:
    verifier, other = Verifier(), tuple(range(500, 540))
    verifier.receive(TEXT[:40])
    verifier.commit(7)
    verifier.receive(other)
    verifier.commit(*other[:12], 8)
    assert verifier.look()[:20] == list(other[13:33])


def test_short_drafts_are_not_kept() -> None:
    """A draft model sends a few nodes at a time. Its dead nodes are of no use to anyone."""
    verifier = Verifier()
    for start in range(0, 80, MIN_RUN - 1):
        verifier.receive(TEXT[start : start + MIN_RUN - 1], parent=verifier.last_id)
    assert not verifier.inbox.kept.has_text
    verifier.commit(7)
    assert verifier.look() == []


def test_a_new_stream_keeps_the_text_and_counts_anew() -> None:
    verifier = Verifier()
    verifier.receive(TEXT[:40])
    verifier.commit(*TEXT[:5], 7)
    verifier.inbox.reset(drafting=True)
    verifier.last_id = 0
    assert verifier.look()[:10] == list(TEXT[6:16])
    verifier.receive(TEXT[6:60])
    text = verifier.inbox.kept._text
    assert text is not None
    assert tuple(text.tokens) == TEXT[:60]


def test_what_is_no_token_is_not_verified() -> None:
    verifier = Verifier()
    verifier.receive([*TEXT[:20], SIZE, SIZE + 5, *TEXT[20:60]])
    verifier.commit(7)
    assert all(0 <= token < SIZE for token in verifier.fill().tokens)


def test_the_text_is_bounded_and_begins_anew() -> None:
    verifier, dice = Verifier(), random.Random(2)
    for _ in range(200):
        verifier.receive([dice.randrange(SIZE) for _ in range(64)])
        verifier.commit(dice.randrange(SIZE))
        kept = verifier.inbox.kept
        assert len(kept._places) <= kept_drafts._MAX_PLACES
        if kept._text is not None:
            assert len(kept._text.tokens) <= MAX_TEXT_TOKENS + kept_drafts._NEW_PART
    verifier.receive(range(64))
    text = verifier.inbox.kept._text
    assert text is not None
    assert text.tokens[-64:] == list(range(64))


def test_a_text_that_the_output_has_left_is_dropped() -> None:
    verifier = Verifier()
    verifier.receive(TEXT)
    for token in range(500, 500 + kept_drafts._MAX_GAP + 2):
        verifier.commit(token)
    verifier.look()
    assert not verifier.inbox.kept.has_text


def test_a_wrong_text_soon_costs_no_rows() -> None:
    verifier, rows = Verifier(), list[int]()
    verifier.receive(TEXT)
    for token in range(500, 560):
        rows.append(len(verifier.fill().tokens))
        verifier.commit(token)
    assert sum(rows[1:20]) > 0
    assert max(rows[20:]) <= 2


@pytest.mark.parametrize("seed", range(10))
def test_an_edited_text_takes_a_pass_or_two_for_each_difference(seed: int) -> None:
    """All of it is there before the first pass. A difference takes the pass that finds it, and in
    the case of new tokens one for each."""
    dice = random.Random(seed)
    output, new = list(TEXT), 0
    for at in sorted(dice.sample(range(5, 75), 5), reverse=True):
        match dice.randrange(3):
            case 0:
                output[at] = 500 + at
            case 1:
                output[at:at] = [500 + at]
            case _:
                del output[at]
        new += 1
    verifier = Verifier()
    verifier.receive(TEXT)
    assert verifier.write(output) <= 2 + 2 * new


@pytest.mark.parametrize("seed", range(10))
def test_a_text_that_grows_is_followed_like_a_whole_one(seed: int) -> None:
    dice = random.Random(seed)
    tokens = [dice.randrange(9) for _ in range(60)]
    whole, growing = PredictedText(tokens, INITIAL_CHANCES), PredictedText((), INITIAL_CHANCES)
    for start in range(0, 60, 7):
        growing.extend(tokens[start : start + 7])
        state = growing.begin()
        for _ in range(4):  # makes the index, and adds to it later
            state = growing.advance(state, dice.randrange(9))
    state, other = whole.begin(), growing.begin()
    output = [dice.randrange(9) for _ in range(80)]
    for position, token in enumerate(output):
        assert whole.candidates(state) == growing.candidates(other)
        state = whole.commit(state, token, output, position)
        other = growing.commit(other, token, output, position)
        assert state == other
