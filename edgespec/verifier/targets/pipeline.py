"""One target model whose layers lie on several stages: processes of this host, with links between.

Experimental. What is told to the other ranks, how they are watched and how they end is as with
tensor parallel (``tensor_parallel.py``); what a rank holds is another (``pipeline_stage.py``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import AutoConfig

from edgespec.verifier.targets.pipeline_stage import PipelineError, StageShare, check_stageable
from edgespec.verifier.targets.tensor_parallel import RankPlan, TensorParallelTarget, start_ranks


class PipelineTarget(TensorParallelTarget):
    """The last stage, which everybody talks to; ``group`` holds the others."""

    words = "layers over {} stages (experimental)"


def pipeline_target(
    path: str,
    *,
    stages: int,
    delay_ms: float = 0.0,
    pass_within_s: float = 300.0,
    device: str = "auto",
    **options: Any,
) -> PipelineTarget:
    """A ``TorchTarget`` with these options over ``stages`` processes, on CPUs. ``delay_ms`` is
    added to each link between two of them, one way.

    Raises as that does, ``PipelineError`` when the model or an option does not go with stages, and
    ``TargetLostError`` when a stage does not come up.
    """
    if device not in ("auto", "cpu"):
        raise PipelineError(
            f"device is {device!r}, but with pipeline.stages {stages} must be auto or cpu: stages"
            " compute on CPUs so far"
        )
    if options.get("quantize"):
        raise PipelineError(
            f"quantize is {options['quantize']!r}, but pipeline.stages {stages} cuts plain weights"
            " alone"
        )
    if options.get("pool_budget") is not None:
        raise PipelineError(
            "kv_budget and gpu_memory_utilization size the cache of one process, but"
            f" pipeline.stages is {stages}; give limits.max_cached_tokens instead"
        )
    check_stageable(AutoConfig.from_pretrained(path, trust_remote_code=False), stages)
    delay_s = delay_ms / 1e3
    plan = RankPlan(
        stages,
        pass_within_s,
        "pipeline.pass_within_s",
        partial(StageShare, delay_s=delay_s),
        PipelineTarget,
        delay_s,
    )
    return start_ranks(path, plan, {**options, "device": "cpu"})
