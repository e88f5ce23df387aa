"""edgespec: speculative decoding between edge devices and a verifier.

The names below are loaded when they are first used, so that ``import edgespec`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec.api import *

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "AgentConfig",
    "Chunk",
    "Constraint",
    "ConstraintError",
    "ConstraintKind",
    "FinishReason",
    "GenerationError",
    "SamplingParams",
    "SetupError",
    "SyncAgent",
    "TokenKind",
    "TokenScore",
    "__version__",
    "connect",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    return getattr(importlib.import_module("edgespec.api"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
