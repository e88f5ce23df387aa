"""A key-value cache in blocks that holds token ids: what the toy target remembers, slot by slot.

It makes a wrong block table an error at once. Whatever a sequence has cached is looked up in its
own slots at every pass, so a block that two sequences hold, or one that was given away too early,
shows as a token that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.protocol.work import CacheShape
from edgespec.ports import PassRequest

_EMPTY = -1


class ToyMemory:
    """Blocks are numbered from 1, as in the ledger."""

    def __init__(self, cache: CacheShape) -> None:
        self._block_count, self._block_tokens = cache.block_count, cache.block_tokens
        self._slots = [_EMPTY] * ((cache.block_count + 1) * cache.block_tokens)
        self._tables: dict[str, tuple[int, ...]] = {}
        """Of each sequence's last pass."""

    def write(self, batch: Sequence[PassRequest], cached: Sequence[Sequence[int]]) -> None:
        """Store the rows of a pass. ``cached[i]`` are the tokens that request i finds in its cache.

        Raises ``ValueError`` when a table is too short, names a block twice or one that is not
        there, or when a cached token is not in its slot.
        """
        blocks = [block for request in batch for block in request.blocks]
        if len(set(blocks)) != len(blocks):
            raise ValueError("two rows of a pass share a block")
        if blocks and not 1 <= min(blocks) <= max(blocks) <= self._block_count:
            raise ValueError(f"blocks {min(blocks)} to {max(blocks)}, limit {self._block_count}")
        for request, tokens in zip(batch, cached, strict=True):
            self._check(request, tokens)
        for request in batch:
            self._tables[request.key] = request.blocks
            for row, token in enumerate((*request.feed, *request.tokens), request.cache_length):
                self._slots[self._slot(request.key, row)] = token

    def keep(self, key: str, length: int, nodes: Sequence[int]) -> None:
        """Move the kept nodes of the last pass, which lie behind ``length`` tokens, together."""
        for place, node in enumerate(nodes):
            kept = self._slots[self._slot(key, length + node)]
            self._slots[self._slot(key, length + place)] = kept

    def _check(self, request: PassRequest, tokens: Sequence[int]) -> None:
        key, rows = request.key, request.cache_length + request.row_count
        room = len(request.blocks) * self._block_tokens
        if rows > room:
            raise ValueError(f"{key!r}: {rows} rows, but its blocks hold {room}")
        size = self._block_tokens
        # Whole blocks at once: a long text is looked at in every pass.
        for block, first in zip(request.blocks, range(0, len(tokens), size), strict=False):
            part = list(tokens[first : first + size])
            found = self._slots[block * size : block * size + len(part)]
            if found != part:
                place = next(i for i, token in enumerate(part) if found[i] != token)
                raise ValueError(
                    f"{key!r}: position {first + place} holds {found[place]},"
                    f" cached was {part[place]}"
                )

    def _slot(self, key: str, position: int) -> int:
        block, offset = divmod(position, self._block_tokens)
        return self._tables[key][block] * self._block_tokens + offset
