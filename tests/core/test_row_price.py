"""The price of a row, from the verifier to the device's drafts; long prompts beside sessions that
decode; and when a pass without a draft may start.

Oracle: chances and formulas by hand, and the rows of the passes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from edgespec.core.device.comparison_policies import WindowedPolicy
from edgespec.core.device.estimates import RowPrice, VerifierEstimates
from edgespec.core.device.events import Connected, DraftAction, Start, StartStep
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import Commit, Draft, Received, RunAhead
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import session_events as se
from edgespec.core.verifier.cache_scheduler import CacheScheduler
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.prompt_queue import (
    BASE_EVERY,
    INITIAL_PREFILL_ROWS,
    MIN_PREFILL_ROWS,
    SLOTS,
    PromptLoad,
)
from edgespec.core.verifier.row_price import UNPRICED_LOOKUP_CHANCE, RowPriceEstimator
from edgespec.core.verifier.run_ahead import (
    ArrivalEstimator,
    DraftHistory,
    RunAheadView,
    auto_run_ahead,
    never_run_ahead,
)
from edgespec.core.verifier.scheduler import PassScheduler
from edgespec.core.verifier.session import VerifySession
from tests.core import scenes
from tests.core.draft_scripts import GREETING, RECONNECT, REQUEST, finish_step


def commit(position: int, row_price: int | None = None, credit: int | None = None) -> Commit:
    return Commit(position, (40 + position,), verify_us=20_000, row_price=row_price, credit=credit)


def run_steps(session: DraftSession, actions: tuple[DraftAction, ...]) -> list[int]:
    """Return the widths of the steps until the session rests; each step finds new tokens."""
    widths: list[int] = []
    while started := [action for action in actions if isinstance(action, StartStep)]:
        (step,) = started
        widths.append(step.width)
        tokens = range(10 * len(widths), 10 * len(widths) + step.width)
        actions = session.handle(finish_step(*tokens), 0.01 * len(widths))
    return widths


def start_session(price: RowPrice, width: int = 2) -> tuple[DraftSession, tuple[DraftAction, ...]]:
    session = DraftSession(
        REQUEST, WindowedPolicy(width), RECONNECT, 1000, verifier=VerifierEstimates(price)
    )
    return session, session.handle(Start(), 0.0)


def test_no_node_is_drafted_below_the_price() -> None:
    """The rates start at 0.7 and 0.1. Chains of 0.7, 0.49 and 0.343 are worth 0.3, siblings are
    not; 0.7 * 0.1 is below 0.08."""
    widths = {price: run_steps(*start_session(RowPrice(price))) for price in (0.3, 0.5, 0.71, 0.08)}
    assert (widths[0.3], widths[0.5], widths[0.71]) == ([1, 1, 1], [1], [])
    assert widths[0.08][0] == 2
    assert set(widths[0.08][1:]) == {1}


def test_a_node_is_priced_at_the_pass_that_it_comes_into() -> None:
    """A round trip takes 200 ms, passes 25 ms and steps 8 ms. Nine passes begin before a draft
    arrives ((8 + 200) / 25 rounded up), so nine tokens are settled, and a node after them has 0.65
    ** 3 < 0.4. Nodes drafted before the first pass travel with the ``Open``, so only one token is
    settled."""
    known = VerifierEstimates(RowPrice(0.4))
    session = DraftSession(
        REQUEST, WindowedPolicy(1, least_chance=0.0), RECONNECT, 1000, 0, 0, known
    )
    estimates, actions = session.estimates, session.handle(Start(), 0.0)
    estimates.rtt_s.add(0.2)
    estimates.pass_s.add(0.025)
    estimates.step_s.weight = 0.0
    for _ in range(50):
        estimates.commit_s.add(0.025)
        estimates.step_s.add(0.008)
    assert len(run_steps(session, actions)) == 1 + 2
    session.handle(Connected(), 1.0)
    session.handle(GREETING, 1.0)
    actions = session.handle(commit(2, row_price=400), 1.2)
    assert len(run_steps(session, actions)) == 9 + 2
    estimates.commit_s.add(
        10.0
    )  # the verifier waits for drafts, so no token is settled before they arrive
    assert session._policy.choose_parent(session._view(0, 0.0)) is None


def find_commits(actions: tuple[ee.EngineAction, ...]) -> list[Commit]:
    said = [action.message for action in actions if isinstance(action, ee.SendTo)]
    return [message for message in said if isinstance(message, Commit)]


def run_first_passes(engine: VerifyEngine) -> list[Commit]:
    """Return the commits of a session's first passes of 20 ms."""
    requests, heard = (
        scenes.batch_in(engine.handle(ee.StreamOpened(1, scenes.RUNNING), 0.0)),
        list[Commit](),
    )
    for number in range(3):
        actions = engine.handle(scenes.finish_batch(requests), 0.02 * (number + 1))
        heard += find_commits(actions)
        received = Received(heard[-1].position + 1, 0)
        actions += engine.handle(ee.StreamMessage(1, received), 0.02 * (number + 1))
        requests = scenes.batch_in(actions)
    return heard


def test_a_verifiers_full_price_is_told() -> None:
    """No draft of this device is right with 0.71."""
    known = ((0.25, (250, None)), (0.69, (690, None)), (0.71, (710, 0)), (0.9, (900, 0)))
    for least_chance, said in (
        *((chance, (None, None)) for chance in (0.0, 0.0004)),
        *known,
        (3.0, (1000, 0)),
    ):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(RowPriceEstimator, "least_chance", least_chance)
            heard = run_first_passes(scenes.new_engine())
        assert {(one.row_price, one.credit) for one in heard} == {said}, least_chance


def test_a_busy_event_loop_does_not_make_rows_dear() -> None:
    """Passes with more rows end later, but the target took the same time for each."""
    loop, target = RowPriceEstimator(), RowPriceEstimator()
    for n in range(40):
        rows = 100 + 10 * (n % 7)
        loop.note_pass(rows, 0, 0.02 + 1e-4 * rows)
        target.note_pass(rows, 0, 0.02 + 1e-4 * rows, 0.02)
    assert loop.row_s == pytest.approx(1e-4)
    assert target.row_s == pytest.approx(0.0, abs=1e-9)
    assert target.pass_s == loop.pass_s


def test_who_waits_for_its_drafts_pays_a_part_of_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of 20 ms began 10 ms after the previous commit: 0.9 * 20 / 30. The full price would
    silence the device, and then it would wait a round trip for each token."""
    monkeypatch.setattr(RowPriceEstimator, "least_chance", 0.9)
    engine = scenes.new_engine()
    waits = replace(scenes.RUNNING, run_ahead=RunAhead.NEVER)
    first = engine.handle(
        scenes.finish_batch(scenes.batch_in(engine.handle(ee.StreamOpened(1, waits), 0.0))), 0.02
    )
    (said,) = find_commits(first)
    held = CommittedPrefix(waits.prompt, said.tokens)
    draft = Draft(1, (0,), (7,), held.length, held.hash_at(held.length))
    (request,) = scenes.batch_in(engine.handle(ee.StreamMessage(1, draft), 0.03))
    assert request.tokens == (7,)
    (heard,) = find_commits(engine.handle(scenes.finish_batch((request,)), 0.05))
    assert (said.row_price, said.credit) == (None, None)  # no price has been measured yet
    assert (heard.row_price, heard.credit) == (600, None)


ROW_S, PASS_S = 0.002, 0.020


def run_passes(row_s: float, count: int = 8, prompts: int = 0) -> PassScheduler:
    """Return a scheduler after passes of one fed token and 0, 1, 2, 0, ... wrong guesses, each
    committing one token. ``prompts`` sessions with a long prompt come behind the first pass;
    until a row beside them has its price, no pass has a guess."""
    now = 0.0
    sessions: dict[str, VerifySession] = {}

    def ask(key: str, offer: se.Offer, at: float) -> PassRequest | None:
        (run,) = sessions[key].handle(offer, at)
        assert isinstance(run, se.RunPass)
        return run.request

    scheduler = PassScheduler(ee.EngineLimits(), CacheScheduler(None, sessions), ask)
    for number in range(count):
        for place in range(prompts if number == 1 else 0):
            long = replace(scenes.REQUEST, session_id=f"long {place}", prompt=(1,) * 4_000)
            sessions[long.session_id] = scenes.new_session(long)
            scheduler.enqueue(long.session_id)
        sessions["s"] = session = scenes.new_session()
        scenes.run_pass(session)
        nodes = number % 3
        if nodes:
            session.handle(make_guesses(session, nodes), now)
        scheduler.enqueue("s")
        (request, *others), _ = scheduler.form_pass(sessions, now)
        assert len(request.tokens) == (0 if prompts and 3 <= number < 8 else nodes)
        now += PASS_S + row_s * sum(one.row_count for one in (request, *others))
        scheduler.finish_pass(now)
        session.handle(se.PassDone((scenes.TEXT[3], *(0 for _ in request.tokens))), now)
        for other in others:
            sessions[other.key].handle(se.PassDone(()), now)
            scheduler.enqueue(other.key)
        scheduler.price.note_tokens(1)
    return scheduler


def make_guesses(session: VerifySession, count: int) -> Draft:
    tokens = tuple(40 + index for index in range(count))
    return Draft(1, (0,) * count, tokens, 3, session.prefix.hash_at(3))


def test_a_node_has_to_bring_more_than_its_time_does_otherwise() -> None:
    scheduler = run_passes(ROW_S)
    otherwise = ROW_S / (PASS_S + 15 / 8 * ROW_S)  # tokens in a row's time
    assert scheduler.price.least_chance == pytest.approx(otherwise * (1 + otherwise), rel=0.02)


def test_prompts_raise_the_price_by_whom_they_hold_up_and_by_the_time_they_take() -> None:
    """Two prompts wait beside one session that decodes; a pass computes some rows of one prompt."""
    row_s = 0.0002
    scheduler = run_passes(row_s, count=60, prompts=2)
    decode_s = PASS_S + 2 * row_s  # the mean: a fed token and one node
    cost = row_s / decode_s * (1 + 2 / 1)
    assert scheduler.price.least_chance == pytest.approx(cost * (1 + cost), rel=0.05)
    assert scheduler.row_price == round(1000 * scheduler.price.least_chance)


def test_own_drafts_make_rows_cheaper_by_the_time_of_their_steps_and_passes_shorter_without() -> (
    None
):
    price = RowPriceEstimator()
    for rows in (1, 41) * 40:
        price.note_round(0.004)
        price.note_round(0.006)
        price.note_pass(rows, 0, PASS_S + 10 * ROW_S + rows * ROW_S, server_rows=rows // 4)
        price.note_tokens(5)
        price.note_queue(1, 0)
    pass_s = price.pass_s
    assert pass_s is not None
    cost = 5 * ROW_S / (pass_s + 0.01)
    assert price.least_chance == pytest.approx(cost * (1 + cost), rel=0.02)
    served = (pass_s - PASS_S - 10 * ROW_S) / ROW_S / 4
    assert price.bare_pass_s == pytest.approx(pass_s - served * ROW_S, rel=0.02)


def test_a_price_fades_when_rows_vary_no_more_and_is_guessed_dear_before() -> None:
    price = RowPriceEstimator()
    assert (price.least_chance, price.least_lookup_chance) == (0.0, UNPRICED_LOOKUP_CHANCE)
    price.note_queue(1, 3)
    assert price.least_chance == 1.0  # prompts wait, and the cost of a row to them is unknown
    for rows in (1, 40, 1, 40, 1, 40, 1, 40, 1):
        price.note_pass(rows, 0, PASS_S + rows * ROW_S)
        price.note_tokens(1)
        price.note_queue(1, 0)
    known = price.row_s
    assert known == pytest.approx(ROW_S, rel=0.01)
    assert price.bare_pass_s == price.pass_s
    for _ in range(400):
        price.note_pass(1, 0, PASS_S + ROW_S)
    assert 0.0 < price.row_s < known / 4
    assert price.least_lookup_chance == price.least_chance


@pytest.mark.parametrize("row_s", [0.00002, 0.0001])
def test_ten_long_prompts_at_once_stretch_the_gaps_of_a_stream_by_less_than_a_third(
    row_s: float,
) -> None:
    """Emulated: a pass takes 20 ms and ``row_s`` for each prompt row. Once the row's price is
    learned, the passes of others are a quarter longer."""
    world = scenes.PacedEngine(row_s)
    world.open("victim", 1)
    world.run_until(50 * scenes.DECODE_S)
    names = [f"long {number}" for number in range(10)]
    for name in names:
        world.open(name, 4_000)
    gaps_s, fed_at_s = list[float](), list[float]()
    while len(fed_at_s) < len(names):
        before_s, rows = world.now, world.run_pass()
        assert rows.pop("victim") == 1
        learning = 2 * INITIAL_PREFILL_ROWS if len(gaps_s) < 4 else 1
        most = 0.25 * scenes.DECODE_S / row_s + learning
        assert sum(count for count in rows.values() if count > 1) <= most
        gaps_s.append(world.now - before_s)
        fed = [name for name in names if world.engine.sessions[name].prefix.length > 4_000]
        fed_at_s += [world.now] * (len(fed) - len(fed_at_s))
    assert max(gaps_s) <= 1.3 * scenes.DECODE_S
    alone_s = 4_000 * row_s
    # One prompt follows the other, in a little less than a fifth of the time (1.25 and 1.125
    # passes, in turn).
    for place, at_s in enumerate(fed_at_s, 1):
        assert at_s - 50 * scenes.DECODE_S <= 7.5 * alone_s * place + 0.3


def open_burst(world: scenes.PacedEngine, length: int) -> list[float]:
    """Open eight sessions at once; return the seconds until the first token of each."""
    began_at, names = world.now, [f"of a burst {number}" for number in range(8)]
    for name in names:
        world.open(name, length)
    first_s: dict[str, float] = {}
    while len(first_s) < len(names):
        world.run_pass()
        for name in names:
            if world.engine.sessions[name].prefix.length > length:
                first_s.setdefault(name, world.now - began_at)
    for name in names:
        world.close(name)
    return [*first_s.values()]


@pytest.mark.parametrize("is_established", [False, True])
def test_prompts_of_one_burst_do_not_wait_for_its_first_session(is_established: bool) -> None:
    """A row takes a twentieth of a pass, as on a CPU. Oracle: the prompts alone, one behind
    another, take 8 x 60 rows. Beside sessions that decode before the burst they have a share of
    0.22."""
    row_s = scenes.DECODE_S / 20
    world = scenes.PacedEngine(row_s)
    open_decoders(world)
    for _ in range(3):  # so that rows are timed
        open_burst(world, 60)
    if not is_established:
        for number in range(7):
            world.close(f"decoder {number}")
    last_s, alone_s = open_burst(world, 60)[-1], 8 * 60 * row_s
    if is_established:
        assert last_s > 3 * alone_s  # 8 rows, the least chunk, in each pass
    else:
        assert last_s < 1.6 * alone_s


def feed_long_prompt(
    world: scenes.PacedEngine, name: str = "long", length: int = 8_000
) -> tuple[list[float], list[int], float]:
    """Open a long prompt beside sessions that decode. Return their gaps while it is fed, its rows
    by pass, and the seconds until its first token."""
    world.open(name, length)
    at, gaps_s, fed = world.now, list[float](), list[int]()
    while world.engine.sessions[name].prefix.length == length:
        before_s, rows = world.now, world.run_pass()
        gaps_s.append(world.now - before_s)
        fed.append(rows.get(name, 0))
    world.close(name)
    return gaps_s, fed, world.now - at


def open_decoders(world: scenes.PacedEngine) -> None:
    for number in range(7):
        world.open(f"decoder {number}", 20)
    for _ in range(40):
        world.run_pass()


# Seconds of a row, rows that are free, the share that passes may become longer by, and the largest
# ratio of the time to the first token to that of the prompt alone. Equal rows allow no less than
# (1 + share) / share, and free rows hardly delay the prompt.
PASS_LAWS = {
    "equal rows": (0.0002, 0, 0.25, 5.4),
    "equal rows, longer passes": (0.0002, 0, 1.0, 2.2),
    "free rows": (0.0002, 100, 0.25, 1.3),
    "free rows of a fast machine": (0.00002, 400, 0.25, 1.3),
}


@pytest.mark.parametrize(("row_s", "free", "share", "most"), PASS_LAWS.values(), ids=[*PASS_LAWS])
def test_a_long_prompt_makes_passes_longer_by_its_share_and_uses_free_rows(
    row_s: float, free: int, share: float, most: float
) -> None:
    """Oracle: the gaps, and the seconds that the rows of the prompt take in passes of its own."""
    limits = ee.EngineLimits(prefill_share=share)
    world = scenes.PacedEngine(row_s, limits, free_rows=free)
    open_decoders(world)
    feed_long_prompt(world, "the first, whose rows are timed")
    gaps_s, fed, first_s = feed_long_prompt(world)
    gaps_s.sort()
    assert gaps_s[int(0.95 * len(gaps_s))] <= (1.005 + share) * scenes.DECODE_S
    assert gaps_s[-1] <= (1.6 + share) * scenes.DECODE_S
    assert sum(fed) == 8_000
    passes = 8_000 / limits.max_rows_per_session
    alone_s = passes * scenes.DECODE_S + row_s * (8_000 - passes * free)
    assert first_s <= most * alone_s
    if free:
        assert sum(count > free for count in fed) > len(fed) / 2


def test_now_and_then_a_pass_is_measured_without_prompts() -> None:
    """Passes without prompts become shorter while a prompt waits, so the budget shrinks too."""
    world = scenes.PacedEngine(0.0002, session_s=0.002)
    open_decoders(world)
    _, fed, _ = feed_long_prompt(world, length=4_000)
    assert sum(not count for count in fed) == pytest.approx(len(fed) / 32, abs=1)
    for number in range(6):
        world.close(f"decoder {number}")
    _, fed, _ = feed_long_prompt(world, "another", 8_000)
    # The prompt's own session makes a pass longer too, by 2 of the 5.3 ms that it may add.
    usual = (0.22 * (scenes.DECODE_S + 0.002) - 0.002) / 0.0002
    assert max(fed[-20:-1]) == pytest.approx(usual, rel=0.2)


def test_a_pass_to_be_measured_without_prompts_has_them_if_no_session_decodes() -> None:
    """Sessions that wait for a draft decline the pass. The prompt does not wait for them."""
    sessions: dict[str, VerifySession] = {}
    declines = False

    def ask(key: str, offer: se.Offer, at: float) -> PassRequest | None:
        if declines and key == "s":
            return None
        (run,) = sessions[key].handle(offer, at)
        assert isinstance(run, se.RunPass)
        return run.request

    scheduler = PassScheduler(ee.EngineLimits(), CacheScheduler(None, sessions), ask)
    now, fed = 0.0, list[int]()
    long = replace(scenes.REQUEST, session_id="long", prompt=(1,) * 4_000)
    sessions["long"] = scenes.new_session(long)
    for _ in range(BASE_EVERY):
        sessions["s"] = session = scenes.new_session()
        scenes.run_pass(session)
        for declines in (False, True):
            scheduler.enqueue("s")
            scheduler.enqueue("long")
            requests, _ = scheduler.form_pass(sessions, now)
            keys = [request.key for request in requests]
            assert keys == ["long"] if declines else keys[0] == "s"
            now += PASS_S + ROW_S * sum(one.row_count for one in requests)
            scheduler.finish_pass(now)
            for one in requests:
                targets = (scenes.TEXT[3],) if one.sample else ()
                sessions[one.key].handle(se.PassDone(targets), now)
            fed += [one.row_count for one in requests if declines]
    assert min(fed) >= MIN_PREFILL_ROWS


def test_no_prompt_starves_behind_short_ones_that_keep_coming() -> None:
    world = scenes.PacedEngine(0.0001)
    world.open("victim", 1)
    for _ in range(20):
        world.run_pass()
    world.open("long", 2_000)
    passes, longest = 0, 0
    while world.engine.sessions["long"].prefix.length == 2_000:
        passes += 1
        assert passes < 600
        name = f"short {passes}"
        world.open(name, 30)
        world.run_pass()
        while world.engine.sessions[name].prefix.length == 30:
            world.run_pass()
            passes += 1
            longest = max(longest, passes)
        world.close(name)
    assert longest < 600


def test_more_sessions_than_rows_leave_prompts_an_eighth_and_each_other_their_turns() -> None:
    world = scenes.PacedEngine(0.0, ee.EngineLimits(max_rows_per_pass=16))
    for number in range(20):
        world.open(f"decoder {number}", 1)
    for _ in range(10):
        world.run_pass()
    world.open("long", 100)
    rows = [world.run_pass() for _ in range(60)]
    assert world.engine.sessions["long"].prefix.length > 100
    for number in range(20):
        turns = [index for index, one in enumerate(rows) if f"decoder {number}" in one]
        assert max(b - a for a, b in pairwise(turns)) <= 2


def test_no_credential_makes_the_load_more_than_twice_what_the_others_bring() -> None:
    load = PromptLoad()
    for slot in range(SLOTS):
        for number in range(10):
            load.add(30, slot + 0.5, f"device {number}")
        load.add(16_000, slot + 0.6, "flood")
    assert load.rows_per_s(SLOTS) == 600.0
    for slot in range(SLOTS, 2 * SLOTS):  # only a session alone counts
        load.add(16_000, slot + 0.5, "fleet")
    assert load.rows_per_s(2 * SLOTS) == 16_000.0


VIEW = RunAheadView(10.0, 9.0, 0.1, None, False, 1.0, False)


def test_never_waits_for_its_patience_only() -> None:
    assert never_run_ahead(VIEW) == 11.0
    assert never_run_ahead(replace(VIEW, no_draft_coming=True)) <= 10.0


def test_auto_waits_for_a_draft_that_comes_soon_and_will_do() -> None:
    soon = replace(VIEW, idle_since=10.0, expected_at=10.04, hit_rate=0.75)
    assert auto_run_ahead(soon, unsure=0.5, sure=1.0) == pytest.approx(10.05)


@pytest.mark.parametrize(("server_draft_s", "start_at"), [(0.03, 10.0), (0.05, 10.05)])
def test_auto_waits_for_no_draft_that_the_server_model_can_match(
    server_draft_s: float, start_at: float
) -> None:
    """The draft is expected after 40 ms."""
    soon = replace(VIEW, idle_since=10.0, expected_at=10.04, hit_rate=0.75)
    view = replace(soon, server_draft_s=server_draft_s)
    assert auto_run_ahead(view, unsure=0.5, sure=1.0) == pytest.approx(start_at)


@pytest.mark.parametrize(
    ("server_draft_s", "start_at"), [(math.inf, 10.03), (0.03, 10.03), (0.02, 10.015)]
)
def test_auto_waits_for_no_overdue_draft_that_the_server_model_can_match(
    server_draft_s: float, start_at: float
) -> None:
    """The draft after a miss is expected after 5 ms and usually takes 25; a pass takes 100."""
    view = replace(VIEW, idle_since=10.0, expected_at=10.005, hit_rate=0.75, response_s=0.025)
    found = auto_run_ahead(replace(view, server_draft_s=server_draft_s), unsure=0.5, sure=1.0)
    assert found == pytest.approx(start_at)


@pytest.mark.parametrize("expected_at", [8.0, 9.0, 9.99, 10.0, 10.01, 10.03, 10.1, 11.0])
@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.75, 0.8, 0.9, 1.0])
def test_auto_never_waits_past_its_share_for_an_overdue_draft(
    expected_at: float, hit_rate: float
) -> None:
    """The wait is never longer than a pass and its slack either."""
    view = replace(VIEW, idle_since=10.0, expected_at=expected_at, hit_rate=hit_rate)
    assert auto_run_ahead(view) - 10.0 <= 1.1 * view.pass_s + 1e-9
    if expected_at <= 10.0:
        share = max(0.0, (hit_rate - 0.5) / 0.5)
        assert auto_run_ahead(view, unsure=0.5, sure=1.0) <= 10.0 + share * view.pass_s


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.84])
@pytest.mark.parametrize("depth", [1, 2, 5, 10, 30])
def test_auto_waits_as_long_as_a_deep_draft_saves(rate: float, depth: int) -> None:
    """Oracle: passes until the next miss is found, 1 + a for a verifier that decodes on and 1 +
    a**k for one that waits for k nodes."""
    saved = (1.0 + rate) - (1.0 + rate**depth)
    view = replace(VIEW, idle_since=10.0, hit_rate=rate, response_depth=depth, response_s=0.02)
    just = replace(view, expected_at=10.0 + (saved - 1e-6) * view.pass_s)
    late = replace(view, expected_at=10.0 + (saved + 1e-6) * view.pass_s)
    assert auto_run_ahead(late) == late.now
    if depth > 1:
        assert auto_run_ahead(just) == pytest.approx(10.0 + saved * view.pass_s)
        gone = replace(just, expected_at=9.9)
        assert auto_run_ahead(gone) <= gone.now, "a draft that never comes is not waited for again"


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.84])
@pytest.mark.parametrize("arrival_rate", [0.05, 0.3, 0.7, 1.0])
def test_auto_expects_to_lose_nothing_by_a_wait(rate: float, arrival_rate: float) -> None:
    """Oracle: the expected passes that a wait saves and costs, for any time of the draft."""
    view = replace(
        VIEW, idle_since=10.0, hit_rate=rate, response_depth=5, arrival_rate=arrival_rate
    )
    saved, waits = rate - rate**5, 0
    for part in range(100):
        expected_at = 10.0 + part / 100 * view.pass_s
        wait = (auto_run_ahead(replace(view, expected_at=expected_at)) - 10.0) / view.pass_s
        waits += wait > 0.0
        if wait > 0.0:
            gain = arrival_rate * (saved - part / 100) - (1.0 - arrival_rate) * wait
            assert gain >= -1e-9
    assert waits > 0 or arrival_rate * saved < 0.02


def test_expected_drafts_that_do_not_come_are_counted() -> None:
    """A draft every 30 ms, after passes of 25: each comes in time. Then none comes any more."""
    history = DraftHistory()
    arrivals, now = ArrivalEstimator(history), 0.0
    for _ in range(20):
        arrivals.on_possible_pass(now, 0.025)
        arrivals.on_possible_pass(now, 0.025)  # offered again: the same wait
        arrivals.on_useful_draft(now + 0.02)
        now += 0.03
        arrivals.on_miss(now - 0.001)
    assert arrivals.arrival_rate == pytest.approx(1.0)
    for _ in range(20):
        arrivals.on_possible_pass(now, 0.025)
        now += 0.03
    assert arrivals.arrival_rate < 0.25
    late = ArrivalEstimator(history)
    assert arrivals.arrival_rate < late.arrival_rate < 0.9, "sessions begin with the history"


def waits_alone(view: RunAheadView) -> float:
    """Return the start time: now in a pass that runs anyway, else after a wait for a draft."""
    return view.now if view.runs_anyway else view.now + 1.0


def test_who_waits_for_a_draft_is_taken_along_by_a_pass_of_others() -> None:
    engine = VerifyEngine(
        scenes.MODEL, scenes.LIMITS, ee.EngineLimits(), run_ahead=lambda kind: waits_alone
    )
    first = scenes.batch_in(
        engine.handle(ee.StreamOpened(1, scenes.name_session("a", scenes.REQUEST)), 0.0)
    )
    waiting = engine.handle(scenes.finish_batch(first), 0.1)
    assert not any(isinstance(action, ee.RunBatch) for action in waiting)
    shared = scenes.batch_in(
        engine.handle(ee.StreamOpened(2, scenes.name_session("b", scenes.REQUEST)), 0.2)
    )
    assert {request.key: len(request.feed) for request in shared} == {"b": 2, "a": 1}
    assert not any(
        isinstance(a, ee.RunBatch) for a in engine.handle(scenes.finish_batch(shared), 0.3)
    )
