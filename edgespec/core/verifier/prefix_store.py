"""The token ids of recent generations, so that a device can name the beginning of its next prompt.

Theory of operation. When a session opens, loses its stream or ends, the full blocks of its text are
stored under their names (``prefix_names.py``). A later ``Open`` of the same credential with the
same key names the longest beginning that it shares with such a text; the store follows the names
back to the first block and returns the ids. A store is only a cache: a name that is not found costs
the device a round trip, in which it sends the ids themselves.

Each credential has a table of its own, and no other table is looked at. So the answer, and the time
that it takes, say nothing about the texts of others. Names are made under a key that each device
draws at random. So even devices of one credential, or all devices of a verifier without API keys,
cannot name each other's texts.

Bounds. The blocks of all tables together take at most ``most_bytes``. If there are more, the table
with the most blocks gives up its least recently used ones. A use refreshes a text's blocks from the
last to the first, so a block is never older than the blocks behind it: texts lose their ends first,
and every block that is held can be reached.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from edgespec.core.protocol.messages import Prefix
from edgespec.core.protocol.prefix_names import (
    TOKEN_BYTES,
    PrefixNames,
    pack_tokens,
    unpack_tokens,
)

PREFIX_BLOCK: Final = 64
"""Tokens of a block. Up to 63 ids of a known beginning are sent again, some 150 bytes; a larger
block would send more, and a smaller one would need more names."""
_OVERHEAD_BYTES: Final = 240
"""Bytes that a block takes beside its ids: its name, the entry in the table and Python's objects,
measured as 222."""


def block_bytes(block_tokens: int) -> int:
    """Return the memory of one stored block."""
    return block_tokens * TOKEN_BYTES + _OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class KeptText:
    """The ids that a device has named, and the names of their blocks."""

    tokens: tuple[int, ...]
    names: PrefixNames


class PrefixStore:
    """Blocks of ids by credential and name, in at most ``most_bytes``."""

    def __init__(self, most_bytes: int, block_tokens: int = PREFIX_BLOCK) -> None:
        self.block_tokens = block_tokens
        self._block_bytes = block_bytes(block_tokens)
        self._most_blocks = most_bytes // self._block_bytes
        self._tables: dict[str, OrderedDict[bytes, tuple[bytes, bytes]]] = {}
        """Blocks of each credential by name: the name before the block, and its packed ids. The
        block that was used longest ago is in front."""
        self._block_count = 0
        self.found = self.missed = 0
        """Named beginnings that were found, and ones that were not."""
        self.found_tokens = 0
        """Ids that did not have to be sent."""

    @property
    def held_bytes(self) -> int:
        """Estimated memory of the stored blocks."""
        return self._block_count * self._block_bytes

    def find(self, owner: str, key: bytes, prefix: Prefix) -> KeptText | None:
        """Return the ids that ``owner`` has named under ``key``, or None if any is not here."""
        text = self._read(owner, key, prefix)
        if text is None:
            self.missed += 1
        else:
            self.found += 1
            self.found_tokens += prefix.length
        return text

    def keep(self, owner: str, names: PrefixNames, tokens: list[int]) -> None:
        """Store the full blocks of a text of ``owner``, and drop other blocks if there is no room.

        ``names`` are extended to all full blocks of ``tokens``."""
        table = self._tables.setdefault(owner, OrderedDict())
        size, known = self.block_tokens, len(table)
        listed = names.extend(tokens)
        for place in reversed(range(len(listed))):
            name = listed[place]
            if name in table:
                table.move_to_end(name)
            else:
                ids = pack_tokens(tokens[place * size : (place + 1) * size])
                table[name] = (listed[place - 1] if place else names.root, ids)
        self._block_count += len(table) - known
        self._drop_surplus()

    def forget(self, owner: str) -> None:
        """Drop everything of a credential, because it was revoked."""
        self._block_count -= len(self._tables.pop(owner, ()))

    def _read(self, owner: str, key: bytes, prefix: Prefix) -> KeptText | None:
        table, size = self._tables.get(owner), self.block_tokens
        if table is None or prefix.length % size:
            return None
        names, name, parts = PrefixNames(key, size), prefix.name, list[bytes]()
        for _ in range(prefix.length // size):
            if (block := table.get(name)) is None:
                return None
            names.names.append(name)
            name, ids = block
            parts.append(ids)
        if name != names.root or not parts:
            return None
        for found in names.names:
            table.move_to_end(found)
        names.names.reverse()
        parts.reverse()
        return KeptText(tokens=unpack_tokens(b"".join(parts)), names=names)

    def _drop_surplus(self) -> None:
        """Take blocks from the largest tables until the rest fits."""
        while (surplus := self._block_count - self._most_blocks) > 0:
            owner = max(self._tables, key=lambda one: len(self._tables[one]))
            table = self._tables[owner]
            second = max([len(one) for one in self._tables.values() if one is not table], default=0)
            count = min(surplus, max(1, len(table) - second))
            for _ in range(count):
                table.popitem(last=False)
            self._block_count -= count
            if not table:
                del self._tables[owner]
