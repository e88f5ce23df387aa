"""Which span of its own a device opens a stream for, as W3C's trace context says it in a header."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

HEADER: Final = "traceparent"
_FORM: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def trace_parent_in(metadata: Iterable[tuple[str, Any]]) -> str:
    """The value of the header if it has the form it must have; else empty."""
    for name, value in metadata:
        if name == HEADER and isinstance(value, str) and _FORM.fullmatch(value):
            return value
    return ""
