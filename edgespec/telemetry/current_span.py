"""The span that the caller of a device is in, for the verifier's span to hang on.

Whoever embeds a device in a traced program gets one trace through both. A program without
OpenTelemetry has not loaded it, and then nothing is asked.
"""

from __future__ import annotations

import sys

_LIBRARY = "opentelemetry.trace"


def current_trace_parent() -> str:
    """The running task's span as W3C's ``traceparent``; empty where there is none."""
    if _LIBRARY not in sys.modules:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")
