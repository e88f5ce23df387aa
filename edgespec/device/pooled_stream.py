"""A stream to one of several verifiers, watched: what happens on it decides where to go next.

Nothing of a verifier that may not continue the text gets through: its greeting is held against the
model that began the text before the session sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Final, Protocol

from edgespec.core.association import failover_events as ev
from edgespec.core.ports import DeviceStream, LinkError
from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    Downlink,
    Fault,
    ModelIdentity,
    Opened,
    Uplink,
)

# A verifier that answers though its stream is quiet is asked less and less often.
_LONGEST_QUIET_S: Final = 12.0
# For a verifier of another model to take back the session that it has opened.
_TAKE_BACK_S: Final = 0.5


class Pool(Protocol):
    """Whom a stream tells what happens on it."""

    @property
    def quiet_s(self) -> float:
        """How long nothing may be heard before somebody asks."""

    def clock(self) -> float: ...

    def tell(self, stream: PooledStream, event: ev.RouteEvent) -> None:
        """``PooledStream.leave`` may be called before this returns."""

    def let_go(self, stream: PooledStream) -> None: ...

    def begins_with(self, route: int, model: ModelIdentity, address: str) -> None: ...


class PooledStream:
    """``ports.DeviceStream``. When it ends, ``LinkError.again_s`` says whether another verifier can
    be tried at once; a fault gets through when none can."""

    def __init__(self, pool: Pool, route: int, address: str, inner: DeviceStream) -> None:
        self.route, self.address = route, address
        self._pool, self._inner = pool, inner
        self._left: LinkError | None = None
        self._closed = self._progressed = False
        self._quiet_s = pool.quiet_s
        self._heard_s = pool.clock()
        self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._listen)

    async def send(self, message: Uplink) -> None:
        if self._left is not None:
            raise self._left
        await self._inner.send(message)

    async def receive(self) -> Downlink:
        if self._left is not None:
            raise self._left
        try:
            message = await self._inner.receive()
        except LinkError as error:
            if self._left is None:
                self._pool.tell(self, ev.Broke(self.route, str(error), error.retryable))
            if self._left is None:
                raise
            raise self._left from error
        self._heard_s, self._quiet_s = self._pool.clock(), self._pool.quiet_s
        match message:
            case Commit():
                if message.tokens and not self._progressed:
                    self._progressed = True
                    self._pool.tell(self, ev.Progressed(self.route))
            case Opened():
                await self._greeted(message)
            case Fault():
                return self._refused(message)
        return message

    async def close(self) -> None:
        self._closed = True
        self._timer.cancel()
        self._pool.let_go(self)
        await self._inner.close()

    def leave(self, error: LinkError) -> None:
        """From now on the stream says ``error``, and nothing else."""
        self._left = self._left or error
        self._timer.cancel()

    async def hang_up(self) -> None:
        """End the wait of whoever reads, after ``leave``."""
        await self._inner.close()

    async def _greeted(self, opened: Opened) -> None:
        model = ModelIdentity.of(opened)
        self._pool.begins_with(self.route, model, self.address)
        self._pool.tell(self, ev.Greeted(self.route, model))
        if self._left is None:
            return
        with contextlib.suppress(LinkError, TimeoutError):  # it would keep the place for its lease
            async with asyncio.timeout(_TAKE_BACK_S):
                await self._inner.send(Cancel())
        raise self._left

    def _refused(self, fault: Fault) -> Fault:
        event = ev.Refused(self.route, fault.code, fault.message, fault.retry_after_s)
        self._pool.tell(self, event)
        left = self._left
        if left is None:
            return fault
        if left.again_s == 0.0 or left.retryable != fault.code.retryable:
            raise left
        return replace(fault, message=str(left), retry_after_s=left.again_s or 0.0)

    def _listen(self) -> None:
        """Nothing may have been heard for long enough to ask whether anybody is there."""
        if self._closed or self._left is not None:
            return
        silent_s = self._pool.clock() - self._heard_s
        wait_s = self._quiet_s - silent_s
        if wait_s <= 0.0:
            self._quiet_s = min(2 * self._quiet_s, _LONGEST_QUIET_S)
            wait_s = self._quiet_s
            self._pool.tell(self, ev.Quiet(self.route))
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._listen)
