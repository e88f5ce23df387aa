"""How a call ends, from the server's side, also one whose client has just left."""

from __future__ import annotations

import asyncio
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

GONE: Final = (
    grpc.aio.BaseError,
    grpc.RpcError,
    ConnectionError,
    asyncio.InvalidStateError,
    RuntimeError,
)
"""What the library raises on a call that is over; which of them depends on the moment."""


async def abort_call(
    context: Any, code: grpc.StatusCode, details: str, metadata: Any = ()
) -> NoReturn:
    """End the call with this status; never returns. If the client left while the call waited for
    its refusal, nobody hears it, and the call counts as cancelled."""
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.AbortError:
        raise
    except GONE as error:
        raise asyncio.CancelledError(f"the client left before its refusal: {error}") from None
    raise AssertionError("abort raises")
