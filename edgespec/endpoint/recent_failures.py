"""The latest requests that failed, and why, for the status page.

They are kept in memory. An error message may quote the request that it refuses, so only messages
about the state of the endpoint are kept. For other errors the name of the parameter and the code
are kept.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Final

from edgespec.endpoint.request_json import ApiError

MAX_FAILURES: Final = 20
_MAX_PATH: Final = 80
_MAX_WHY: Final = 300
_UNQUOTED: Final = frozenset((401, 403, 408, 413, 415, 429, 501, 503, 529))
"""Statuses whose messages quote no text of a prompt."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed request, or several equal ones in a row."""

    path: str
    status: int
    why: str
    request_id: str
    """Name of the latest request, which log lines have."""
    at_s: float
    """Time of the latest one, in seconds since 1970."""
    count: int = 1


class RecentFailures:
    """The latest ``MAX_FAILURES`` failures. Equal ones are one entry with a count, so that one
    client that tries again and again hides no other."""

    def __init__(self) -> None:
        self._by_cause: dict[tuple[str, int, str], Failure] = {}

    def add(self, path: str, error: ApiError, request_id: str = "") -> None:
        """Add a failed request."""
        path, why = path[:_MAX_PATH], _explain(error)[:_MAX_WHY]
        cause = (path, error.status, why)
        earlier = self._by_cause.pop(cause, None)
        count = 1 if earlier is None else earlier.count + 1
        self._by_cause[cause] = Failure(
            path=path,
            status=error.status,
            why=why,
            request_id=request_id,
            at_s=time.time(),
            count=count,
        )
        if len(self._by_cause) > MAX_FAILURES:
            del self._by_cause[next(iter(self._by_cause))]

    @property
    def latest(self) -> list[dict[str, Any]]:
        """The failures as plain values, the latest first."""
        return [asdict(one) for one in reversed(self._by_cause.values())]


def _explain(error: ApiError) -> str:
    if error.status in _UNQUOTED:
        return error.message
    if error.status >= 500:
        return "a failure on this device; its log has the details"
    words = [error.code or "invalid_request"]
    if error.param:
        words.append(f"at {error.param}")
    return " ".join(words)
