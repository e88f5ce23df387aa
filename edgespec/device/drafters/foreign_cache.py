"""Keys and values of a foreign graph between its steps, in two ways.

``InPlaceCache``: past and present are one buffer per tensor, with room to spare; attention appends
to it, and a rollback is a smaller length somewhere else: nothing is copied. ``ReslicedCache``: the
graph concatenates past and present itself, so it wants a past of exactly the cached length and
writes a present of exactly the new one. Two buffers take turns; a rollback copies the rows that are
kept into the other one, and says how many bytes that were.

Buffers grow by doubling, so a long context costs memory only once it is used. Their addresses are
given to the runtime, which reads and writes them during a run and at no other time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.device.drafters.foreign_graph import CacheTensor

_FIRST_CAPACITY = 256

Buffer = NDArray[np.generic]


class KeyValueCache(Protocol):
    """Where keys and values lie; lengths are in tokens."""

    def bind(self, binding: Any, cached: int, count: int) -> None:
        """Bind past (``cached`` tokens) and present (``count`` more) of every tensor."""

    def advance(self) -> None:
        """The run that was bound has ended well: present becomes past."""

    def truncate(self, length: int) -> int:
        """Keep so many tokens; returns the bytes copied for it."""

    def memory_bytes(self, length: int) -> int:
        """What ``length`` cached tokens keep resident."""


class InPlaceCache:
    """For grouped-query attention with shared buffers."""

    def __init__(self, tensors: Sequence[CacheTensor], context_length: int) -> None:
        self._tensors = tuple(tensors)
        self._context_length = context_length
        self._capacity = 0
        self._buffers: list[Buffer] = []
        self._bound = 0

    def bind(self, binding: Any, cached: int, count: int) -> None:
        self._grow(cached, cached + count)
        if self._bound == self._capacity:
            return
        for tensor, buffer in zip(self._tensors, self._buffers, strict=True):
            place = "cpu", 0, buffer.dtype.type, tensor.shape(self._capacity), buffer.ctypes.data
            binding.bind_input(tensor.past, *place)
            binding.bind_output(tensor.present, *place)
        self._bound = self._capacity

    def advance(self) -> None:
        pass

    def truncate(self, length: int) -> int:
        return 0

    def memory_bytes(self, length: int) -> int:
        return (
            sum(one.row_elements * np.dtype(one.dtype).itemsize for one in self._tensors) * length
        )

    def _grow(self, cached: int, needed: int) -> None:
        if needed <= self._capacity:
            return
        capacity = _room(needed, self._context_length)
        buffers: list[Buffer] = [np.zeros(one.shape(capacity), one.dtype) for one in self._tensors]
        for grown, old in zip(buffers, self._buffers, strict=False):  # at first there are none
            grown[:, :, :cached] = old[:, :, :cached]
        self._buffers, self._capacity = buffers, capacity  # not before all of them are there


class ReslicedCache:
    """For graphs that concatenate; flat buffers whose beginning is shaped as the graph wants it."""

    def __init__(self, tensors: Sequence[CacheTensor], context_length: int) -> None:
        self._tensors = tuple(tensors)
        self._context_length = context_length
        self._length = 0
        self._next_length = 0
        self._past: list[Buffer] = [np.zeros(0, dtype=one.dtype) for one in tensors]
        self._present: list[Buffer] = [np.zeros(0, dtype=one.dtype) for one in tensors]

    def bind(self, binding: Any, cached: int, count: int) -> None:
        assert cached == self._length, (cached, self._length)
        self._next_length = cached + count
        for index, tensor in enumerate(self._tensors):
            past = self._past[index] = self._with_room(tensor, self._past[index], max(1, cached))
            shape = tensor.shape(cached)
            binding.bind_input(tensor.past, "cpu", 0, past.dtype.type, shape, past.ctypes.data)
            present = self._with_room(tensor, self._present[index], self._next_length)
            self._present[index] = present
            binding.bind_output(
                tensor.present,
                "cpu",
                0,
                present.dtype.type,
                tensor.shape(self._next_length),
                present.ctypes.data,
            )

    def advance(self) -> None:
        self._past, self._present = self._present, self._past
        self._length = self._next_length

    def truncate(self, length: int) -> int:
        if length >= self._length:
            return 0
        copied = 0
        past, present = list(self._past), list(self._present)
        for index, tensor in enumerate(self._tensors):
            if tensor.tokens_first or not length:
                continue  # the beginning of the buffer is what is kept
            other = self._with_room(tensor, present[index], length)
            source = past[index][: tensor.row_elements * self._length]
            kept = other[: tensor.row_elements * length].reshape(tensor.shape(length))
            kept[...] = source.reshape(tensor.shape(self._length))[:, :, :length]
            past[index], present[index] = other, past[index]
            copied += kept.nbytes
        self._past, self._present, self._length = past, present, length
        return copied

    def memory_bytes(self, length: int) -> int:
        row = sum(one.row_elements * np.dtype(one.dtype).itemsize for one in self._tensors)
        return 2 * row * length

    def _with_room(self, tensor: CacheTensor, buffer: Buffer, needed: int) -> Buffer:
        if buffer.size >= tensor.row_elements * needed:
            return buffer
        room = _room(needed, self._context_length)
        grown: Buffer = np.zeros(tensor.row_elements * room, dtype=tensor.dtype)
        grown[: buffer.size] = buffer
        return grown


def _room(needed: int, context_length: int) -> int:
    """The next power of two from 256 on, or the whole context."""
    doubled = 1 << max(int(math.log2(_FIRST_CAPACITY)), math.ceil(math.log2(needed)))
    return max(needed, min(doubled, context_length))
