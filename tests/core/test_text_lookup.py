"""Draft nodes by lookup in the text: the verifier's and the device's.

Oracle: texts whose next token is known, counted shares, chances by hand, and the session's own
messages for the nodes in flight.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest

from edgespec.core.device import events as ev
from edgespec.core.device.device_lookup import MAX_LOOKUP_NODES, MIN_PATH_CHANCE, DeviceLookup
from edgespec.core.device.estimates import DraftEstimates, KeptEstimates
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.policy import DraftView
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol import text_lookup as tg
from edgespec.core.protocol.acceptance import ExactRule
from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.messages import Commit, Draft, Limits, Open, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import FoundText, TextChances, TextReader, TextTables
from edgespec.core.protocol.tree import ROOT, UNRANKED, CommittedPrefix, SpeculationTree
from edgespec.core.protocol.work import Candidate, PassRequest
from edgespec.core.verifier import server_drafts as sd
from edgespec.core.verifier import session_events as se
from edgespec.core.verifier.run_ahead import always_run_ahead
from edgespec.core.verifier.session import VerifySession
from tests.core.draft_scripts import GREETING, RECONNECT, messages_in
from tests.core.scenes import LIMITS, MODEL, chain_draft, commit_in
from tests.present import require

REQUEST = Open("s", "", "", (1,))


def _new_lookup() -> sd.ServerLookup:
    return sd.ServerLookup(tg.TextTables(ngrams=True))


def test_a_loop_is_gone_on_with() -> None:
    proposal = _new_lookup().propose([1, 2, 3, 4] * 6, 64, 40, 0.0)
    chain = [index for index in range(sd.MAX_LOOKUP_NODES) if proposal.parents[index] == index - 1]
    assert chain[:6] == [0, 1, 2, 3, 4, 5]
    assert proposal.tokens[:6] == [1, 2, 3, 4, 1, 2]
    drafts = _new_lookup()  # the target's tokens after a wrong guess are remembered
    drafts.propose([1, 2, 3, 1, 2], 64, 40, 0.0)
    drafts.note_rejected(3, 9)
    assert 9 in drafts.propose([1, 2, 3, 1, 2, 5, 3], 64, 40, 0.0).tokens


def _text_of(make: sd.ServerDraftsFactory, credential: Credential) -> sd.ServerLookup:
    served = require(make(REQUEST, credential))
    return require(served.text)


def test_sessions_of_one_owner_profit_from_each_other() -> None:
    make, text = sd.ServerDraftsFactory(), [11, 12, 13, 14, 15, 16]
    first = _text_of(make, Credential("me"))
    first.propose(text, 64, 40, 0.0)
    for credential, knows in (
        (Credential("me"), True),
        (Credential("you"), False),
        (ANYBODY, False),
    ):
        other = _text_of(make, credential)
        assert bool(other.propose([40, 12, 13], 64, 40, 0.0).tokens) == knows


def test_the_device_decides_where_it_may() -> None:
    make = sd.ServerDraftsFactory()
    assert make(Open("s", "", "", (1,), run_ahead=RunAhead.NEVER), ANYBODY) is None
    assert make(Open("s", "", "", (1,), run_ahead=RunAhead.ALWAYS), ANYBODY) is not None


def test_room_depth_and_price_are_kept() -> None:
    text = [1, 2, 3, 4] * 6
    for room in range(20):
        assert len(_new_lookup().propose(text, room, 40, 0.0).tokens) <= min(
            room, sd.MAX_LOOKUP_NODES
        )
    for depth in range(8):
        proposal = _new_lookup().propose(text, 64, depth, 0.0)
        depths: list[int] = []
        for parent in proposal.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        assert max(depths, default=0) == depth
    counts = []
    for price in (0.0, 0.1, 0.3, 0.5, 0.8, 0.99):
        proposal = _new_lookup().propose(text, 64, 40, price)
        assert all(chance >= max(price, sd.MIN_LOOKUP_CHANCE) for chance in proposal.chances)
        counts.append(len(proposal.tokens))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[4] > counts[-1] == 0


def test_a_parent_stands_before_its_children_and_siblings_differ() -> None:
    """In these texts each token determines its successor, except at a share of the places."""
    for seed in range(20):
        dice, drafts, text = random.Random(seed), _new_lookup(), [0]
        while len(text) < 200:
            text.append(dice.randrange(40) if dice.random() < 0.3 else (text[-1] * 7 + 3) % 40)
        for end in range(2, 200, 5):
            proposal = drafts.propose(text[:end], 64, 40, 0.0)
            nodes = list(zip(proposal.parents, proposal.tokens, strict=True))
            assert all(-1 <= parent < node for node, (parent, _) in enumerate(nodes))
            assert len(set(nodes)) == len(nodes)


def test_a_long_text_is_learned_a_part_at_a_time() -> None:
    text = [number % 1500 for number in range(4000)]
    drafts, known = _new_lookup(), []
    while not drafts.propose(text, 64, 40, 0.0).tokens:
        known.append(drafts.reader.lookup.indexed_length)
        assert len(known) < 9
    steps = [after - before for before, after in zip([0, *known], known, strict=False)]
    assert max(steps) <= sd.INDEXED_PER_PASS
    assert len(known) == 3


def test_a_new_session_begins_with_what_all_have_seen() -> None:
    make = sd.ServerDraftsFactory()
    first, cell = _text_of(make, ANYBODY), tg.RECYCLED_CELL
    before = first.chances.by_cell[cell]
    for _ in range(20):
        first.chances.note(cell, False)
    second = _text_of(make, Credential("other"))
    assert second.chances.by_cell[cell] == first.chances.by_cell[cell] < before / 5


def test_a_table_is_bounded_and_remembers_the_last_leaders() -> None:
    dice, table, recent = random.Random(1), tg.FollowerTable(max_leaders=50), [0]
    for _ in range(3000):
        leader, token = dice.randrange(400), dice.randrange(9)
        table.add(leader, token)
        recent = [leader, *(other for other in recent if other != leader)][:50]
        assert len(table) <= 50
        assert table.after(leader)[0] == token
        assert len(table.after(leader)) == len(set(table.after(leader))) <= 2
    assert all(table.after(leader) for leader in recent)


def test_owners_are_bounded() -> None:
    owners = sd.ServerDraftsFactory(max_owners=3)
    first = owners.tables_of(Credential("0"))
    for number in range(1, 10):
        owners.tables_of(Credential(str(number)))
        assert len(owners.tables) <= 3
    assert owners.tables_of(Credential("0")) is not first


def _count_common(text: list[int], position: int) -> int:
    """Count the tokens before ``position`` that equal the last ones of the text."""
    length = 0
    while (
        length < min(tg.MAX_MATCH_LENGTH, position)
        and text[position - 1 - length] == text[-1 - length]
    ):
        length += 1
    return length


def test_every_match_is_one() -> None:
    """The tokens before the match are the last ones of the text, as many as its length states. A
    match exists whenever the last pair occurred in the text before."""
    for seed in range(30):
        dice = random.Random(seed)
        text: list[int] = []
        lookup = tg.PromptLookup()
        for _ in range(120):
            text.append(dice.randrange(3))
            lookup.add(text)
            stood_before = any(_count_common(text, p) >= 2 for p in range(2, len(text)))
            assert bool(lookup.length) == stood_before
            if lookup.length:
                assert lookup.position < len(text)
                assert 2 <= lookup.length <= _count_common(text, lookup.position)


def test_loading_a_text_gives_the_index_of_adding_it() -> None:
    dice = random.Random(1)
    text = [dice.randrange(6) for _ in range(300)]
    loaded, added = tg.PromptLookup(), tg.PromptLookup()
    loaded.load(text, 100)
    loaded.load(text, 300)
    for end in range(1, 301):
        added.add(text[:end])
    assert loaded.indexed_length == added.indexed_length == 300
    assert len(loaded) == len(added)
    pairs = [(a, b) for a in range(6) for b in range(6)]
    assert [loaded.position_after(text, *pair) for pair in pairs] == [
        added.position_after(text, *pair) for pair in pairs
    ]
    assert loaded.length >= 2


def test_the_index_is_bounded() -> None:
    text = list(range(1000))
    added, loaded = tg.PromptLookup(max_length=64), tg.PromptLookup(max_length=64)
    for end in range(1, 1001):
        added.add(text[:end])
        assert len(added) <= 64
        if end > 40:  # The latest half of the bound is always there.
            assert added.position_after(text[:end], text[end - 32], text[end - 31]) == end - 30
    for end in (10, 500, 530, 560, 1000):
        loaded.load(text, end)
        assert len(loaded) <= 64
    assert loaded.position_after(text, 997, 998) == 999


@pytest.mark.parametrize("alphabet", [3, 40, 5000])
@pytest.mark.parametrize("max_length", [64, 500, tg.MAX_INDEXED])
def test_an_index_finds_every_place_of_a_pair(alphabet: int, max_length: int) -> None:
    """Parts of all sizes are read, and slots are shared by several pairs."""
    dice = random.Random(alphabet)
    text = [dice.randrange(alphabet) * 4096 for _ in range(1200)]
    index, end = tg.PairIndex(max_length), 2
    while end < len(text):
        end = min(len(text), end + dice.choice((1, 1, 1, 7, 300)))
        index.extend(text, end)
        assert index.length == end
        assert min(end, max_length // 2) <= len(index) <= max_length
        before, last = text[at := dice.randrange(end - 1)], text[at + 1]
        first = end - len(index) + 2
        stood = [p for p in range(first, end) if (text[p - 2], text[p - 1]) == (before, last)]
        assert [*index.positions_after(text, before, last)] == stood[::-1]


def test_a_long_prompt_is_indexed_as_a_whole() -> None:
    """An output that repeats the beginning of a prompt of 60,000 tokens finds it there, and is
    found there still after some more tokens."""
    dice = random.Random(4)
    prompt = [dice.randrange(30_000) for _ in range(60_000)]
    session, _ = open_session(*prompt, *prompt[100:102], context=1 << 17)
    hits = 0
    for at in range(102, 480):
        hits += [node.token for node in session.tree.roots[:1]] == [prompt[at]]
        session.handle(Commit(len(session.prefix.tokens), (prompt[at],)), 0.02 * at)
    assert hits > 360


PROMPT = (1, 2, 3, 4) * 5


def _new_session(max_tokens: int = 40, counts: sd.DraftCounts | None = None) -> VerifySession:
    sampling = SamplingParams(max_tokens=max_tokens)
    request = Open("s", "", "", PROMPT, sampling=sampling, run_ahead=RunAhead.ALWAYS)
    text = sd.ServerLookup(tg.TextTables(ngrams=False))
    served = sd.ServerDrafts("s", counts or sd.DraftCounts(), text, None)
    session = VerifySession(request, MODEL, LIMITS, ExactRule(), always_run_ahead, 0.0, served)
    session.handle(se.Attach(request), 0.0)
    return session


def _offer(session: VerifySession, least_chance: float = 0.1) -> PassRequest:
    (action,) = session.handle(se.Offer(64, 0.02, least_chance), 1.0)
    assert isinstance(action, se.RunPass)
    return action.request


def _finish_pass(session: VerifySession, request: PassRequest) -> Commit:
    """Finish a pass in which the target's token after each row is the next of 1, 2, 3, 4, 1, ..."""
    told = tuple(token % 4 + 1 for token in (request.feed[-1], *request.tokens))
    return commit_in(session.handle(se.PassDone(told), 1.0))


def test_a_pass_without_a_draft_commits_several_tokens() -> None:
    counts = sd.DraftCounts()
    session = _new_session(counts=counts)
    request = _offer(session)
    assert request.server_nodes == len(request.tokens) > 3
    assert request.device_nodes == 0
    commit = _finish_pass(session, request)
    assert commit.tokens == tuple((1, 2, 3, 4) * 9)[: len(commit.tokens)]
    assert len(commit.tokens) > 3
    assert session.cache_length == session.prefix.length - 1
    # Server nodes are not counted as the device's.
    assert (commit.accepted, commit.rows, commit.stale) == (0, 0, 0)
    assert (session.device_accepted, counts.server_tokens) == (0, len(commit.tokens) - 1)


def test_a_draft_of_the_device_goes_before_guesses() -> None:
    counts = sd.DraftCounts()
    session = _new_session(counts=counts)
    _finish_pass(session, _offer(session))
    following = session.prefix.tokens[-1] % 4 + 1
    session.handle(chain_draft(session, following), 1.0)
    request = _offer(session)
    assert (request.tokens, request.server_nodes, request.device_nodes) == ((following,), 0, 1)
    before = counts.server_tokens
    commit = _finish_pass(session, request)
    assert (commit.accepted, commit.rows, session.device_accepted) == (1, 1, 1)
    assert counts.server_tokens == before


def test_a_draft_that_arrives_meanwhile_is_fast_forwarded() -> None:
    """Its first nodes agree with the tokens that the guesses committed; the others stay alive after
    them."""
    session = _new_session(80)
    _finish_pass(session, _offer(session))
    request = _offer(session)
    ahead = [session.prefix.tokens[-1] % 4 + 1]
    while len(ahead) < 24:
        ahead.append(ahead[-1] % 4 + 1)
    session.handle(chain_draft(session, *ahead), 1.0)
    commit = _finish_pass(session, request)
    alive = session.inbox.tree.nodes
    assert (commit.accepted, commit.stale) == (0, 0)
    assert len(alive) == 24 - len(commit.tokens)
    assert _offer(session, least_chance=0.0).device_nodes == len(alive) > 0


# --- the device's, in its own tree beside the nodes of its draft model
# -----------------------------


LOOP = (5, 6, 7, 8, 9)


def tables() -> TextTables:
    return TextTables(ngrams=True, max_leaders=4096)


def open_session(
    *prompt: int,
    said: TextTables | None = None,
    learned: KeptEstimates | None = None,
    context: int = 4096,
) -> tuple[DraftSession, list[object]]:
    """Return a session that streams, and the messages that it sent after its request."""
    request = Open("s", "", "", prompt, sampling=SamplingParams(max_tokens=400))
    session = DraftSession(
        request, GoodputPolicy(2), RECONNECT, context, learned=learned, text=said or tables()
    )
    session.handle(ev.Start(), 0.0)
    greeting = replace(GREETING, limits=replace(GREETING.limits, context_length=context))
    actions = session.handle(ev.Connected(), 0.0) + session.handle(greeting, 0.0)
    return session, messages_in(actions)[1:]


def first_guesses(session: DraftSession) -> list[int]:
    """Return the chain of first candidates from the root on."""
    found, children = [], session.tree.roots
    while children:
        found.append(children[0].token)
        children = children[0].children
    return found


def test_a_loop_is_in_flight_before_the_draft_has_said_a_word() -> None:
    session, sent = open_session(*LOOP, *LOOP, 5, 6)
    assert isinstance(sent[0], Draft)
    assert sent[0].tokens[:6] == (7, 8, 9, 5, 6, 7)
    assert first_guesses(session)[:6] == [7, 8, 9, 5, 6, 7]
    assert all(node.rank == UNRANKED for node in session.tree.nodes.values())
    assert len(session.tree.nodes) <= MAX_LOOKUP_NODES
    # The first step began before the text existed; its late answer confirms a guess.
    session.handle(ev.StepDone((Candidate(7, -0.1), Candidate(30, -3.0))), 0.01)
    first, second = session.tree.roots
    assert (first.token, first.rank, second.token, second.rank) == (7, 0, 30, 1)
    assert first.lookup_cell >= 0 > second.lookup_cell


def test_what_the_draft_denies_is_hardly_likely_any_more() -> None:
    session, _ = open_session(*LOOP, 5, 6)
    (text,) = session.tree.roots
    before = text.chance
    session.handle(ev.StepDone((Candidate(20, -0.1), Candidate(30, -3.0))), 0.01)
    assert [node.token for node in session.tree.roots] == [7, 20, 30]
    assert text.chance == pytest.approx(before / 4)


def test_a_step_behind_a_dead_branch_changes_nothing() -> None:
    session, _ = open_session(*LOOP, 5, 6)
    session.handle(ev.StepDone((Candidate(40, -0.1),)), 0.01)  # begins one node after 40 or 7
    step = require(session._model._step)
    assert step.parent != ROOT
    session.handle(Commit(7, (50,)), 0.02)
    before = {node.id: (node.rank, node.chance) for node in session.tree.nodes.values()}
    session.handle(ev.StepDone((Candidate(5, -0.1), Candidate(6, -0.2))), 0.03)
    assert {i: (n.rank, n.chance) for i, n in session.tree.nodes.items() if i in before} == before


def test_what_was_said_outlives_a_generation() -> None:
    dice = random.Random(2)
    said, known, learned = [dice.randrange(900) for _ in range(60)], tables(), KeptEstimates()
    hits = []
    for prompt in (901, 902):
        session, _ = open_session(prompt, said=known, learned=learned)
        hits.append(0)
        for at, token in enumerate(said):
            hits[-1] += bool(session.tree.roots) and session.tree.roots[0].token == token
            session.handle(Commit(1 + at, (token,)), 0.02 * at)
    assert hits[0] == 0
    assert hits[1] > 50


# --- earlier texts ------------------------------------------------------------------------------


def find_in_texts(texts: Sequence[Sequence[int]], end: Sequence[int]) -> tuple[int, set[int]]:
    """Return the number of last tokens of ``end`` that occur in a text, and what follows there."""
    for length in range(len(end), 1, -1):
        followers = {
            text[at + length]
            for text in texts
            for at in range(len(text) - length)
            if [*text[at : at + length]] == [*end[-length:]]
        }
        if followers:
            return length, followers
    return 0, set()


@pytest.mark.parametrize("alphabet", [8, 30, 400])
def test_earlier_texts_are_found_as_a_search_finds_them(alphabet: int) -> None:
    dice, earlier, texts = random.Random(alphabet), tg.EarlierTexts(), list[list[int]]()
    for _ in range(12):
        texts.append([dice.randrange(alphabet) for _ in range(dice.randrange(1, 60))])
        if dice.random() < 0.5:
            texts[-1] += dice.choice(texts)[:20]
        earlier.add(texts[-1])
    for _ in range(300):
        text = dice.choice(texts)
        at = dice.randrange(len(text) + 1)
        end = [*(dice.randrange(alphabet) for _ in range(2)), *text[max(0, at - 18) : at]]
        end = end[-dice.randrange(2, tg.CORPUS_LENGTH + 1) :]
        length, followers = find_in_texts(texts, end)
        found, named = earlier.after(tuple(end))
        if alphabet > 8:  # Few letters have pairs at more places than are looked at.
            assert found == length
            assert len(named) == min(tg.RANKS, len(followers))
            assert {token for token, _ in named} <= followers
        assert found <= length
        assert sum(share for _, share in named) <= 1.0 + 1e-9
        if named:
            part = (*end[-found:], named[0][0])
            whole = require(earlier.find_text(part))
            first = whole.next_index - len(part)
            assert tuple(whole.tokens[first : whole.next_index]) == part
            assert list(whole.tokens) in [one[-len(whole.tokens) :] for one in texts]


def test_a_conversation_is_kept_once() -> None:
    """Each prompt repeats the one before and its answer, and another conversation begins alike."""
    dice = random.Random(1)
    earlier, text, added = tg.EarlierTexts(), [dice.randrange(900) for _ in range(640)], 640
    earlier.add(text)
    for _ in range(20):
        more = [dice.randrange(900) for _ in range(dice.randrange(1, 300))]
        text, added = text + more, added + len(more)
        earlier.add(text)
        length, named = earlier.after(tuple(more[-3:-1])) if len(more) > 2 else (2, [(more[-1], 1)])
        assert length == 2
        assert more[-1] in [token for token, _ in named]
    other = text[:640] + [dice.randrange(900, 1000) for _ in range(100)]
    earlier.add(other)
    # Blocks that end behind the repeated part are kept again, and a few tokens before it.
    assert len(earlier) <= added + 100 + 22 * (64 + tg.CORPUS_LENGTH + 1)
    before = len(earlier)
    earlier.add(other[:640])
    assert len(earlier) == before


def test_earlier_texts_are_bounded_and_the_latest_stay() -> None:
    dice, earlier = random.Random(2), tg.EarlierTexts(max_tokens=1000)
    for _ in range(40):
        text = [dice.randrange(5000) for _ in range(dice.randrange(2, 1500))]
        earlier.add(text)
        assert len(earlier) <= 1000
        assert earlier.after(tuple(text[-5:-1])) == (len(text[-5:-1]), [(text[-1], 1.0)])
        assert len(earlier._blocks) <= 1000 // 64


def test_a_long_earlier_text_is_indexed_a_part_at_a_time() -> None:
    dice, earlier = random.Random(3), tg.EarlierTexts()
    text = [dice.randrange(50_000) for _ in range(20_000)]
    earlier.add(text)
    looks = 0
    while earlier.after(tuple(text[-4:-1]))[0] == 0:
        looks += 1
    assert looks == 20_000 // 2048
    assert earlier.after(tuple(text[-4:-1])) == (3, [(text[-1], 1.0)])


@pytest.mark.parametrize("where", ["tool result", "answer before", "other conversation"])
def test_what_was_returned_and_answered_is_drafted_from(where: str) -> None:
    """The output repeats a part of a page that a tool returned or that was answered before. Both
    stand in the conversation's prompt, and in no prompt of another conversation."""
    dice = random.Random(8)
    page = [dice.randrange(100, 900) for _ in range(200)]
    user, tool, assistant = (1, 2, 3), (4, 5, 6), (7, 8, 9)
    said = TextTables(ngrams=True, max_leaders=32, earlier=tg.EarlierTexts())
    if where == "tool result":
        prompt = (*user, *tool, *page, *assistant)
    elif where == "answer before":
        prompt = (*user, *assistant, *page, *user, *assistant)
    else:
        require(said.earlier).add((*user, *tool, *page, *assistant, 10, 11))
        prompt = (*user, *assistant)
    session, _ = open_session(*prompt, said=said)
    session.handle(Commit(len(prompt), tuple(page[50:66])), 0.1)
    assert first_guesses(session)[:6] == page[66:72]


def test_a_long_match_goes_before_a_recent_one() -> None:
    text = [5, 6, 7, 8, 20, 1, 7, 8, 21, 2, 7, 8, 22, 5, 6, 7, 8]
    lookup = tg.PromptLookup()
    lookup.load(text, len(text))
    assert (lookup.length, text[lookup.position]) == (4, 20)
    lookup.add([*text, 20])
    assert (lookup.length, lookup.position) == (5, 5)


def test_the_longer_match_of_earlier_texts_and_corpus_counts() -> None:
    said = TextTables(ngrams=True, earlier=tg.EarlierTexts())
    require(said.earlier).add([1, 2, 3, 4, 5])
    for length, named in ((5, 9), (2, 5), (4, 5)):
        said.corpus = Phrases(length, (9, 1.0))
        assert said.after((7, 1, 2, 3, 4))[1] == ([(named, 1.0)] if named == 5 else ((9, 1.0),))


def test_another_conversations_text_is_in_flight_at_once() -> None:
    """A file that a tool returned in an earlier conversation is copied in this one."""
    dice = random.Random(6)
    file = [dice.randrange(900) for _ in range(300)]
    said = TextTables(ngrams=True, max_leaders=64, earlier=tg.EarlierTexts())
    hits = []
    for _ in range(2):
        session, _ = open_session(901, *file[:2], said=said)
        hits.append(0)
        for at in range(2, 300):
            hits[-1] += [node.token for node in session.tree.roots[:1]] == [file[at]]
            session.handle(Commit(1 + at, (file[at],)), 0.02 * at)
        require(said.earlier).add((902, *file))
    assert hits[0] < 10
    assert hits[1] > 290


class Phrases:
    """A corpus that maps the last tokens to their continuation."""

    def __init__(self, length: int, *named: tuple[int, float]) -> None:
        self._found = length, named

    def after(self, end: tuple[int, ...]) -> tuple[int, Sequence[tuple[int, float]]]:
        return self._found

    def find_text(self, part: tuple[int, ...]) -> FoundText | None:
        return None


@pytest.mark.parametrize(
    ("length", "phrases", "named"),
    [
        (0, (), (7,)),
        (3, ((20, 0.6), (30, 0.3)), (7, 20)),
        # The chances are equal.
        (9, ((20, 1.0), (30, 0.1)), (7, 20)),
        (16, ((20, 1.0), (30, 0.1)), (20, 7)),
        (16, ((7, 1.0),), (7,)),
        (2, ((7, 0.9), (20, 0.1)), (7, 20)),
    ],
)
def test_the_likelier_is_named_first_and_nothing_twice(
    length: int, phrases: Sequence[tuple[int, float]], named: Sequence[int]
) -> None:
    """The text itself continues with 7 after an end of three tokens, with a chance of 0.6."""
    said = tables()
    said.corpus = Phrases(length, *phrases)
    reader, tokens = TextReader(said, TextChances()), (4, 5, 6, 7, 40, 4, 5, 6)
    reader.lookup.load(tokens, len(tokens))
    guesses, place = reader.candidates(tokens, reader.state_at_end(tokens))
    assert tuple(token for _, token in guesses) == named
    assert len({cell for cell, _ in guesses}) == len(guesses)
    assert tuple(token for _, token in reader.candidates(tokens, place)[0]) == named


def test_a_corpus_that_is_right_comes_first_though_it_was_not_named() -> None:
    """The corpus is judged although its candidate came second: its 9 is always right, while the
    text's candidates (7 or 8) never are."""
    said, chances = tables(), TextChances()
    said.corpus = Phrases(2, (9, 0.2))
    reader, tokens = TextReader(said, chances), [1, 2, 7, 1, 2, 8, 1, 2]
    reader.lookup.load(tokens, len(tokens))
    assert 9 not in [
        token for _, token in reader.candidates(tokens, reader.state_at_end(tokens))[0][:1]
    ]
    for number in range(12):
        tokens += [9, 30 + number, 1, 2]
        said.recycled.add(2, 50 + number)
        reader.learn(tokens)
    assert reader.candidates(tokens, reader.state_at_end(tokens))[0][0][1] == 9


def test_a_corpus_is_followed_and_judged() -> None:
    """The corpus is right at first, so a chain of it is in flight. Then it is always wrong, and its
    candidates are omitted."""
    said, learned = tables(), KeptEstimates()
    said.corpus = Phrases(5, (7, 1.0))
    session, sent = open_session(1, 2, said=said, learned=learned)
    assert isinstance(sent[0], Draft)
    assert sent[0].tokens[:3] == (7, 7, 7)
    dice = random.Random(3)
    for at in range(2, 80):
        session.handle(Commit(at, (dice.randrange(100, 1000),)), 0.02 * at)
    assert all(node.token != 7 for node in session.tree.roots)


def test_guesses_are_judged_whether_they_were_made_or_not() -> None:
    """The text never repeats its old continuation, so its candidates are soon omitted."""
    session, _ = open_session(1)
    dice, last = random.Random(0), 1
    for at in range(1, 300):
        last = dice.choice([token for token in range(6) if token != last])
        session.handle(Commit(at, (last,)), 0.02 * at)
    chances = session.estimates.guesses.text.by_cell
    assert chances[0] == pytest.approx(0.2, abs=0.12)  # a match of two among five possible tokens


def view_of(tree: SpeculationTree, estimates: DraftEstimates, room: int = 128) -> DraftView:
    return DraftView(tree, 0, 0, room, 1000, estimates)


@pytest.mark.parametrize("room", [0, 1, 7, 40, 128, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_added_is_worth_it_and_within_bounds(seed: int, room: int) -> None:
    dice = random.Random(seed)
    text = [dice.randrange(4) for _ in range(80)]
    tree, estimates = SpeculationTree(CommittedPrefix(text)), DraftEstimates()
    drafts = DeviceLookup(tree, tables(), estimates)
    for _ in range(3):
        drafts.add_nodes(view_of(tree, estimates, room))
    reached = {ROOT: 1.0}
    for node in tree.nodes.values():
        reached[node.id] = reached[node.parent] * node.chance
        assert reached[node.id] >= MIN_PATH_CHANCE
        siblings = [child.token for child in tree.children(node.parent)]
        assert len(set(siblings)) == len(siblings)
    assert len(tree.nodes) <= min(MAX_LOOKUP_NODES, 3 * max(room // 2, room - 32))


@pytest.mark.parametrize(("chance", "leaf"), [(0.95, 3), (0.4, ROOT)])
def test_a_sure_guess_saves_a_step_of_the_draft(chance: float, leaf: int) -> None:
    """The text offers three candidates in a row. If they are certain, the draft continues after
    them; otherwise the draft runs first."""
    tree, estimates = SpeculationTree(CommittedPrefix((1, 2))), DraftEstimates()
    for node in range(3):
        tree.grow(1 + node, node, 10 + node, 2, UNRANKED, 0.0, chance, 0)
    assert GoodputPolicy(2).choose_parent(view_of(tree, estimates)) == leaf


def test_guesses_of_the_text_leave_room_for_the_drafts_own() -> None:
    session, _ = open_session(*LOOP * 20, 5, 6)
    limits = Limits()
    alive = len(session.tree.nodes)
    assert alive <= limits.max_nodes_outstanding // 2
    session.handle(ev.StepDone((Candidate(99, -0.1), Candidate(30, -3.0))), 0.01)
    assert session._model.is_running  # and so on


def test_the_tables_are_bounded() -> None:
    dice, said = random.Random(0), tables()
    tree, estimates = SpeculationTree(CommittedPrefix((1, 2))), DraftEstimates()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        drafts = DeviceLookup(tree, said, estimates)
        for _ in range(12_000):
            tree.commit((dice.randrange(1 << 20),))
            drafts.add_nodes(view_of(tree, estimates))
        del drafts
        tree.prefix.tokens.clear()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 200_000 < grown < 2 << 20
