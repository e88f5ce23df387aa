"""When a draft node is worth its row. Oracle: the tokens that the row's time brings otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import Draft
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.row_price import UNPRICED_GUESS, RowPriceKeeper
from edgespec.core.verifier.scheduler import PassScheduler
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import Offer, PassDone, RunPass
from tests.core.fixed_text import REQUEST, TEXT, new_session, run_pass

ROW_S, PASS_S = 0.002, 0.020


def passes(row_s: float, count: int = 8, prompts: int = 0) -> PassScheduler:
    """Passes of one fed token and 0, 1, 2, 0, ... wrong guesses, each committing one token, beside
    so many sessions with a long prompt; none of the first eight has a guess in company."""
    now = 0.0
    sessions: dict[str, VerifySession] = {}

    def ask(key: str, offer: Offer, at: float) -> PassRequest | None:
        (run,) = sessions[key].handle(offer, at)
        assert isinstance(run, RunPass)
        return run.request

    scheduler = PassScheduler(EngineLimits(), CacheKeeper(None, sessions), ask)
    for number in range(prompts):
        long = replace(REQUEST, session_id=f"long {number}", prompt=(1,) * 4_000)
        sessions[long.session_id] = new_session(long)
        scheduler.enqueue(long.session_id)
    for number in range(count):
        sessions["s"] = session = ready()
        nodes = number % 3
        if nodes:
            session.handle(guesses(session, nodes), now)
        scheduler.enqueue("s")
        (request, *others), _ = scheduler.form(sessions, now)
        assert len(request.tokens) == (0 if prompts and number < 8 else nodes)
        now += PASS_S + row_s * sum(one.row_count for one in (request, *others))
        scheduler.finish(now)
        session.handle(PassDone((TEXT[3], *(0 for _ in request.tokens))), now)
        for other in others:
            sessions[other.key].handle(PassDone(()), now)
            scheduler.enqueue(other.key)
        scheduler.count(1)
    return scheduler


def ready() -> VerifySession:
    session = new_session()
    run_pass(session)
    return session


def guesses(session: VerifySession, count: int) -> Draft:
    tokens = tuple(40 + index for index in range(count))
    return Draft(1, (0,) * count, tokens, 3, session.prefix.hash_at(3))


def test_a_node_has_to_bring_more_than_its_time_does_otherwise() -> None:
    scheduler = passes(ROW_S)
    otherwise = ROW_S / (PASS_S + 15 / 8 * ROW_S)  # tokens in a row's time
    assert scheduler.least_chance == pytest.approx(otherwise * (1 + otherwise), rel=0.02)


def test_prompts_raise_the_price_by_whom_they_hold_up_and_by_the_time_they_take() -> None:
    """Two prompts wait beside one session that decodes; a pass feeds some rows of one of them."""
    row_s = 0.0002
    scheduler = passes(row_s, count=60, prompts=2)
    decode_s = PASS_S + 2 * row_s  # a fed token and one node, in the mean
    cost = row_s / decode_s * (1 + 2 / 1)
    assert scheduler.least_chance == pytest.approx(cost * (1 + cost), rel=0.05)
    assert scheduler.row_price == round(1000 * scheduler.least_chance)


def test_rows_that_cost_nothing_are_all_welcome() -> None:
    assert passes(0.0).least_chance == pytest.approx(0.0, abs=1e-9)


def test_nothing_is_left_out_before_rows_have_a_price() -> None:
    assert passes(ROW_S, count=5).least_chance == 0.0


def test_a_price_fades_when_rows_vary_no_more_and_is_guessed_dear_before() -> None:
    price = RowPriceKeeper()
    assert (price.least_chance, price.least_guess) == (0.0, UNPRICED_GUESS)
    price.note_line(1, 3)
    assert price.least_chance == 1.0  # prompts wait, and nobody knows what a row costs them
    for rows in (1, 40, 1, 40, 1, 40, 1, 40, 1):
        price.note_pass(rows, 0, PASS_S + rows * ROW_S)
        price.note_tokens(1)
        price.note_line(1, 0)
    known = price.row_s
    assert known == pytest.approx(ROW_S, rel=0.01)
    for _ in range(400):
        price.note_pass(1, 0, PASS_S + ROW_S)
    assert 0.0 < price.row_s < known / 4
    assert price.least_guess == price.least_chance
