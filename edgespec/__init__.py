"""edgespec: speculative decoding between edge devices and a verifier.

The names below are loaded when they are first used, so that ``import edgespec`` costs nothing. The
import does one thing: it turns the telemetry of other libraries off (``TELEMETRY_OFF``).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec.api import *

__version__ = "0.1.0"

TELEMETRY_OFF = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime 1.29 and later: a device id, models, timings
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, transformers and hf_xet
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",  # vLLM across several machines
    "DO_NOT_TRACK": "1",  # what others agreed on
}
"""Environment variables that keep dependencies from reporting to their makers.

They are set here, because every program of this project imports this module first, and some of the
libraries read their variable once. Child processes inherit them. The values always win: no command
of edgespec reports anything to anybody (docs/security.md)."""
os.environ.update(TELEMETRY_OFF)

__all__ = [
    "TLS",
    "Agent",
    "AgentConfig",
    "Chunk",
    "Completion",
    "ConnectError",
    "Constraint",
    "ConstraintError",
    "ConstraintKind",
    "Draft",
    "EdgespecError",
    "FaultCode",
    "FinishReason",
    "GenerationError",
    "GenerationStats",
    "GenerationStream",
    "GenerationTimeout",
    "InvalidRequest",
    "Link",
    "LocalVerifier",
    "ModelInfo",
    "Overloaded",
    "Policy",
    "Refused",
    "SamplingFields",
    "SamplingParams",
    "SetupError",
    "SyncAgent",
    "SyncGenerationStream",
    "TokenKind",
    "TokenScore",
    "Unauthenticated",
    "Usage",
    "__version__",
    "connect",
    "run_verifier",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    return getattr(importlib.import_module("edgespec.api"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
