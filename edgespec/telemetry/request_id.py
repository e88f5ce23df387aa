"""The short name under which everything that is said about one stream can be found.

It is drawn by the verifier when the stream begins, and says nothing about the session, whose id is
half of what it takes to resume it. Whatever runs for the stream finds it in its context.
"""

from __future__ import annotations

import secrets
from contextvars import ContextVar

_BYTES = 5
request_id: ContextVar[str] = ContextVar("edgespec_request_id", default="")
"""Of the stream that the running task serves; empty where it serves none."""
trace_parent: ContextVar[str] = ContextVar("edgespec_trace_parent", default="")
"""The device's own span that the stream belongs to, as W3C's ``traceparent``; empty if untold."""


def new_request_id() -> str:
    """A fresh id, of 10 hexadecimal digits: of a million streams, (1e6)**2 / 2 / 16**10 = 0.45
    pairs have the same one."""
    return secrets.token_hex(_BYTES)
