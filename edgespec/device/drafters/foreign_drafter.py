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

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from edgespec.device.drafters.foreign_cache import InPlaceCache, KeyValueCache, ReslicedCache
from edgespec.device.drafters.foreign_check import CHECKED_LENGTH, Behaviour, check_behaviour
from edgespec.device.drafters.foreign_graph import ForeignGraph, HeadHint, Role, read_graph
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.device.drafters.masked_guesses import guesses
from edgespec.device.drafters.onnx_nodes import read_nodes
from edgespec.device.drafters.runtime_session import (
    CPU,
    Placement,
    load_session,
    placement,
    ports,
    usual_threads,
    weights_bytes,
)
from edgespec.device.drafters.token_cache import TokenCache
from edgespec.sampling.arrays import Workspace

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
