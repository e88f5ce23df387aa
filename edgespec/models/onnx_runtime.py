"""The one place that imports onnxruntime, with its telemetry off.

Official builds from 1.29 on report to their maker: a persistent device id, the processor, the names
of graphs and how often they run. ``edgespec.TELEMETRY_OFF`` keeps that part from being created. A
program that imported onnxruntime before edgespec is too late for the variable; the call below then
stops all events that follow.
"""

from __future__ import annotations

import onnxruntime as ort

__all__ = ["ort"]

ort.disable_telemetry_events()
