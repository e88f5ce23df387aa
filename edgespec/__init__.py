"""edgespec: speculative decoding between edge devices and a verifier.

The public names are loaded on first use, so that ``import edgespec`` is quick. The import itself
only turns off the telemetry of other libraries (``TELEMETRY_OFF``).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec.api import *

__version__ = "0.2.0"

TELEMETRY_OFF = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime 1.29 and later: a device id, models, timings
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, transformers and hf_xet
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",  # vLLM across several machines
    "DO_NOT_TRACK": "1",  # a convention of several projects
}
"""Environment variables that keep dependencies from reporting to their makers.

They are set here because every program of this project imports this module first, and some
libraries read their variable only once. Child processes inherit them. These values replace any that
the user has set: no command of edgespec sends telemetry (docs/security.md)."""
os.environ.update(TELEMETRY_OFF)

__all__ = [
    "TLS",
    "Agent",
    "AgentConfig",
    "CallOptions",
    "Chunk",
    "Completion",
    "ConnectError",
    "ConnectOptions",
    "Constraint",
    "ConstraintError",
    "ConstraintKind",
    "Draft",
    "EdgespecError",
    "FaultCode",
    "FinishReason",
    "GenerateOptions",
    "GenerationError",
    "GenerationStats",
    "GenerationStream",
    "GenerationTimeout",
    "InvalidRequest",
    "Link",
    "LocalVerifier",
    "ModelInfo",
    "Overloaded",
    "PictureInput",
    "PlacedPicture",
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
    "picture_part",
    "run_verifier",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    return getattr(importlib.import_module("edgespec.api"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
