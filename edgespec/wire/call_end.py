"""The end of a gRPC call: the statuses that refuse one, and the errors of one that has ended."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from edgespec.core.protocol.messages import Fault, FaultCode

CALL_ENDED_ERRORS: Final = (
    grpc.aio.BaseError,
    grpc.RpcError,
    ConnectionError,
    asyncio.InvalidStateError,
    RuntimeError,
)
"""Errors of the library on a call that has ended. Timing decides which one is raised."""


async def abort_call(
    context: Any, code: grpc.StatusCode, details: str, metadata: Any = ()
) -> NoReturn:
    """End the call with this status; never returns.

    If the client has left meanwhile, the call counts as cancelled."""
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.AbortError:
        raise
    except CALL_ENDED_ERRORS as error:
        raise asyncio.CancelledError(f"the client left before its refusal: {error}") from None
    raise AssertionError("abort raises")


STATUS_OF_FAULT: Final = {
    FaultCode.RESYNC: grpc.StatusCode.ABORTED,
    FaultCode.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    FaultCode.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    FaultCode.VOCABULARY_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    FaultCode.CONTEXT_TOO_LONG: grpc.StatusCode.OUT_OF_RANGE,
    FaultCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FaultCode.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    FaultCode.INTERNAL: grpc.StatusCode.INTERNAL,
    FaultCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
}
# Most characters of a status. It travels in a header, and peers refuse long ones. The Fault message
# carries the whole text.
_MAX_DETAILS_CHARS: Final = 512


async def refuse(context: Any, fault: Fault) -> NoReturn:
    """End the call with the status of ``fault``.

    The metadata give the time to wait for any gRPC client: in whole seconds as in HTTP, and in
    milliseconds as in gRPC's own retries."""
    advice: tuple[tuple[str, str], ...] = ()
    if (wait_s := fault.retry_after_s) > 0.0:
        whole, milliseconds = str(math.ceil(wait_s)), str(math.ceil(wait_s * 1e3))
        advice = ("retry-after", whole), ("grpc-retry-pushback-ms", milliseconds)
    await abort_call(
        context, STATUS_OF_FAULT[fault.code], fault.message[:_MAX_DETAILS_CHARS], advice
    )
