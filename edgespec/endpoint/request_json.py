"""The JSON of a request, read in a time that does not let others wait.

Python's reader holds the interpreter until it is done, and many small values take it a hundred
times as long as one large text: so lists, objects and texts are counted before it begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from edgespec.endpoint.errors import ApiError

MAX_VALUES: Final = 1 << 17
"""Lists, objects and texts, names among them, together. A chat of 4,096 messages has 20,482."""


def read_object(body: bytes) -> Mapping[str, Any]:
    """The JSON object in a body. Raises ``ApiError`` saying where it is none."""
    if (values := _values(body)) > MAX_VALUES:
        why = f"the request has {values} lists, objects and texts, but at most {MAX_VALUES}"
        raise ApiError(400, why, code="too_many_values")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError:
        raise ApiError(400, "the request is not UTF-8", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the request is no JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise nested_too_deep() from None
    if not isinstance(value, dict):
        found = type(value).__name__
        raise ApiError(400, f"the request is a JSON {found}, not an object", code="invalid_json")
    return value


def nested_too_deep() -> ApiError:
    """Of lists in lists there are more than can be read, or written again."""
    return ApiError(400, "the request is nested too deep", code="invalid_json")


def _values(body: bytes) -> int:
    """How many there are, or a number beyond the limit; without looking for what is text, or for
    much of it, where that makes no difference."""
    lists = body.count(b"[") + body.count(b"{")
    if (most := lists + body.count(b'"') // 2) <= MAX_VALUES:
        return most
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now a quote begins or ends a text
    if (texts := body.count(b'"') // 2) > MAX_VALUES:
        return texts
    outside = b"".join(body.split(b'"')[::2])
    return texts + outside.count(b"[") + outside.count(b"{")


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
