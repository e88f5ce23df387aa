"""Scores of tokens. Oracle: the softmax written out; and which row of a pass a token came from."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edgespec.core.device.commit_bounds import CommitBounds
from edgespec.core.protocol.messages import Commit, Draft, FaultCode, Limits, Open, Received
from edgespec.core.protocol.work import LEAST_LOGPROB, MAX_LOGPROBS, TokenScore, score_token
from edgespec.core.verifier.admission import refuse_open
from edgespec.core.verifier.session import ScoreKeeper
from edgespec.core.verifier.session_events import Attach, Detach, PassDone, Send
from edgespec.wire.codec import decode_downlink, encode_downlink, payload_bytes
from edgespec_sim.wire_size import message_bytes
from tests.core.scenes import MODEL, REQUEST, commit_in, new_session, offer

ASKING = replace(REQUEST, logprobs=2)


def score(number: int) -> TokenScore:
    """One that tells which row it is of; exact in 32 bits."""
    return TokenScore(-float(number), 0.5, ((number, -0.25), (7, -2.0)))


def scores(*numbers: int) -> tuple[TokenScore, ...]:
    return tuple(score(number) for number in numbers)


def test_a_score_is_the_log_of_the_softmax() -> None:
    logits = [0.3, -1.0, 2.5, 2.0, 0.0]
    norm = math.log(sum(math.exp(logit) for logit in logits))
    found = score_token(logits, 1, 3)
    assert math.isclose(found.logprob, -1.0 - norm)
    assert [token for token, _ in found.top] == [2, 3, 0]
    assert all(math.isclose(logprob, logits[token] - norm) for token, logprob in found.top)
    assert found.margin == 0.5
    everything = score_token(logits, 2, MAX_LOGPROBS).top
    assert math.isclose(sum(math.exp(logprob) for _, logprob in everything), 1.0)


def test_what_cannot_be_has_a_finite_score_and_equals_go_by_id() -> None:
    found = score_token([1.0, -math.inf, 1.0], 1, 3)
    assert found.logprob == LEAST_LOGPROB
    assert [token for token, _ in found.top] == [0, 2, 1]
    assert (found.margin, found.top[2][1]) == (0.0, LEAST_LOGPROB)
    assert score_token([5.0], 0, 2) == TokenScore(0.0, -LEAST_LOGPROB, ((0, 0.0),))


# --- a session -------------------------------------------------------------------------------


def test_a_session_that_asks_gets_the_score_of_each_token_it_commits() -> None:
    session = new_session(ASKING)
    first = offer(session)
    assert first.logprobs == 2
    commit = commit_in(session.handle(PassDone((10,), scores(0)), 1.0))
    assert commit.logprobs == scores(0)
    base = session.prefix.hash_at(3)
    session.handle(Draft(1, (0, 0, 1, 2, 2, 4), (40, 11, 12, 41, 12, 13), 3, base), 1.0)
    offer(session)
    done = PassDone((11, 40, 12, 41, 41, 13, 14), scores(0, 1, 2, 3, 4, 5, 6))
    commit = commit_in(session.handle(done, 1.0))
    assert commit.tokens == (11, 12, 13)
    assert commit.logprobs == scores(0, 2, 5)  # after the root, node 1 and node 4


def test_a_device_that_comes_back_is_told_the_scores_it_missed() -> None:
    session = new_session(ASKING)
    for token in (10, 11, 12):
        offer(session)
        session.handle(PassDone((token,), scores(token)), 1.0)
    session.handle(Received(3, 0), 1.0)
    for held, told in (((10, 11), scores(12)), ((10,), scores(11, 12)), ((), ())):
        session.handle(Detach(), 2.0)
        sent = session.handle(Attach(replace(ASKING, committed=held)), 3.0)
        (commit,) = [
            one.message for one in sent if isinstance(one, Send) and isinstance(one.message, Commit)
        ]
        assert commit.tokens == (10, 11, 12)[len(held) :]
        assert commit.logprobs == told  # the first one was acknowledged, so nobody keeps its score


def test_the_keeper_holds_what_is_not_acknowledged() -> None:
    keeper = ScoreKeeper()
    keeper.commit(5, scores(0, 1, 2), (0, 1), 3)
    keeper.commit(8, scores(3), (), 1)
    assert keeper.of(5, 4) == scores(0, 1, 2, 3)
    keeper.acknowledged(7)
    assert keeper.of(5, 4) == keeper.of(6, 1) == keeper.of(8, 2) == ()
    assert keeper.of(7, 2) == scores(2, 3)
    keeper.commit(9, (), (), 1)  # a pass that scored nothing leaves a gap
    keeper.commit(10, scores(5), (), 1)
    assert keeper.of(7, 2) == keeper.of(9, 2) == ()
    assert keeper.of(10, 1) == scores(5)
    keeper.acknowledged(99)
    keeper.acknowledged(3)
    assert keeper.of(10, 1) == keeper.of(10, 0) == ()


@pytest.mark.parametrize("asked", [-1, MAX_LOGPROBS + 1])
def test_asking_for_more_than_there_may_be_is_refused(asked: int) -> None:
    fault = refuse_open(replace(REQUEST, logprobs=asked), MODEL, Limits(), frozenset({"exact"}))
    assert fault is not None
    assert fault.code is FaultCode.INVALID
    assert f"logprobs is {asked}, but must be in [0, 20]" in fault.message


def test_a_device_cuts_scores_with_the_tokens_it_refuses() -> None:
    bounds = CommitBounds(2, 3)
    commit, wrong = bounds.fitting(Commit(2, (1, 2, 3, 4), logprobs=scores(1, 2, 3, 4)))
    assert wrong is not None
    assert (commit.tokens, commit.logprobs) == ((1, 2, 3), scores(1, 2, 3))


# --- the wire --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "told",
    [
        scores(1, 300),
        (TokenScore(0.0, 0.0, ()), TokenScore(-0.5, 0.0, ((70_000, LEAST_LOGPROB),) * 20)),
    ],
)
def test_scores_travel_and_are_weighed(told: tuple[TokenScore, ...]) -> None:
    commit = Commit(5, (1, 2), logprobs=told)
    assert decode_downlink(encode_downlink(commit)) == commit
    assert message_bytes(commit) == payload_bytes(commit)
    asking = Open("s", "", "", (1,), logprobs=20)
    assert payload_bytes(asking) - payload_bytes(replace(asking, logprobs=0)) == 3
