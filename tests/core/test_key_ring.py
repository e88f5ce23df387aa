"""The ring of keys. Oracle: a dictionary of names by key, kept by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.verifier.credential import MAX_KEYS, Credential, KeyChanges, KeyRing, digest


def ring(**keys: str) -> KeyRing:
    return KeyRing({name: (digest(key), Credential(name)) for name, key in keys.items()})


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=20), st.text())
def test_a_key_opens_for_its_owner_and_nobody_else(keys: dict[str, str], stranger: str) -> None:
    owners = {key: name for name, key in keys.items()}
    unique = {name: key for key, name in owners.items()}
    found = KeyRing({name: (digest(key), Credential(name)) for name, key in unique.items()})
    for key in (*owners, stranger):
        credential = found.credential(key)
        assert (credential.name if credential else None) == owners.get(key)


def test_a_ring_holds_no_key() -> None:
    assert "a secret" not in repr(vars(ring(one="a secret")))


def test_changes_tell_added_revoked_and_limits_apart() -> None:
    old = ring(same="s", gone="g", rotated="before", tighter="t")
    keys = {name: (digest(key), Credential(name)) for name, key in (("same", "s"), ("new", "n"))}
    keys["rotated"] = digest("after"), Credential("rotated")
    keys["tighter"] = digest("t"), replace(Credential("tighter"), max_sessions=1)
    changes = old.changes(KeyRing(keys))
    assert changes == KeyChanges(("new", "rotated"), ("gone", "rotated"), ("tighter",))
    assert str(changes) == "added: new, rotated; revoked: gone, rotated; new limits: tighter"
    assert not old.changes(old)


def test_what_cannot_be_a_ring_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="'a' and 'b' have the same key"):
        ring(a="k", b="k")
    with pytest.raises(ValueError, match="digest of 'a' has 3 bytes, not 32"):
        KeyRing({"a": (b"abc", Credential("a"))})
    with pytest.raises(ValueError, match="'b' stands under 'a'"):
        KeyRing({"a": (digest("k"), Credential("b"))})
    with pytest.raises(ValueError, match=f"{MAX_KEYS + 1} keys, but at most {MAX_KEYS}"):
        ring(**{f"n{number}": f"k{number}" for number in range(MAX_KEYS + 1)})
