"""A draft model on onnxruntime: one sequence, key/value buffers that grow, rollback by one integer.

Past and present keys/values of every layer are bound once to the same memory (``KvBuffers``),
so a step copies no cache. What is cached is said by two small integers the graph reads; writing
smaller ones is the whole rollback. Inputs and logits are numpy arrays that onnxruntime reads and
writes in place. Of a text longer than the window only the last tokens are held (``DraftWindow``).

Lifetime of a step: check the contract, write the ids and the two lengths, run, pick candidates
from the last row. Long feeds run in chunks of ``CHUNK`` tokens, which bounds scratch memory
and lets a step end early that nobody waits for any more.
Chunking changes logits by rounding only, so a guess may differ; a guess is only a hint.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.core.device.memory import KvType
from edgespec.core.ports import (
    PREFILL_CHUNK,
    Cancelled,
    Candidate,
    ModelInfo,
    StepCancelledError,
    never_cancelled,
)
from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.manifest import (
    MAX_CONTEXT_LENGTH,
    MODEL_FILE,
    DraftManifest,
    DraftModelError,
    read_manifest,
)
from edgespec.device.drafters.runtime_session import (
    CPU,
    Placement,
    guesses,
    load_session,
    placement,
    usual_threads,
)
from edgespec.device.drafters.token_cache import DraftWindow, TokenCache
from edgespec.sampling.arrays import MAX_WIDTH, Workspace

CHUNK = PREFILL_CHUNK

# Below about 10M parameters a second thread costs more than it brings; so many bytes of weights.
_TWO_THREADS_FROM_BYTES = {4: 6_000_000, 8: 11_000_000, 32: 40_000_000}

# Initializers plus the kernels' repacked copies, over the size of the file; measured at 135M.
_RESIDENT_PER_STORED = {4: 2.2, 8: 1.5, 32: 1.4}
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

    Each is one private anonymous mapping, whose capacity is address space alone: the system adds a
    page when a row in it is first written, and takes it back on ``shrink``. They are mappings of
    our own, as an allocator keeps what it is given back, and of small pages: one of 2 MiB under the
    first row of a head would hold the rows of its whole context. Without ``madvise`` (Windows) a
    mapping is given back on ``close`` alone.

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


class OnnxDrafter:
    """``Drafter`` over a folder written by ``export.export_draft``.

    ``threads`` 0 chooses by size. ``context_length`` 0 is the model's own; a
    smaller one bounds the memory of keys and values: texts beyond it are not drafted for.
    ``window`` bounds that memory too, but slides: any text is drafted for, by its last tokens
    (``DraftWindow``); 0: as many as the draft was trained on, by its manifest. ``chunk`` is
    how many tokens a long feed takes at a time. Raises ``DraftModelError`` naming the file for
    a folder that cannot be used; ``step`` raises ``ValueError`` for a broken contract.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int = 0,
        context_length: int = 0,
        window: int = 0,
        chunk: int = CHUNK,
        providers: Sequence[str] = CPU,
    ) -> None:
        self._manifest = read_manifest(folder)
        self._info = _limited(self._manifest.model, context_length)
        bounded("window", window, 0, self._info.context_length)
        bounded("chunk", chunk, 1, CHUNK)
        self._chunk = chunk
        trained = min(self._manifest.window, self._info.context_length)
        self._window = DraftWindow(window or trained or self._info.context_length)
        self._capacity, self._most_guesses = self._window.size, MAX_WIDTH
        if window or (trained and not context_length):
            self._info = replace(self._info, context_length=MAX_CONTEXT_LENGTH)
        self._weights_bytes = _weights_bytes(folder)
        two_from = _TWO_THREADS_FROM_BYTES.get(self._manifest.bits, 0)
        self._session: ort.InferenceSession | None = load_session(
            folder / MODEL_FILE,
            threads or usual_threads(self._weights_bytes, two_from),
            providers,
        )
        _check_signature(folder / MODEL_FILE, self._session, self._manifest)
        self._cache, self._work = TokenCache(self._info), Workspace()
        self._binding: Any = None  # onnxruntime has no types
        self._bind(self._session)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def manifest(self) -> DraftManifest:
        return self._manifest

    @property
    def placement(self) -> Placement | None:
        """What of the graph runs where, if that is known and not the CPU alone."""
        return None if self._session is None else placement(self._session)

    def twin(self) -> OnnxDrafter:
        """Another sequence on the same weights, with buffers of its own (``ports.Twinned``)."""
        if self._session is None:
            raise ValueError("the drafter is closed")
        twin = copy(self)
        twin._cache, twin._work = TokenCache(self._info), Workspace()
        twin._window = DraftWindow(self._window.size)
        twin._bind(self._session)
        return twin

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._cache.begin(prompt_length, sampling)
        self._window.clear()

    def restrict(self, window: int, width: int) -> None:
        """From now on hold at most ``window`` rows and give at most ``width`` guesses a step, and
        give the rest of the rows back to the system; 0 rests: no rows and no guesses. Calls come
        from the thread of the steps. Raises ``ValueError`` for a window beyond the first one."""
        bounded("window", window, 0, self._capacity)
        if window > self._window.size:
            self._window.clear()  # the next step reaches further back
        self._window.size, self._most_guesses = window, width if window else 0
        self._rows.shrink(window)

    @property
    def held_tokens(self) -> int:
        """Rows of keys and values that are resident."""
        return self._rows.touched_length

    def growth_bytes(self, length: int) -> int:
        """What a step that makes the text ``length`` long may add to what is resident."""
        rows = min(length, self._window.size) - self._rows.touched_length
        return max(0, rows) * self._rows.bytes_per_token

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
        if not self._most_guesses:
            self._window.clear()
            return ()
        first = self._window.place(keep_length, position)
        try:
            for start in range(first, position, self._chunk):
                if cancelled():
                    fed, of = start - first, position - first
                    raise StepCancelledError(f"cancelled with {fed} of {of} tokens fed")
                end = min(start + self._chunk, position)
                self._forward(start - self._window.first, self._cache.tokens[start:end])
        except Exception:
            self._cache.forget(keep_length)  # rows behind it are not to be trusted
            raise
        self._logits[0, self._manifest.proposable :] = -np.inf
        width = min(width, self._most_guesses)
        return guesses(self._logits[0], self._cache, position, width, self._work)

    def close(self) -> None:
        """Free weights and buffers; further steps are refused."""
        self._cache.forget(0)
        self._session = self._binding = None
        self._ids_values.clear()
        self._buffers.clear()
        self._rows.close()
        give_back()

    def memory_bytes(self, cached_length: int | None = None) -> int:
        """An estimate of what this drafter keeps resident: weights, cache rows, logits.

        With ``cached_length``, what it would be with so many tokens cached; without, with the
        most there have been (``KvBuffers``). Not counted: the runtime itself (about 50 MB with
        its imports) and scratch.
        """
        rows = self._rows.touched_length if cached_length is None else cached_length
        factor = _RESIDENT_PER_STORED.get(self._manifest.bits, 1.5)
        cache = rows * self._rows.bytes_per_token
        return int(self._weights_bytes * factor) + cache + self._logits.nbytes

    @property
    def logits(self) -> NDArray[np.float32]:
        """The row behind the last step's candidates, [V]; overwritten by the next step."""
        row: NDArray[np.float32] = self._logits[0]
        return row

    def cached_rows(self, length: int) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """(``"0.key"``, the first ``length`` rows of that buffer, [heads, length, head dim])."""
        for name, array in self._rows.arrays():
            yield name, array[0, :, :length]

    def _bind(self, session: ort.InferenceSession) -> None:
        manifest = self._manifest
        kv_type = KV_TYPES[_types(session.get_inputs())["past.0.key"]]
        self._rows = KvBuffers(
            manifest.layers, manifest.kv_heads, self._capacity, manifest.head_dim, kv_type
        )
        self._binding = session.io_binding()
        self._ids = np.zeros((1, CHUNK), dtype=np.int64)
        self._last_index = np.zeros(1, dtype=np.int32)
        self._length = np.zeros((), dtype=np.int32)
        self._logits = np.zeros((1, self._info.vocabulary_size), dtype=np.float32)
        self._ids_values: dict[int, ort.OrtValue] = {}
        self._bound_length = 0
        # Held here because onnxruntime borrows the memory of these arrays.
        self._buffers: list[ort.OrtValue] = []
        self._bind_input("seqlens_k", self._last_index)
        self._bind_input("total_sequence_length", self._length)
        self._binding.bind_ortvalue_output("logits", self._borrow(self._logits))
        for name, array in self._rows.arrays():
            value = self._borrow(array)
            self._binding.bind_ortvalue_input(f"past.{name}", value)
            self._binding.bind_ortvalue_output(f"present.{name}", value)

    def _borrow(self, array: NDArray[np.generic]) -> ort.OrtValue:
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._buffers.append(value)
        return value

    def _bind_input(self, name: str, array: NDArray[np.generic]) -> None:
        self._binding.bind_ortvalue_input(name, self._borrow(array))

    def _forward(self, cached_length: int, tokens: Sequence[int]) -> None:
        """Append ``tokens`` (1..CHUNK) behind ``cached_length`` rows; logits of the last one."""
        assert self._session is not None
        count = len(tokens)
        self._ids[0, :count] = tokens
        if count != self._bound_length:
            if count not in self._ids_values:
                view = self._ids[:, :count]
                self._ids_values[count] = ort.OrtValue.ortvalue_from_numpy(view)
            self._binding.bind_ortvalue_input("input_ids", self._ids_values[count])
            self._bound_length = count
        length = cached_length + count
        self._last_index[0] = length - 1
        self._length[()] = length
        self._rows.touch(length)
        self._session.run_with_iobinding(self._binding)
        self._window.held = length


def runtime_version() -> tuple[int, int]:
    """Of the onnxruntime in use: (major, minor)."""
    major, minor, *_ = str(ort.__version__).split(".")
    return int(major), int(minor)


def _limited(model: ModelInfo, context_length: int) -> ModelInfo:
    if not 0 <= context_length <= model.context_length:
        raise ValueError(
            f"context_length is {context_length}, but must be in [0, {model.context_length}]"
        )
    length = context_length or model.context_length
    return ModelInfo(
        model.name, model.vocabulary, model.vocabulary_size, length, model.eos_token_ids
    )


def _weights_bytes(folder: Path) -> int:
    path = folder / MODEL_FILE
    if not path.is_file():
        raise DraftModelError(f"{path}: no such file")
    return sum(part.stat().st_size for part in folder.glob(f"{MODEL_FILE}*"))


def _check_signature(path: Path, session: ort.InferenceSession, manifest: DraftManifest) -> None:
    """The graph against the manifest, before any buffer is sized by the latter."""
    inputs = {node.name: list(node.shape) for node in session.get_inputs()}
    outputs = {node.name: list(node.shape) for node in session.get_outputs()}
    parts = [f"{layer}.{part}" for layer in range(manifest.layers) for part in ("key", "value")]
    needed = ["input_ids", "seqlens_k", "total_sequence_length", *(f"past.{p}" for p in parts)]
    for kind, names, found in (
        ("input", needed, inputs),
        ("output", ["logits", *(f"present.{p}" for p in parts)], outputs),
    ):
        missing, unknown = sorted(set(names) - set(found)), sorted(set(found) - set(names))
        if missing or unknown:
            raise DraftModelError(
                f"{path}: not a draft graph of {manifest.layers} layers:"
                f" {kind}s missing {missing}, unknown {unknown}"
            )
    if outputs["logits"] != [1, manifest.model.vocabulary_size]:
        raise DraftModelError(
            f"{path}: logits have shape {outputs['logits']}, but the manifest's vocabulary"
            f" has {manifest.model.vocabulary_size} ids"
        )
    heads, dim = inputs["past.0.key"][1], inputs["past.0.key"][3]
    if (heads, dim) != (manifest.kv_heads, manifest.head_dim):
        raise DraftModelError(
            f"{path}: keys have {heads} heads of {dim}, but the manifest says"
            f" {manifest.kv_heads} of {manifest.head_dim}"
        )
    kv_type = _types(session.get_inputs())["past.0.key"]
    if kv_type not in KV_TYPES:
        raise DraftModelError(f"{path}: keys are {kv_type}, not one of {sorted(KV_TYPES)}")


def _types(nodes: Sequence[ort.NodeArg]) -> Mapping[str, str]:
    return {node.name: node.type for node in nodes}
