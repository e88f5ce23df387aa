"""The account of the target's key-value cache: which session holds which blocks.

Theory of operation. The cache has blocks 1 .. ``block_count`` of ``block_tokens`` rows each; block
0 belongs to nobody (targets keep it zero and point masked keys at it). A session holds a list of
blocks, its *table*: the row of position p is ``p % block_tokens`` of block ``table[p //
block_tokens]``. Tables grow before a pass and shrink after it; the target owns the memory and never
chooses a block.

A full block may be *published* under a name (``BlockNames``); from then on its rows do not
change, and any number of sessions may hold it. When the last of them lets go it is free, but keeps
its name and rows until it is needed: free blocks without a name are given out first, then the named
one that nobody has held for longest, of one session's the last in its text.

Invariants: a block is free or in as many tables as it has holders, once in each; free and held
blocks add up to ``block_count``; a name belongs to one block and a block has at most one name; only
a block with one holder and no name is *writable*. Who gives blocks up, and who shares, is decided
in ``cache_keeper.py``.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from hashlib import blake2b

from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import CacheShape


class BlockLedger:
    """Raises nothing: a request that does not fit is answered with False and changes nothing."""

    def __init__(self, cache: CacheShape) -> None:
        assert min(cache.block_count, cache.block_tokens) >= 1
        self.block_count, self.block_tokens = cache.block_count, cache.block_tokens
        self._blank = list(range(cache.block_count, 0, -1))
        """Free blocks without a name."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Free blocks with a name, the one let go longest ago first."""
        self._tables: dict[str, list[int]] = {}
        self._holders = [0] * (cache.block_count + 1)
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free_count(self) -> int:
        """Blocks that no session holds; also those whose rows may still be of use."""
        return len(self._blank) + len(self._idle)

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(self._tables)

    def table(self, key: str) -> tuple[int, ...]:
        return tuple(self._tables.get(key, ()))

    def held(self, key: str) -> int:
        return len(self._tables.get(key, ()))

    def holder_count(self, block: int) -> int:
        return self._holders[block]

    def writable(self, block: int) -> bool:
        """Whether its one holder may write rows into the block."""
        return self._holders[block] == 1 and block not in self._name_of

    def missing(self, key: str, length: int) -> int:
        """How many more blocks the session needs before it can hold ``length`` rows."""
        return max(0, -(-length // self.block_tokens) - self.held(key))

    def reserve(self, key: str, length: int) -> bool:
        """The session can hold ``length`` rows afterwards, unless too few blocks are free."""
        missing = -(-length // self.block_tokens) - len(self._tables.get(key, ()))
        if missing <= 0:
            return True
        if missing > self.free_count:
            return False
        table = self._tables.setdefault(key, [])
        table += [self._take() for _ in range(missing)]
        return True

    def trim(self, key: str, length: int) -> None:
        """Let go of the session's blocks that hold no row before ``length``."""
        if length <= 0:
            self.release(key)
        elif (table := self._tables.get(key)) is not None:
            keep = -(-length // self.block_tokens)
            if keep < len(table):
                self._let_go(table[keep:])
                del table[keep:]

    def release(self, key: str) -> int:
        """Let go of all blocks of a session; how many those were."""
        table = self._tables.pop(key, [])
        self._let_go(table)
        return len(table)

    # --- names -----------------------------------------------------------------------------

    def find(self, name: bytes) -> int | None:
        return self._block_of.get(name)

    def publish(self, key: str, place: int, name: bytes) -> None:
        """The rows of block ``place`` of the session's table are final and can be found by this
        name. A block that has a name keeps it, and so does a name that has a block."""
        block = self._tables[key][place]
        if block not in self._name_of and name not in self._block_of:
            assert self.writable(block), f"block {block} has {self._holders[block]} holders"
            self._name_of[block], self._block_of[name] = name, block

    def adopt(self, key: str, place: int, blocks: Sequence[int]) -> None:
        """From ``place`` on, the session holds these published blocks in place of its own."""
        table = self._tables.setdefault(key, [])
        assert place <= len(table)
        for block in blocks:
            assert block in self._name_of
            self._holders[block] += 1
            self._idle.pop(block, None)
        replaced = table[place : place + len(blocks)]
        table[place : place + len(blocks)] = blocks
        self._let_go(replaced)

    def withdraw(self, key: str) -> None:
        """The blocks of the session are not found any more, whoever else holds them."""
        for block in self._tables.get(key, ()):
            if (name := self._name_of.pop(block, None)) is not None:
                del self._block_of[name]

    # --- free blocks -----------------------------------------------------------------------

    def _take(self) -> int:
        """A free block, which has no name any more and one holder."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._name_of.pop(block)]
        assert self._holders[block] == 0
        self._holders[block] = 1
        return block

    def _let_go(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._name_of:
                    self._idle[block] = None
                else:
                    self._blank.append(block)


_NAME_BYTES = 32


class SharePrefixes(Enum):
    """Which sessions may use cached blocks that another session has filled."""

    ALL = "all"
    CREDENTIAL = "credential"
    NONE = "none"


class BlockNames:
    """Names of the full blocks of ``prefix``: equal ones mean equal tokens from the beginning on.

    The name of block i is the hash of the name of block i - 1 and of the block's own tokens; before
    the first stands the hash of the text's owner. No device can make two texts with one name."""

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
