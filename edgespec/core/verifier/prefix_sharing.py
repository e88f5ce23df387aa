"""Sessions whose texts begin alike use the same cached blocks: nobody computes them again.

Theory of operation. What a session's passes have fed is published block by block, under names that
stand for all tokens up to the block's end (``block_names.py``). A session that enters the cache
takes hold of the longest chain of blocks that bear the first names of its committed prefix, and
feeds only what is behind them. So a second session with the same system prompt, the next turn of a
chat, a device that comes back and a session that had lost its blocks start where others left off.

Four rules keep that exact:

    1. Published are fed tokens of passes that went well, and only full blocks. The row of an
       accepted node is moved to its place before the next pass; until that pass has gone well
       nobody knows that the move did too.
    2. At least one token of a prefix is fed, or nothing could be sampled: of 32 tokens in blocks of
       16 only one block is taken.
    3. Nobody writes into a published block. A session writes behind its cached rows, which fill
       what it shares to the last row. So there is nothing to copy on write.
    4. What a session held that failed in the target is not given to others any more.

While a session still feeds its prompt it looks before every pass whether others have come further
(``catch_up``). And when the pass that is being formed computes for another session just what this
one would compute next, it sits that pass out (``waits``), unless it could sample in it: ten devices
that open together with one long prompt then cost little more than one.
"""

from __future__ import annotations

from collections.abc import Callable

from edgespec.core.protocol.prefix import CommittedPrefix
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.core.verifier.block_names import BlockNames

OwnerOf = Callable[[str], str]
"""Sessions with equal owners may share."""


class PrefixSharing:
    """``owner_of`` is asked once, when a session enters for the first time."""

    def __init__(self, ledger: BlockLedger, owner_of: OwnerOf) -> None:
        self.query_tokens = 0
        """Committed tokens of all sessions that entered the cache, each time they did."""
        self.hit_tokens = 0
        """Of these, tokens that were cached already."""
        self._ledger, self._owner_of = ledger, owner_of
        self._names: dict[str, BlockNames] = {}
        self._filling: set[bytes] = set()
        """Names of the blocks that the pass which is being formed will have filled."""

    def enter(self, key: str, prefix: CommittedPrefix) -> int | None:
        """A session without cached rows takes hold of what is there for it; how many tokens that
        are. None if it holds blocks already, since its first pass failed."""
        names = self._names.get(key)
        if names is None or names.prefix is not prefix:  # another session of this id is over
            self._ledger.release(key)
            names = BlockNames(prefix, self._ledger.block_tokens, self._owner_of(key))
            self._names[key] = names
        if self._ledger.held(key):
            return None
        names.published = 0
        return self._take(key, names, 0)

    def count(self, tokens: int, cached: int) -> None:
        """A session with so many committed tokens entered, and found so many of them cached."""
        self.query_tokens += tokens
        self.hit_tokens += cached

    def catch_up(self, key: str, start: int) -> int:
        """A session with ``start`` cached rows takes hold of what others have published behind
        them; how many rows it has then."""
        names = self._names[key]
        place = start // self._ledger.block_tokens
        found = self._take(key, names, place) if place < self._shareable(names) else 0
        if not found:
            return start
        length = place * self._ledger.block_tokens + found
        self.hit_tokens += length - start
        return length

    def waits(self, key: str, start: int, most: int) -> bool:
        """Whether a session that may feed ``most`` rows gets as far without feeding any."""
        names, size = self._names[key], self._ledger.block_tokens
        if not self._filling or start + most >= names.prefix.length:
            return False
        place = start // size
        stop = place
        while stop < self._shareable(names) and names.name(stop) in self._filling:
            stop += 1
        return stop > place and (stop + 1) * size > start + most

    def new_pass(self) -> None:
        """Nobody has joined the pass that is being formed."""
        self._filling.clear()

    def joins(self, key: str, first: int, stop: int) -> None:
        """The pass being formed will fill the session's blocks ``first`` to ``stop - 1``."""
        self._filling.update(map(self._names[key].name, range(first, stop)))

    def publish(self, key: str, length: int) -> None:
        """A pass went well, so the first ``length`` rows of the session are what they should be."""
        names, count = self._names.get(key), length // self._ledger.block_tokens
        if names is None or count <= names.published:
            return
        for place in range(names.published, min(count, self._ledger.held(key))):
            self._ledger.publish(key, place, names.name(place))
        names.published = count

    def forget(self, key: str) -> None:
        """The session is over."""
        self._names.pop(key, None)

    def _take(self, key: str, names: BlockNames, place: int) -> int:
        """Hold the published blocks from ``place`` on; how many tokens they are."""
        blocks: list[int] = []
        for next_place in range(place, self._shareable(names)):
            block = self._ledger.find(names.name(next_place))
            if block is None:
                break
            blocks.append(block)
        if blocks:
            self._ledger.adopt(key, place, blocks)
            names.published = max(names.published, place + len(blocks))
        return len(blocks) * self._ledger.block_tokens

    def _shareable(self, names: BlockNames) -> int:
        """How many blocks of a text may be another's: all full ones that leave a token to feed."""
        return (names.prefix.length - 1) // self._ledger.block_tokens
