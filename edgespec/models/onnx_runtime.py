"""The only module that imports onnxruntime, with its telemetry off.

Official builds from 1.29 on report to their maker: a persistent device id, the processor, the names
of graphs and how often they run. ``edgespec.TELEMETRY_OFF`` prevents the part that reports. If a
program imported onnxruntime before edgespec, that variable comes too late; then the call below
stops all later events.
"""

from __future__ import annotations

import onnxruntime as ort

__all__ = ["ort"]

ort.disable_telemetry_events()
