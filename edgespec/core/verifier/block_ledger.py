"""The account of the target's key-value cache: which session holds which blocks.

Theory of operation. The cache has blocks 1 .. ``block_count`` of ``block_tokens`` rows each; block
0 belongs to nobody (targets keep it zero and point masked keys at it). A session holds a list of
blocks, its *table*: the row of position p is ``p % block_tokens`` of block ``table[p //
block_tokens]``. Tables grow before a pass and shrink after it; the target owns the memory and never
chooses a block.

Invariants: a block is free or in exactly one table, once; free and held blocks add up to
``block_count``. Worked example: 40 cached tokens and a pass of 10 rows in blocks of 16 need
ceil(50 / 16) = 4 blocks.

Who has to give blocks up is decided in ``cache_keeper.py``.
"""

from __future__ import annotations

from edgespec.core.protocol.work import CacheShape


class BlockLedger:
    """Raises nothing: a request that does not fit is answered with False and changes nothing."""

    def __init__(self, cache: CacheShape) -> None:
        assert min(cache.block_count, cache.block_tokens) >= 1
        self.block_count, self.block_tokens = cache.block_count, cache.block_tokens
        self._free = list(range(cache.block_count, 0, -1))
        self._tables: dict[str, list[int]] = {}

    @property
    def free_count(self) -> int:
        """Blocks that no session holds."""
        return len(self._free)

    @property
    def holders(self) -> tuple[str, ...]:
        """Sessions that hold at least one block."""
        return tuple(self._tables)

    def table(self, key: str) -> tuple[int, ...]:
        """The blocks of a session in the order of its positions; empty if it holds none."""
        return tuple(self._tables.get(key, ()))

    def held(self, key: str) -> int:
        """How many blocks a session holds."""
        return len(self._tables.get(key, ()))

    def blocks_for(self, length: int) -> int:
        """How many blocks ``length`` rows fill."""
        return -(-length // self.block_tokens)

    def missing(self, key: str, length: int) -> int:
        """How many more blocks the session needs before it can hold ``length`` rows."""
        return max(0, self.blocks_for(length) - self.held(key))

    def reserve(self, key: str, length: int) -> bool:
        """The session can hold ``length`` rows afterwards, unless too few blocks are free."""
        missing = self.missing(key, length)
        if missing == 0:
            return True
        if missing > len(self._free):
            return False
        table = self._tables.setdefault(key, [])
        table += [self._free.pop() for _ in range(missing)]
        return True

    def trim(self, key: str, length: int) -> None:
        """Free the blocks that hold no row before ``length``."""
        if length <= 0:
            self.release(key)
        elif (table := self._tables.get(key)) is not None:
            keep = -(-length // self.block_tokens)
            if keep < len(table):
                self._free += reversed(table[keep:])
                del table[keep:]

    def release(self, key: str) -> int:
        """Free all blocks of a session; how many those were."""
        table = self._tables.pop(key, [])
        self._free += reversed(table)
        return len(table)
