"""A key-value cache in blocks that holds marks: what the toy target remembers, slot by slot.

The *mark* of a token is a hash of it and of all tokens before it, as a model's keys and values
depend on them all. Whatever a sequence has cached is looked up in its own slots at every pass, so
a block that was given away too early, or shared by two texts that differ before it, shows as a mark
that is not there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.work import CacheShape

_EMPTY = -1
_BEGINNING = 0
"""The mark before the first token."""


class ToyMemory:
    """Blocks are numbered from 1, as in the ledger."""

    def __init__(self, cache: CacheShape) -> None:
        self._block_count, self._block_tokens = cache.block_count, cache.block_tokens
        self._slots = array("q", [_EMPTY]) * ((cache.block_count + 1) * cache.block_tokens)
        self._tables: dict[str, tuple[int, ...]] = {}
        """Of each sequence's last pass."""
        self._marks: dict[str, array[int]] = {}
        """Of each sequence's committed tokens so far, whose text only grows."""

    def write(self, batch: Sequence[PassRequest], cached: Sequence[Sequence[int]]) -> None:
        """Store the rows of a pass. ``cached[i]`` are the tokens that request i finds in its cache.

        Raises ``ValueError`` when a table is too short, names a block twice or one that is not
        there, when a block that is written is also another request's, or when a cached token is
        not in its slot.
        """
        for request in batch:
            self._check_room(request)
        blocks = [block for request in batch for block in request.blocks]
        if blocks and not 1 <= min(blocks) <= max(blocks) <= self._block_count:
            raise ValueError(f"blocks {min(blocks)} to {max(blocks)}, limit {self._block_count}")
        if len(set(blocks)) != len(blocks):
            self._check_writes(batch)
        for request, tokens in zip(batch, cached, strict=True):
            marks = self._marks.setdefault(request.key, array("q"))
            marks.extend(_marks(marks, tokens[len(marks) :]))
            self._check(request, marks)
        for request in batch:
            self._tables[request.key] = request.blocks
            for row, mark in enumerate(self._row_marks(request), request.cache_length):
                self._slots[self._slot(request.key, row)] = mark

    def keep(self, key: str, length: int, nodes: Sequence[int]) -> None:
        """Move the kept nodes of the last pass, which lie behind ``length`` tokens, together."""
        for place, node in enumerate(nodes):
            kept = self._slots[self._slot(key, length + node)]
            self._slots[self._slot(key, length + place)] = kept

    def forget(self, key: str) -> None:
        """The sequence is closed; its slots keep what they hold."""
        self._tables.pop(key, None)
        self._marks.pop(key, None)

    def _check_room(self, request: PassRequest) -> None:
        rows = request.cache_length + request.row_count
        room = len(request.blocks) * self._block_tokens
        if rows > room:
            raise ValueError(f"{request.key!r}: {rows} rows, but its blocks hold {room}")

    def _check_writes(self, batch: Sequence[PassRequest]) -> None:
        """For a pass in which some block is mentioned more than once."""
        held: set[int] = set()
        written: set[int] = set()
        for request in batch:
            if len(set(request.blocks)) != len(request.blocks):
                raise ValueError(f"{request.key!r}: a block stands in its table twice")
            writes = set(request.blocks[request.cache_length // self._block_tokens :])
            if not writes.isdisjoint(held) or not written.isdisjoint(request.blocks):
                raise ValueError(f"{request.key!r}: a block that is written is another's too")
            written |= writes
            held.update(request.blocks)

    def _check(self, request: PassRequest, marks: array[int]) -> None:
        size, length = self._block_tokens, request.cache_length
        # Whole blocks at once: a long text is looked at in every pass.
        for block, first in zip(request.blocks, range(0, length, size), strict=False):
            part = marks[first : min(first + size, length)]
            found = self._slots[block * size : block * size + len(part)]
            if found != part:
                place = next(i for i, mark in enumerate(part) if found[i] != mark)
                raise ValueError(
                    f"{request.key!r}: position {first + place} holds another token than the one"
                    " that was cached, or the same one behind another text"
                )

    def _row_marks(self, request: PassRequest) -> list[int]:
        """Marks of the fed tokens and of the nodes behind them."""
        known = self._marks[request.key]
        del known[request.cache_length :]
        fed = _marks(known, request.feed)
        known.extend(fed)
        nodes: list[int] = []
        for token, parent in zip(request.tokens, request.parents, strict=True):
            nodes.append(hash((nodes[parent] if parent >= 0 else known[-1], token)))
        return fed + nodes

    def _slot(self, key: str, position: int) -> int:
        block, offset = divmod(position, self._block_tokens)
        return self._tables[key][block] * self._block_tokens + offset


def _marks(known: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The marks of ``tokens`` behind a text with these marks; the same in every process."""
    mark = known[-1] if known else _BEGINNING
    marks: list[int] = []
    for token in tokens:
        mark = hash((mark, token))
        marks.append(mark)
    return marks
