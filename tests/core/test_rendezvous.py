"""Replicas behind one name. Oracles: what the hashing promises (who moves, and where to), the
binomial law of the spread, and the bound on loads; each is shown a policy that breaks it."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.association import failover_events as ev
from edgespec.core.association.conversation import (
    BEGINNING_TOKENS,
    conversation_named,
    conversation_of,
)
from edgespec.core.association.failover import Failover
from edgespec.core.association.policies import (
    AssociationPolicy,
    DeviceView,
    Links,
    LinkView,
    RandomAssociation,
    VerifierView,
)
from edgespec.core.association.rendezvous import CALM_SESSIONS, RendezvousHash, weight
from edgespec.core.association.route import FailoverPolicy
from edgespec.core.protocol.messages import FaultCode, Limits, VerifierInfo
from edgespec.core.protocol.work import ModelInfo

NAMES = [f"10.0.0.{number}:7420" for number in range(1, 8)]
CONVERSATIONS = [conversation_named(f"chat {number}") for number in range(600)]
BALANCE = 1.25


def replicas(names: Sequence[str], sessions: int = 0, most: int = 64) -> list[VerifierView]:
    return [VerifierView(name, 0.02, sessions, most) for name in names]


def chosen(
    policy: AssociationPolicy, conversation: str, views: Sequence[VerifierView], device: str = "d"
) -> str:
    """The name that one device gets for this conversation."""
    view = DeviceView(device, 0.01, conversation=conversation)
    (index,) = policy.assign([view], views, [[LinkView(0.01)] * len(views)])
    return views[index].name


def homes(policy: AssociationPolicy, names: Sequence[str]) -> dict[str, str]:
    return {one: chosen(policy, one, replicas(names)) for one in CONVERSATIONS}


class Modulo:
    """A mutant: the hash of the conversation modulo the number of replicas."""

    name = "modulo"

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        return tuple(zlib.crc32(one.conversation.encode()) % len(verifiers) for one in devices)


class NextInList(RendezvousHash):
    """A mutant: who loses its replica goes to the one that follows it in the list, as on a ring
    with one point each."""

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        (index,) = super().assign(devices, replicas(NAMES), links)
        left = [view.name for view in verifiers]
        places = range(index, index + len(NAMES))
        name = next(one for p in places if (one := NAMES[p % len(NAMES)]) in left)
        return (left.index(name),)


# --- who moves ---------------------------------------------------------------------------------


def moves_only_its_share(policy: AssociationPolicy) -> bool:
    """One replica goes: its conversations move, and no other. It is back: they are back."""
    before = homes(policy, NAMES)
    for gone in NAMES:
        after = homes(policy, [name for name in NAMES if name != gone])
        if any(after[one] != home for one, home in before.items() if home != gone):
            return False
        newly = [one for one in CONVERSATIONS if after[one] != before[one]]
        if not all(before[one] == gone for one in newly):
            return False
    return True


def spreads_the_share_of_one_that_goes(policy: AssociationPolicy) -> bool:
    before = homes(policy, NAMES)
    after = homes(policy, NAMES[1:])
    heirs = Counter(after[one] for one, home in before.items() if home == NAMES[0])
    return len(heirs) == len(NAMES) - 1


def is_the_same_everywhere(policy: AssociationPolicy) -> bool:
    """Whoever asks, and in whatever order the names come."""
    return all(
        chosen(policy, one, replicas(names), device) == chosen(policy, one, replicas(NAMES))
        for one in CONVERSATIONS[:50]
        for names in (NAMES, NAMES[::-1])
        for device in ("laptop", "phone")
    )


def test_only_the_share_of_a_replica_moves_with_it() -> None:
    assert moves_only_its_share(RendezvousHash())
    assert not moves_only_its_share(Modulo())


def test_the_share_of_one_that_goes_is_spread_over_all_others() -> None:
    assert spreads_the_share_of_one_that_goes(RendezvousHash())
    assert moves_only_its_share(NextInList())
    assert not spreads_the_share_of_one_that_goes(NextInList())


def test_all_who_know_the_names_find_the_same_one() -> None:
    assert is_the_same_everywhere(RendezvousHash())
    assert not is_the_same_everywhere(RandomAssociation(1))


def test_conversations_spread_evenly() -> None:
    """Each replica's share of n conversations is within five standard deviations of n/r."""
    count, share = len(CONVERSATIONS), 1 / len(NAMES)
    off = 5 * math.sqrt(count * share * (1 - share))
    counts = Counter(homes(RendezvousHash(), NAMES).values())
    assert len(counts) == len(NAMES)
    assert all(abs(number - count * share) < off for number in counts.values())


def test_lengths_of_conversation_and_name_are_kept_apart() -> None:
    assert weight("ab", "c") != weight("a", "bc")


# --- loads --------------------------------------------------------------------------------------


Loads = list[tuple[int, int]]


def keeps_the_bound(policy: RendezvousHash, count: int) -> bool:
    """So many new sessions at once: no replica with more than the bound says."""
    views = replicas(NAMES[:3], most=10_000)
    devices = [DeviceView(f"d{number}", 0.01) for number in range(count)]
    placed = policy.assign(devices, views, [[LinkView(0.01)] * 3] * count)
    return max(Counter(placed).values()) <= max(math.ceil(BALANCE * count / 3), CALM_SESSIONS)


def test_no_replica_gets_more_than_its_bound() -> None:
    assert all(keeps_the_bound(RendezvousHash(BALANCE), count) for count in range(1, 90))
    assert not all(keeps_the_bound(RendezvousHash(), count) for count in range(1, 90))


def test_a_crowded_replica_is_passed_over_for_the_next_in_order_alone() -> None:
    policy, calm = RendezvousHash(BALANCE), replicas(NAMES, sessions=20)
    for one in CONVERSATIONS[:40]:
        home = chosen(policy, one, calm)
        crowded = [replace(view, sessions=60) if view.name == home else view for view in calm]
        rest = [view for view in calm if view.name != home]
        assert chosen(policy, one, crowded) == chosen(policy, one, rest)
        busier = [replace(view, sessions=24) if view.name == home else view for view in calm]
        assert chosen(policy, one, busier) == home


def test_a_handful_of_sessions_is_no_crowd() -> None:
    """Where hardly anybody is, the order alone decides, however uneven the load."""
    policy = RendezvousHash(BALANCE)
    for one in CONVERSATIONS[:40]:
        home = chosen(policy, one, replicas(NAMES))
        views = [
            replace(view, sessions=CALM_SESSIONS - 1) if view.name == home else view
            for view in replicas(NAMES)
        ]
        assert chosen(policy, one, views) == home


@given(
    loads=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=6),
    conversation=st.text(max_size=8),
    balance=st.sampled_from((BALANCE, math.inf)),
)
@settings(max_examples=100)
def test_a_full_replica_is_named_only_when_all_are(
    loads: Loads, conversation: str, balance: float
) -> None:
    views = [
        VerifierView(f"v{number}", 0.02, sessions, most)
        for number, (sessions, most) in enumerate(loads)
    ]
    name = chosen(RendezvousHash(balance), conversation, views)
    roomy = [view.name for view in views if view.sessions < view.max_sessions]
    assert name in (roomy or [view.name for view in views])


@pytest.mark.parametrize("balance", [1.0, 0.0, math.nan])
def test_a_balance_that_nobody_can_keep_is_refused(balance: float) -> None:
    with pytest.raises(ValueError, match=f"balance is {balance}, but must be above 1"):
        RendezvousHash(balance)


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
    found = Failover(
        FailoverPolicy(),
        RendezvousHash(),
        DeviceView("laptop", 0.01),
        ask_first=False,
    )
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
