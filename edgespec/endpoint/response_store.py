"""Responses that were stored, for requests that continue one (``previous_response_id``).

They are kept in memory, up to a number and a size, and the oldest makes room for a new one. A
restart loses them all. Each has its whole conversation, so a dropped one breaks no other.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgespec.endpoint.request_json import ApiError, compact_json

MAX_RESPONSES: Final = 1024
MAX_BYTES: Final = 16 << 20
"""Limit on the JSON of all stored conversations together."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body: bytes
    """The response as JSON."""
    items: bytes
    """The items of its whole conversation as JSON: its input, with the earlier turns, and its
    output."""
    input_count: int

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.items)

    @property
    def conversation(self) -> list[Any]:
        found: list[Any] = json.loads(self.items)
        return found


class ResponseStore:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, response: Mapping[str, Any], input_items: Sequence[Any]) -> None:
        """Store a finished response. One that is larger than the whole store is not kept."""
        items = [*input_items, *response["output"]]
        one = StoredResponse(
            compact_json(response).encode(), compact_json(items).encode(), len(input_items)
        )
        if one.size_bytes > self._max_bytes:
            return
        self._stored[response["id"]] = one
        self.held_bytes += one.size_bytes
        while len(self._stored) > self._max_responses or self.held_bytes > self._max_bytes:
            self.held_bytes -= self._stored.popitem(last=False)[1].size_bytes

    def find(self, identity: str, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raises ``ApiError`` 404 that says why it may be missing;
        ``param`` names the parameter that refers to it."""
        if (one := self._stored.get(identity)) is None:
            raise _not_found(identity, param)
        return one

    def delete(self, identity: str) -> None:
        """Delete a stored response. Raises ``ApiError`` 404."""
        self.held_bytes -= self.find(identity).size_bytes
        del self._stored[identity]


def _not_found(identity: str, param: str | None) -> ApiError:
    why = (
        f"the response {identity[:80]!r} is not stored here: it was sent with store false, it made"
        f" room for newer ones, its conversation has more than {MAX_BYTES} bytes, or this endpoint"
        " was restarted; send the whole input instead"
    )
    code = "previous_response_not_found" if param else "response_not_found"
    return ApiError(404 if param is None else 400, why, param=param, code=code)


def as_items(value: Any) -> Any:
    """Return the ``input`` of a request as a list of items."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value
