"""What goes wrong, in the shape and with the status codes of OpenAI's API.

{"error": {"message": "...", "type": "invalid_request_error", "param": "n", "code": null}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgespec.core.protocol.messages import FaultCode
from edgespec.device.agent import GenerationError

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# What a refusal of the verifier is for the client of a device: status and code.
_FAULTS: Final = {
    FaultCode.CONTEXT_TOO_LONG: (400, "context_length_exceeded"),
    FaultCode.INVALID: (400, "invalid_request"),
    FaultCode.UNKNOWN_MODEL: (404, "model_not_found"),
    FaultCode.OVERLOADED: (503, "verifier_unavailable"),
    FaultCode.SHUTTING_DOWN: (503, "verifier_unavailable"),
    FaultCode.RESYNC: (503, "verifier_unavailable"),
    FaultCode.INTERNAL: (503, "verifier_failed"),
    FaultCode.UNAUTHENTICATED: (503, "verifier_refused_key"),
    FaultCode.VOCABULARY_MISMATCH: (503, "verifier_does_not_fit"),
}
_MOST_NAMED: Final = 16
VERIFIER_BACK_S: Final = 5
"""What a client is told to wait when the verifier is away."""


class ApiError(Exception):
    """Becomes the answer to a request. ``param`` names the parameter that is to blame."""

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

    @property
    def kind(self) -> str:
        """The ``type`` in the body."""
        return _TYPES.get(self.status) or (
            "server_error" if self.status >= 500 else "invalid_request_error"
        )

    @property
    def body(self) -> dict[str, Any]:
        error = {
            "message": _encodable(self.message),
            "type": self.kind,
            "param": None if self.param is None else _encodable(self.param),
            "code": self.code,
        }
        return {"error": error}

    @property
    def headers(self) -> Mapping[str, str]:
        found = {}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            found["WWW-Authenticate"] = 'Bearer realm="edgespec"'
        return found


def _encodable(text: str) -> str:
    """``text``, with half of a surrogate pair, which a request may hold, written out."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """A request that cannot be: 400, and whose fault it is."""
    return ApiError(400, message, param=param, code=code)


def stopping() -> ApiError:
    """The endpoint is about to end."""
    return ApiError(
        503,
        "this endpoint is stopping",
        code="shutting_down",
        retry_after_s=VERIFIER_BACK_S,
    )


def no_such_model(name: str, known: Sequence[str]) -> ApiError:
    """Nothing of this name is served; ``known`` is."""
    shown = ", ".join(map(repr, known[:_MOST_NAMED]))
    if more := known[_MOST_NAMED:]:
        shown += f" and {len(more)} more"
    there = f"this is {shown}" if len(known) == 1 else f"there are {shown}"
    return ApiError(
        404,
        f"the model {name[:200]!r} does not exist here; {there}",
        param="model",
        code="model_not_found",
    )


def too_many_connections() -> ApiError:
    """All places are taken by requests that are being answered."""
    return ApiError(
        503,
        "too many connections are open, and requests are being answered on all of them",
        code="too_many_connections",
        retry_after_s=1,
    )


def no_tokenizer() -> ApiError:
    """Nobody was there in time who lends this device a tokenizer."""
    return ApiError(
        503,
        "no verifier answers, and this device takes its tokenizer from one",
        code="verifier_unavailable",
        retry_after_s=VERIFIER_BACK_S,
    )


def from_generation(error: GenerationError) -> ApiError:
    """What a generation that failed is over HTTP."""
    status, code = (503, "verifier_unavailable")
    if error.code is not None:
        status, code = _FAULTS[error.code]
    retry_after_s = VERIFIER_BACK_S if status == 503 else None
    param = "model" if error.code is FaultCode.UNKNOWN_MODEL else None
    return ApiError(status, str(error), param=param, code=code, retry_after_s=retry_after_s)
