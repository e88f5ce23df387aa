"""The failover machine. Oracles: answers written down by hand, and laws of random worlds."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from edgespec.core.association import failover_events as ev
from edgespec.core.association.candidates import (
    CLOSED,
    HALF_OPEN,
    OPEN,
    BreakerPolicy,
    CircuitBreaker,
)
from edgespec.core.association.failover import Failover, FailoverPolicy
from edgespec.core.association.policies import (
    BEGINNING_TOKENS,
    Association,
    VerifierView,
    conversation_named,
    conversation_of,
    ranked,
    weight,
)
from edgespec.core.protocol.messages import FaultCode, Limits, ModelIdentity, VerifierInfo, why_not
from edgespec.core.protocol.work import ModelInfo
from tests.core.failover_world import CALM_AFTER_S, DIAL_S, MODEL, Mood, World

SERVED = ModelIdentity("big", "fp-1", 4096)

MOVED = FaultCode.SHUTTING_DOWN


def machine(*addresses: str, ask_first: bool = False) -> Failover:
    association = Association.LOWEST_DELAY if ask_first else Association.LISTED
    found = Failover(FailoverPolicy(), association, 1)
    found.handle(ev.Known(addresses or ("a", "b")), 0.0)
    return found


def streaming(*addresses: str) -> Failover:
    """Generation 1 has got a token from ``a``."""
    found = machine(*addresses)
    assert found.handle(ev.Wanted(1, 100), 0.0) == (ev.Dial(1, "a"),)
    assert found.handle(ev.Dialed(1, "a"), 0.01) == (ev.Use(1, "a"),)
    assert found.handle(ev.Greeted(1, SERVED), 0.02) == ()
    assert found.handle(ev.Progressed(1), 0.03) == ()
    return found


def answer(address: str, rtt_s: float, model: object = MODEL) -> ev.ProbeAnswered:
    info = VerifierInfo(model, Limits(), 0, 8, 20_000)  # type: ignore[arg-type] # a ModelInfo
    return ev.ProbeAnswered(address, info, rtt_s)


def test_before_the_first_stream_all_are_asked_and_the_nearest_is_dialed() -> None:
    found = machine("a", "b", "c", ask_first=True)
    assert found.handle(ev.Wanted(1), 0.0) == (ev.Probe("a"), ev.Probe("b"), ev.Probe("c"))
    assert found.handle(answer("a", 0.2), 0.2) == ()
    assert found.deadline == pytest.approx(0.3)
    assert found.handle(answer("b", 0.1), 0.25) == ()
    assert found.handle(ev.Tick(), 0.31) == (ev.Dial(1, "b"),)


def test_a_second_one_is_dialed_when_the_first_has_not_answered_soon() -> None:
    found = machine()
    assert found.handle(ev.Wanted(1), 0.0) == (ev.Dial(1, "a"),)
    assert found.deadline == 0.25
    assert found.handle(ev.Tick(), 0.25) == (ev.Dial(1, "b"),)
    assert found.handle(ev.Dialed(1, "b"), 0.3) == (ev.Use(1, "b"), ev.Drop(1, "a"))
    assert found.handle(ev.Dialed(1, "a"), 0.31) == (ev.Drop(1, "a"),)


def test_a_stream_that_broke_is_looked_for_where_its_cache_is_first() -> None:
    found = streaming()
    assert found.handle(ev.Broke(1, "reset"), 1.0) == (ev.Leave(1, "reset", 0.0),)
    assert found.handle(ev.Wanted(1), 1.0) == (ev.Dial(1, "a"),)
    assert found.handle(ev.DialFailed(1, "a", "refused"), 1.01) == (ev.Dial(1, "b"),)
    found.handle(ev.Dialed(1, "b"), 1.02)
    found.handle(ev.Greeted(1, SERVED), 1.03)
    found.handle(ev.Progressed(1), 1.04)
    route = found.routes[1]
    assert (route.served, route.failovers) == (["a", "b"], 1)


def test_one_that_drains_is_left_at_once_and_not_asked_before_its_time() -> None:
    found = streaming()
    refused = ev.Refused(1, MOVED, "resume elsewhere", 2.0)
    assert found.handle(refused, 1.0) == (ev.Leave(1, "resume elsewhere", 0.0),)
    assert found.handle(ev.Wanted(1), 1.0) == (ev.Dial(1, "b"),)
    assert found.handle(ev.DialFailed(1, "b", "refused"), 1.01) == (
        ev.Leave(1, "a: resume elsewhere; b: refused", None),
    )
    assert found.deadline is not None
    assert found.deadline >= 3.0
    assert found.handle(ev.Tick(), found.deadline) == (ev.Probe("a"),)


def test_retry_after_holds_for_that_address_alone() -> None:
    found = streaming()
    found.handle(ev.Refused(1, FaultCode.OVERLOADED, "full", 30.0), 1.0)
    found.handle(ev.Wanted(1), 1.0)
    found.handle(ev.Dialed(1, "b"), 1.1)
    (leave,) = found.handle(ev.Refused(1, FaultCode.OVERLOADED, "full", 5.0), 1.2)
    assert isinstance(leave, ev.Leave)
    assert leave.again_s == pytest.approx(5.0)
    assert leave.why == "a: full; b: full"
    (again,) = found.handle(ev.Wanted(1), 3.0)
    assert isinstance(again, ev.Leave)
    assert again.again_s == pytest.approx(3.2)
    assert found.handle(ev.Wanted(1), 6.2) == (ev.Dial(1, "b"),)


def test_a_quiet_verifier_is_asked_and_left_if_it_does_not_answer() -> None:
    found = streaming()
    assert found.handle(ev.Quiet(1), 2.0) == (ev.Probe("a"),)
    assert found.handle(answer("a", 0.1), 2.1) == ()
    assert found.handle(ev.Quiet(1), 4.0) == (ev.Probe("a"),)
    assert found.handle(ev.ProbeFailed("a", "busy", alive=True), 4.1) == ()
    assert found.handle(ev.Quiet(1), 6.0) == (ev.Probe("a"),)
    assert found.handle(ev.ProbeFailed("a", "no answer"), 7.5) == (ev.Leave(1, "no answer", 0.0),)
    assert found.handle(ev.Wanted(1), 7.5) == (ev.Dial(1, "b"),)


def test_when_no_verifier_will_ever_do_the_generation_is_told_why() -> None:
    found = machine()
    found.handle(ev.Wanted(1), 0.0)
    found.handle(ev.Dialed(1, "a"), 0.1)
    (leave,) = found.handle(ev.Refused(1, FaultCode.UNAUTHENTICATED, "no key"), 0.2)
    assert leave == ev.Leave(1, "no key", 0.0)
    found.handle(ev.Wanted(1), 0.2)
    (last,) = found.handle(ev.DialFailed(1, "b", "wrong name", retryable=False), 0.3)
    assert last == ev.Leave(1, "a: no key; b: wrong name", None, retryable=False)


def test_what_is_late_or_of_another_generation_is_ignored() -> None:
    found = streaming()
    assert found.handle(ev.Over(1), 1.0) == ()
    assert found.handle(ev.Broke(1, "reset"), 1.0) == ()
    assert found.handle(ev.Dialed(1, "b"), 1.0) == (ev.Drop(1, "b"),)
    assert found.handle(answer("gone", 0.1), 1.0) == ()
    assert found.deadline is None


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (ModelIdentity("renamed", "fp-1", 4096), None),
        (ModelIdentity("big", "fp-2", 4096), "but the text was begun by 'big' (fp-1)"),
        (ModelIdentity("big", "", 4096), "the model 'big' (no fingerprint)"),
        (ModelIdentity("big", "fp-1", 200), None),
        (ModelIdentity("big", "fp-1", 199), "its context is 199 tokens"),
    ],
)
def test_who_may_continue(here: ModelIdentity, reason: str | None) -> None:
    why = why_not(SERVED, here, 200)
    assert why is None if reason is None else re.search(re.escape(reason), str(why))


def test_verifiers_that_tell_no_fingerprint_are_told_apart_by_name() -> None:
    old = ModelIdentity("big", "", 0)
    assert why_not(old, old, 200) is None
    assert why_not(old, ModelIdentity("small", "", 0), 200) is not None


def test_a_breaker_opens_asks_and_closes() -> None:
    breaker = CircuitBreaker(BreakerPolicy(failures=2, open_s=1.0, longest_open_s=4.0), 7)
    breaker.failed(0.0)
    assert breaker.state is CLOSED
    lengths = []
    for now in (0.0, 10.0, 20.0, 30.0, 40.0):
        breaker.failed(now)
        assert breaker.state is OPEN
        assert breaker.probe_at is not None
        lengths.append(breaker.probe_at - now)
        breaker.probing()
        assert breaker.state is HALF_OPEN
    for length_s, longest_s in zip(lengths, (1.0, 2.0, 4.0, 4.0, 4.0), strict=True):
        assert longest_s / 2 <= length_s <= longest_s
    breaker.answered()
    assert breaker.state is CLOSED
    breaker.failed(50.0)
    assert breaker.state is OPEN  # it answers questions and breaks streams
    breaker.succeeded()
    breaker.failed(60.0)
    assert breaker.state is CLOSED


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("first_seed", range(0, 30, 10))
def test_in_random_worlds_every_text_goes_on_when_one_verifier_is_there(
    count: int, first_seed: int
) -> None:
    """The world's own assertions say what must never happen; here is what must. The first verifier
    is there in the end, and a text goes on unless it was found to be of no use for it before."""
    went_on = 0
    for seed in range(first_seed, first_seed + 10):
        world = World(seed, count)
        world.run(CALM_AFTER_S + 20.0)
        for session in world.sessions.values():
            limit_s = FailoverPolicy().ask_s + DIAL_S + 2.0 * count
            assert session.longest_wait_s <= limit_s, seed
            if session.failed is not None:
                assert _all_refused(session.failed.why, count), (seed, session.failed)
            elif "v0" not in world.machine.routes[session.route].unfit:
                assert session.last_token_at > CALM_AFTER_S + 19.0, (seed, session)
                went_on += 1
    assert went_on >= 3


def _all_refused(why: str, count: int) -> bool:
    """A generation fails only when each of the verifiers has refused it for good."""
    final = f"{Mood.KEYLESS.value}|it serves the model"
    return len(re.findall(final, why)) == count


NAMES = [f"10.0.0.{number}:7420" for number in range(1, 8)]

CONVERSATIONS = [conversation_named(f"chat {number}") for number in range(600)]

Choose = Callable[[str, Sequence[str]], str]


def rendezvous(conversation: str, names: Sequence[str]) -> str:
    views = [VerifierView(name, 0.03, 0) for name in names]
    return ranked(Association.RENDEZVOUS, conversation, views)[0]


def modulo(conversation: str, names: Sequence[str]) -> str:
    """A mutant: the hash of the conversation modulo the number of replicas."""
    return names[zlib.crc32(conversation.encode()) % len(names)]


def next_in_list(conversation: str, names: Sequence[str]) -> str:
    """A mutant: who loses its replica goes to the one that follows it in the list, as on a ring
    with one point each."""
    place = NAMES.index(rendezvous(conversation, NAMES))
    places = range(place, place + len(NAMES))
    return next(one for p in places if (one := NAMES[p % len(NAMES)]) in names)


def homes(choose: Choose, names: Sequence[str]) -> dict[str, str]:
    return {one: choose(one, names) for one in CONVERSATIONS}


def moves_only_its_share(choose: Choose) -> bool:
    """One replica goes: its conversations move, and no other. It is back: they are back."""
    before = homes(choose, NAMES)
    for gone in NAMES:
        after = homes(choose, [name for name in NAMES if name != gone])
        if any(after[one] != home for one, home in before.items() if home != gone):
            return False
    return True


def spreads_the_share_of_one_that_goes(choose: Choose) -> bool:
    before, after = homes(choose, NAMES), homes(choose, NAMES[1:])
    heirs = {after[one] for one, home in before.items() if home == NAMES[0]}
    return len(heirs) == len(NAMES) - 1


def is_the_same_in_any_order(choose: Choose) -> bool:
    return homes(choose, NAMES) == homes(choose, NAMES[::-1])


def test_what_the_hashing_promises() -> None:
    assert moves_only_its_share(rendezvous)
    assert not moves_only_its_share(modulo)
    assert spreads_the_share_of_one_that_goes(rendezvous)
    assert moves_only_its_share(next_in_list)
    assert not spreads_the_share_of_one_that_goes(next_in_list)
    assert is_the_same_in_any_order(rendezvous)
    assert not is_the_same_in_any_order(modulo)
    assert weight("ab", "c") != weight("a", "bc")


def test_conversations_spread_evenly() -> None:
    """Each replica's share of n conversations is within five standard deviations of n/r."""
    count, share = len(CONVERSATIONS), 1 / len(NAMES)
    off = 5 * math.sqrt(count * share * (1 - share))
    counts = Counter(homes(rendezvous, NAMES).values())
    assert len(counts) == len(NAMES)
    assert all(abs(number - count * share) < off for number in counts.values())


def test_texts_that_begin_alike_are_one_conversation() -> None:
    prompt = list(range(1, BEGINNING_TOKENS + 1))
    assert conversation_of(prompt) == conversation_of([*prompt, 7, 8, 9])
    assert conversation_of(prompt) != conversation_of([*prompt[:-1], 99])
    assert conversation_of([1, 23]) != conversation_of([12, 3])
    assert conversation_of([1]) != conversation_named("1")
    assert len(conversation_of(prompt)) == len(conversation_named("\ud800 half a pair")) == 16


def replicas(names: Sequence[str]) -> Failover:
    found = Failover(FailoverPolicy(), Association.RENDEZVOUS)
    found.handle(ev.Known(tuple(names)), 0.0)
    return found


def order(conversation: str, names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: weight(conversation, name), reverse=True)


def test_a_text_walks_down_the_order_of_its_conversation() -> None:
    """The first is full, the second drains, the third is not there: the fourth serves."""
    conversation = CONVERSATIONS[0]
    first, second, third, fourth = order(conversation, NAMES[:4])
    found = replicas(NAMES[:4])
    assert found.handle(ev.Wanted(1, 100, conversation), 0.0) == (ev.Dial(1, first),)
    found.handle(ev.Dialed(1, first), 0.1)
    (left,) = found.handle(ev.Refused(1, FaultCode.OVERLOADED, "full"), 0.2)
    assert isinstance(left, ev.Leave)
    assert left.again_s == 0.0
    assert found.handle(ev.Wanted(1, 100, conversation), 0.2) == (ev.Dial(1, second),)
    found.handle(ev.Dialed(1, second), 0.3)
    found.handle(ev.Refused(1, FaultCode.SHUTTING_DOWN, "drains"), 0.4)
    assert found.handle(ev.Wanted(1, 100, conversation), 0.4) == (ev.Dial(1, third),)
    assert found.handle(ev.DialFailed(1, third, "nobody there"), 0.5) == (ev.Dial(1, fourth),)


def test_a_load_of_long_ago_keeps_nobody_away() -> None:
    """The first was full when it was last asked; after a while nobody knows."""
    conversation, (first, second) = CONVERSATIONS[0], order(CONVERSATIONS[0], NAMES[:2])
    found = replicas(NAMES[:2])
    model = ModelInfo("big", "words", 100, 4096, (), "fp-1")
    full = VerifierInfo(model, Limits(), 8, 8, 20_000)
    found.handle(ev.ProbeAnswered(first, full, 0.01), 0.0)
    assert found.handle(ev.Wanted(1, 100, conversation), 1.0) == (ev.Dial(1, second),)
    assert found.handle(ev.Wanted(2, 100, conversation), 60.0) == (ev.Dial(2, first),)


# --- a generation names a model that not every verifier has -------------------------------------

SQL = replace(MODEL, name="sql", fingerprint="sql-1")


def told_by(address: str, rtt_s: float, *adapters: object) -> ev.ProbeAnswered:
    info = VerifierInfo(MODEL, Limits(), 0, 8, 20_000, adapters)  # type: ignore[arg-type]
    return ev.ProbeAnswered(address, info, rtt_s)


def asked(near: tuple[object, ...] = (), far: tuple[object, ...] = (SQL,)) -> Failover:
    """Both have answered; ``a`` is nearer."""
    found = Failover(FailoverPolicy(), Association.LOWEST_DELAY, 1)
    found.handle(ev.Known(("a", "b")), 0.0)
    found.handle(told_by("a", 0.01, *near), 0.0)
    found.handle(told_by("b", 0.2, *far), 0.0)
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
    found.handle(told_by("a", 0.01), 0.3)
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
