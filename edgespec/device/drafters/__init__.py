"""Draft models: one sequence in a cache, truncated and extended step by step.

No library is imported here, so that a device that only receives the stream needs neither numpy nor
onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

around_deaf_calls: Callable[[], AbstractContextManager[None]] = nullcontext
"""Entered around calls that hold Python's interpreter for long, in which no signal is heard:
onnxruntime builds a session in two seconds for a draft of 0.6B. A command puts here what lets a
Ctrl-C end the process."""
