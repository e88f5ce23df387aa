"""A generation names a model that not every verifier has, and none goes on with another one.

Oracles: answers written down by hand.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.core.association import failover_events as ev
from edgespec.core.association.candidates import CLOSED
from edgespec.core.association.failover import Failover, FailoverPolicy
from edgespec.core.association.policies import Association
from edgespec.core.device.estimates import Learned, LearnedByModel
from edgespec.core.device.events import Connect, Connected, Disconnect, Fail, Tick, Transmit
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    FaultCode,
    Limits,
    Opened,
    VerifierInfo,
)
from tests.core.draft_scripts import GREETING, streaming
from tests.core.failover_world import MODEL

SQL = replace(MODEL, name="sql", fingerprint="sql-1")


def answer(address: str, rtt_s: float, *adapters: object) -> ev.ProbeAnswered:
    info = VerifierInfo(MODEL, Limits(), 0, 8, 20_000, adapters)  # type: ignore[arg-type]
    return ev.ProbeAnswered(address, info, rtt_s)


def asked(near: tuple[object, ...] = (), far: tuple[object, ...] = (SQL,)) -> Failover:
    """Both have answered; ``a`` is nearer."""
    found = Failover(FailoverPolicy(), Association.LOWEST_DELAY, 1)
    found.handle(ev.Known(("a", "b")), 0.0)
    found.handle(answer("a", 0.01, *near), 0.0)
    found.handle(answer("b", 0.2, *far), 0.0)
    return found


def breakers(found: Failover) -> list[object]:
    return [one.breaker.state for one in found.candidates.listed.values()]


def test_a_verifier_is_not_kept_out_for_a_model_that_it_lacks() -> None:
    """It is asked what it has by now; the generation goes elsewhere, others go on there."""
    found = asked(near=(SQL,))
    assert found.handle(ev.Wanted(1, model="sql"), 0.0) == (ev.Dial(1, "a"),)
    found.handle(ev.Dialed(1, "a"), 0.1)
    refused = ev.Refused(1, FaultCode.UNKNOWN_MODEL, "unknown model 'sql'")
    probe, leave = found.handle(refused, 0.2)
    assert probe == ev.Probe("a")
    assert isinstance(leave, ev.Leave)
    assert (leave.again_s, leave.retryable) == (0.0, True)
    assert breakers(found) == [CLOSED, CLOSED]
    assert found.handle(ev.Wanted(1, model="sql"), 0.2) == (ev.Dial(1, "b"),)
    assert found.handle(ev.Wanted(2), 0.2) == (ev.Dial(2, "a"),)
    found.handle(answer("a", 0.01), 0.3)
    assert found.handle(ev.Wanted(3, model="sql"), 0.4) == (ev.Dial(3, "b"),)


def test_a_name_that_nobody_has_is_the_end() -> None:
    found = asked()
    refused = "unknown model 'sequel'"
    leaves = []
    for address in ("a", "b"):
        assert found.handle(ev.Wanted(1, model="sequel"), 0.0) == (ev.Dial(1, address),)
        found.handle(ev.Dialed(1, address), 0.1)
        event = ev.Refused(1, FaultCode.UNKNOWN_MODEL, refused)
        leaves += [one for one in found.handle(event, 0.2) if isinstance(one, ev.Leave)]
    assert [one.retryable for one in leaves] == [True, False]
    assert leaves[-1].why == f"a: {refused}; b: {refused}"


# --- one verifier -----------------------------------------------------------------------------

FIRST = replace(GREETING, fingerprint="fp-1")
OTHER = replace(GREETING, fingerprint="fp-2", limits=Limits(context_length=7))


def reopened(session: DraftSession, opened: Opened) -> tuple[object, ...]:
    now = session.deadline
    assert now is not None
    assert session.handle(Tick(), now)[0] == Connect()
    session.handle(Connected(), now)
    return session.handle(opened, now)


def test_a_text_does_not_go_on_with_another_model() -> None:
    session = streaming(greeting=FIRST)
    session.handle(Commit(2, (10,)), 1.0)
    session.handle(Tick(), 40.0)
    actions = reopened(session, OTHER)
    assert actions[:2] == (Transmit(Cancel()), Disconnect())
    assert session.limits.context_length != 7
    for _ in range(6):
        assert Fail not in map(type, actions)
        actions = reopened(session, OTHER)
    (fail,) = [one for one in reopened(session, OTHER) if isinstance(one, Fail)]
    assert fail.why == (
        "gave up on the verifier after 8 streams without a new token: the verifier serves"
        " 'big' (fp-2) now, but the text was begun by 'big' (fp-1)"
    )


def test_it_goes_on_when_the_model_is_back() -> None:
    session = streaming(greeting=FIRST)
    session.handle(Commit(2, (10,)), 1.0)
    session.handle(Tick(), 40.0)
    reopened(session, OTHER)
    assert Disconnect() not in reopened(session, FIRST)
    now = session.deadline
    assert now is not None
    session.handle(Commit(3, (11,)), now - 1.0)
    assert session.prefix.tokens[-2:] == [10, 11]


# --- what is learned --------------------------------------------------------------------------


def test_what_is_learned_of_one_model_is_not_believed_of_another() -> None:
    usual = Learned()
    learned = LearnedByModel("base", usual)
    assert learned.of("base") is usual
    sql = learned.of("sql")
    assert learned.of("sql") is sql
    assert sql.greedy is not usual.greedy
