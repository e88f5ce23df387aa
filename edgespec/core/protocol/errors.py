"""The exceptions that a user of the Python API meets.

    EdgespecError
    ├── SetupError                 a library, model, file or key is missing or cannot be used
    ├── ConstraintError            a schema or grammar cannot be kept (also a ValueError)
    │   └── ConstraintBusyError    it cannot be read now; the same one may be read later
    └── GenerationError            a generation did not reach its end
        ├── ConnectError           no verifier could be reached, or the connection to it was lost
        ├── GenerationTimeout      the ``timeout_s`` of the call was over (also a TimeoutError)
        └── Refused                a verifier ended the generation, and ``code`` says why
            ├── InvalidRequest     the same request will always be refused
            ├── Unauthenticated    the API key is missing, unknown or revoked
            └── Overloaded         the same request may succeed after ``retry_after_s``

A wrong argument, such as an empty prompt or a temperature below zero, raises Python's own
``TypeError`` or ``ValueError`` before anything is sent.
"""

from __future__ import annotations

from enum import Enum


class FaultCode(Enum):
    """The reason why a verifier ended a stream."""

    RESYNC = "resync"
    INVALID = "invalid"
    UNKNOWN_MODEL = "unknown_model"
    VOCABULARY_MISMATCH = "vocabulary_mismatch"
    CONTEXT_TOO_LONG = "context_too_long"
    OVERLOADED = "overloaded"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"
    UNAUTHENTICATED = "unauthenticated"
    """The API key is missing, unknown or revoked."""

    @property
    def retryable(self) -> bool:
        """Whether the device may open the stream again, a bounded number of times
        (``core/device/link_session.py``)."""
        return self in (
            FaultCode.RESYNC,
            FaultCode.OVERLOADED,
            FaultCode.SHUTTING_DOWN,
            FaultCode.INTERNAL,
        )


class EdgespecError(Exception):
    """The base of all exceptions that edgespec itself raises to its user."""


class SetupError(EdgespecError, RuntimeError):
    """A command cannot begin its work. The message names the cause and, if known, the remedy."""


class GenerationError(EdgespecError, RuntimeError):
    """A generation did not reach its end.

    What was yielded before it is valid: it is the beginning of the target's own output.

    Attributes:
        code: Why the verifier ended the generation, or None if it was not the verifier.
    """

    def __init__(self, message: str, code: FaultCode | None = None) -> None:
        super().__init__(message)
        self.code = code


class ConnectError(GenerationError):
    """No verifier could be reached in time, or the connection to it could not be restored."""


class GenerationTimeout(GenerationError, TimeoutError):
    """The generation took longer than the ``timeout_s`` of its call."""


class Refused(GenerationError):
    """A verifier ended the generation. ``code`` says why."""


class InvalidRequest(Refused):
    """The verifier will always refuse this request: it asks for a model, a length or a constraint
    that the verifier does not have."""


class Unauthenticated(Refused):
    """The verifier asks for an API key, and the one sent is missing, unknown or revoked."""


class Overloaded(Refused):
    """The verifier has no room now, or is shutting down.

    Attributes:
        retry_after_s: Seconds after which the verifier expects to have room; 0 if it named none.
    """

    def __init__(
        self, message: str, code: FaultCode | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message, code)
        self.retry_after_s = retry_after_s
