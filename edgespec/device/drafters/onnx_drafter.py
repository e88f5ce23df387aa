"""Draft models on onnxruntime: one sequence, whose rollback is a smaller number.

A graph says what it wants (``decoder_graph``); ``GraphDrafter`` binds it. Ids, positions and masks
are slices of arrays made once. Past and present keys and values of a graph that appends in place,
as grouped-query attention does, are one buffer each (``KvBuffers``), bound once: nothing is copied,
and what is cached is said by lengths that the graph reads. A graph that concatenates gets a cache
that is sliced anew at each step (``ReslicedCache``).

``OnnxDrafter`` is for folders that ``edgespec export`` wrote, ``ForeignDrafter`` for graphs of
others, which are used as they behave and not only as they look: a few tokens are decoded in several
ways when one is loaded.

Lifetime of a step: check the contract, write ids and lengths, run, pick candidates from the last
row. Long feeds run in chunks, which bounds scratch memory and lets a step end early that nobody
waits for any more. Chunking changes logits by rounding only; a guess is only a hint. Of a text
longer than the window only the first and the last tokens are held (``DraftWindow``): rows between
them leave, and those behind move down, their keys turned back (``kv_buffers``).
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
from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters import decoder_graph as dg
from edgespec.device.drafters import kv_buffers as kv
from edgespec.device.drafters import manifest as mf
from edgespec.device.drafters.token_cache import DraftWindow, TokenCache
from edgespec.models.onnx_runtime import ort
from edgespec.sampling.arrays import MAX_WIDTH, Workspace, best_candidates
from edgespec.telemetry.process_memory import trim_heap

CHUNK = ports.PREFILL_CHUNK
# Past this, positions and masks are longer than most models' contexts; as of our own drafts.
DEFAULT_CONTEXT_LIMIT = 16_384

# Below about 10M parameters a second thread costs more than it brings; so many bytes of weights.
_TWO_THREADS_FROM_BYTES = {4: 6_000_000, 8: 11_000_000, 32: 40_000_000}

# Inputs that are one number, which follows from the tokens cached and those in all.
_NUMBERS: Final[dict[dg.Role, Callable[[int, int], int]]] = {
    dg.Role.CACHED: lambda cached, length: cached > 0,
    dg.Role.ROWS: lambda cached, length: 1,
    dg.Role.LAST_INDEX: lambda cached, length: length - 1,
    dg.Role.LENGTH: lambda cached, length: length,
}

Row = NDArray[np.float32]
_log = logging.getLogger(__name__)


class GraphDrafter:
    """``Drafter`` over a session of onnxruntime; ``ValueError`` for a broken contract."""

    def __init__(
        self,
        path: Path,
        session: ort.InferenceSession,
        graph: dg.DecoderGraph,
        info: ports.ModelInfo,
        *,
        capacity: int,
        proposable: int,
        chunk: int = CHUNK,
        window: int = 0,
    ) -> None:
        self._path, self.info, self._graph, self._chunk = path, info, graph, chunk
        self._session: ort.InferenceSession | None = session
        self.placement = dg.placement(session)
        """What of the graph runs where, if that is known and not the CPU alone."""
        self._proposable, self._capacity = proposable, capacity
        self._binding: Any = None  # onnxruntime has no types
        self._chunks = True
        """May several tokens be fed behind a cache, or one at a time only?"""
        self._store_kind: type[kv.KvBuffers] | type[kv.ReslicedCache] = kv.KvBuffers
        self.weights_bytes = dg.weights_bytes(path)
        """Of the file and its external data."""
        self._run_options: ort.RunOptions | None = None
        moving = not any(cache.dtype == "int8" for cache in graph.caches)
        self._most_guesses, self._window = MAX_WIDTH, DraftWindow(window or capacity, moving=moving)
        self._frequencies: list[kv.Frequencies | None] = []
        """Of each cache tensor, found when a text first outgrows the window; None: of values."""

    def twin(self) -> GraphDrafter:
        """Another sequence on the same weights, with buffers of its own (``ports.Twinned``)."""
        if self._session is None:
            raise ValueError("the drafter is closed")
        twin = copy(self)
        twin._window = DraftWindow(self._window.size, moving=self._window.moving)
        twin._lay_out()
        return twin

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._cache.begin(prompt_length, sampling)
        self._window.clear()

    def restrict(self, window: int, width: int) -> None:
        """From now on hold at most ``window`` rows and give at most ``width`` guesses a step, and
        give the rest of the rows back to the system; 0 rests: no rows and no guesses. Calls come
        from the thread of the steps. Raises ``ValueError`` for a window beyond the first one."""
        bounded("window", window, 0, self._capacity)
        self._window.resize(window)
        self._most_guesses = width if window else 0
        self._store.shrink(window)

    @property
    def held_tokens(self) -> int:
        """Rows of keys and values that are resident."""
        return self._store.touched_length

    def growth_bytes(self, length: int) -> int:
        """What a step that makes the text ``length`` long may add to what is resident."""
        rows = min(length, self._window.size) - self._store.touched_length
        return max(0, rows) * self._store.bytes_per_token

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: ports.Cancelled = ports.never_cancelled,
    ) -> tuple[ports.Candidate, ...]:
        if self._session is None:
            raise ValueError("the drafter is closed")
        position = self._cache.advance(keep_length, feed)
        if not self._most_guesses:
            self._window.clear()
            return ()
        try:
            window = self._place(keep_length, position)
            first, end = window.held, position - window.skipped
            while (start := window.held) < end:
                if cancelled():
                    raise ports.StepCancelledError(
                        f"cancelled with {start - first} of {end - first} tokens fed"
                    )
                count = self._chunk if self._chunks or not start else 1
                tokens = window.tokens(self._cache.tokens, start, min(start + count, end))
                self._forward(start, tokens)
        except Exception:
            self._cache.forget(keep_length)  # rows behind it are not to be trusted
            raise
        self.logits[self._proposable :] = -np.inf
        return self._guesses(position, min(width, self._most_guesses))

    def close(self) -> None:
        """Free weights and buffers; further steps are refused."""
        self._cache.forget(0)
        self._session = self._binding = None
        self._store.close()
        trim_heap()  # else half of the weights would stay there

    def cached_rows(self, length: int) -> Iterator[tuple[dg.CacheTensor, kv.Buffer]]:
        """Layer by layer keys and values: the first ``length`` rows, [heads, length, head size]."""
        return self._store.rows(length)

    # --- the window -------------------------------------------------------------------------

    def _place(self, keep_length: int, length: int) -> DraftWindow:
        """The window, moved to where the text has got."""
        window = self._window
        if window.moving and length > window.size and not self._frequencies:
            self._find_frequencies()
        if leaving := window.place(keep_length, length):
            held, window.held = window.held, 0  # none is valid while they move
            angles = [None if one is None else leaving * one for one in self._frequencies]
            self._store.remove(window.sinks, leaving, held + leaving, angles)
            window.held = held
        return window

    def _find_frequencies(self) -> None:
        """By a few tokens in a cache beside this one, once. A graph that turns its keys in no way
        that is known gets a window whose rows do not move."""
        probe, count = self.twin(), min(kv.PROBED_ROWS, self._window.size)
        try:
            probe.begin(1, SamplingParams())
            probe.step(0, [self._proposable // 2] * count, 1)
            self._frequencies = [
                kv.frequencies_of(rows, f"{self._path}: {cache.past}")
                if cache.part == "key"
                else None
                for cache, rows in probe.cached_rows(count)
            ]
        except mf.DraftModelError as error:
            _log.warning("of a long text each half of the window is fed anew: %s", error)
            self._window.moving = False
            self._window.resize(self._window.size)
        finally:
            probe.close()

    # --- one run ----------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Buffers, and the arrays that inputs are slices of, bound as far as they stay."""
        assert self._session is not None
        self._cache, self._work = TokenCache(self.info), Workspace()
        self._binding = self._session.io_binding()
        self._store = self._store_kind(self._graph.caches, self._capacity)
        roles = self._graph.roles
        self._ids = np.zeros((1, CHUNK), dtype=roles[dg.Role.IDS].dtype)
        self._bound_count = 0
        mask = roles.get(dg.Role.MASK)
        self._ones = np.ones(self._capacity, dtype=mask.dtype) if mask else None
        self._counted = {
            role: np.arange(self._capacity, dtype=roles[role].dtype)
            for role in (dg.Role.POSITIONS, dg.Role.CACHE_POSITIONS)
            if role in roles
        }
        self._numbers: list[tuple[NDArray[Any], Callable[[int, int], int]]] = []
        """Bound by their addresses; what each is when a number of tokens are cached and in all."""
        for role in roles.keys() & _NUMBERS.keys():
            number = np.ones((1,) * len(roles[role].shape), dtype=roles[role].dtype)
            self._bind_input(role, number, number.shape)
            self._numbers.append((number, _NUMBERS[role]))
        self.logits: Row = np.zeros(self.info.vocabulary_size, dtype=np.float32)
        """The row behind the last step's candidates, [V]; overwritten by the next step."""
        self._one_row = self._graph.one_row
        if self._one_row:
            place = np.float32, (1, self.logits.size), self.logits.ctypes.data
            self._binding.bind_output(self._graph.logits.name, "cpu", 0, *place)

    def _forward(self, cached: int, tokens: Sequence[int]) -> NDArray[Any]:
        """Append ``tokens`` (1..CHUNK) behind ``cached`` rows. Returns the logits that come out, of
        all rows or the last one, which is then in ``logits``."""
        assert self._session is not None
        count, length = len(tokens), cached + len(tokens)
        self._store.truncate(cached)
        self._ids[0, :count] = tokens
        if count != self._bound_count:
            self._bind_input(dg.Role.IDS, self._ids, (1, count))
            self._bound_count = count
        if self._ones is not None:
            self._bind_input(dg.Role.MASK, self._ones, (1, length))
        for role, array in self._counted.items():
            shape = (1, count) if role is dg.Role.POSITIONS else (count,)
            self._bind_input(role, array[cached:], shape)
        for number, value_of in self._numbers:
            number.fill(value_of(cached, length))
        if not self._one_row:
            self._binding.bind_output(self._graph.logits.name, "cpu")  # before all others
        self._store.bind(self._binding, cached, count)
        self._session.run_with_iobinding(self._binding, self._run_options)
        self._store.advance()
        self._window.held = length
        if self._one_row:
            return self.logits
        logits: NDArray[Any] = self._binding.get_outputs()[0].numpy()
        rows = logits.reshape(-1, logits.shape[-1])
        self.logits[:] = rows[-1]
        return rows

    def _guesses(self, position: int, width: int) -> tuple[ports.Candidate, ...]:
        """Behind the text in the cache. ``logits`` lose what the constraint forbids; without a
        token that it allows there are no guesses."""
        cache, logits = self._cache, self.logits
        mask = cache.mask()
        if mask is not None:
            bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
            count = min(bits.size, logits.size)
            logits[count:] = -np.inf
            logits[:count][bits[:count] == 0] = -np.inf
            if logits.max() == -np.inf:
                return ()
        return best_candidates(logits, cache.sampling, position, width, cache.counts, self._work)

    def _bind_input(self, role: dg.Role, array: NDArray[Any], shape: tuple[int, ...]) -> None:
        name = self._graph.roles[role].name
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)


def _limited(
    info: ports.ModelInfo, context_length: int, usual: int, window: int, trained: int = 0
) -> tuple[ports.ModelInfo, int]:
    """``info`` with the length of texts that are drafted for: any, where a window slides. And how
    many rows of keys and values that takes."""
    bounded("context_length", context_length, 0, info.context_length)
    limit = context_length or min(info.context_length, usual)
    bounded("window", window, 0, limit)
    trained = min(trained, limit)
    slides = window or (trained and not context_length)
    longest = mf.MAX_CONTEXT_LENGTH if slides else limit
    return replace(info, context_length=longest), window or trained or limit


# --- drafts of our own ----------------------------------------------------------------------


class OnnxDrafter(GraphDrafter):
    """Over a folder written by ``export.export_draft``.

    ``threads`` 0 chooses by size. ``context_length`` 0 is the model's own; a
    smaller one bounds the memory of keys and values: texts beyond it are not drafted for.
    ``window`` bounds that memory too, but slides: any text is drafted for, by its last tokens
    (``DraftWindow``); 0: as many as the draft was trained on, by its manifest. ``chunk`` is
    how many tokens a long feed takes at a time. Raises ``DraftModelError`` naming the file for
    a folder that cannot be used."""

    def __init__(
        self,
        folder: Path,
        *,
        threads: int = 0,
        context_length: int = 0,
        window: int = 0,
        chunk: int = CHUNK,
        providers: Sequence[str] = dg.CPU,
    ) -> None:
        self.manifest = manifest = mf.read_manifest(folder)
        info, capacity = _limited(
            manifest.model, context_length, mf.MAX_CONTEXT_LENGTH, window, manifest.window
        )
        bounded("chunk", chunk, 1, CHUNK)
        path = folder / mf.MODEL_FILE
        if why := mf.damage(folder, manifest, (mf.MODEL_FILE, f"{mf.MODEL_FILE}.data")):
            raise mf.DraftModelError(f"{why}; export or copy the draft again")
        two_from = _TWO_THREADS_FROM_BYTES.get(manifest.bits, 0)
        threads = threads or dg.usual_threads(dg.weights_bytes(path), two_from)
        session = dg.load_session(path, threads, providers)
        graph = dg.read_graph(path, session)
        _check_manifest(path, graph, manifest)
        super().__init__(
            path,
            session,
            replace(graph, one_row=True),
            info,
            capacity=capacity,
            proposable=manifest.proposable,
            chunk=chunk,
        )
        self._lay_out()


def _check_manifest(path: Path, graph: dg.DecoderGraph, manifest: mf.DraftManifest) -> None:
    """Before any buffer is sized by it."""
    cache = graph.caches[0]
    for name, found, said in (
        ("layers", len(graph.caches) // 2, manifest.layers),
        ("kv_heads", cache.heads, manifest.kv_heads),
        ("head_dim", cache.head_size, manifest.head_dim),
        ("ids", graph.logits.shape[-1], manifest.model.vocabulary_size),
    ):
        if found != said:
            raise mf.DraftModelError(f"{path}: has {found} {name}, but the manifest says {said}")


# --- drafts that others exported ------------------------------------------------------------
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
# deal between all these ways, a wrong mask or a wrong row of the cache far more, so the bound
# between them is wide.

LARGEST_DIFFERENCE = 0.35
"""Root mean square of a difference of logits, over their standard deviation."""
_TOKENS = (1, 2, 3, 1)
_LATER = (4, 5, 6, 7, 8, 9, 10, 11)
_CHECKED_LENGTH = 2 + len(_LATER)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a graph may be used."""

    chunks: bool = False
    """May several tokens be fed behind a cache, or one at a time only?"""
    in_place: bool = False
    """Is a rollback a smaller number, or a copy?"""
    all_rows: bool = False
    """Are there logits of every token fed, or of the last one alone?"""
    reason: str = ""
    """Why steps and rollbacks do not give what decoding from nothing gives; empty: they do."""


def check_behaviour(
    decode_rows: Callable[[int, Sequence[int]], Row], vocabulary_size: int
) -> Behaviour:
    """``decode_rows(keep, tokens)`` cuts the cache, feeds the tokens, returns logits [rows, V]."""
    a, b, c, d, *later = (token % vocabulary_size for token in (*_TOKENS, *_LATER))
    rows = decode_rows(0, (a, b, c, d))
    whole = rows[-1]
    if not np.isfinite(whole).all():
        return Behaviour(reason="its logits are not all finite")
    decode_rows(0, (a, b))
    decode_rows(2, (c,))
    for way in ("decoding token by token", "decoding after a rollback"):
        difference = _difference(decode_rows(3, (d,))[-1], whole)
        if not difference <= LARGEST_DIFFERENCE:
            by = f"by {difference:.2f} standard deviations of the logits"
            return Behaviour(reason=f"{way} differs from decoding at once {by}")
    several = _difference(decode_rows(1, (b, c, d))[-1], whole)
    alone, fed = decode_rows(1, (b,))[-1], decode_rows(1, (b, *later))
    if len(fed) > 1:
        several = max(several, _difference(fed[0], alone))
    return Behaviour(several <= LARGEST_DIFFERENCE, all_rows=len(rows) > 1)


def _difference(row: Row, reference: Row) -> float:
    """Root mean square of the difference over the reference's standard deviation."""
    return float(np.sqrt(np.mean((row - reference) ** 2))) / max(float(reference.std()), 1e-12)


class ForeignDrafter(GraphDrafter):
    """Over an ONNX file that somebody else exported.

    ``info`` is what the folder says of the model; the graph's own vocabulary size wins. ``hint``
    helps where the graph leaves sizes of heads open. ``threads`` 0 chooses by size,
    ``context_length`` 0 means the model's own, at most 16384. ``window`` is as of ``OnnxDrafter``,
    0: none. ``token_count`` ids have a text, the others are never proposed; 0: all have. Raises
    ``DraftModelError`` naming the file and what is wrong with the graph."""

    behaviour: Behaviour
    """How it is used, after trying."""

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
            path, threads or dg.usual_threads(dg.weights_bytes(path)), providers
        )
        self.graph = graph = dg.read_graph(path, session, hint)
        limited, capacity = _limited(info, context_length, DEFAULT_CONTEXT_LIMIT, window)
        size = graph.logits.shape[-1]
        size = size if isinstance(size, int) else info.vocabulary_size
        super().__init__(
            path,
            session,
            graph,
            replace(limited, vocabulary_size=size),
            capacity=max(capacity, _CHECKED_LENGTH),
            proposable=min(token_count or size, size),
            window=window,
        )
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = 4  # what is tried may fail
        self._settle()

    def _settle(self) -> None:
        """Find the way to use the graph that works. Raises ``DraftModelError``."""
        reason = ""
        in_place = not any(cache.tokens_first for cache in self.graph.caches)
        for kind in (kv.KvBuffers, kv.ReslicedCache) if in_place else (kv.ReslicedCache,):
            self._store_kind = kind
            try:
                self._lay_out()
                found = check_behaviour(self._tried, self.info.vocabulary_size)
            except Exception as error:  # onnxruntime's exceptions share no base of their own
                reason = f"it does not run: {error}"
                continue
            if not (reason := found.reason):
                self.behaviour = replace(found, in_place=kind is kv.KvBuffers)
                self._chunks, self._run_options = found.chunks, None
                self._lay_out()
                return
        raise mf.DraftModelError(f"{self._path}: the graph cannot draft: {reason}")

    def _tried(self, keep_length: int, tokens: Sequence[int]) -> Row:
        return self._forward(keep_length, tokens).astype(np.float32)
