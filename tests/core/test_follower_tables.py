"""What followed what. Oracle: rows written down, and a plain list of all that was added."""

from __future__ import annotations

import random

from edgespec.core.protocol.text_guesses import FollowerTable
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.served_drafts import ServedDraftsMaker


def test_a_table_is_bounded_and_remembers_the_last_leaders() -> None:
    dice, table, recent = random.Random(1), FollowerTable(most_leaders=50), [0]
    for _ in range(3000):
        leader, token = dice.randrange(400), dice.randrange(9)
        table.add(leader, token)
        recent = [leader, *(other for other in recent if other != leader)][:50]
        assert len(table) <= 50
        assert table.after(leader)[0] == token
        assert len(table.after(leader)) == len(set(table.after(leader))) <= 2
    assert all(table.after(leader) for leader in recent)


def test_only_sessions_of_one_named_credential_share() -> None:
    owners = ServedDraftsMaker()
    mine, yours = owners.of(Credential("me")), owners.of(Credential("you"))
    assert owners.of(Credential("me")) is mine
    assert mine is not yours
    assert mine.ngrams is not None
    strangers = owners.of(ANYBODY), owners.of(ANYBODY)
    assert strangers[0] is not strangers[1]
    assert strangers[0].recycled is not strangers[1].recycled
    assert len(owners.tables) == 2


def test_owners_are_bounded() -> None:
    owners = ServedDraftsMaker(most_owners=3)
    first = owners.of(Credential("0"))
    for number in range(1, 10):
        owners.of(Credential(str(number)))
        assert len(owners.tables) <= 3
    assert owners.of(Credential("0")) is not first
