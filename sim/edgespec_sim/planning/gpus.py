"""What a GPU costs an hour and what it holds: list prices, each with its source and date.

Prices are for one GPU on demand, in US dollars, without tax, storage and egress; they change and
differ by a factor of three between providers, so a plan that matters gives its own
(``--cost-per-hour``). Memory is the data sheet's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edgespec_sim.scenario.rooflines import MODELS

# Room for activations, the runtime and fragmentation.
_USABLE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Gpu:
    price_per_hour: float
    source: str
    date: str
    """When the source said so."""
    memory_bytes: float


_HYPERSTACK: Final = "Hyperstack, on demand (hyperstack.cloud/gpu-pricing)"
GPUS: Final = {
    "h200": Gpu(3.99, _HYPERSTACK, "2026-08-26", 141e9),
    "h100": Gpu(3.20, _HYPERSTACK, "2026-08-26", 80e9),
    "a100-80g": Gpu(1.60, _HYPERSTACK, "2026-08-26", 80e9),
    "rtx-4090": Gpu(0.29, "OpenRelay (openrelay.inc/gpu-pricing-calculator)", "2026-09-20", 24e9),
}
"""By the names of ``rooflines.MACHINES``; ``h100`` and ``a100-80g`` are the SXM ones."""


def gpu_named(name: str) -> Gpu:
    """Raises ``ValueError`` that names the known ones."""
    if name not in GPUS:
        raise ValueError(f"gpu is {name!r}, but must be one of {', '.join(GPUS)}")
    return GPUS[name]


def sessions_that_fit(model_name: str, gpu_name: str, tokens: float) -> int:
    """Sessions of so many cached tokens beside the weights. Raises ``ValueError`` where not even
    the weights fit, or for names that are not known."""
    gpu = gpu_named(gpu_name)
    if model_name not in MODELS:
        raise ValueError(f"model is {model_name!r}, but must be one of {', '.join(MODELS)}")
    model = MODELS[model_name]
    weights = model.parameters * model.weight_bytes
    free = _USABLE * gpu.memory_bytes - weights
    fit = int(free / (model.context_bytes * tokens))
    if fit < 1:
        raise ValueError(
            f"the weights of {model_name} take {weights / 1e9:.0f} GB and a session of"
            f" {tokens:.0f} tokens {model.context_bytes * tokens / 1e9:.2f} GB, but of the"
            f" {gpu.memory_bytes / 1e9:.0f} GB of {gpu_name} at most {_USABLE:.0%} are to be used"
        )
    return fit
