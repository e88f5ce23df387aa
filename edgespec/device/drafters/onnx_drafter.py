"""Draft models on onnxruntime: one sequence, whose rollback is a smaller number.

A graph describes its inputs (``decoder_graph``); ``GraphDrafter`` binds them. Ids, positions and
masks are slices of arrays that are made once. In a graph that appends in place, as grouped-query
attention does, past and present keys and values are one buffer each (``KvBuffers``). It is bound
once and nothing is copied: lengths that the graph reads state how much is cached. A graph that
concatenates has a cache that is sliced anew at each step (``ReslicedCache``).

``OnnxDrafter`` is for folders that ``edgespec export`` wrote, ``ForeignDrafter`` for graphs of
other exporters. A foreign graph is used as it behaves and not only as it looks: at loading, a few
tokens are decoded in several ways.

A step checks the contract, writes ids and lengths, runs the graph, and picks candidates from the
last row. Long feeds run in chunks, which bounds scratch memory and lets a cancelled step end early.
Chunking changes logits by rounding only. If a sequence is longer than the window, only its first
and last tokens are held (``DraftWindow``): rows between them leave, and the rows behind those move
down, with their keys turned back (``kv_buffers``).

The rows of a sequence stay when the next one begins, and so do the rows of a cancelled step.
A step keeps them as far as its sequence begins with the same tokens, so the next turn of a
conversation feeds only what is new in it.

A parallel draft gives candidates for several positions in one run: mask tokens are fed behind the
last token, and each of their rows is one more position. They are no part of the sequence, so the
next step begins at the row of the first mask.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgespec.core import ports
from edgespec.core.device.draft_window import DraftWindow
from edgespec.core.device.memory import USUAL_WINDOW
from edgespec.core.device.token_cache import TokenCache, common_prefix_length, draft_chain
from edgespec.core.protocol.checks import check_range
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters import decoder_graph as dg
from edgespec.device.drafters import kv_buffers as kv
from edgespec.device.drafters import manifest as mf
from edgespec.models.onnx_runtime import ort
from edgespec.sampling.arrays import MAX_WIDTH, NoiseIds, Workspace, best_candidates
from edgespec.telemetry.process_memory import trim_heap

CHUNK = ports.PREFILL_CHUNK
# Tokens of context unless the user sets a length, for foreign graphs as for our own exports.
# Positions and masks beyond it are longer than most models' contexts.
DEFAULT_CONTEXT_LIMIT = 16_384

# Bytes of weights, by their bits, from which a second thread pays. It is about 10M parameters.
_TWO_THREADS_FROM_BYTES = {4: 6_000_000, 8: 11_000_000, 32: 40_000_000}

# Inputs that are one number, computed from the number of cached tokens, the total length, and the
# rows of logits that are needed.
_NUMBERS: Final[dict[dg.Role, Callable[[int, int, int], int]]] = {
    dg.Role.CACHED: lambda cached, length, rows: cached > 0,
    dg.Role.ROWS: lambda cached, length, rows: rows,
    dg.Role.LAST_INDEX: lambda cached, length, rows: length - 1,
    dg.Role.LENGTH: lambda cached, length, rows: length,
}

Row = NDArray[np.float32]
_log = logging.getLogger(__name__)


class GraphDrafter:
    """A ``Drafter`` over a session of onnxruntime. Raises ``ValueError`` for a broken contract."""

    def __init__(
        self,
        path: Path,
        session: ort.InferenceSession,
        graph: dg.DecoderGraph,
        info: ports.ModelInfo,
        *,
        capacity: int,
        proposable_count: int,
        chunk: int = CHUNK,
        window: int = 0,
        parallel: ports.ParallelDraft | None = None,
    ) -> None:
        self._parallel = parallel
        self._path, self.info, self._graph, self._chunk = path, info, graph, chunk
        self._session: ort.InferenceSession | None = session
        self.placement = dg.read_placement(session)
        """Which nodes of the graph run where. None if only the CPU runs them, or if it is not
        known."""
        self._proposable_count, self._capacity = proposable_count, capacity
        self._binding: Any = None  # onnxruntime has no types.
        self._takes_chunks = True
        """Whether several tokens may be fed behind a cache, instead of one at a time."""
        self._store_type: type[kv.KvBuffers] | type[kv.ReslicedCache] = kv.KvBuffers
        self.weights_bytes = dg.weights_bytes(path)
        """Size of the file and its external data."""
        self._run_options: ort.RunOptions | None = None
        can_move = not any(cache.dtype == "int8" for cache in graph.caches)
        self._max_candidates = MAX_WIDTH
        self._window = DraftWindow(window or capacity, can_move=can_move)
        self._row_tokens: list[int] = []
        """Tokens of an earlier sequence, or of a cancelled step, whose rows the window still holds.
        Empty once a step has used them."""
        self._frequencies: list[kv.Frequencies | None] = []
        """Frequencies of each cache tensor, measured when a sequence first outgrows the window. The
        entry of values is None."""
        self._noise: tuple[NoiseIds, int] | None = None
        """Noise of another vocabulary, and the position that it is for (``set_noise``)."""

    @property
    def max_places(self) -> int:
        """Most positions that one step drafts for."""
        return 1 if self._parallel is None else self._parallel.tokens

    @property
    def inner(self) -> None:
        """None, because the graph computes the candidates."""
        return None

    def twin(self) -> GraphDrafter:
        """Return another sequence on the same weights, with its own buffers (``ports.Twinned``)."""
        if self._session is None:
            raise ValueError("the drafter is closed")
        twin = copy(self)
        twin._window = DraftWindow(self._window.size, can_move=self._window.can_move)
        twin._bind_buffers()
        return twin

    @property
    def resumes_feeds(self) -> bool:
        """True: a step that follows a cancelled one computes only what that one did not."""
        return True

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        tokens = self._cache.tokens[: self._window.skipped + self._window.held_rows]
        self._cache.begin(prompt_length, sampling)
        self._row_tokens = self._row_tokens or tokens
        self._noise = None

    def set_noise(self, ids: NoiseIds, position: int) -> None:
        """Let the next step add the noise that the target's ``ids`` have at ``position`` in its own
        text, until ``begin``. It is for a draft whose ids and positions are not the target's."""
        self._noise = ids, position

    def restrict(self, window: int, width: int) -> None:
        """Hold at most ``window`` rows and give at most ``width`` candidates a step from now on.

        The other rows are returned to the system. A window of 0 rests: it has no rows and no
        candidates. Call this in the thread of the steps. Raises ``ValueError`` for a window beyond
        the first one."""
        check_range("window", window, 0, self._capacity)
        self._window.resize(window)
        self._max_candidates = width if window else 0
        self._store.shrink(window)

    @property
    def held_tokens(self) -> int:
        """Number of rows of keys and values that are resident."""
        return self._store.touched_length

    def growth_bytes(self, length: int) -> int:
        """Return the bytes that a step may add to the resident memory.

        ``length`` is the length of the sequence after the step."""
        rows = min(length, self._window.size) - self._store.touched_length
        return max(0, rows) * self._store.bytes_per_token

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: ports.Cancelled = ports.never_cancelled,
    ) -> tuple[ports.Candidate, ...]:
        if (position := self._run(keep_length, feed, 0, cancelled)) is None:
            return ()
        return self._candidates(self.logits, position, min(width, self._max_candidates))

    def step_places(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        places: int,
        cancelled: ports.Cancelled = ports.never_cancelled,
    ) -> tuple[tuple[ports.Candidate, ...], ...]:
        length = keep_length + len(feed)
        masks = min(places, self.max_places) - 1
        # Masks take positions of the context, room in the window, and places in a run.
        masks = min(masks, self.info.context_length - length, self._window.size // 4)
        masks = max(0, min(masks, self._chunk - 1))
        if (position := self._run(keep_length, feed, masks, cancelled)) is None:
            return ()
        rows, width = self._rows[: masks + 1], min(width, self._max_candidates)
        return draft_chain(
            self._cache,
            masks + 1,
            lambda place: self._candidates(rows[place], position + place, width),
        )

    def _run(
        self, keep_length: int, feed: Sequence[int], masks: int, cancelled: ports.Cancelled
    ) -> int | None:
        """Run the graph over ``feed`` and ``masks`` mask tokens behind it, and return the position
        behind ``feed``; None if the drafter rests.

        ``logits`` then belong to the last token, and ``_rows`` to it and to the masks. The rows of
        the masks do not count as held, so that the next run writes over them."""
        if self._session is None:
            raise ValueError("the drafter is closed")
        position = self._cache.advance(keep_length, feed)
        row_tokens, self._row_tokens = self._row_tokens, []
        if not self._max_candidates:
            self._window.clear()
            return None
        kept = keep_length
        if row_tokens:
            kept = max(
                kept, min(position - 1, common_prefix_length(row_tokens, self._cache.tokens))
            )
        try:
            window = self._move_window(kept, position + masks)
            first, end = window.held_rows, position - window.skipped
            while (start := window.held_rows) < end:
                if cancelled():
                    self._row_tokens = self._cache.tokens[: window.skipped + start]
                    raise ports.StepCancelledError(
                        f"cancelled with {start - first} of {end - first} tokens fed"
                    )
                count = self._chunk if self._takes_chunks or not start else 1
                if masks and end - start + masks > count:  # They run with the last token.
                    count = min(count, end - start - 1)
                tokens = window.tokens(self._cache.tokens, start, min(start + count, end))
                if masks and start + len(tokens) == end:
                    assert self._parallel is not None
                    tokens = [*tokens, *[self._parallel.mask_token] * masks]
                    self._forward(start, tokens, masks + 1)
                    window.held_rows = end
                else:
                    self._forward(start, tokens)
        except Exception:
            # Rows behind it may hold anything after a failed run.
            self._cache.truncate(keep_length)
            raise
        self._rows[: masks + 1, self._proposable_count :] = -np.inf
        return position

    def close(self) -> None:
        """Free weights and buffers. Further steps are refused."""
        self._cache.truncate(0)
        self._session = self._binding = None
        self._store.close()
        trim_heap()  # Without this, half of the weights would stay resident.

    def cached_rows(self, length: int) -> Iterator[tuple[dg.CacheTensor, kv.Buffer]]:
        """Yield keys and values of each layer: the first ``length`` rows, [heads, length, head
        size]."""
        return self._store.rows(length)

    # --- the window -------------------------------------------------------------------------

    def _move_window(self, keep_length: int, length: int) -> DraftWindow:
        """Move the window to the end of a sequence of ``length`` tokens and return it."""
        window = self._window
        if window.can_move and length > window.size and not self._frequencies:
            self._measure_frequencies()
        if leaving := window.move_to(keep_length, length):
            held, window.held_rows = window.held_rows, 0  # No row is valid while they move.
            angles = [None if one is None else leaving * one for one in self._frequencies]
            self._store.remove(window.sinks, leaving, held + leaving, angles)
            window.held_rows = held
        return window

    def _measure_frequencies(self) -> None:
        """Measure the frequencies once, by a few tokens in a second cache.

        A graph that turns its keys in no known way gets a window whose rows do not move."""
        probe, count = self.twin(), min(kv.PROBED_ROWS, self._window.size)
        try:
            probe.begin(1, SamplingParams())
            probe.step(0, [self._proposable_count // 2] * count, 1)
            self._frequencies = [
                kv.measure_frequencies(rows, f"{self._path}: {cache.past}")
                if cache.part == "key"
                else None
                for cache, rows in probe.cached_rows(count)
            ]
        except mf.DraftModelError as error:
            _log.warning("beyond the window, half of its tokens are fed again: %s", error)
            self._window.can_move = False
            self._window.resize(self._window.size)
        finally:
            probe.close()

    # --- one run ----------------------------------------------------------------------------

    def _bind_buffers(self) -> None:
        """Make the buffers and the arrays that inputs are slices of, and bind all that stay the
        same."""
        assert self._session is not None
        self._cache, self._work = TokenCache(self.info), Workspace()
        self._row_tokens = []
        self._binding = self._session.io_binding()
        self._store = self._store_type(self._graph.caches, self._capacity)
        roles = self._graph.roles
        self._ids = np.zeros((1, CHUNK), dtype=roles[dg.Role.IDS].dtype)
        self._bound_count = 0
        mask = roles.get(dg.Role.MASK)
        self._ones = np.ones(self._capacity, dtype=mask.dtype) if mask else None
        self._counting_arrays = {
            role: np.arange(self._capacity, dtype=roles[role].dtype)
            for role in (dg.Role.POSITIONS, dg.Role.CACHE_POSITIONS)
            if role in roles
        }
        self._numbers: list[tuple[NDArray[Any], Callable[[int, int, int], int]]] = []
        """Inputs that are one number, bound by their addresses, and the function that computes each
        from the number of cached tokens, the total length and the rows of logits."""
        for role in roles.keys() & _NUMBERS.keys():
            number = np.ones((1,) * len(roles[role].shape), dtype=roles[role].dtype)
            self._bind_input(role, number, number.shape)
            self._numbers.append((number, _NUMBERS[role]))
        shape = self.max_places, self.info.vocabulary_size
        self._rows: NDArray[np.float32] = np.zeros(shape, dtype=np.float32)
        """Logits of the last rows, [rows, V]: of the last token, and of masks behind it. The next
        step overwrites them."""
        self.logits: Row = self._rows[0]
        """Logits of the last token, [V]."""
        self._one_row = self._graph.one_row
        self._bound_rows = 0

    def _forward(self, cached: int, tokens: Sequence[int], rows: int = 1) -> NDArray[Any]:
        """Append ``tokens`` (1 to CHUNK) behind ``cached`` rows and return the logits of the run.

        They cover all tokens, or the last ``rows`` only, which are also copied to ``_rows``."""
        assert self._session is not None
        count, length = len(tokens), cached + len(tokens)
        self._store.truncate(cached)
        self._ids[0, :count] = tokens
        if count != self._bound_count:
            self._bind_input(dg.Role.IDS, self._ids, (1, count))
            self._bound_count = count
        if self._ones is not None:
            self._bind_input(dg.Role.MASK, self._ones, (1, length))
        for role, array in self._counting_arrays.items():
            shape = (1, count) if role is dg.Role.POSITIONS else (count,)
            self._bind_input(role, array[cached:], shape)
        for number, value_of in self._numbers:
            number.fill(value_of(cached, length, rows))
        if not self._one_row:
            # This output has to be bound before all others.
            self._binding.bind_output(self._graph.logits.name, "cpu")
        elif rows != self._bound_rows:
            place = np.float32, (rows, self.logits.size), self._rows.ctypes.data
            self._binding.bind_output(self._graph.logits.name, "cpu", 0, *place)
            self._bound_rows = rows
        self._store.bind(self._binding, cached, count)
        self._session.run_with_iobinding(self._binding, self._run_options)
        self._store.advance()
        self._window.held_rows = length
        if self._one_row:
            return self._rows[:rows]
        logits: NDArray[Any] = self._binding.get_outputs()[0].numpy()
        found = logits.reshape(-1, logits.shape[-1])
        self._rows[:rows] = found[-rows:]
        return found

    def _candidates(self, logits: Row, position: int, width: int) -> tuple[ports.Candidate, ...]:
        """Return candidates for ``position`` by its ``logits``, at most ``width``.

        Tokens that the constraint forbids lose their ``logits``. If it allows none, there are no
        candidates."""
        cache = self._cache
        mask = cache.allowed_mask()
        if mask is not None:
            bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
            count = min(bits.size, logits.size)
            logits[count:] = -np.inf
            logits[:count][bits[:count] == 0] = -np.inf
            if logits.max() == -np.inf:
                return ()
        ids, position = (None, position) if self._noise is None else self._noise
        return best_candidates(
            logits, cache.sampling, position, width, cache.counts, self._work, ids
        )

    def _bind_input(self, role: dg.Role, array: NDArray[Any], shape: tuple[int, ...]) -> None:
        name = self._graph.roles[role].name
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)


def _limit_length(
    info: ports.ModelInfo,
    context_length: int,
    default: int,
    window: int | None,
    trained: int = 0,
) -> tuple[ports.ModelInfo, int]:
    """Return ``info`` with the longest sequence that is drafted for, and the rows that it takes.

    A sliding window accepts any length."""
    if window is None:
        window, trained = 0, trained or (0 if context_length else USUAL_WINDOW)
    check_range("context_length", context_length, 0, info.context_length)
    limit = context_length or min(info.context_length, default)
    check_range("window", window, 0, limit)
    trained = min(trained, limit)
    slides = window or (trained and not context_length)
    longest = mf.MAX_CONTEXT_LENGTH if slides else limit
    return replace(info, context_length=longest), window or trained or limit


# --- drafts of our own ----------------------------------------------------------------------


class OnnxDrafter(GraphDrafter):
    """A drafter on a folder that ``export.export_draft`` wrote.

    Args:
        folder: The draft folder.
        threads: Threads of a step. 0 chooses by the size of the weights.
        context_length: Longest sequence that is drafted for, which bounds the memory of keys and
            values. 0 is the model's own.
        window: Most rows of keys and values. A longer sequence is drafted for by its last tokens
            (``DraftWindow``). 0 takes the length that the draft was trained on, by its manifest,
            else the context length. None takes at most ``USUAL_WINDOW`` in place of the latter,
            unless ``context_length`` is given.
        chunk: Most tokens in one run of a long feed.
        providers: Execution providers of onnxruntime, in order of preference.

    Raises:
        DraftModelError: The folder cannot be used; the error names the file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int = 0,
        context_length: int = 0,
        window: int | None = 0,
        chunk: int = CHUNK,
        providers: Sequence[str] = dg.CPU,
    ) -> None:
        self.manifest = manifest = mf.read_manifest(folder)
        info, capacity = _limit_length(
            manifest.model, context_length, mf.MAX_CONTEXT_LENGTH, window, manifest.window
        )
        check_range("chunk", chunk, 1, CHUNK)
        path = folder / mf.MODEL_FILE
        if why := mf.find_damage(folder, manifest, (mf.MODEL_FILE, f"{mf.MODEL_FILE}.data")):
            raise mf.DraftModelError(f"{why}; export or copy the draft again")
        two_from = _TWO_THREADS_FROM_BYTES.get(manifest.bits, 0)
        threads = threads or dg.default_threads(dg.weights_bytes(path), two_from)
        session = dg.load_session(path, threads, providers)
        graph = dg.read_graph(path, session)
        _check_manifest(path, graph, manifest)
        super().__init__(
            path,
            session,
            replace(graph, one_row=True),
            info,
            capacity=capacity,
            proposable_count=manifest.proposable_count,
            chunk=chunk,
            parallel=manifest.parallel,
        )
        self._bind_buffers()


def _check_manifest(path: Path, graph: dg.DecoderGraph, manifest: mf.DraftManifest) -> None:
    """Compare the graph with its manifest, before any buffer is sized by it."""
    cache = graph.caches[0]
    for name, actual, expected in (
        ("layers", len(graph.caches) // 2, manifest.layers),
        ("kv_heads", cache.heads, manifest.kv_heads),
        ("head_dim", cache.head_size, manifest.head_dim),
        ("ids", graph.logits.shape[-1], manifest.model.vocabulary_size),
        ("numbers of logits", dg.Role.ROWS in graph.roles, manifest.parallel is not None),
    ):
        if actual != expected:
            raise mf.DraftModelError(
                f"{path}: has {actual} {name}, but the manifest says {expected}"
            )


# --- drafts of other exporters ------------------------------------------------------------------
#
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
# deal between all these ways. A wrong mask or a wrong row of the cache differs far more, so the
# bound between them is wide.

MAX_DIFFERENCE = 0.35
"""Largest root mean square of a difference of logits, divided by their standard deviation."""
_PROBE_TOKENS = (1, 2, 3, 1)
_LATER_TOKENS = (4, 5, 6, 7, 8, 9, 10, 11)
_CHECKED_LENGTH = 2 + len(_LATER_TOKENS)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The ways in which a graph may be used."""

    chunks: bool = False
    """Whether several tokens may be fed behind a cache, instead of one at a time."""
    in_place: bool = False
    """Whether a rollback only sets a smaller length, instead of copying."""
    all_rows: bool = False
    """Whether there are logits of every fed token, instead of the last one only."""
    reason: str = ""
    """Reason why steps and rollbacks differ from decoding from nothing. Empty if they agree."""


def check_behaviour(
    decode_rows: Callable[[int, Sequence[int]], Row], vocabulary_size: int
) -> Behaviour:
    """Decode a few tokens in several ways and return how the graph may be used.

    ``decode_rows(keep, tokens)`` truncates the cache, feeds the tokens and returns logits [rows,
    V]."""
    a, b, c, d, *later = (token % vocabulary_size for token in (*_PROBE_TOKENS, *_LATER_TOKENS))
    rows = decode_rows(0, (a, b, c, d))
    whole = rows[-1]
    if not np.isfinite(whole).all():
        return Behaviour(reason="its logits are not all finite")
    decode_rows(0, (a, b))
    decode_rows(2, (c,))
    for way in ("decoding token by token", "decoding after a rollback"):
        difference = _relative_difference(decode_rows(3, (d,))[-1], whole)
        if not difference <= MAX_DIFFERENCE:
            by = f"by {difference:.2f} standard deviations of the logits"
            return Behaviour(reason=f"{way} differs from decoding at once {by}")
    several = _relative_difference(decode_rows(1, (b, c, d))[-1], whole)
    alone, rows_of_feed = decode_rows(1, (b,))[-1], decode_rows(1, (b, *later))
    if len(rows_of_feed) > 1:
        several = max(several, _relative_difference(rows_of_feed[0], alone))
    return Behaviour(several <= MAX_DIFFERENCE, all_rows=len(rows) > 1)


def _relative_difference(row: Row, reference: Row) -> float:
    """Return the root mean square of the difference over the reference's standard deviation."""
    return float(np.sqrt(np.mean((row - reference) ** 2))) / max(float(reference.std()), 1e-12)


class ForeignDrafter(GraphDrafter):
    """A drafter on an ONNX file of another exporter.

    Args:
        path: The file.
        info: Facts about the model from its folder. The vocabulary size of the graph takes
            precedence.
        hint: Number of heads and head size, for a graph that leaves them open.
        threads: Threads of a step. 0 chooses by the size of the weights.
        context_length: Longest sequence that is drafted for. 0 is the model's own, at most 16384.
        window: Most rows of keys and values, as in ``OnnxDrafter``. 0 means no window.
        token_count: Number of ids that have a text; others are never proposed. 0 means all.
        providers: Execution providers of onnxruntime, in order of preference.

    Raises:
        DraftModelError: The graph cannot be used; the error names the file and the fault.
    """

    behaviour: Behaviour
    """How the graph is used, as found by trying."""

    def __init__(
        self,
        path: Path,
        info: ports.ModelInfo,
        *,
        hint: dg.HeadHint = (0, 0),
        threads: int = 0,
        context_length: int = 0,
        window: int = 0,
        token_count: int = 0,
        providers: Sequence[str] = dg.CPU,
    ) -> None:
        session = dg.load_session(
            path, threads or dg.default_threads(dg.weights_bytes(path)), providers
        )
        self.graph = graph = dg.read_graph(path, session, hint)
        range_field, capacity = _limit_length(info, context_length, DEFAULT_CONTEXT_LIMIT, window)
        size = graph.logits.shape[-1]
        size = size if isinstance(size, int) else info.vocabulary_size
        super().__init__(
            path,
            session,
            graph,
            replace(range_field, vocabulary_size=size),
            capacity=max(capacity, _CHECKED_LENGTH),
            proposable_count=min(token_count or size, size),
            window=window,
        )
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = 4  # A way that is tried may fail.
        self._choose_store()

    def _choose_store(self) -> None:
        """Find a way to use the graph that works. Raises ``DraftModelError`` if there is none."""
        reason = ""
        in_place = not any(cache.tokens_first for cache in self.graph.caches)
        for kind in (kv.KvBuffers, kv.ReslicedCache) if in_place else (kv.ReslicedCache,):
            self._store_type = kind
            try:
                self._bind_buffers()
                behaviour = check_behaviour(self._decode_rows, self.info.vocabulary_size)
            # The exceptions of onnxruntime share no base class of their own.
            except Exception as error:
                reason = f"it does not run: {error}"
                continue
            if not (reason := behaviour.reason):
                self.behaviour = replace(behaviour, in_place=kind is kv.KvBuffers)
                self._takes_chunks, self._run_options = behaviour.chunks, None
                self._bind_buffers()
                return
        raise mf.DraftModelError(f"{self._path}: the graph cannot draft: {reason}")

    def _decode_rows(self, keep_length: int, tokens: Sequence[int]) -> Row:
        return self._forward(keep_length, tokens).astype(np.float32)
