"""Reader of a request's JSON. Every mistake is an ``ApiError`` that names the field and what it
must be, in the shape and with the status codes of OpenAI's API.

Python's JSON parser holds the interpreter until it is done, and many small values take it a hundred
times as long as one large text. So lists, objects and texts are counted before parsing begins.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from edgespec.core.protocol.checks import is_unicode
from edgespec.core.protocol.messages import MAX_TOKEN_ID, FaultCode
from edgespec.device.agent import GenerationError

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# Status and error code for each fault of a verifier. All other faults mean that no verifier is
# available now.
_ERRORS_BY_FAULT: Final[Mapping[FaultCode | None, tuple[int, str]]] = {
    FaultCode.CONTEXT_TOO_LONG: (400, "context_length_exceeded"),
    FaultCode.INVALID: (400, "invalid_request"),
    FaultCode.UNKNOWN_MODEL: (404, "model_not_found"),
    FaultCode.INTERNAL: (503, "verifier_failed"),
    FaultCode.UNAUTHENTICATED: (503, "verifier_refused_key"),
    FaultCode.VOCABULARY_MISMATCH: (503, "verifier_does_not_fit"),
}
_MAX_NAMES_SHOWN: Final = 16
VERIFIER_RETRY_S: Final = 5
"""Seconds after which a client should try again when no verifier is available."""


class ApiError(Exception):
    """An error that becomes the response to a request. ``param`` names the parameter at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def with_sent_names(self, names: Mapping[str, str]) -> ApiError:
        """Return this error with field names as the client sent them. ``names`` maps our names, or
        beginnings of longer names such as ``messages[2]``, to the sent ones."""
        param = None if self.param is None else sent_name(self.param, names)

        def sent(word: re.Match[str]) -> str:
            is_name = word.start() == 0 or word[0] == self.param or not word[0].isalpha()
            return sent_name(word[0], names) if is_name else word[0]

        message = re.sub(r"(?<!['\w])[a-z][\w.\[\]]*(?<!\.)", sent, self.message)
        return ApiError(
            self.status, message, param=param, code=self.code, retry_after_s=self.retry_after_s
        )

    @property
    def body(self) -> dict[str, Any]:
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": _escape_surrogates(self.message),
            "type": _TYPES.get(self.status, usual),
            "param": None if self.param is None else _escape_surrogates(self.param),
            "code": self.code,
        }
        return {"error": error}

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="edgespec"'
        return headers


def sent_name(name: str, names: Mapping[str, str]) -> str:
    """Return the name of a field as the client sent it. The longest known beginning is replaced."""
    known = [
        one for one in names if name.startswith(one) and name[len(one) :][:1] in ("", ".", "[")
    ]
    if not known:
        return name
    longest = max(known, key=len)
    return names[longest] + name[len(longest) :]


@contextmanager
def errors_with_sent_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in each ``ApiError`` that leaves the block to the names that the client
    sent."""
    try:
        yield
    except ApiError as error:
        raise error.with_sent_names(names) from None


def _escape_surrogates(text: str) -> str:
    """Return ``text`` with unpaired surrogates, which a request may contain, written as escapes."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def invalid_request(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable_error(message: str, code: str = "verifier_unavailable") -> ApiError:
    return ApiError(503, message, code=code, retry_after_s=VERIFIER_RETRY_S)


def fallback_refusal(answered_by: str, error: ApiError) -> ApiError:
    """Return the error for a request that the model of this device cannot serve, because of
    ``error``, while no verifier can be reached."""
    why = f"no verifier can be reached, and {answered_by} cannot serve this request"
    return ApiError(
        503,
        f"{why}: {error.message}",
        param=error.param,
        code="fallback_cannot_serve",
        retry_after_s=VERIFIER_RETRY_S,
    )


def unknown_model_error(name: str, known: Sequence[str]) -> ApiError:
    shown_value = ", ".join(map(repr, known[:_MAX_NAMES_SHOWN]))
    if hidden := known[_MAX_NAMES_SHOWN:]:
        shown_value += f" and {len(hidden)} more"
    there = f"this is {shown_value}" if len(known) == 1 else f"there are {shown_value}"
    why = f"the model {name[:200]!r} does not exist here; {there}"
    return ApiError(404, why, param="model", code="model_not_found")


def generation_error(error: GenerationError) -> ApiError:
    status, code = _ERRORS_BY_FAULT.get(error.code, (503, "verifier_unavailable"))
    if status == 503:
        return unavailable_error(str(error), code)
    param = "model" if error.code is FaultCode.UNKNOWN_MODEL else None
    return ApiError(status, str(error), param=param, code=code)


MAX_VALUES: Final = 1 << 17
"""Limit on the number of lists, objects and texts of a request together, names of fields included.
A chat of 4,096 messages has 20,482."""


def read_object(body: bytes) -> Mapping[str, Any]:
    """Return the JSON object in a body. Raises ``ApiError`` that says where the body is
    malformed."""
    if (values := _count_values(body)) > MAX_VALUES:
        why = f"the request has {values} lists, objects and texts, but at most {MAX_VALUES}"
        raise ApiError(400, why, code="too_many_values")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ApiError(400, "the request is not UTF-8", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the request is no JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise nested_too_deep() from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ApiError(400, f"the request is a JSON {kind}, not an object", code="invalid_json")
    return value


def check_members(body: bytes, max_members: int) -> None:
    """Raise ``ApiError`` if the lists and objects in a body have more than ``most`` members.

    Counting commas takes a thousandth of the time of parsing, so it does not delay other
    requests."""
    if body.count(b",") < max_members:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now a quote begins or ends a text
    if (members := b"".join(plain.split(b'"')[::2]).count(b",") + 1) > max_members:
        why = f"the request has {members} values, but at most {max_members}"
        raise ApiError(400, why, code="too_many_values")


def nested_too_deep() -> ApiError:
    """Return the error for nesting beyond what can be parsed or written again."""
    return ApiError(400, "the request is nested too deep", code="invalid_json")


def _count_values(body: bytes) -> int:
    """Return the number of lists, objects and texts, or any number beyond the limit. The cheap
    upper bound is returned if it is within the limit; the exact scan leaves out what stands inside
    texts."""
    lists = body.count(b"[") + body.count(b"{")
    if (most := lists + body.count(b'"') // 2) <= MAX_VALUES:
        return most
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now a quote begins or ends a text
    if (texts := body.count(b'"') // 2) > MAX_VALUES:
        return texts
    outside = b"".join(body.split(b'"')[::2])
    return texts + outside.count(b"[") + outside.count(b"{")


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


_SHOWN_CHARACTERS = 80
_shortened = reprlib.Repr()
_shortened.maxlevel, _shortened.maxlist, _shortened.maxdict = (
    6,
    _SHOWN_CHARACTERS,
    _SHOWN_CHARACTERS,
)
_shortened.maxstring = _shortened.maxlong = 4 * _SHOWN_CHARACTERS


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a request. ``place`` is its path, such as ``messages[0].``. A field that is null
    counts as absent. ``spelling`` maps our names of fields to the names that the client sent, where
    they differ."""

    data: Mapping[str, Any]
    place: str = ""
    spelling: Mapping[str, str] = field(default_factory=dict)

    def name(self, field: str) -> str:
        """Return the field's name as the client wrote it, with its path, for errors."""
        return self.place + self.spelling.get(field, field)

    def raw(self, field: str) -> Any:
        return self.data.get(field)

    def text(self, field: str) -> str | None:
        value = self._typed(field, str, "text")
        return None if value is None else check_encodable(self.name(field), value)

    def boolean(self, field: str, absent: bool = False) -> bool:
        value = self._typed(field, bool, "true or false")
        return absent if value is None else bool(value)

    def number(self, field: str, low: float, high: float) -> float | None:
        value = self._typed(field, int | float, "a number")
        if value is not None and not low <= value <= high:
            raise self.wrong_value(field, value, f"in [{low:g}, {high:g}]")
        return None if value is None else float(value)

    def integer(self, field: str, low: int, high: int) -> int | None:
        value = self._typed(field, int | float, "a whole number")
        if value is None:
            return None
        if isinstance(value, float) and not value.is_integer():
            raise self.wrong_value(field, value, "a whole number")
        if not low <= value <= high:
            raise self.wrong_value(field, int(value), f"in [{low}, {high}]")
        return int(value)

    def sections(self, field: str, most: int | None = None) -> tuple[Fields, ...]:
        """Return a list of objects, with at most ``most`` of them; empty if the field is absent."""
        value = self._typed(field, list, "a list of objects") or ()
        if most is not None and len(value) > most:
            raise self.error(field, f"holds {len(value)} objects, but at most {most}")
        return tuple(self._section(f"{field}[{place}]", one) for place, one in enumerate(value))

    def texts(self, field: str, most: int) -> tuple[str, ...]:
        """Return a text as a tuple of one, or a list of at most ``most`` texts; empty if absent."""
        value = self.data.get(field)
        texts = [value] if isinstance(value, str) else [] if value is None else value
        if isinstance(texts, list) and len(texts) > most:
            raise self.error(field, f"holds {len(texts)} texts, but at most {most}")
        if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
            raise self.wrong_value(field, value, "text, or a list of texts")
        return tuple(check_encodable(self.name(field), one) for one in texts)

    def token_ids(self, field: str, most: int) -> tuple[int, ...]:
        value = self.data.get(field)
        if not isinstance(value, list | tuple) or len(value) > most:
            raise self.wrong_value(field, value, f"a list of at most {most} token ids")
        for one in value:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= MAX_TOKEN_ID:
                why = f"holds {shown_value(one)}, but token ids are in [0, {MAX_TOKEN_ID}]"
                raise self.error(field, why)
        return tuple(value)

    def _typed(self, field: str, kind: Any, wanted: str) -> Any:
        value = self.data.get(field)
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if value is not None and not fits:
            raise self.wrong_value(field, value, wanted)
        return value

    def section(self, field: str) -> Fields:
        """Return an object; an empty one if the field is absent."""
        value = self.data.get(field)
        return self._section(field, {} if value is None else value)

    def wrong_value(self, field: str, value: object, wanted: str) -> ApiError:
        return self.error(field, f"is {shown_value(value)}, but must be {wanted}")

    def error(self, field: str, why: str, code: str | None = None) -> ApiError:
        """Return an ``ApiError`` whose message is the field's name followed by ``why``."""
        name = self.name(field)
        return invalid_request(name, f"{name} {why}", code)

    def _section(self, field: str, value: object) -> Fields:
        if not isinstance(value, dict):
            raise self.wrong_value(field, value, "an object")
        return Fields(value, f"{self.place}{field}.")


def check_encodable(name: str, text: str) -> str:
    """Return ``text`` if UTF-8 can encode it. Raises ``ApiError`` for an unpaired surrogate."""
    if not is_unicode(text):
        raise invalid_request(name, f"{name} holds half of a surrogate pair, which is no text")
    return text


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""Made once, because ``json.dumps`` makes one for each value."""


def compact_json(value: object) -> str:
    """Return the JSON of a value, without spaces."""
    return _ENCODER.encode(value)


def shown_value(value: object) -> str:
    """Return a value as it is shown in an error, shortened. Only the shown part is converted to
    text."""
    text = _shortened.repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
