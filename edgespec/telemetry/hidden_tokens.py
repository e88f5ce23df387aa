"""Tokens of a trace under names that only this trace knows, so that nobody reads the text from it.

A secret drawn for the trace permutes token ids: equal ones stay equal, and one takes as many bytes
on the wire as before, so everything that is counted, compared or timed is as in the open trace. It
is a substitution cipher and hides a text from whoever meets the file, not from a cryptanalyst with
much of it; a trace is still nobody else's business. Stop texts are replaced by their lengths, and
hashes of prefixes by keyed ones: from a chain of open ones each token could be found by trying all.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, Final

TOKEN_FIELDS: Final = frozenset("tokens prompt committed feed text targets stop_token_ids".split())
"""Sequences of token ids, under these names in the core's classes."""
_ROUNDS: Final = 4
_MOST_KEPT: Final = 1 << 18
_LARGEST: Final = (1 << 31) - 1


class HiddenTokens:
    """Of one trace. ``key`` is for tests."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(16) if key is None else key
        self._known: dict[int, int] = {}

    def hide(self, name: str, value: Any) -> Any:
        """``value`` of a field of that name, without what it tells of a text."""
        match name, value:
            case ("token", int()):
                return self.token(value)
            case ("stop", tuple() | list()):
                return [f"{len(one)} characters" for one in value]
            case ("logit_bias", Mapping()):
                return {self.token(int(one)): bias for one, bias in value.items()}
            case ("top", tuple() | list()):
                return [(self.token(one), *rest) for one, *rest in value]
            case ("base_hash", int()) if value:
                return int.from_bytes(self._digest(b"prefix %d" % value)[:4], "big") or 1
            case (_, tuple() | list()) if name in TOKEN_FIELDS:
                return [self.token(one) if isinstance(one, int) else one for one in value]
        return value

    def token(self, token: int) -> int:
        """The name of a token: another id of the same size as a varint."""
        if not 0 <= token <= _LARGEST:
            return token
        if token not in self._known:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            self._known[token] = self._permuted(token)
        return self._known[token]

    def _permuted(self, token: int) -> int:
        """A Feistel network over the ids of that size, walked until it stays among them (Black and
        Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002)."""
        groups = max(1, -(-token.bit_length() // 7))
        least = 0 if groups == 1 else 1 << 7 * (groups - 1)
        most = min((1 << 7 * groups) - 1, _LARGEST)
        half = -(-(most - least).bit_length() // 2)
        while True:
            left, right = divmod(token - least, 1 << half)
            for number in range(_ROUNDS):
                seen = self._digest(b"%d %d %d" % (groups, number, right))
                left, right = right, left ^ int.from_bytes(seen[:4], "big") % (1 << half)
            token = least + (left << half | right)
            if token <= most:
                return token

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=8).digest()
