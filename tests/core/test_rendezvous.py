"""Replicas behind one name. Oracles: what the hashing promises (who moves, and where to) and the
binomial law of the spread; each is shown a policy that breaks it."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

from edgespec.core.association import failover_events as ev
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
from edgespec.core.protocol.messages import FaultCode, Limits, VerifierInfo
from edgespec.core.protocol.work import ModelInfo

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


# --- what a conversation is ---------------------------------------------------------------------


def test_texts_that_begin_alike_are_one_conversation() -> None:
    prompt = list(range(1, BEGINNING_TOKENS + 1))
    assert conversation_of(prompt) == conversation_of([*prompt, 7, 8, 9])
    assert conversation_of(prompt) != conversation_of([*prompt[:-1], 99])
    assert conversation_of([1, 23]) != conversation_of([12, 3])
    assert conversation_of([1]) != conversation_named("1")
    assert len(conversation_of(prompt)) == len(conversation_named("\ud800 half a pair")) == 16


# --- within the failover of a device ------------------------------------------------------------


def machine(names: Sequence[str]) -> Failover:
    found = Failover(FailoverPolicy(), Association.RENDEZVOUS)
    found.handle(ev.Known(tuple(names)), 0.0)
    return found


def order(conversation: str, names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: weight(conversation, name), reverse=True)


def test_a_text_walks_down_the_order_of_its_conversation() -> None:
    """The first is full, the second drains, the third is not there: the fourth serves."""
    conversation = CONVERSATIONS[0]
    first, second, third, fourth = order(conversation, NAMES[:4])
    found = machine(NAMES[:4])
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


def test_conversations_of_one_device_go_their_own_ways() -> None:
    found, gone = machine(NAMES[:3]), set[str]()
    for number, one in enumerate(CONVERSATIONS[:30]):
        (dial,) = found.handle(ev.Wanted(number, 100, one), 0.0)
        assert dial == ev.Dial(number, order(one, NAMES[:3])[0])
        gone.add(dial.address)
    assert gone == set(NAMES[:3])


def test_a_load_of_long_ago_keeps_nobody_away() -> None:
    """The first was full when it was last asked; after a while nobody knows."""
    conversation, (first, second) = CONVERSATIONS[0], order(CONVERSATIONS[0], NAMES[:2])
    found = machine(NAMES[:2])
    model = ModelInfo("big", "words", 100, 4096, (), "fp-1")
    full = VerifierInfo(model, Limits(), 8, 8, 20_000)
    found.handle(ev.ProbeAnswered(first, full, 0.01), 0.0)
    assert found.handle(ev.Wanted(1, 100, conversation), 1.0) == (ev.Dial(1, second),)
    assert found.handle(ev.Wanted(2, 100, conversation), 60.0) == (ev.Dial(2, first),)
