"""Memory that a verifier is granted for keys and values, from settings to the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.config.verifier import LimitsSection
from edgespec.core.device.memory import parse_budget
from edgespec.telemetry.process_memory import machine_memory

if TYPE_CHECKING:
    from edgespec.verifier.targets.pool_size import PoolBudget


def pool_budget(limits: LimitsSection) -> PoolBudget | None:
    """None where ``limits`` count tokens instead."""
    from edgespec.verifier.targets.pool_size import PoolBudget

    if not limits.kv_budget and limits.gpu_memory_utilization is None:
        return None
    return PoolBudget(
        kv=parse_budget(limits.kv_budget) if limits.kv_budget else None,
        gpu_share=limits.gpu_memory_utilization,
        rows=limits.max_rows_per_pass,
        machine=machine_memory,
    )
