"""The verifier's own guesses. Oracle: texts whose next token is known, and counted shares."""

from __future__ import annotations

import random

from edgespec.core.protocol.messages import Open, RunAhead
from edgespec.core.protocol.text_guesses import (
    RECYCLED_CELL,
    TextTables,
)
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.served_drafts import (
    LEAST_CHANCE,
    LOADED_PER_PASS,
    MOST_NODES,
    ServedDrafts,
    ServedDraftsMaker,
)

REQUEST = Open("s", "", "", (1,))


def _drafts() -> ServedDrafts:
    return ServedDrafts(TextTables(ngrams=True))


def _noisy_text(seed: int, length: int, wrong: float) -> list[int]:
    """Each token names its successor, but for a share of the places."""
    dice = random.Random(seed)
    text = [0]
    while len(text) < length:
        text.append(dice.randrange(40) if dice.random() < wrong else (text[-1] * 7 + 3) % 40)
    return text


def test_a_loop_is_gone_on_with() -> None:
    drafts, text = _drafts(), [1, 2, 3, 4] * 6
    proposal = drafts.propose(text, 64, 40, 0.0)
    chain = [index for index in range(MOST_NODES) if proposal.parents[index] == index - 1]
    assert chain[:6] == [0, 1, 2, 3, 4, 5]
    assert proposal.tokens[:6] == [1, 2, 3, 4, 1, 2]


def test_what_the_target_said_behind_a_wrong_guess_is_remembered() -> None:
    drafts = _drafts()
    drafts.propose([1, 2, 3, 1, 2], 64, 40, 0.0)
    drafts.learn([3], [9], ())
    assert 9 in drafts.propose([1, 2, 3, 1, 2, 5, 3], 64, 40, 0.0).tokens


def test_sessions_of_one_owner_profit_from_each_other() -> None:
    make, text = ServedDraftsMaker(), [11, 12, 13, 14, 15, 16]
    first = make(REQUEST, Credential("me"))
    assert first is not None
    first.propose(text, 64, 40, 0.0)
    for credential, knows in (
        (Credential("me"), True),
        (Credential("you"), False),
        (ANYBODY, False),
    ):
        other = make(REQUEST, credential)
        assert other is not None
        assert bool(other.propose([40, 12, 13], 64, 40, 0.0).tokens) == knows


def test_the_device_decides_where_it_may() -> None:
    make = ServedDraftsMaker()
    assert make(Open("s", "", "", (1,), rule="relaxed"), ANYBODY) is None
    assert make(Open("s", "", "", (1,), run_ahead=RunAhead.NEVER), ANYBODY) is None
    assert make(Open("s", "", "", (1,), run_ahead=RunAhead.ALWAYS), ANYBODY) is not None


def test_room_depth_and_price_are_kept() -> None:
    text = [1, 2, 3, 4] * 6
    for room in range(20):
        assert len(_drafts().propose(text, room, 40, 0.0).tokens) <= min(room, MOST_NODES)
    for depth in range(8):
        proposal = _drafts().propose(text, 64, depth, 0.0)
        depths: list[int] = []
        for parent in proposal.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        assert max(depths, default=0) == depth
    counts = []
    for price in (0.0, 0.1, 0.3, 0.5, 0.8, 0.99):
        proposal = _drafts().propose(text, 64, 40, price)
        assert all(chance >= max(price, LEAST_CHANCE) for chance in proposal.chances)
        counts.append(len(proposal.tokens))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[3] > counts[-1] == 0


def test_a_parent_stands_before_its_children_and_siblings_differ() -> None:
    for seed in range(20):
        drafts, text = _drafts(), _noisy_text(seed, 200, 0.3)
        for end in range(2, 200, 5):
            proposal = drafts.propose(text[:end], 64, 40, 0.0)
            nodes = list(zip(proposal.parents, proposal.tokens, strict=True))
            assert all(-1 <= parent < node for node, (parent, _) in enumerate(nodes))
            assert len(set(nodes)) == len(nodes)


def test_a_long_text_is_learned_a_part_at_a_time() -> None:
    text = [number % 1500 for number in range(4000)]
    drafts, known = _drafts(), []
    while not drafts.propose(text, 64, 40, 0.0).tokens:
        known.append(drafts.lookup.known)
        assert len(known) < 9
    steps = [after - before for before, after in zip([0, *known], known, strict=False)]
    assert max(steps) <= LOADED_PER_PASS
    assert len(known) == 3


def test_a_new_session_begins_with_what_all_have_seen() -> None:
    make = ServedDraftsMaker()
    first, cell = make(REQUEST, ANYBODY), RECYCLED_CELL
    assert first is not None
    before = first.chances.of[cell]
    for _ in range(20):
        first.chances.note(cell, False)
    second = make(REQUEST, Credential("other"))
    assert second is not None
    assert second.chances.of[cell] == first.chances.of[cell] < before / 5
