"""Do recorded passes compute what the plain path computes, here and now?

Two questions, at start-up and in tests. The paged kernel on the fixed and padded places of
``static_pass.py`` is held against the reference, over a pool whose every slot that no row may see
holds NaN. Then the model's logits over a few schedules are compared with those of the plain path:
once as they come when passes are recorded, once as they come when all of them are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from edgespec.core.ports import PassRequest
from edgespec.verifier.targets.attention_backend import (
    AttentionLayout,
    LayerAttention,
    LayerStates,
)
from edgespec.verifier.targets.batch_rows import BatchRows
from edgespec.verifier.targets.graphed_passes import GraphedPasses
from edgespec.verifier.targets.kv_pool import KvPool
from edgespec.verifier.targets.paged_attention import PagedAttention
from edgespec.verifier.targets.self_test import (
    TOKENS_NEEDED,
    RunPass,
    few_passes,
    schedule_logits,
)
from edgespec.verifier.targets.static_pass import StaticPass, bucket_of

# Of the row's largest logit. Padded matrices are multiplied by other kernels, which round otherwise
# in every layer; a layout that is wrong shows in the first of the two questions as well.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2}
_TOLERANCE_ELSE = 5e-2


@dataclass(frozen=True, slots=True)
class StaticPaged:
    """``AttentionBackend`` that lays every pass that fits a bucket out as recorded ones are."""

    attention: PagedAttention

    @property
    def name(self) -> str:
        return f"{self.attention.name}, at fixed places,"

    def lay_out(self, rows: BatchRows) -> AttentionLayout:
        bucket = bucket_of(rows, self.attention)
        if bucket is None:
            return self.attention.lay_out(rows)
        static = StaticPass(bucket, rows.pool, self.attention)
        static.send(rows)
        return _Cut(static.plan.attention, rows.row_count, bucket.rows)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A padded layout, asked with rows that are not."""

    padded: AttentionLayout
    row_count: int
    padded_count: int

    def attend(self, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
        heads, _, head_dim = states.query.shape
        query = states.query.new_zeros((self.padded_count, heads, head_dim)).transpose(0, 1)
        query[:, : self.row_count] = states.query
        return self.padded.attend(layer, replace(states, query=query))[: self.row_count]


def graphs_disagree(
    passes: GraphedPasses, pool: KvPool, plain: RunPass, vocabulary_size: int, dtype: torch.dtype
) -> str:
    """Why ``passes`` must not be used, or an empty string where they agree with ``plain``, a pass
    over reserved requests without recordings. Leaves ``pool`` as it was."""
    if pool.free_tokens < TOKENS_NEEDED:
        return f"{pool.free_tokens} free tokens, {TOKENS_NEEDED} needed for the self-test"

    def recorded(batch: Sequence[PassRequest]) -> torch.Tensor:
        found = passes.run_requests(batch)
        return plain(batch) if found is None else found

    passes.eager_first, limit = False, TOLERANCE.get(dtype, _TOLERANCE_ELSE)
    try:
        with torch.inference_mode():
            for name, steps in few_passes(vocabulary_size).items():
                wanted = schedule_logits(pool, plain, steps)
                largest = wanted.abs().amax(dim=-1).clamp(min=1.0)
                for turn in ("recorded", "repeated"):
                    found = schedule_logits(pool, recorded, steps)
                    share = float(((found - wanted).abs().amax(dim=-1) / largest).max())
                    if passes.why_not:
                        return passes.why_not
                    if not share <= limit:  # NaN differs too
                        return (
                            f"{name}, {turn}: logits differ from the plain path's by {share:.1e} of"
                            f" the largest, limit {limit:.0e}"
                        )
    finally:
        passes.eager_first = True
    return "" if passes.replayed else "no pass was repeated from a recording"
