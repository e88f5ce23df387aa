"""Whether a loaded model's passes are recorded as CUDA graphs, and what memory that takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.sampling.torch_device_copies import current_device
from edgespec.verifier.targets.attention_backend import AttentionBackend
from edgespec.verifier.targets.attention_choice import head_shape, tried_layers
from edgespec.verifier.targets.backend_self_test import disagreement
from edgespec.verifier.targets.cuda_graphs import MEMORY_MAX, CudaRecorder
from edgespec.verifier.targets.graph_self_test import StaticPaged, graphs_disagree
from edgespec.verifier.targets.graphed_passes import (
    MOST_RECORDINGS,
    Call,
    GraphedPasses,
    Recorder,
)
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE, KvPool
from edgespec.verifier.targets.loading import LoadedModel
from edgespec.verifier.targets.paged_attention import PagedAttention
from edgespec.verifier.targets.pool_size import largest_pass
from edgespec.verifier.targets.self_test import RunPass
from edgespec.verifier.targets.static_pass import SIZES

logger = logging.getLogger(__name__)

# Of a graph's list of launches, and so that a few buckets more find room in the common pool.
_GRAPH_BYTES = 4 << 20
_SLACK = 1.25
# Rows of the block tables beside those of sessions: the probe's, the self-test's, padding.
_TABLES_MORE = 4
_TREE_BLOCKS = 4
_KEPT: list[object] = []
"""What a failed capture has left: freeing it could end the process."""


@dataclass(slots=True)
class GraphChoice:
    """Asked once for each pool; ``run`` is a pass over reserved requests without recordings."""

    loaded: LoadedModel
    attention: AttentionBackend
    call: Call
    run: RunPass
    max_sessions: int
    wanted: bool
    recorder: Callable[[torch.device, int], Recorder] = CudaRecorder
    """Of a device, and of how many bytes."""
    limit_bytes: int = MEMORY_MAX
    why_not: str = ""
    """Why passes are not recorded, once that is known."""
    _last: Recorder | None = field(default=None, init=False)

    def choose(self, pool: KvPool) -> GraphedPasses | None:
        """Recorded passes over ``pool`` that have passed their self-test; None where they are not
        wanted, or do not work, which is logged."""
        if not self.wanted or self.why_not:
            return None
        if self.loaded.device.type != "cuda" and self.recorder is CudaRecorder:
            return None
        passes = None
        try:
            with current_device(self.loaded.device):
                passes, why_not = self._tried(pool)
        except Exception as error:  # a kernel that does not compile may raise anything
            why_not = f"{type(error).__name__}: {error}"
        if not why_not:
            return passes
        self._drop(passes, why_not)
        return None

    def measure(self, pool: KvPool, rows: int) -> int:
        """How many bytes the graphs may take when the largest pass has ``rows`` rows: found by
        recording passes over ``pool``, and from then on kept to. 0 where there are none."""
        passes = self.choose(pool)
        if passes is None or self._last is None:
            return 0
        batch = largest_pass(min(rows, SIZES[-1]), self.loaded.vocabulary_size)
        for request in batch:
            pool.open(request.key, 1, SamplingParams())
        try:
            pool.reserve(batch)
            passes.eager_first = False
            with torch.inference_mode(), current_device(self.loaded.device):
                passes.run_requests(batch)
        finally:
            for request in batch:
                pool.close(request.key)
        if passes.why_not:
            self._drop(passes, passes.why_not)
            return 0
        self.limit_bytes = int(_SLACK * self._last.used_bytes) + MOST_RECORDINGS * _GRAPH_BYTES
        return self.limit_bytes

    def _drop(self, passes: GraphedPasses | None, why_not: str) -> None:
        self.why_not = why_not
        if self._last is not None and self._last.wrecked:
            _KEPT.append((passes, self._last))
        logger.warning("passes run without CUDA graphs, so slower: %s", why_not)

    def _tried(self, pool: KvPool) -> tuple[GraphedPasses | None, str]:
        loaded, attention = self.loaded, self.attention
        if not isinstance(attention, PagedAttention):
            return None, f"attention is {attention.name}, but only the paged kernel is recorded"
        shape = head_shape(loaded)
        layers = tried_layers(shape, loaded.device)
        why_not = disagreement(StaticPaged(attention), shape, layers, loaded.dtype, loaded.device)
        if why_not:
            return None, why_not
        blocks = -(-loaded.context_length // BLOCK_SIZE) + _TREE_BLOCKS
        # Whole vectors: Triton then knows where a row begins.
        pool.tables.expect(self.max_sessions + _TABLES_MORE, -(-blocks // 16) * 16)
        self._last = self.recorder(loaded.device, self.limit_bytes)
        passes = GraphedPasses(self.call, pool, attention, self._last)
        why_not = graphs_disagree(passes, pool, self.run, loaded.vocabulary_size, loaded.dtype)
        return passes, why_not
