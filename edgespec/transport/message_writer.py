"""How a stream writes: messages that nobody waits for, and few of them under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from edgespec.transport.front_call import FrontCall
from edgespec.transport.shielded_call import ShieldedCall


class MessageWriter(Protocol):
    """Writes to one call. ``FrontCall`` is one."""

    @property
    def busy(self) -> bool:
        """Whether no write may be begun: as many as there may be have not ended."""

    @property
    def under_way(self) -> bool:
        """Whether a write has not ended."""

    def begin(self, payload: bytes, ended: Callable[[BaseException | None], None]) -> None:
        """Begin to write; ``ended`` hears what went wrong, None for a good end. Not when it is
        ``busy``."""

    async def settle(
        self, unless: asyncio.Future[Any] | None = None, timeout_s: float | None = None
    ) -> None:
        """Wait for the writes under way, if any. Raises ``InterruptedOperation`` when ``unless``
        comes first, ``TimeoutError`` after that time."""

    async def write(self, payload: bytes) -> None:
        """Write to the end. Raises what went wrong."""


class CallWriter:
    """The writer of a gRPC call of this process: one write at a time."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._call: ShieldedCall[None] = ShieldedCall()

    @property
    def busy(self) -> bool:
        """As ``MessageWriter`` says, and so do the others."""
        return self._call.busy

    @property
    def under_way(self) -> bool:
        return self._call.busy

    def begin(self, payload: bytes, ended: Callable[[BaseException | None], None]) -> None:
        self._call.begin(self._context.write(payload), ended)

    async def settle(
        self, unless: asyncio.Future[Any] | None = None, timeout_s: float | None = None
    ) -> None:
        await self._call.settle(unless, timeout_s)

    async def write(self, payload: bytes) -> None:
        await self._call.take(lambda: self._context.write(payload))


def writer_of(context: Any) -> MessageWriter:
    """The writer of a call, whoever has taken it."""
    return context if isinstance(context, FrontCall) else CallWriter(context)
