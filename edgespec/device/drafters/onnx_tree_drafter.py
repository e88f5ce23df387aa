"""A draft model on onnxruntime whose steps may run behind several leaves of a tree.

The rows of a step go through the model together. Each has the position it has in its own text, and
sees the rows that lead to it and no others (``tree_graph.py``). Rows are slots of the key/value
buffers: what a step moves is copied there, a few kilobytes a row and layer. Keys were rotated for
positions, which stay, so a moved row is exact, and so is a text after any switch of branch.

A lone leaf's row has the bits that ``OnnxDrafter`` gives it, if it is fed alike. In a step of
several rows products of quantised matrices are added up in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.core.device.memory import KvType
from edgespec.core.device.tree_cache import MAX_TREE_NODES
from edgespec.core.ports import (
    Cancelled,
    Candidate,
    StepCancelledError,
    TreeRows,
    never_cancelled,
)
from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.device.drafters.masked_guesses import guesses
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.drafters.runtime_session import CPU, load_session
from edgespec.device.drafters.tree_rows import RowTable, common_length
from edgespec.device.export.tree_graph import with_tree_inputs

MAX_LEAVES = 16


class OnnxTreeDrafter(OnnxDrafter):
    """``Drafter`` and ``TreeDrafter`` over a folder written by ``export.export_draft``.

    Arguments as of ``OnnxDrafter``, but for a window: the whole context is held. Raises
    ``TreeGraphError`` for a graph that cannot take trees, besides what that raises.
    """

    _slides = False

    def __init__(
        self,
        folder: Path,
        most_leaves: int,
        *,
        threads: int = 0,
        context_length: int = 0,
        providers: Sequence[str] = CPU,
    ) -> None:
        bounded("leaves", most_leaves, 1, MAX_LEAVES)
        self.most_leaves = most_leaves
        self._table, self._held = RowTable(), 0
        self._half = False
        super().__init__(
            folder, threads=threads, context_length=context_length, providers=providers
        )

    def twin(self) -> OnnxTreeDrafter:
        twin = super().twin()
        assert isinstance(twin, OnnxTreeDrafter)
        twin._table, twin._held = RowTable(), 0
        return twin

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        super().begin(prompt_length, sampling)
        self._table.clear()
        self._held = 0

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        rows = TreeRows((), (), (), (keep_length + len(feed) - 1,))
        return self.step_tree(keep_length, feed, rows, width, cancelled)[0]

    def step_tree(
        self,
        keep_length: int,
        feed: Sequence[int],
        rows: TreeRows,
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[tuple[Candidate, ...], ...]:
        if self._session is None:
            raise ValueError("the drafter is closed")
        self._check(keep_length, feed, rows)
        table = self._table
        fed = table.advance(keep_length, feed, rows)
        self._move(keep_length, rows.moved)
        self._held = first = min(self._held, fed)
        logits: dict[int, NDArray[np.float32]] = {}
        end = first
        while end < len(table.tokens):
            start, end = end, min(end + self._chunk, len(table.tokens))
            if cancelled():
                raise StepCancelledError(f"cancelled with {start - first} rows fed")
            if not start:  # behind no row at all, the attention counts positions by itself
                end = min(end, table.trunk)
            leaves = [leaf for leaf in rows.leaves if start <= leaf < end]
            self._feed(start, end, leaves or [end - 1])
            logits |= {leaf: self._leaf_logits[at].copy() for at, leaf in enumerate(leaves)}
        return tuple([self._guesses(leaf, logits[leaf], width) for leaf in rows.leaves])

    def restrict(self, window: int, width: int) -> None:
        """Not for trees: a draft below a memory budget takes one leaf a step."""
        raise ValueError("a draft that takes several leaves a step cannot be restricted")

    # --- a step ----------------------------------------------------------------------------

    def _check(self, keep_length: int, feed: Sequence[int], rows: TreeRows) -> None:
        size, context = self._info.vocabulary_size, self._info.context_length
        for token in (*feed, *rows.tokens):
            if not 0 <= token < size:
                raise ValueError(f"token id is {token}, but the draft's vocabulary has {size} ids")
        text = keep_length + len(feed)
        if text > context:
            raise ValueError(f"{text} tokens do not fit the draft's context length of {context}")
        bounded("leaves", len(rows.leaves), 1, self.most_leaves)
        count = text + len(rows.moved) + len(rows.tokens)
        bounded("rows", count, 1, context + MAX_TREE_NODES)

    def _move(self, keep_length: int, moved: Sequence[int]) -> None:
        """Rows ``moved`` close up behind row ``keep_length``; those not valid are fed again."""
        if not moved or moved[-1] >= self._held:
            self._held = min(self._held, keep_length)
            return
        self._held = keep_length + len(moved)
        for _, array in self._rows.arrays():
            array[:, :, keep_length : self._held] = array[:, :, list(moved)]

    def _guesses(self, leaf: int, logits: NDArray[np.float32], width: int) -> tuple[Candidate, ...]:
        cache, position = self._cache, self._table.positions[leaf] + 1
        if cache.sampling.penalised or cache.constrained:  # what these say is of the leaf's text
            path = self._table.path(leaf)
            keep = common_length(cache.tokens, path[:-1])
            cache.advance(keep, path[keep:])
        self._logits[0] = logits
        self._logits[0, self._manifest.proposable :] = -np.inf
        return guesses(self._logits[0], cache, position, width, self._work)

    def _feed(self, start: int, end: int, leaves: Sequence[int]) -> None:
        """Rows ``start`` to ``end`` (at most ``CHUNK``) behind those before them, which are held;
        logits of ``leaves``, which are among them."""
        assert self._session is not None
        table, count = self._table, end - start
        bias = np.zeros((1, 1, count, end), dtype=np.float16 if self._half else np.float32)
        for row in range(max(start, table.trunk), end):
            bias[0, 0, row - start, table.hidden_from(row)] = -np.inf
        inputs = {
            "input_ids": np.array([table.tokens[start:end]], dtype=np.int64),
            "position_ids": np.array([table.positions[start:end]], dtype=np.int64),
            "attention_bias": bias,
            "leaves": np.array([leaf - start for leaf in leaves], dtype=np.int64),
        }
        values = {name: ort.OrtValue.ortvalue_from_numpy(one) for name, one in inputs.items()}
        for name, value in values.items():
            self._binding.bind_ortvalue_input(name, value)
        if len(leaves) not in self._logits_values:
            view = self._leaf_logits[: len(leaves)]
            self._logits_values[len(leaves)] = ort.OrtValue.ortvalue_from_numpy(view)
        self._binding.bind_ortvalue_output("logits", self._logits_values[len(leaves)])
        self._last_index[0] = end - 1
        self._length[()] = end
        self._rows.touch(end)
        self._held = start
        self._session.run_with_iobinding(self._binding)
        self._held = end

    # --- loading ---------------------------------------------------------------------------

    def _open(self, path: Path, threads: int, providers: Sequence[str]) -> ort.InferenceSession:
        """The graph as it stands has to be one of ours before it is rewritten."""
        manifest = self._manifest
        self._half = manifest.kv_type == KvType.FLOAT16.value
        try:
            model = path.read_bytes()
        except OSError as error:
            raise DraftModelError(f"{path}: cannot be read: {error.strerror}") from error
        model = with_tree_inputs(model, manifest.model.vocabulary_size, KvType(manifest.kv_type))
        return load_session(path, threads, providers, model)

    def _bind(self, session: ort.InferenceSession) -> None:
        self._leaf_logits = np.zeros(
            (self.most_leaves, self._info.vocabulary_size), dtype=np.float32
        )
        self._logits_values: dict[int, ort.OrtValue] = {}
        self._capacity = self._window.size + MAX_TREE_NODES
        super()._bind(session)

    def close(self) -> None:
        super().close()
        self._logits_values.clear()
