"""What a client may do with its connection before, between and behind its requests.

A connection is let go on which nothing moves: a request that is not sent, an answer that is not
read. Where there are too many, one that asks nothing makes room for one that may, so that nobody
is kept out by who only holds places. A client that still sends when it has been answered can read
its answer: what it sends is read and dropped for a while, since a connection that is closed with
unread bytes is reset, and the answer with it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.endpoint.errors import too_many_connections
from edgespec.endpoint.guard import error_response

_LOOKS: Final = 4
_LONGEST_LOOK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """``most`` connections; a request's head has to arrive within ``head_within_s``, and of what
    waits to be read some has to leave within ``write_within_s``."""

    most: int
    head_within_s: float
    write_within_s: float

    @property
    def look_s(self) -> float:
        """How often each connection is looked at."""
        shortest = min(self.head_within_s, self.write_within_s)
        return min(shortest / _LOOKS, _LONGEST_LOOK_S)


class WatchedConnection(H11Protocol):
    """One of them, as ``connections_with`` makes its class."""

    limits: ClassVar[ConnectionLimits]
    _since = 0.0
    """When it began to wait for what it waits for, or answered last."""
    _waited: int | None = None
    """What ``_waits`` was at the last look."""
    _timer: asyncio.TimerHandle | None = None
    _lingers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._whole = transport
        super().connection_made(_ClosesInOrder(transport, self))  # type: ignore[arg-type]
        self._since = self.loop.time()
        self._timer = self.loop.call_later(self.limits.look_s, self._look)
        if not self._has_room():
            self.app = _refuse

    def data_received(self, data: bytes) -> None:
        if not self._lingers:
            super().data_received(data)

    def lingers(self) -> bool:
        """Whether a connection that is to be closed has to be read on for a while, because its
        client has not sent all of its request. The next look at it closes it for good."""
        if self._lingers or self.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            return False
        self._lingers, self._since = True, self.loop.time()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    @property
    def idle(self) -> bool:
        """Whether nothing is asked or answered here."""
        answered = getattr(self.cycle, "response_complete", True)  # no cycle: nothing was asked
        unread = self.transport.get_write_buffer_size()
        return (answered or self.transport.is_closing()) and not unread

    @property
    def _waits(self) -> int | None:
        """For how many bytes to be read, or 0: for a request; None: the client waits for us."""
        unread = self.transport.get_write_buffer_size()
        return unread or (0 if self.idle else None)

    def _look(self) -> None:
        now, waits = self.loop.time(), self._waits
        if waits is None or waits != self._waited:
            self._since = now if waits != 0 else self._since
            self._waited = waits
        within_s = self.limits.write_within_s if waits else self.limits.head_within_s
        if waits is not None and now - self._since >= within_s:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(self.limits.look_s, self._look)

    def _has_room(self) -> bool:
        """Whether this connection is within the limit, if need be because another one is let go:
        the one that has asked nothing for longest. Those that are going already leave room."""
        every = (one for one in self.connections if isinstance(one, WatchedConnection))
        stay = [one for one in every if not one._going]
        if len(stay) <= self.limits.most:
            return True
        others = [one for one in stay if one is not self and one.idle]
        if not others:
            return False
        min(others, key=lambda one: one._since).transport.abort()
        return True

    @property
    def _going(self) -> bool:
        """Whether its descriptor is about to be closed."""
        return self._whole.is_closing() and not self._whole.get_write_buffer_size()


class _ClosesInOrder:
    """A connection's transport, whose ``close`` ends our half alone while the client still sends a
    request that was answered already."""

    def __init__(self, transport: asyncio.Transport, connection: WatchedConnection) -> None:
        self._transport, self._connection = transport, connection
        self._half_closed = False

    def close(self) -> None:
        if self._transport.is_closing() or not self._connection.lingers():
            self._transport.close()
            return
        self._half_closed = True
        self._transport.write_eof()
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._half_closed or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def connections_with(limits: ConnectionLimits) -> type[WatchedConnection]:
    """The class of connections that have these limits."""
    return type("Connection", (WatchedConnection,), {"limits": limits})


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a connection too many."""
    response = error_response(too_many_connections(), {"Connection": "close"})
    await response(scope, receive, send)
