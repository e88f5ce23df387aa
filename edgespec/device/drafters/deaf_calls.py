"""Calls that hold Python's interpreter for long: meanwhile no other thread runs and no signal is
heard.

onnxruntime does so while it builds a session: two seconds for a draft of 0.6B on the CPU, eighteen
where OpenVINO compiles it. A command enters ``around`` there what lets a Ctrl-C end the process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

around: Callable[[], AbstractContextManager[None]] = nullcontext
