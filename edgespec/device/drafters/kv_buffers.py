"""Buffers for keys and values of one sequence: rows are appended, truncated, or moved down.

``KvBuffers`` are for graphs that append in place, ``ReslicedCache`` is for graphs that concatenate.

**Rows that move down** leave out tokens in the middle of a sequence. A key is cached after a
rotation by its position (RoFormer, Su et al. 2021): with head size d, entries i and i + d / 2 are a
point of the plane, turned by position times the frequency of pair i. A row that moves down by n
positions is turned back by n times that. It then equals the row that would have been computed there
(StreamingLLM, Xiao et al. 2023, section 3.2; llama.cpp shifts its contexts in the same way).

A graph does not state its frequencies, but they can be measured. In a sequence of one repeated
token, every position computes the same in every layer, since an average of equal values is that
value whatever the weights. So the keys of a layer differ by their rotations only.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgespec.device.drafters.decoder_graph import CacheTensor
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.operating_system import CAN_DROP_MEMORY, drop_memory, map_memory

_FIRST_CAPACITY: Final = 256

Buffer = NDArray[np.generic]
Frequencies = NDArray[np.float64]
Turns = Sequence[Frequencies | None]


def growth_tokens(row_bytes: int) -> int:
    """Return the number of tokens by which a buffer grows.

    It is the smallest for which the rows of one head fill whole pages. Rows of 512 bytes, on pages
    of 4096, grow by 8 tokens."""
    return mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row_bytes)


class KvBuffers:
    """Zeroed buffers for ``capacity`` tokens of each of ``tensors``, past and present in one.

    Each buffer is one private anonymous mapping, whose capacity is address space only. The system
    adds a page when a row in it is first written, and takes it back on ``shrink``. An allocator
    would keep returned memory, so the mappings are our own. They use small pages, since a page of 2
    MiB under the first row of a head would hold the rows of its whole context. Without ``madvise``
    (Windows) memory is returned on ``close`` only.

    The capacity is rounded up to whole blocks of tokens, so that no page holds rows of two heads.
    Raises ``MemoryError`` naming the size if the system has no address space for them."""

    def __init__(self, tensors: Sequence[CacheTensor], capacity: int) -> None:
        self._tensors = tuple(tensors)
        self._block = math.lcm(*(growth_tokens(one.row_bytes // one.heads) for one in tensors))
        self.capacity = -(-capacity // self._block) * self._block
        self.bytes_per_token = sum(one.row_bytes for one in tensors)
        self.touched_length = 0
        """Length below which rows may be resident."""
        self._bound = False
        try:
            self._maps = [map_memory(one.row_bytes * self.capacity) for one in tensors]
        except OSError as error:
            raise MemoryError(
                f"no address space for {len(tensors)} key and value buffers of"
                f" {tensors[0].row_bytes * self.capacity} bytes, {self.capacity} tokens:"
                f" {error.strerror}"
            ) from error

    def arrays(self) -> Iterator[tuple[CacheTensor, Buffer]]:
        """Yield each tensor with its buffer, [1, heads, capacity, head size]."""
        for tensor, memory in zip(self._tensors, self._maps, strict=True):
            yield tensor, np.frombuffer(memory, tensor.dtype).reshape(tensor.shape(self.capacity))

    def rows(self, length: int) -> Iterator[tuple[CacheTensor, Buffer]]:
        """Yield each tensor with its first ``length`` rows, [heads, length, head size]."""
        for tensor, array in self.arrays():
            yield tensor, array[0, :, :length]

    def bind(self, binding: Any, cached: int, count: int) -> None:
        """Bind past (``cached`` tokens) and present (``count`` more) of every tensor."""
        self.touched_length = max(self.touched_length, cached + count)
        if self._bound:
            return
        for tensor, array in self.arrays():
            place = "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
            binding.bind_input(tensor.past, *place)
            binding.bind_output(tensor.present, *place)
        self._bound = True

    def advance(self) -> None:
        """Make present the new past, after the run that was bound has succeeded."""

    def truncate(self, length: int) -> None:
        """Keep ``length`` tokens."""

    def remove(self, start: int, count: int, length: int, turns: Turns) -> None:
        """Remove ``count`` of ``length`` valid rows from ``start`` on, and move later rows down.

        ``turns`` holds, for each tensor, the angles by which its rows are turned back, or None."""
        for (_, array), angles in zip(self.rows(length), turns, strict=True):
            # One head at a time, since a copy of all heads would show in the memory.
            for rows in array:
                rows[start : length - count] = turn_back(rows[start + count :], angles)

    def shrink(self, length: int) -> None:
        """Return the blocks behind row ``length`` to the system; they read as zeros afterwards.

        This costs one call for each head and buffer, and nothing if no such row was written."""
        if length >= self.touched_length or not CAN_DROP_MEMORY:
            return
        kept = -(-length // self._block) * self._block
        end = -(-self.touched_length // self._block) * self._block
        if end > kept:
            for tensor, memory in zip(self._tensors, self._maps, strict=True):
                row = tensor.row_bytes // tensor.heads
                for start in range(0, len(memory), self.capacity * row):
                    drop_memory(memory, start + kept * row, (end - kept) * row)
        self.touched_length = length

    def close(self) -> None:
        """Release everything. An array from ``arrays`` keeps its own buffer while it is in use."""
        self._maps, self._tensors = [], ()
        self.touched_length = 0


class ReslicedCache:
    """A cache for graphs that concatenate past and present.

    They require a past of exactly the cached length, and write a present of exactly the new one.
    Each tensor has two flat buffers that swap roles and grow by doubling. A rollback copies the
    kept rows into the other buffer. The methods are those of ``KvBuffers``."""

    def __init__(self, tensors: Sequence[CacheTensor], capacity: int) -> None:
        self._tensors = tuple(tensors)
        self._context_length = capacity
        self._length = self._next_length = self.touched_length = 0
        self.bytes_per_token = 2 * sum(one.row_bytes for one in tensors)
        self._past: list[Buffer] = [np.zeros(0, dtype=one.dtype) for one in tensors]
        self._present = list(self._past)

    def rows(self, length: int) -> Iterator[tuple[CacheTensor, Buffer]]:
        for tensor, past in zip(self._tensors, self._past, strict=True):
            rows = past[: tensor.row_elements * length].reshape(tensor.shape(length))[0]
            yield tensor, rows.swapaxes(0, 1) if tensor.tokens_first else rows

    def bind(self, binding: Any, cached: int, count: int) -> None:
        assert cached == self._length, (cached, self._length)
        self._next_length = cached + count
        for index, tensor in enumerate(self._tensors):
            past = self._past[index] = self._ensure_room(tensor, self._past[index], max(1, cached))
            shape = tensor.shape(cached)
            binding.bind_input(tensor.past, "cpu", 0, past.dtype.type, shape, past.ctypes.data)
            present = self._ensure_room(tensor, self._present[index], self._next_length)
            self._present[index], shape = present, tensor.shape(self._next_length)
            place = present.dtype.type, shape, present.ctypes.data
            binding.bind_output(tensor.present, "cpu", 0, *place)

    def advance(self) -> None:
        self._past, self._present = self._present, self._past
        self._length = self._next_length
        self.touched_length = max(self.touched_length, self._length)

    def truncate(self, length: int) -> None:
        if length >= self._length:
            return
        past, present = list(self._past), list(self._present)
        for index, tensor in enumerate(self._tensors):
            if tensor.tokens_first or not length:
                continue  # The beginning of the buffer is what is kept.
            other = self._ensure_room(tensor, present[index], length)
            source = past[index][: tensor.row_elements * self._length]
            kept = other[: tensor.row_elements * length].reshape(tensor.shape(length))
            kept[...] = source.reshape(tensor.shape(self._length))[:, :, :length]
            past[index], present[index] = other, past[index]
        self._past, self._present, self._length = past, present, length

    def remove(self, start: int, count: int, length: int, turns: Turns) -> None:
        self.truncate(length)
        for tensor, past, angles in zip(self._tensors, self._past, turns, strict=True):
            rows = past[: tensor.row_elements * length].reshape(tensor.shape(length))
            axis = 1 if tensor.tokens_first else 2
            kept, _, moved = np.split(rows, (start, start + count), axis)
            rest = np.concatenate([kept, turn_back(moved, angles)], axis)
            past[: rest.size] = rest.ravel()
        self._length = length - count

    def shrink(self, length: int) -> None:
        """Do nothing: memory is returned on ``close`` only."""

    def close(self) -> None:
        self._past = self._present = []
        self._tensors = ()

    def _ensure_room(self, tensor: CacheTensor, buffer: Buffer, needed: int) -> Buffer:
        if buffer.size >= tensor.row_elements * needed:
            return buffer
        room = max(_FIRST_CAPACITY, 1 << (needed - 1).bit_length())
        room = max(needed, min(room, self._context_length))
        grown: Buffer = np.zeros(tensor.row_elements * room, dtype=tensor.dtype)
        grown[: buffer.size] = buffer
        return grown


# --- how far a graph turns its keys -----------------------------------------------------------

PROBED_ROWS: Final = 16
_LAGS: Final = (1, 2, 4, 8)
MAX_RESIDUE: Final = 0.02
"""Largest root mean square that rotations may leave unexplained, as a share of that of the keys.
float32 leaves 2e-7, float16 leaves 5e-4."""


def measure_frequencies(keys: NDArray[Any], name: str) -> Frequencies:
    """Return the radians per position of each pair, [head size / 2].

    ``keys`` [heads, rows, head size] belong to one repeated token, and ``name`` names them in
    the error. Raises ``DraftModelError`` if they are not rotated by position.

    Between rows n apart a pair turns by n * f, but whole turns cannot be seen. The f from rows half
    as far apart determines their number."""
    half = keys.shape[-1] // 2
    points = keys[..., :half].astype(np.float64) + 1j * keys[..., half : 2 * half]
    frequencies: Frequencies = np.zeros(half)
    for lag in (one for one in _LAGS if one < keys.shape[1]):
        angle = np.angle((points[:, lag:] * points[:, :-lag].conj()).sum((0, 1)))
        whole_turns = np.round((lag * frequencies - angle) / math.tau)
        frequencies = (angle + math.tau * whole_turns) / lag
    back = points * np.exp(-1j * frequencies * np.arange(keys.shape[1])[:, None])
    rest = np.abs(back - back.mean(1, keepdims=True))
    size = float(np.mean(np.abs(points) ** 2))
    residue = math.sqrt(np.mean(rest**2) / size) if size > 0.0 else math.inf
    if keys.shape[-1] % 2 or not residue <= MAX_RESIDUE:
        raise DraftModelError(
            f"{name}: cached keys are not turned by their position: a share of {residue:.2g} of"
            f" them is left unexplained, at most {MAX_RESIDUE}"
        )
    return frequencies


def turn_back(rows: Buffer, angles: Frequencies | None) -> Buffer:
    """Return keys ``rows`` [..., head size] with each pair turned back by its angle in radians.

    Values have no angles and are returned as they are."""
    if angles is None:
        return rows
    half = rows.shape[-1] // 2
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = rows[..., :half].astype(np.float32), rows[..., half:].astype(np.float32)
    turned = np.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)
    return turned.astype(rows.dtype, copy=False)
