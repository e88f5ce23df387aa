"""The account of the target's KV cache: which session holds which blocks.

Theory of operation. The cache has blocks 1 .. ``block_count`` of ``block_tokens`` rows each. Block
0 is never allotted: targets keep it zero and point masked keys at it. A session holds a list of
blocks, its *table*: the row of position p is row ``p % block_tokens`` of block ``table[p //
block_tokens]``. Tables grow before a pass and shrink after it. The target owns the memory and never
chooses a block.

A full block may be *published* under a name (``BlockNames``). From then on its rows do not change,
and any number of sessions may hold it. A published block that no session holds is free, but keeps
its name and rows until it is needed. Free blocks without a name are allotted first; then the named
block that has been free for longest; among blocks that one session released together, the block
that is last in its text.

Invariants: a block is free or stands in as many tables as it has holders, once in each; free and
held blocks add up to ``block_count``; a name belongs to one block and a block has at most one name;
only a block with one holder and no name is *writable*. ``cache_scheduler.py`` decides which
sessions give up blocks and which share them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum

from edgespec.core.protocol.prefix_names import PrefixNames
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import CacheShape


class BlockLedger:
    """The block tables of all sessions and the blocks that are free.

    A request that does not fit returns False and changes nothing; no method raises for it. ``key``
    is a session id in all methods.
    """

    def __init__(self, cache: CacheShape) -> None:
        assert min(cache.block_count, cache.block_tokens) >= 1
        self.block_count, self.block_tokens = cache.block_count, cache.block_tokens
        self._free_unnamed = list(range(cache.block_count, 0, -1))
        """Free blocks without a name."""
        self._free_named: OrderedDict[int, None] = OrderedDict()
        """Free blocks with a name, the block that was released first in front."""
        self._tables: dict[str, list[int]] = {}
        self._holders = [0] * (cache.block_count + 1)
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free_count(self) -> int:
        """Blocks that no session holds, including named blocks whose rows may still be reused."""
        return len(self._free_unnamed) + len(self._free_named)

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(self._tables)

    def table(self, key: str) -> tuple[int, ...]:
        return tuple(self._tables.get(key, ()))

    def held_count(self, key: str) -> int:
        return len(self._tables.get(key, ()))

    def holder_count(self, block: int) -> int:
        return self._holders[block]

    def is_writable(self, block: int) -> bool:
        """Return whether the block's one holder may write rows into it."""
        return self._holders[block] == 1 and block not in self._name_of

    def missing_count(self, key: str, length: int) -> int:
        """Return how many more blocks the session needs before it can hold ``length`` rows."""
        return max(0, -(-length // self.block_tokens) - self.held_count(key))

    def reserve(self, key: str, length: int) -> bool:
        """Give the session enough blocks for ``length`` rows; return False if too few blocks are
        free."""
        missing = -(-length // self.block_tokens) - len(self._tables.get(key, ()))
        if missing <= 0:
            return True
        if missing > self.free_count:
            return False
        table = self._tables.setdefault(key, [])
        table += [self._allot() for _ in range(missing)]
        return True

    def trim(self, key: str, length: int) -> None:
        """Release the session's blocks that hold no row before position ``length``."""
        if length <= 0:
            self.release(key)
        elif (table := self._tables.get(key)) is not None:
            keep = -(-length // self.block_tokens)
            if keep < len(table):
                self._release_blocks(table[keep:])
                del table[keep:]

    def release(self, key: str) -> int:
        """Release all blocks of a session and return how many there were."""
        table = self._tables.pop(key, [])
        self._release_blocks(table)
        return len(table)

    # --- names -----------------------------------------------------------------------------

    def find(self, name: bytes) -> int | None:
        return self._block_of.get(name)

    def publish(self, key: str, place: int, name: bytes) -> None:
        """Publish the block at index ``place`` of the session's table under ``name``.

        The rows of the block must be final. Nothing changes if the block already has a name, or if
        the name already belongs to another block.
        """
        block = self._tables[key][place]
        if block not in self._name_of and name not in self._block_of:
            assert self.is_writable(block), f"block {block} has {self._holders[block]} holders"
            self._name_of[block], self._block_of[name] = name, block

    def adopt(self, key: str, place: int, blocks: Sequence[int]) -> None:
        """Replace the session's blocks from index ``place`` on by these published blocks."""
        table = self._tables.setdefault(key, [])
        assert place <= len(table)
        for block in blocks:
            assert block in self._name_of
            self._holders[block] += 1
            self._free_named.pop(block, None)
        replaced = table[place : place + len(blocks)]
        table[place : place + len(blocks)] = blocks
        self._release_blocks(replaced)

    def withdraw(self, key: str) -> None:
        """Remove the names of the session's blocks, so that no other session finds them again."""
        for block in self._tables.get(key, ()):
            if (name := self._name_of.pop(block, None)) is not None:
                del self._block_of[name]

    # --- free blocks -----------------------------------------------------------------------

    def _allot(self) -> int:
        """Return a free block. It has no name any more and one holder."""
        if self._free_unnamed:
            block = self._free_unnamed.pop()
        else:
            block, _ = self._free_named.popitem(last=False)
            del self._block_of[self._name_of.pop(block)]
        assert self._holders[block] == 0
        self._holders[block] = 1
        return block

    def _release_blocks(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._name_of:
                    self._free_named[block] = None
                else:
                    self._free_unnamed.append(block)


class SharePrefixes(Enum):
    """Which sessions may use cached blocks that another session has filled."""

    ALL = "all"
    CREDENTIAL = "credential"
    NONE = "none"


class BlockNames:
    """Names of the full blocks of ``prefix``; equal names mean equal tokens from the beginning on.

    The text's owner is the key of the names (``prefix_names.py``).
    """

    def __init__(self, prefix: CommittedPrefix, block_tokens: int, owner: str) -> None:
        self.prefix = prefix
        self.published = 0
        """Leading blocks of the session's table that the ledger has names for."""
        self._names = PrefixNames(owner.encode(), block_tokens)

    def name(self, place: int) -> bytes:
        """Return the name of the block at index ``place``; the prefix must fill that block."""
        names = self._names.names
        if place >= len(names):
            self._names.extend(self.prefix.tokens)
        return names[place]
