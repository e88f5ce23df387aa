"""The keys and values of one sequence, in memory that grows with what is cached and is given back.

Each buffer is one private anonymous mapping of [1, heads, capacity, head dim]; past and present of
the graph are bound to the same one, so a step copies nothing. The capacity is address space alone:
the system adds a page when a row in it is first written, a block of tokens of one head at a time,
and takes it back on ``shrink``. That needs two things of the system, both asked for here:

* small pages. A large page (2 MiB) under the first row of a head would hold the rows of its whole
  context, and numpy asks for large pages for every array of 4 MiB and more: such a cache is
  resident as a whole after its first token.
* mappings of our own. What an allocator has been given back it keeps.

Where the system has no ``madvise`` (Windows), a mapping is resident as far as the system likes
and is given back on ``close`` alone.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgespec.core.device.memory import KvType

_PRIVATE: Final = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
_DROP: Final = getattr(mmap, "MADV_DONTNEED", None)
_SMALL_PAGES: Final = getattr(mmap, "MADV_NOHUGEPAGE", None)
PARTS: Final = ("key", "value")
KV_TYPES: Final = {
    "tensor(float)": KvType.FLOAT32,
    "tensor(float16)": KvType.FLOAT16,
    "tensor(int8)": KvType.INT8,
}
"""By onnxruntime's name of the type of an input."""


def block_tokens(row_bytes: int) -> int:
    """In how many tokens a buffer grows: the fewest whose rows of one head fill whole pages. Rows
    of 512 bytes, on pages of 4096, grow by 8 tokens."""
    return mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row_bytes)


class KvBuffers:
    """``2 * layers`` buffers [1, heads, capacity, head_dim] of ``kv_type``, all zero.

    The capacity is rounded up to whole blocks of tokens, so that no page holds rows of two heads.
    Raises ``MemoryError`` naming the size when the system has no address space for them.
    """

    def __init__(
        self, layers: int, heads: int, capacity: int, head_dim: int, kv_type: KvType
    ) -> None:
        self._type = kv_type
        self._row_bytes = head_dim * kv_type.bytes
        self._block = block_tokens(self._row_bytes)
        capacity = -(-capacity // self._block) * self._block
        self._shape = (1, heads, capacity, head_dim)
        self._touched = 0
        size = heads * capacity * self._row_bytes
        try:
            self._maps = [_mapping(size) for _ in range(2 * layers)]
        except OSError as error:
            raise MemoryError(
                f"no address space for {2 * layers} key and value buffers of {size} bytes,"
                f" {capacity} tokens: {error.strerror}"
            ) from error

    @property
    def capacity(self) -> int:
        """In tokens."""
        return self._shape[2]

    @property
    def bytes_per_token(self) -> int:
        return len(self._maps) * self._shape[1] * self._row_bytes

    @property
    def touched_length(self) -> int:
        """Rows below it may be resident."""
        return self._touched

    @property
    def resident_bytes(self) -> int:
        """What the rows that were written keep resident: whole blocks. 100 rows of 512 bytes, in
        blocks of 8, in 4 heads of 6 buffers take 24 * 104 * 512 = 1277952 bytes."""
        return -(-self._touched // self._block) * self._block * self.bytes_per_token

    def arrays(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """(``"0.key"``, the buffer) and so on, layer by layer, as the graph names them."""
        for index, memory in enumerate(self._maps):
            name = f"{index // 2}.{PARTS[index % 2]}"
            yield name, np.frombuffer(memory, dtype=self._type.value).reshape(self._shape)

    def touch(self, length: int) -> None:
        """Rows below ``length`` are about to be written."""
        self._touched = max(self._touched, length)

    def shrink(self, length: int) -> None:
        """Give the blocks behind row ``length`` back to the system; they read as zeros. Costs one
        call a head and buffer, and nothing where no such row was written."""
        if length >= self._touched:
            return
        if _DROP is None:
            return
        kept = -(-length // self._block) * self._block * self._row_bytes
        end = -(-self._touched // self._block) * self._block * self._row_bytes
        head_bytes = self.capacity * self._row_bytes
        if end > kept:
            for memory in self._maps:
                for start in range(0, len(memory), head_bytes):
                    memory.madvise(_DROP, start + kept, end - kept)
        self._touched = length

    def close(self) -> None:
        """Give everything back. An array of ``arrays`` that somebody still holds keeps its own
        buffer until it is dropped."""
        self._maps.clear()
        self._touched = 0


def _mapping(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=_PRIVATE) if _PRIVATE else mmap.mmap(-1, size)
    if _SMALL_PAGES is not None:
        try:
            memory.madvise(_SMALL_PAGES)
        except OSError:  # a kernel without large pages has only small ones
            pass
    return memory


def give_back() -> None:
    """Ask the C library to return what it keeps of freed memory; a model that was closed leaves
    half of its weights there. Does nothing where the library cannot (only glibc can)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        pass
