"""A draft model on a decoder graph that somebody else exported.

The graph says what it wants (``foreign_graph``), this binds it: ids, positions and masks are slices
of arrays made once, keys and values lie in a ``KeyValueCache``. Four tokens are decoded in several
ways when it is loaded, so that a graph is used as it behaves and not only as it looks: one that
cannot take several tokens behind a cache gets them one at a time, one whose buffers turn out not to
be shared is re-sliced, and one whose cache does not work is refused.

Most graphs give logits for every token fed, and compute them all unless they have an input
``num_logits_to_keep``; only the last row is read. None takes an attention bias, so a tree's
branches are the siblings of one row of logits, as with our own drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.core.ports import (
    PREFILL_CHUNK,
    Cancelled,
    Candidate,
    ModelInfo,
    StepCancelledError,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.foreign_graph import (
    CacheTensor,
    ForeignGraph,
    HeadHint,
    Role,
    read_graph,
    read_nodes,
)
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.device.drafters.runtime_session import (
    CPU,
    Placement,
    guesses,
    load_session,
    placement,
    ports,
    usual_threads,
    weights_bytes,
)
from edgespec.device.drafters.token_cache import TokenCache
from edgespec.sampling.arrays import Workspace

# --------------------------------------------------------------------------------------------
# Keys and values of a foreign graph between its steps, in two ways.
#
# ``InPlaceCache``: past and present are one buffer per tensor, with room to spare; attention
# appends to it, and a rollback is a smaller length somewhere else: nothing is copied.
# ``ReslicedCache``: the graph concatenates past and present itself, so it wants a past of exactly
# the cached length and writes a present of exactly the new one. Two buffers take turns; a rollback
# copies the rows that are kept into the other one, and says how many bytes that were.
#
# Buffers grow by doubling, so a long context costs memory only once it is used. Their addresses are
# given to the runtime, which reads and writes them during a run and at no other time.


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


# --------------------------------------------------------------------------------------------
# Does a graph with a cache behave like one? Four tokens are decoded in four ways and compared.
#
#     at once from nothing    a b c d
#     one by one behind two   a b | c | d
#     again after a rollback  a b c | d     the last token alone is taken back
#     several behind a cache  a | b c d     all but the first token are taken back
#
# The logits behind ``d`` must agree but for rounding. Early merged decoders were traced with one
# token behind the cache, so that in a longer feed a token sees those after it. That moves the
# logits behind ``d`` little, but those behind the first token of a long feed much, so they are
# compared too. Activations that are rounded to 8 bits for a whole tensor at a time differ a good
# deal between all these ways, a wrong mask or a wrong row of the cache far more, so the bound
# between them is wide.


Rows = NDArray[np.float32]
"""Logits of every token fed, or of the last one alone, [rows, V]."""
LARGEST_DIFFERENCE = 0.35
"""Root mean square of a difference of logits, over their standard deviation."""
TOKENS = (1, 2, 3, 1)
_LATER = (4, 5, 6, 7, 8, 9, 10, 11)
CHECKED_LENGTH = 2 + len(_LATER)
"""The most tokens that are cached while checking."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a graph may be used."""

    works: bool
    """Steps and rollbacks give what decoding from nothing gives."""
    chunks: bool = False
    """May several tokens be fed behind a cache, or one at a time only?"""
    in_place: bool = False
    """Is a rollback a smaller number, or a copy?"""
    reason: str = ""
    """Why it does not work, or why a rollback is a copy."""
    difference: float = 0.0
    """The largest that was let pass, as ``LARGEST_DIFFERENCE`` counts."""


def check_behaviour(
    decode_rows: Callable[[int, Sequence[int]], Rows], vocabulary_size: int
) -> Behaviour:
    """``decode_rows(keep, tokens)`` cuts the cache to ``keep`` tokens, feeds the others and returns
    a copy of the logits."""

    def decode(keep_length: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        last: NDArray[np.float32] = decode_rows(keep_length, tokens)[-1]
        return last

    a, b, c, d = (token % vocabulary_size for token in TOKENS)
    whole = decode(0, (a, b, c, d))
    if not np.isfinite(whole).all():
        return Behaviour(False, reason="its logits are not all finite")
    decode(0, (a, b))
    decode(2, (c,))
    single = decode(3, (d,))
    again = decode(3, (d,))
    ways = (
        (single, "decoding token by token differs from decoding at once"),
        (again, "decoding after a rollback differs from decoding at once"),
    )
    largest = 0.0
    for row, what in ways:
        difference = relative_difference(row, whole)
        if not difference <= LARGEST_DIFFERENCE:
            reason = f"{what} by {difference:.2f} standard deviations of the logits"
            return Behaviour(False, reason=reason, difference=difference)
        largest = max(largest, difference)
    several = relative_difference(decode(1, (b, c, d)), whole)
    alone = decode(1, (b,))
    rows = decode_rows(1, (b, *(token % vocabulary_size for token in _LATER)))
    if len(rows) > 1:
        several = max(several, relative_difference(rows[0], alone))
    chunks = several <= LARGEST_DIFFERENCE
    return Behaviour(True, chunks, difference=max(largest, several if chunks else 0.0))


def relative_difference(row: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """Root mean square of the difference over the reference's standard deviation."""
    scale = max(float(reference.std()), 1e-12)
    return float(np.sqrt(np.mean((row - reference) ** 2))) / scale


# Past this, positions and masks are longer than most models' contexts; as of our own drafts.
DEFAULT_CONTEXT_LIMIT = 16_384
_RESIDENT_PER_STORED = 1.5

Row = NDArray[np.float32]


class ForeignDrafter:
    """``Drafter`` over an ONNX file.

    ``info`` is what the folder says of the model; the graph's own vocabulary size wins. ``hint``
    helps where the graph leaves sizes of heads open. ``threads`` 0 chooses by size,
    ``context_length`` 0 means the model's own, at most 16384. ``token_count`` ids have a text, the
    others are never proposed; 0: all have. Raises ``DraftModelError`` naming the file and what is
    wrong with the graph; ``step`` raises ``ValueError`` for a broken contract.
    """

    def __init__(
        self,
        path: Path,
        info: ModelInfo,
        *,
        hint: HeadHint | None = None,
        threads: int = 0,
        context_length: int = 0,
        token_count: int = 0,
        providers: Sequence[str] = CPU,
    ) -> None:
        self._path = path
        self._session: ort.InferenceSession | None = load_session(
            path, threads or usual_threads(weights_bytes(path)), providers
        )
        found = ports(self._session.get_inputs()), ports(self._session.get_outputs())
        self._graph = read_graph(path, *found, read_nodes(path), hint)
        logits = _logits_of_two(path, self._session, self._graph)
        self._all_rows = bool(logits.size > logits.shape[-1])
        self._info = _limited(info, logits.shape[-1], context_length)
        self._weights_bytes = weights_bytes(path)
        self._cache, self._work = TokenCache(self._info), Workspace()
        self._copied_bytes = self._touched_length = 0
        self._binding: Any = self._session.io_binding()  # onnxruntime has no types
        self._store: KeyValueCache = ReslicedCache((), 1)
        self._output: NDArray[Any] = np.zeros(0, dtype=np.float32)
        self._lay_out()
        self._behaviour = self._settle()
        size = self._info.vocabulary_size
        self._proposable = min(token_count or size, size)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def graph(self) -> ForeignGraph:
        """What was found in the file."""
        return self._graph

    @property
    def behaviour(self) -> Behaviour:
        """How it is used, after trying."""
        return self._behaviour

    @property
    def placement(self) -> Placement | None:
        """What of the graph runs where, if that is known and not the CPU alone."""
        return None if self._session is None else placement(self._session)

    @property
    def gives_all_rows(self) -> bool:
        """Are there logits of every token fed, or of the last one alone?"""
        return self._all_rows

    @property
    def weights_bytes(self) -> int:
        """Of the file and its external data."""
        return self._weights_bytes

    @property
    def copied_bytes(self) -> int:
        """Copied by rollbacks so far."""
        return self._copied_bytes

    @property
    def logits(self) -> Row:
        """The row behind the last step's candidates, [V]; overwritten by the next step."""
        return self._row

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._cache.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        if self._session is None:
            raise ValueError("the drafter is closed")
        position = self._cache.advance(keep_length, feed)
        try:
            start = 0
            while start < len(feed):
                if cancelled():
                    raise StepCancelledError(f"cancelled with {start} of {len(feed)} tokens fed")
                cached = keep_length + start
                count = PREFILL_CHUNK if self._behaviour.chunks or not cached else 1
                part = feed[start : start + count]
                self._forward(cached, part)
                start += len(part)
        except Exception:
            self._cache.forget(keep_length)  # rows behind it are not to be trusted
            raise
        self._row[self._proposable :] = -np.inf
        return guesses(self._row, self._cache, position, width, self._work)

    def close(self) -> None:
        """Free weights and buffers; further steps are refused."""
        self._cache.forget(0)
        self._session = self._binding = None
        self._store = ReslicedCache((), 1)
        self._output = self._output[:0].copy()
        self._numbers.clear()
        self._counted.clear()

    def memory_bytes(self, cached_length: int | None = None) -> int:
        """An estimate of what this drafter keeps resident: weights, cache rows, logits. With
        ``cached_length``, what it would be with so many tokens cached; else with the most so far.
        """
        rows = self._touched_length if cached_length is None else cached_length
        weights = int(self._weights_bytes * _RESIDENT_PER_STORED)
        logits = int(self._output.nbytes) + int(self._row.nbytes)
        return weights + self._store.memory_bytes(rows) + logits

    # --- set-up -----------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """The arrays that inputs are slices of."""
        length, roles = max(self._info.context_length, CHECKED_LENGTH), self._graph.roles
        self._ids = np.zeros(PREFILL_CHUNK, dtype=roles[Role.IDS].dtype)
        mask = roles.get(Role.MASK)
        self._ones = np.ones(length if mask else 0, dtype=mask.dtype if mask else "int64")
        self._counted: dict[Role, NDArray[Any]] = {
            role: np.arange(length, dtype=roles[role].dtype)
            for role in (Role.POSITIONS, Role.CACHE_POSITIONS)
            if role in roles
        }
        self._numbers: dict[Role, NDArray[Any]] = {
            role: np.ones((1,) * len(roles[role].shape), dtype=roles[role].dtype)
            for role in (Role.CACHED, Role.ROWS, Role.LAST_INDEX, Role.LENGTH)
            if role in roles
        }
        for role, array in self._numbers.items():
            self._bind_input(role, array, array.shape)
        self._row = np.zeros(self._info.vocabulary_size, dtype=np.float32)
        rows = PREFILL_CHUNK if self._all_rows else 1
        size = self._info.vocabulary_size * rows
        self._output = np.zeros(size, dtype=self._graph.logits.dtype)

    def _settle(self) -> Behaviour:
        """Find the way to use the graph that works. Raises ``DraftModelError``."""
        reason = self._graph.in_place_reason
        kinds: list[type[InPlaceCache] | type[ReslicedCache]] = [ReslicedCache]
        if self._graph.in_place:
            kinds.insert(0, InPlaceCache)
        for kind in kinds:
            self._store = kind(self._graph.caches, self._info.context_length)
            try:
                found = check_behaviour(self._tried, self._info.vocabulary_size)
            except Exception as error:  # onnxruntime's exceptions share no base of their own
                reason = f"it does not run: {error}"
                continue
            if found.works:
                self._store.truncate(0)
                self._copied_bytes = self._touched_length = 0
                return replace(found, in_place=kind is InPlaceCache, reason=reason)
            reason = found.reason
        raise DraftModelError(f"{self._path}: the graph cannot draft: {reason}")

    # --- one run ----------------------------------------------------------------------------

    def _tried(self, keep_length: int, tokens: Sequence[int]) -> Row:
        """Logits of every token that the graph gives them for, [rows, V]."""
        self._forward(keep_length, tokens)
        size = self._info.vocabulary_size
        rows = len(tokens) if self._all_rows else 1
        return self._output[: rows * size].reshape(rows, size).astype(np.float32)

    def _forward(self, cached: int, tokens: Sequence[int]) -> None:
        """Append ``tokens`` (1..PREFILL_CHUNK) behind ``cached`` rows; logits of the last one."""
        assert self._session is not None
        count, length = len(tokens), cached + len(tokens)
        self._copied_bytes += self._store.truncate(cached)
        self._ids[:count] = tokens
        self._bind_input(Role.IDS, self._ids, (1, count))
        if Role.MASK in self._graph.roles:
            self._bind_input(Role.MASK, self._ones, (1, length))
        for role, array in self._counted.items():
            shape = (1, count) if role is Role.POSITIONS else (count,)
            self._bind_input(role, array[cached:], shape)
        numbers = {Role.CACHED: cached > 0, Role.LAST_INDEX: length - 1, Role.LENGTH: length}
        for role in numbers.keys() & self._numbers.keys():
            self._numbers[role][...] = numbers[role]
        self._store.bind(self._binding, cached, count)
        rows = count if self._all_rows else 1
        self._bind_logits(rows)
        self._session.run_with_iobinding(self._binding)
        self._store.advance()
        size = self._info.vocabulary_size
        self._row[:] = self._output[(rows - 1) * size : rows * size]
        self._touched_length = max(self._touched_length, length)

    def _bind_input(self, role: Role, array: NDArray[Any], shape: tuple[int, ...]) -> None:
        name = self._graph.roles[role].name
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)

    def _bind_logits(self, rows: int) -> None:
        logits, output = self._graph.logits, self._output
        shape = (1,) * (len(logits.shape) - 2) + (rows, self._info.vocabulary_size)
        self._binding.bind_output(
            logits.name, "cpu", 0, output.dtype.type, shape, output.ctypes.data
        )


def _limited(info: ModelInfo, vocabulary_size: int, context_length: int) -> ModelInfo:
    if not 0 <= context_length <= info.context_length:
        raise ValueError(
            f"context_length is {context_length}, but must be in [0, {info.context_length}]"
        )
    length = context_length or min(info.context_length, DEFAULT_CONTEXT_LIMIT)
    return replace(info, context_length=length, vocabulary_size=vocabulary_size)


def _logits_of_two(path: Path, session: ort.InferenceSession, graph: ForeignGraph) -> NDArray[Any]:
    """What the graph gives for two tokens: not every exporter says in the shapes whether there are
    logits of every token fed or of the last one alone. Raises ``DraftModelError``."""
    values: dict[Role, object] = {
        Role.IDS: [[1, 1]],
        Role.MASK: [[1, 1]],
        Role.POSITIONS: [[0, 1]],
        Role.CACHE_POSITIONS: [0, 1],
        Role.CACHED: False,
        Role.ROWS: 1,
        Role.LAST_INDEX: 1,
        Role.LENGTH: 2,
    }
    feed: dict[str, NDArray[Any]] = {}
    for role, port in graph.roles.items():
        value = np.asarray(values[role], dtype=port.dtype)
        feed[port.name] = value if value.ndim else value.reshape((1,) * len(port.shape))
    for cache in graph.caches:
        feed[cache.past] = np.zeros(cache.shape(0), dtype=cache.dtype)
    try:
        logits: NDArray[Any] = session.run([graph.logits.name], feed)[0]
    except Exception as error:  # onnxruntime's exceptions share no base of their own
        raise DraftModelError(f"{path}: the graph does not run: {error}") from error
    if int(np.prod(logits.shape[:-1])) not in (1, 2):
        raise DraftModelError(
            f"{path}: logits of two tokens have shape {list(logits.shape)}, which is neither a row"
            " for each nor one for the last"
        )
    return logits
