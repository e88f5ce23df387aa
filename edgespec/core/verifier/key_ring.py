"""The API keys that a verifier accepts, and how two versions of their list differ."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from edgespec.core.protocol.credential import Credential

MAX_KEYS = 1024
DIGEST_BYTES = 32


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """Differences between two key rings, as sorted names of credentials."""

    added: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()
    """Credentials that are gone, or have another digest."""
    changed: tuple[str, ...] = ()
    """Credentials with the same API key but other limits."""

    def __bool__(self) -> bool:
        return bool(self.added or self.revoked or self.changed)

    def __str__(self) -> str:
        words = ("added", self.added), ("revoked", self.revoked), ("new limits", self.changed)
        return "; ".join(f"{word}: {', '.join(names)}" for word, names in words if names)


class KeyRing:
    """The API keys that a verifier accepts: ``keys`` maps the name of each credential to its digest
    and its limits.

    An API key is random text of at least 128 bits, so a fast hash is enough (slow hashes are for
    passwords, which can be guessed). A look-up compares every digest in constant time, which takes
    0.11 ms for ``MAX_KEYS``. A name whose digest changed counts as revoked and added again.

    Raises ``ValueError`` for too many API keys, and for two names with the same API key.
    """

    def __init__(self, keys: Mapping[str, tuple[bytes, Credential]]) -> None:
        if len(keys) > MAX_KEYS:
            raise ValueError(f"{len(keys)} keys, but at most {MAX_KEYS} can be held")
        owners: dict[bytes, str] = {}
        for name, (of_key, credential) in keys.items():
            assert len(of_key) == DIGEST_BYTES
            assert credential.name == name != ""
            if (other := owners.setdefault(of_key, name)) != name:
                raise ValueError(f"{other!r} and {name!r} have the same key")
        self._keys = dict(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def credential(self, key: str) -> Credential | None:
        shown, found = digest(key), None
        for of_key, credential in self._keys.values():
            if hmac.compare_digest(of_key, shown):
                found = credential
        return found

    def changes(self, newer: KeyRing) -> KeyChanges:
        old, new = self._keys, newer._keys
        unchanged = {name for name in old.keys() & new.keys() if old[name][0] == new[name][0]}
        return KeyChanges(
            added=tuple(sorted(new.keys() - unchanged)),
            revoked=tuple(sorted(old.keys() - unchanged)),
            changed=tuple(sorted(name for name in unchanged if old[name] != new[name])),
        )
