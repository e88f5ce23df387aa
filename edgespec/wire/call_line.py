"""The line in which unary calls wait for their turn: ``Info``, health and reflection.

The budget (``core/verifier/call_budget.py``) says how long; here the caller is held that long, or
told RESOURCE_EXHAUSTED when it finds no place in the line.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.traffic_budget import CallBudget, CallLimits
from edgespec.wire.call_end import abort_call
from edgespec.wire.peer_address import peer_address
from edgespec.wire.refusals import Refusals


def caller(peer: str, credential: Credential) -> str:
    """Who waits in a line: the peer, and whose key it showed. So no key can fill the line of others
    that call from the same address, such as a proxy's."""
    return f"{peer} (key {credential.name!r})" if credential.name else peer


def payer(peer: str, credential: Credential) -> str:
    """Whose share it is that a call or a message is charged to: the key's, from whatever address,
    or the peer's where no key was shown."""
    return f"key {credential.name!r}" if credential.name else peer


def retry_metadata(wait_s: float) -> tuple[tuple[str, str], ...]:
    """What a status carries besides, so that any gRPC client learns when to come back: whole
    seconds as HTTP has it, and milliseconds as gRPC's own retries do. 0: no advice."""
    if wait_s <= 0.0:
        return ()
    milliseconds = math.ceil(wait_s * 1e3)
    return ("retry-after", str(math.ceil(wait_s))), ("grpc-retry-pushback-ms", str(milliseconds))


class CallLine:
    """One line for all callers, in which each peer has a rate of its own."""

    def __init__(self, limits: CallLimits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._budget = CallBudget(limits, clock())
        self._refusals = Refusals()

    async def turn(self, context: Any, credential: Credential = ANYBODY) -> None:
        """Wait until the call of ``context`` has its turn. Aborts it when the line is too long."""
        address = peer_address(str(context.peer()))
        peer = caller(address, credential)
        wait_s = self._budget.turn(peer, self._clock(), payer(address, credential))
        if wait_s > self._limits.max_wait_s:
            text = (
                f"{peer} asks too often: the wait would be {wait_s:.1f} s, "
                f"the limit is {self._limits.max_wait_s:g} s"
            )
            advice = retry_metadata(wait_s - self._limits.max_wait_s)
            await self._refusals.hold(peer)
            await abort_call(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text, advice)
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)


class SideServices(grpc.aio.ServerInterceptor):
    """Puts the calls of all services but ``own`` into a line: the library's health and reflection
    services would answer a peer that asks in a loop as fast as it can."""

    def __init__(self, own: str, line: CallLine) -> None:
        self._own, self._line = f"/{own}/", line

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The handler of the method, with a wait before each request that it reads."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(self._own):
            return handler
        parts = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._one(handler.unary_unary), *parts)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._many(handler.unary_stream), *parts)
        return grpc.stream_stream_rpc_method_handler(self._each(handler.stream_stream), *parts)

    def _one(self, answer: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def in_turn(request: Any, context: Any) -> Any:
            await self._line.turn(context)
            return await answer(request, context)

        return in_turn

    def _many(self, answer: Callable[[Any, Any], Any]) -> Any:
        async def in_turn(request: Any, context: Any) -> None:
            await self._line.turn(context)
            await answer(request, context)

        return in_turn

    def _each(self, answer: Callable[[Any, Any], Any]) -> Any:
        async def in_turn(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async def paced() -> AsyncIterator[Any]:
                async for request in requests:
                    await self._line.turn(context)
                    yield request

            async for reply in answer(paced(), context):
                yield reply

        return in_turn
