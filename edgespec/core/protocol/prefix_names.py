"""Names of the beginnings of texts, by which both ends refer to token ids without sending them.

A text is cut into blocks of equal length. The name of the beginning that ends with block i is the
hash of the name before it and of the ids of block i; the name of nothing is the hash of a key. So
one name stands for all tokens before it, and a text that grows only hashes its new blocks. A
cryptographic hash is used, since an equal name is taken for equal tokens: no device can make two
texts with one name. A key that others do not have keeps a name from being computed or guessed by
them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

NAME_BYTES: Final = 32
TOKEN_BYTES: Final = 4
"""Bytes of a token id in a packed block."""
MAX_BLOCK_TOKENS: Final = 1 << 16


def name_of_nothing(key: bytes) -> bytes:
    """Return the name of the empty text under ``key``."""
    return _hash(key)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return the ids in four bytes each, the lowest byte first."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Return the ids that ``pack_tokens`` has packed."""
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)


class PrefixNames:
    """Names of the beginnings of one text that end with a full block, the shortest first.

    ``key`` is what the names are made under. ``known`` are the names of the first blocks, if they
    were computed before."""

    __slots__ = ("block_tokens", "names", "root")

    def __init__(self, key: bytes, block_tokens: int, known: Iterable[bytes] = ()) -> None:
        self.block_tokens = block_tokens
        self.root = name_of_nothing(key)
        self.names: list[bytes] = [*known]

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Name the full blocks of ``tokens`` that have no name yet, and return all names.

        ``tokens`` is the whole text from its beginning. Tokens that are named may not change."""
        names, size = self.names, self.block_tokens
        first, stop = len(names) * size, len(tokens) // size * size
        if first < stop:
            packed, step = pack_tokens(tokens[first:stop]), size * TOKEN_BYTES
            before = names[-1] if names else self.root
            for at in range(0, len(packed), step):
                before = _hash(before + packed[at : at + step])
                names.append(before)
        return names


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=NAME_BYTES).digest()
