"""Pass times from data sheets: what a machine could do at best, until someone measures it.

Theory of operation. A pass reads the weights once and the cached keys and values of its sessions,
and multiplies every row with every weight; it takes as long as the slower of the two, plus the
engine's own time (Williams, Waterman, Patterson, CACM 2009; Chen, "Transformer Inference
Arithmetic", 2022). Real engines reach a share of either limit: ``_EFFICIENCY``, which published
serving figures lie around. A report that used one of these says "computed, not measured".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edgespec.telemetry.cost_profile import TimeLaw

_EFFICIENCY: Final = 0.7
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float
    flops: float
    """Dense, in the precision of the model's products."""
    overhead_s: float
    """Launches, sampling, scheduling: a pass takes at least this beyond the work itself."""


@dataclass(frozen=True, slots=True)
class Model:
    parameters: float
    weight_bytes: float
    """Of one parameter."""
    context_bytes: float
    """Keys and values of one cached token, over all layers."""


# Vendors' data sheets: memory bandwidth, dense throughput (bf16 where weights are 16 or 8 bit).
MACHINES: Final = {
    "h200": Machine(4.8e12, 989e12, 2e-3),
    "h100": Machine(3.35e12, 989e12, 2e-3),
    "a100-80g": Machine(2.04e12, 312e12, 2e-3),
    "rtx-4090": Machine(1.01e12, 165e12, 2e-3),
    "jetson-orin-nano": Machine(102e9, 20e12, 3e-3),
    "laptop-cpu": Machine(60e9, 1e12, 1e-3),
}
# Published configurations: 2 (K and V) * layers * KV heads * head dimension * 2 bytes.
MODELS: Final = {
    "llama-3.1-70b-fp8": Model(70.6e9, 1.0, 2 * 80 * 8 * 128 * 2),
    "llama-3.1-8b-bf16": Model(8.03e9, 2.0, 2 * 32 * 8 * 128 * 2),
    "qwen3-32b-fp8": Model(32.8e9, 1.0, 2 * 64 * 8 * 128 * 2),
    "llama-3.2-1b-int4": Model(1.24e9, 0.56, 2 * 16 * 8 * 64 * 2),
    "qwen3-0.6b-int4": Model(0.6e9, 0.56, 2 * 28 * 8 * 128 * 2),
}


def roofline_law(name: str, share: float = 1.0) -> TimeLaw:
    """The law of MODEL@MACHINE, ``share`` of whose layers lie on this machine. Raises
    ``ValueError`` that names what is known."""
    model_name, _, machine_name = name.partition("@")
    if model_name not in MODELS or machine_name not in MACHINES:
        raise ValueError(
            f"roofline is {name!r}, but must be MODEL@MACHINE with a model of "
            f"{', '.join(MODELS)} and a machine of {', '.join(MACHINES)}"
        )
    model, machine = MODELS[model_name], MACHINES[machine_name]
    read_s = share * model.parameters * model.weight_bytes / machine.bytes_per_s
    row_s = share * 2.0 * model.parameters / machine.flops
    table = tuple(
        (float(rows), machine.overhead_s + max(read_s, rows * row_s) / _EFFICIENCY)
        for rows in _ROWS
    )
    context_s = share * model.context_bytes / machine.bytes_per_s / _EFFICIENCY
    return TimeLaw(table, context_s)
