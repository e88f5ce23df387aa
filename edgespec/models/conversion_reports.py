"""Reports about the conversion of a GGUF file, from the code that converts to the command that
shows them.

A conversion happens wherever a model reference is resolved first. Programs that use edgespec as a
library see nothing of it unless they call ``watch_conversions``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The state of one conversion."""

    file: str
    """Name of the GGUF file, or of the model if it has another one, as in Ollama's store."""
    types: str
    """Types of its tensors with their numbers, such as ``211 Q4_1, 61 F32``."""
    written_type: str
    """Type of the matrices in the folder: float32, float16 or bfloat16."""
    done_tensors: int
    tensors: int
    done_bytes: int
    total_bytes: int
    elapsed_s: float
    relative_error: float
    """Error of rounding so far: the root of the summed squares of the differences over that of the
    values. 0 if nothing is rounded."""
    folder: Path | None = None
    """The finished folder; None while the conversion runs."""


ConversionObserver = Callable[[ConversionReport], None]
_observers: list[ConversionObserver] = []


def watch_conversions(observer: ConversionObserver | None) -> None:
    """Call ``observer`` after each tensor of every conversion in this process from now on, in the
    thread that converts, instead of the observer so far. None stops that."""
    _observers[:] = [] if observer is None else [observer]


def report_conversion(report: ConversionReport) -> None:
    """Hand ``report`` to the observer, if there is one."""
    for observer in _observers:
        observer(report)
