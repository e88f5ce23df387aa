"""The names of a text's full blocks: equal names mean equal tokens from the text's beginning on.

Theory of operation. What the target caches for a token depends on that token and on all before it,
so a block may stand for another one only if both texts agree up to the block's end. The name of
block i is the hash of the name of block i - 1 and of the block's own tokens; the name before the
first is the hash of the text's owner, so that texts of different owners never have a name in
common. The hash is BLAKE2b of 32 bytes: no device can make two texts with one name.

Worked example: in blocks of 16 a text of 40 tokens has two names; the 8 tokens behind them get one
when there are 16.
"""

from __future__ import annotations

import struct
from enum import Enum
from hashlib import blake2b

from edgespec.core.protocol.prefix import CommittedPrefix

_NAME_BYTES = 32


class SharePrefixes(Enum):
    """Which sessions may use cached blocks that another session has filled."""

    ALL = "all"
    CREDENTIAL = "credential"
    """Those that showed the same key (``credential.py``)."""
    NONE = "none"


class BlockNames:
    """Names of the blocks of ``prefix``, made when they are asked for."""

    def __init__(self, prefix: CommittedPrefix, block_tokens: int, owner: str) -> None:
        self.prefix = prefix
        self.published = 0
        """Blocks of the session's table that the ledger was given names for."""
        self._block_tokens = block_tokens
        self._pack = struct.Struct(f"<{block_tokens}I").pack
        self._names = [_hash(owner.encode())]

    def name(self, place: int) -> bytes:
        """The name of the block at ``place`` (0: the first), which the prefix has to fill."""
        size = self._block_tokens
        assert (place + 1) * size <= self.prefix.length
        for first in range((len(self._names) - 1) * size, (place + 1) * size, size):
            tokens = self.prefix.tokens[first : first + size]
            self._names.append(_hash(self._names[-1] + self._pack(*tokens)))
        return self._names[place + 1]


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=_NAME_BYTES).digest()
