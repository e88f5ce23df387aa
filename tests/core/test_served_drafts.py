"""The verifier's own guesses. Oracle: texts whose next token is known, and counted shares."""

from __future__ import annotations

import random

from edgespec.core.protocol import text_guesses as tg
from edgespec.core.protocol.messages import Commit, Open, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier import served_drafts as sd
from edgespec.core.verifier import session_events as se
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.drafts import AlwaysRunAhead, ExactRule
from edgespec.core.verifier.session import VerifySession
from tests.core.scenes import LIMITS, MODEL, chain, commit_in
from tests.present import present

REQUEST = Open("s", "", "", (1,))


def _drafts() -> sd.TextDrafts:
    return sd.TextDrafts(tg.TextTables(ngrams=True))


def test_a_loop_is_gone_on_with() -> None:
    proposal = _drafts().propose([1, 2, 3, 4] * 6, 64, 40, 0.0)
    chain = [index for index in range(sd.MOST_NODES) if proposal.parents[index] == index - 1]
    assert chain[:6] == [0, 1, 2, 3, 4, 5]
    assert proposal.tokens[:6] == [1, 2, 3, 4, 1, 2]
    drafts = _drafts()  # what the target said behind a wrong guess is remembered
    drafts.propose([1, 2, 3, 1, 2], 64, 40, 0.0)
    drafts.learn([3], [9], ())
    assert 9 in drafts.propose([1, 2, 3, 1, 2, 5, 3], 64, 40, 0.0).tokens


def _text_of(make: sd.ServedDraftsMaker, credential: Credential) -> sd.TextDrafts:
    served = present(make(REQUEST, credential))
    return present(served.text)


def test_sessions_of_one_owner_profit_from_each_other() -> None:
    make, text = sd.ServedDraftsMaker(), [11, 12, 13, 14, 15, 16]
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
    make = sd.ServedDraftsMaker()
    assert make(Open("s", "", "", (1,), run_ahead=RunAhead.NEVER), ANYBODY) is None
    assert make(Open("s", "", "", (1,), run_ahead=RunAhead.ALWAYS), ANYBODY) is not None


def test_room_depth_and_price_are_kept() -> None:
    text = [1, 2, 3, 4] * 6
    for room in range(20):
        assert len(_drafts().propose(text, room, 40, 0.0).tokens) <= min(room, sd.MOST_NODES)
    for depth in range(8):
        proposal = _drafts().propose(text, 64, depth, 0.0)
        depths: list[int] = []
        for parent in proposal.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        assert max(depths, default=0) == depth
    counts = []
    for price in (0.0, 0.1, 0.3, 0.5, 0.8, 0.99):
        proposal = _drafts().propose(text, 64, 40, price)
        assert all(chance >= max(price, sd.LEAST_CHANCE) for chance in proposal.chances)
        counts.append(len(proposal.tokens))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[4] > counts[-1] == 0


def test_a_parent_stands_before_its_children_and_siblings_differ() -> None:
    """In texts where each token names its successor, but for a share of the places."""
    for seed in range(20):
        dice, drafts, text = random.Random(seed), _drafts(), [0]
        while len(text) < 200:
            text.append(dice.randrange(40) if dice.random() < 0.3 else (text[-1] * 7 + 3) % 40)
        for end in range(2, 200, 5):
            proposal = drafts.propose(text[:end], 64, 40, 0.0)
            nodes = list(zip(proposal.parents, proposal.tokens, strict=True))
            assert all(-1 <= parent < node for node, (parent, _) in enumerate(nodes))
            assert len(set(nodes)) == len(nodes)


def test_a_long_text_is_learned_a_part_at_a_time() -> None:
    text = [number % 1500 for number in range(4000)]
    drafts, known = _drafts(), []
    while not drafts.propose(text, 64, 40, 0.0).tokens:
        known.append(drafts.reader.lookup.known)
        assert len(known) < 9
    steps = [after - before for before, after in zip([0, *known], known, strict=False)]
    assert max(steps) <= sd.LOADED_PER_PASS
    assert len(known) == 3


def test_a_new_session_begins_with_what_all_have_seen() -> None:
    make = sd.ServedDraftsMaker()
    first, cell = _text_of(make, ANYBODY), tg.RECYCLED_CELL
    before = first.chances.of[cell]
    for _ in range(20):
        first.chances.note(cell, False)
    second = _text_of(make, Credential("other"))
    assert second.chances.of[cell] == first.chances.of[cell] < before / 5


def test_a_table_is_bounded_and_remembers_the_last_leaders() -> None:
    dice, table, recent = random.Random(1), tg.FollowerTable(most_leaders=50), [0]
    for _ in range(3000):
        leader, token = dice.randrange(400), dice.randrange(9)
        table.add(leader, token)
        recent = [leader, *(other for other in recent if other != leader)][:50]
        assert len(table) <= 50
        assert table.after(leader)[0] == token
        assert len(table.after(leader)) == len(set(table.after(leader))) <= 2
    assert all(table.after(leader) for leader in recent)


def test_owners_are_bounded() -> None:
    owners = sd.ServedDraftsMaker(most_owners=3)
    first = owners.of(Credential("0"))
    for number in range(1, 10):
        owners.of(Credential(str(number)))
        assert len(owners.tables) <= 3
    assert owners.of(Credential("0")) is not first


def _common(text: list[int], position: int) -> int:
    """How many tokens before ``position`` equal the last ones of the text."""
    length = 0
    while length < min(tg.LONGEST, position) and text[position - 1 - length] == text[-1 - length]:
        length += 1
    return length


def test_every_match_is_one() -> None:
    """The tokens before the match are the text's last ones, as many as its length says; there is a
    match whenever the last pair stood in the text before."""
    for seed in range(30):
        dice = random.Random(seed)
        text: list[int] = []
        lookup = tg.PromptLookup()
        for _ in range(120):
            text.append(dice.randrange(3))
            lookup.add(text)
            stood_before = any(_common(text, p) >= 2 for p in range(2, len(text)))
            assert bool(lookup.length) == stood_before
            if lookup.length:
                assert lookup.position < len(text)
                assert 2 <= lookup.length <= _common(text, lookup.position)


def test_loading_a_text_gives_the_index_of_adding_it() -> None:
    dice = random.Random(1)
    text = [dice.randrange(6) for _ in range(300)]
    loaded, added = tg.PromptLookup(), tg.PromptLookup()
    loaded.load(text, 100)
    loaded.load(text, 300)
    for end in range(1, 301):
        added.add(text[:end])
    assert loaded.known == added.known == 300
    assert len(loaded) == len(added)
    pairs = [tg.pair_of(a, b) for a in range(6) for b in range(6)]
    assert [loaded.place(pair) for pair in pairs] == [added.place(pair) for pair in pairs]
    assert loaded.length >= 2


def test_the_index_is_bounded() -> None:
    text = list(range(1000))
    added, loaded = tg.PromptLookup(most_pairs=64), tg.PromptLookup(most_pairs=64)
    for end in range(1, 1001):
        added.add(text[:end])
        assert len(added) <= 64
    for end in (10, 500, 530, 560, 1000):
        loaded.load(text, end)
        assert len(loaded) <= 64
    assert loaded.place(tg.pair_of(997, 998)) == 999


PROMPT = (1, 2, 3, 4) * 5


def _session(max_tokens: int = 40, counts: sd.ServedCounts | None = None) -> VerifySession:
    sampling = SamplingParams(max_tokens=max_tokens)
    request = Open("s", "", "", PROMPT, sampling=sampling, run_ahead=RunAhead.ALWAYS)
    text = sd.TextDrafts(tg.TextTables(ngrams=False))
    served = sd.ServedDrafts("s", counts or sd.ServedCounts(), text, None)
    session = VerifySession(request, MODEL, LIMITS, ExactRule(), AlwaysRunAhead(), 0.0, served)
    session.handle(se.Attach(request), 0.0)
    return session


def _offer(session: VerifySession, least_chance: float = 0.1) -> PassRequest:
    (action,) = session.handle(se.Offer(64, 0.02, least_chance), 1.0)
    assert isinstance(action, se.RunPass)
    return action.request


def _done(session: VerifySession, request: PassRequest) -> Commit:
    """The target's token behind each is the next of 1, 2, 3, 4, 1, ..."""
    told = tuple(token % 4 + 1 for token in (request.feed[-1], *request.tokens))
    return commit_in(session.handle(se.PassDone(told), 1.0))


def test_a_pass_without_a_draft_commits_several_tokens() -> None:
    counts = sd.ServedCounts()
    session = _session(counts=counts)
    request = _offer(session)
    assert request.served == len(request.tokens) > 3
    assert request.drafted == 0
    commit = _done(session, request)
    assert commit.tokens == tuple((1, 2, 3, 4) * 9)[: len(commit.tokens)]
    assert len(commit.tokens) > 3
    assert session.cache_length == session.prefix.length - 1
    # Guesses are not counted as the device's.
    assert (commit.accepted, commit.rows, commit.stale) == (0, 0, 0)
    assert (session.device_accepted, counts.served_tokens) == (0, len(commit.tokens) - 1)


def test_a_draft_of_the_device_goes_before_guesses() -> None:
    counts = sd.ServedCounts()
    session = _session(counts=counts)
    _done(session, _offer(session))
    following = session.prefix.tokens[-1] % 4 + 1
    session.handle(chain(session, following), 1.0)
    request = _offer(session)
    assert (request.tokens, request.served, request.drafted) == ((following,), 0, 1)
    before = counts.served_tokens
    commit = _done(session, request)
    assert (commit.accepted, commit.rows, session.device_accepted) == (1, 1, 1)
    assert counts.served_tokens == before


def test_a_draft_that_arrives_meanwhile_is_fast_forwarded() -> None:
    """Its first nodes agree with what the guesses committed; the others are alive behind them."""
    session = _session(80)
    _done(session, _offer(session))
    request = _offer(session)
    ahead = [session.prefix.tokens[-1] % 4 + 1]
    while len(ahead) < 24:
        ahead.append(ahead[-1] % 4 + 1)
    session.handle(chain(session, *ahead), 1.0)
    commit = _done(session, request)
    alive = session.inbox.tree.nodes
    assert (commit.accepted, commit.stale) == (0, 0)
    assert len(alive) == 24 - len(commit.tokens)
    assert _offer(session, least_chance=0.0).drafted == len(alive) > 0
