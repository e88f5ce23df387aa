"""The target model on torch and transformers: one packed forward pass for all sessions.

Life of a pass: check every request -> reserve blocks, all or nothing -> lay the rows out
(``pass_plan.py``) -> one call of the model, whose attention reads and writes the pool
(``canonical_attention.py``, also in plain mode) -> choose a token for every sampled row
(``sampling/tensors.py``). Canonical mode (``canonical_mode.py``), the default, makes the logits of
a position the same to the last bit under every schedule. On a GPU attention is a kernel of ours
(``paged_attention.py``), and small passes are repeated from recordings (``recorded_passes.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from edgespec.core.ports import (
    ModelInfo,
    PassRequest,
    PassResult,
    SimpleTarget,
    UnsupportedModelError,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape, Candidate, NodeScore
from edgespec.sampling import tensors
from edgespec.sampling.arrays import Row
from edgespec.verifier.targets import cpu_threads, kv_pool, memory_sizing
from edgespec.verifier.targets.canonical_attention import CanonicalAttention
from edgespec.verifier.targets.canonical_mode import (
    CanonicalModeError,
    find_canonical_mode,
    has_finite_logits,
    head_shape,
    run_self_test,
    tree_logits,
)
from edgespec.verifier.targets.graph_passes import GraphModel, find_counts
from edgespec.verifier.targets.linear_layers import is_packed, pack_model
from edgespec.verifier.targets.loading import LoadedModel, load_model
from edgespec.verifier.targets.paged_attention import PagedAttention
from edgespec.verifier.targets.pass_batch import PassBatch, split_results, tree_depths
from edgespec.verifier.targets.pass_plan import AttentionBackend, BatchRows, PassPlan, plan_pass
from edgespec.verifier.targets.pass_requests import ConstrainedRows, check_batch, check_opening
from edgespec.verifier.targets.recorded_passes import MEMORY_BYTES, RecordedPasses
from edgespec.verifier.targets.row_tiles import SIZES, RowTiles

logger = logging.getLogger(__name__)

_LARGE_WEIGHTS = 50_000_000
"""Numbers in a model from which on a CPU's caches do not hold them."""
_PLAIN_TILES = RowTiles(attention_sizes=SIZES[2], attention_batch=16)
"""How attention is laid out in plain mode, where bits may depend on the schedule."""


class TorchTarget(SimpleTarget):
    """``ports.TargetModel`` for checkpoints of the families in ``loading.py``.

    ``path`` is a folder with safetensors or a hub id. ``name``, ``vocabulary`` and ``weights`` go
    on to ``info``; the last two are fingerprints.

    The key-value pool, over all sessions, holds ``max_cached_tokens``; None means
    ``memory_sizing.default_tokens``. With a ``pool_budget`` it is sized by memory instead.

    ``canonical`` True means canonical mode or ``CanonicalModeError``. False means plain mode. None
    means canonical mode where it holds at a bearable cost (on a GPU: with Triton), else plain mode
    with a warning. ``model_threads`` is how many threads a pass on a CPU may have; None means
    torch's own count. In canonical mode on a CPU torch itself has one thread, *for the whole
    process* (``cpu_threads.py``).

    ``quantize`` rounds the weights (``quantized_linear.FORMATS``). With ``packed`` large weights
    are stored on a CPU as its kernels read them (``linear_layers.py``).

    Raises ``UnsupportedModelError`` for a model that it cannot serve, or whose weights or logits
    are not numbers, and ``ValueError`` for an option out of bounds."""

    def __init__(
        self,
        path: str,
        *,
        name: str,
        vocabulary: str,
        weights: str = "",
        dtype: str = "auto",
        device: str = "auto",
        max_cached_tokens: int | None = None,
        max_sessions: int = 64,
        context_length: int | None = None,
        canonical: bool | None = None,
        model_threads: int | None = None,
        quantize: str = "",
        packed: bool = True,
        pool_budget: memory_sizing.PoolBudget | None = None,
    ) -> None:
        if max_sessions < 1:
            raise ValueError(f"max_sessions is {max_sessions}, but must be >= 1")
        if model_threads is not None:
            torch.set_num_threads(model_threads)
        cpu_threads.set_count(torch.get_num_threads())
        load = partial(
            load_model,
            path,
            dtype=dtype,
            device=device,
            context_length=context_length,
            quantize=quantize,
        )
        loaded = load()
        if packed:
            pack_model(loaded.model)
        self._model = loaded.model
        self._max_sessions = max_sessions
        number_format = str(loaded.dtype).removeprefix("torch.")
        if quantize:
            # The version counts what makes other bits of the same weights: 2 has zero points, 3
            # sums blocks in another order.
            number_format = f"{quantize}v3-{number_format}"
        self.info = ModelInfo(
            name,
            vocabulary,
            loaded.vocabulary_size,
            loaded.context_length,
            loaded.eos_token_ids,
            f"{weights}-{number_format}" if weights else "",
        )
        if pool_budget is not None:
            max_cached_tokens = memory_sizing.starting_tokens(pool_budget, loaded.device)
        has_default = max_cached_tokens is None
        if max_cached_tokens is None:
            token_bytes = 2 * loaded.layer_count * loaded.key_width * loaded.dtype.itemsize
            max_cached_tokens = memory_sizing.default_tokens(
                loaded.context_length, token_bytes, loaded.device
            )
        self._pool = _make_pool(loaded, max_cached_tokens)
        self._constrained = ConstrainedRows(self.info)
        self._row_tiles: RowTiles | None = None
        self._attention: AttentionBackend = CanonicalAttention(_PLAIN_TILES)
        self._recorded: RecordedPasses | None = None
        if loaded.device.type == "cuda":
            self._attention = self._gpu_attention(loaded)
        self._graph = loaded.graph
        bearable = loaded.device.type == "cpu" or isinstance(self._attention, PagedAttention)
        if bearable if canonical is None else canonical:
            if loaded.graph is not None and not self._enter_canonical_graph(loaded.graph):
                loaded = load(as_graph=False)
                self._model, self._graph = loaded.model, None
            if self._graph is None:
                self._enter_canonical_mode(loaded, required=canonical is True)
        if self._graph is not None:
            self._graph.probe = None
        if not has_finite_logits(self._pool, self._run, self.info.vocabulary_size):
            raise UnsupportedModelError(
                f"{path}: the model's logits are NaN or infinite for a short text in {loaded.dtype}"
            )
        self._notes = [f"{quantize} weights, {loaded.rounding_loss}"] if quantize else []
        if is_packed(loaded.model):
            self._notes.append("packed weights")
        if not quantize and _would_gain_by_rounding(loaded):
            self._notes.append("quicker with --quantize int8")
        if pool_budget is not None:
            self._size_pool(loaded, pool_budget)
        if has_default or pool_budget is not None:
            self._notes.append(self._describe_pool())
        if isinstance(self._attention, PagedAttention):
            self._record_passes(self._attention)

    @property
    def cache(self) -> CacheShape:
        return CacheShape(self._pool.block_count, kv_pool.BLOCK_SIZE)

    @property
    def canonical(self) -> bool:
        """Whether canonical mode is on. Then a text is promised to be the same, bit for bit,
        whatever is drafted. Else it may differ where the two best tokens nearly tie."""
        return self._row_tiles is not None

    @property
    def mode(self) -> str:
        """A description of how the target computes, for the ready line."""
        how = "plain (texts may differ where two tokens nearly tie)"
        if self._row_tiles is not None:
            how = f"canonical ({self._row_tiles})"
        return ", ".join([how, *self._notes])

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        opened, most = self._pool.sequences, self._max_sessions
        check_opening(key, prompt_length, opened, most, self.info)
        self._constrained.open(key, sampling)
        self._pool.open(key, prompt_length, sampling, text)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        """Compute a pass, as ``ports.TargetModel.forward``.

        Raises ``CapacityError`` or ``ValueError`` before anything changes, and ``ModelOutputError``
        before any token is chosen. All sessions but the one that a ``ModelOutputError`` names can
        then go on with another batch from the same ``cache_length``."""
        if not batch:
            return []
        batch = self._check(batch)
        logits = self._pass(batch)
        with torch.inference_mode():
            tokens, nodes_scored = self._choose(logits, batch)
            scores = tensors.score_passes(logits, batch, tokens)
        if scores or batch.has_nodes or not all(batch.samples):
            return split_results(batch, tokens, scores, nodes_scored)
        return [PassResult(key, (token,)) for key, token in zip(batch.keys, tokens, strict=True)]

    def guess(self, batch: Sequence[PassRequest], width: int) -> list[tuple[Candidate, ...]]:
        """Return candidates for each request, as ``packed_drafter.DraftModel.guess``."""
        batch = self._check(batch)
        logits = self._pass(batch)
        blocks = [block for block in map(self._sample_block, batch) if block.positions]
        with torch.inference_mode():
            found = iter(tensors.best_candidates_of_rows(logits, blocks, width))
        return [next(found) if sample else () for sample in batch.samples]

    def pass_logits(self, batch: Sequence[PassRequest]) -> Row:
        """Run one pass, and return its logits as ``bench.theory.OpenTarget`` states."""
        found: Row = self._pass(self._check(batch)).float().cpu().numpy().copy()
        return found

    def _pass(self, batch: PassBatch) -> torch.Tensor:
        """Return logits [sampled rows, vocabulary], which are valid until the next pass."""
        self._pool.reserve(batch)
        logits = self._run(batch)
        self._pool.commit_all(batch)
        return logits

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self._pool.keep(key, nodes)

    def close(self, key: str) -> None:
        self._pool.close(key)
        self._constrained.close(key)

    def shift(self, key: str, first: int) -> None:
        """Move the window of a sequence, as ``packed_drafter.DraftModel.shift``."""
        self._pool.sequence(key).first = first

    def self_test(self) -> str:
        """Return a description of where logits depend on the schedule, which is empty if they do
        not. Call it only while no session is open."""
        return run_self_test(self._pool, self._run, self.info.vocabulary_size)

    def _size_pool(self, loaded: LoadedModel, budget: memory_sizing.PoolBudget) -> None:
        figures = memory_sizing.memory_figures(
            budget, self.forward, self._pool, self.info.vocabulary_size
        )
        if isinstance(self._attention, PagedAttention):
            figures = replace(figures, activations=figures.activations + MEMORY_BYTES)
        longest = -(-self.info.context_length // kv_pool.BLOCK_SIZE) * kv_pool.BLOCK_SIZE
        tokens = memory_sizing.pool_tokens(budget, figures, self._max_sessions * longest)
        self._pool = _make_pool(loaded, tokens)
        logger.info("%d cached tokens: %s", tokens, figures)

    def _describe_pool(self) -> str:
        tokens = self.cache.tokens
        return f"{tokens} cached tokens in {tokens * self._pool.token_bytes / (1 << 20):.0f} MiB"

    def _enter_canonical_graph(self, graph: GraphModel) -> bool:
        """Enter canonical mode with ``graph`` and return whether it holds."""
        counts = find_counts(graph)
        if isinstance(counts, str):
            why_not = counts
        else:
            graph.counts = counts
            why_not = self.self_test()
            if not why_not:
                self._row_tiles = RowTiles(
                    base=counts.rows[0],
                    row_multiple=counts.rows[0],
                    attention_sizes=counts.group_rows,
                    largest=counts.rows[-1],
                )
                return True
        logger.warning("layers are not computed as one graph, so slower: %s", why_not)
        return False

    def _enter_canonical_mode(self, loaded: LoadedModel, *, required: bool) -> None:
        plain = self._attention
        paged = isinstance(plain, PagedAttention)

        def self_test(tiles: RowTiles) -> str:
            self._row_tiles = tiles
            self._attention = plain if paged else CanonicalAttention(tiles)
            return self.self_test()

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        found = find_canonical_mode(loaded, self_test, row_by_row=required, paged=paged)
        if found.tiles is None and threads > 1 and not paged:
            cpu_threads.set_count(1)
            found = find_canonical_mode(loaded, self_test, row_by_row=required, paged=paged)
        if paged:
            torch.set_num_threads(threads)
        self._row_tiles = found.tiles
        if found.tiles is not None:
            return
        self._attention = plain
        torch.set_num_threads(threads)
        cpu_threads.set_count(threads)
        why = "; ".join(found.failures)
        if required:
            raise CanonicalModeError(f"canonical mode does not hold on this machine: {why}")
        logger.warning(
            "canonical mode is off, so texts may differ where two tokens nearly tie: %s", why
        )

    def _gpu_attention(self, loaded: LoadedModel) -> AttentionBackend:
        """Return the paged kernel where Triton is installed and agrees with what torch computes,
        else the attention of a CPU."""
        plain, size = self._attention, self.info.vocabulary_size
        try:
            from edgespec.verifier.targets.paged_kernel import attend  # needs Triton

            heads = head_shape(loaded)
            wanted = tree_logits(self._pool, self._run, size)
            self._attention = PagedAttention(heads.heads // heads.kv_heads, attend)
            found = tree_logits(self._pool, self._run, size)
            if wanted is None or found is None or _agree(found, wanted, loaded.dtype):
                return self._attention
            why = f"its logits differ by {float((found - wanted).abs().max()):.1e}"
        except Exception as error:  # a kernel that does not compile may raise anything
            why = f"{type(error).__name__}: {error}"
        logger.warning("attention runs without the paged kernel, so slower: %s", why)
        return plain

    def _record_passes(self, attention: PagedAttention) -> None:
        """Repeat small passes from recordings from now on, unless their logits differ."""
        size = self.info.vocabulary_size
        wanted = tree_logits(self._pool, self._run, size)

        def call(plan: PassPlan) -> torch.Tensor:
            return _call_model(self._model, plan, size)

        passes = self._recorded = RecordedPasses(call, self._pool, attention)
        found = tree_logits(self._pool, self._run, size)
        if not passes.off and found is not None and wanted is not None:
            dtype = self._pool.dtype
            if torch.equal(found, wanted) if self.canonical else _agree(found, wanted, dtype):
                self._notes.append("CUDA graphs")
                return
            logger.warning("passes are not recorded, so slower: recorded ones differ")
        self._recorded = None

    def _run(self, batch: Sequence[PassRequest]) -> torch.Tensor:
        """Return logits [sampled rows, vocabulary] of a reserved batch."""
        # A thread takes over the process's thread count when it first reads it. oneDNN does not
        # read it, so without this call it would use all cores whatever canonical mode has set.
        torch.get_num_threads()
        with torch.inference_mode():
            rows = BatchRows(self._pool, batch)
            if self._graph is not None:
                return self._graph.run_pass(rows)
            if self._recorded is not None:
                logits = self._recorded.run(rows)
                if logits is not None:
                    return logits
            plan = plan_pass(rows, self._attention, tiles=self._row_tiles)
            return _call_model(self._model, plan, self.info.vocabulary_size)

    def _check(self, batch: Sequence[PassRequest]) -> PassBatch:
        """Return the requests as columns. Raises as ``check_batch`` if one of them is not valid."""
        if isinstance(batch, PassBatch):
            return batch
        try:
            found = PassBatch.of(batch)
        except (ValueError, OverflowError):
            check_batch(batch, self._pool.cached_length, self.info)
            raise
        if not found.is_surely_valid(self._pool.cached_lengths(found), self.info):
            check_batch(batch, self._pool.cached_length, self.info)
        return found

    def _choose(
        self, logits: torch.Tensor, batch: PassBatch
    ) -> tuple[list[int], Mapping[str, tuple[NodeScore, ...]]]:
        """Return the token that the target chooses for each sampled row, and by key the node scores
        of the sessions that want them. ``logits`` is [sampled rows, vocabulary]."""
        wants_scores = any(batch.node_scores)
        if not wants_scores and self._pool.sampled_keys.isdisjoint(batch.keys):
            best = tensors.best_tokens(logits)
            if best is not None:
                return best, {}
        blocks = [block for block in map(self._sample_block, batch) if block.positions]
        tokens = tensors.choose_tokens(logits, blocks)
        return tokens, tensors.score_nodes(logits, batch, blocks) if wants_scores else {}

    def _sample_block(self, request: PassRequest) -> tensors.SampleBlock:
        """Return the rows of ``request`` whose tokens are wanted. The sequence's token counts are
        brought up to date in any case."""
        sequence = self._pool.sequence(request.key)
        params, length = sequence.sampling, sequence.first + len(sequence.tokens)
        counts = None
        if params.is_penalised:
            counts = sequence.counts or tensors.TextOccurrences(sequence.prompt_length)
            sequence.counts = counts
            counts.update(sequence.tokens, request.cache_length)
        if not request.sample:
            return tensors.SampleBlock(request.key, params, ())
        positions = [length]
        if request.parents:
            positions += (tree_depths(request.parents) + length).tolist()
        before = counts.occurrences_before(request.tokens, request.parents) if counts else None
        masks = self._constrained.masks(request.key, sequence, request.tokens, request.parents)
        return tensors.SampleBlock(request.key, params, positions, before, masks)


def _would_gain_by_rounding(loaded: LoadedModel) -> bool:
    """Return whether rounded weights would make passes of few rows shorter. They do where such
    passes spend most of their time on reading weights: on a CPU, in a dense model of some size."""
    weights = [tensor for tensor in loaded.model.parameters() if tensor.ndim > 1]
    dense = all(tensor.ndim == 2 for tensor in weights)
    return loaded.device.type == "cpu" and dense and loaded.weight_count >= _LARGE_WEIGHTS


def _make_pool(loaded: LoadedModel, max_cached_tokens: int) -> kv_pool.KvPool:
    return kv_pool.KvPool(
        loaded.layer_count, loaded.key_width, max_cached_tokens, loaded.dtype, loaded.device
    )


def _agree(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether two logits differ by no more than another way of computing the same model may
    make them."""
    most = (1e-3 if dtype == torch.float32 else 0.1) * float(wanted.abs().max())
    return bool((found - wanted).abs().max() <= most)


def _call_model(model: Any, plan: PassPlan, vocabulary_size: int) -> torch.Tensor:
    arguments = {
        "input_ids": plan.tokens,
        "position_ids": plan.positions,
        "use_cache": False,
        "edgespec_pass": plan,
    }
    if plan.sampled_count == 0:  # a pure prefill: spare the vocabulary projection
        model.model(**arguments)
        return torch.empty((0, vocabulary_size), device=plan.tokens.device)
    logits: torch.Tensor = model(**arguments, logits_to_keep=plan.sampled_rows).logits
    return logits[0, : plan.sampled_count]
