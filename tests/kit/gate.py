"""A TCP gate in front of a verifier, so that a test can kill and replace the verifier at once. A
verifier distinguishes its peers by their addresses, so clients on one machine need several gates.

The gate owns every socket and task that it makes. ``asyncio.Server`` of CPython 3.11 does not: it
leaves connections accepted in the same turn as its closing to the garbage collector, which then
warns during an unrelated test.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from functools import partial
from typing import Self

from tests.present import require

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, for 0 seconds
_FLUSH_ON_CLOSE = struct.pack("ii", 0, 0)


class Gate:
    """Carry connections to 127.0.0.1:``port``, where they seem to come from ``source``. If ``port``
    is None, no verifier exists and connections are reset.

    Use the gate as an async context manager; ``address`` is where it listens. No socket outlives
    it.
    """

    def __init__(self, port: int | None, source: str = "127.0.0.1") -> None:
        self.address, self.port, self.source = "", port, source
        self.accepted = 0
        """Number of connections so far."""
        self._flows = asyncio.Event()
        self._flows.set()
        self._listener: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._listener is not None
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self.kill()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def kill(self) -> None:
        """Act as if the verifier's process died: reset all connections, and new ones until ``port``
        is set again."""
        self.port = None
        self.cut()

    def cut(self) -> None:
        """Reset all connections, and accept new ones."""
        for task in tuple(self._connections):
            task.cancel()

    def swallow(self) -> None:
        """Accept connections from now on, but carry nothing in either direction."""
        self._flows.clear()

    def swallow_open(self) -> None:
        """Carry nothing any more on the connections that are open now, but carry new ones: the
        device has changed its network."""
        self._flows.clear()
        self._flows = asyncio.Event()
        self._flows.set()

    def _accept(self) -> None:
        with suppress(OSError):  # the client has left again
            near, _ = require(self._listener).accept()
            far = socket.socket()
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            if self.port is None:
                near.close()
                far.close()
                return
            task = asyncio.create_task(self._connection(near, far, self.port))
            self._connections.add(task)
            # The task cannot do this itself: a task that is cancelled before its first step runs
            # nothing.
            task.add_done_callback(partial(self._close, (near, far)))

    def _close(self, ends: tuple[socket.socket, ...], task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        for end in ends:
            end.close()
        if not task.cancelled():
            task.exception()  # a side that has left; the reset reports it

    async def _connection(self, near: socket.socket, far: socket.socket, port: int) -> None:
        """Carry bytes until both sides have ended, and reset the connection if anything fails or is
        cancelled."""
        self.accepted += 1
        far.bind((self.source, 0))
        await asyncio.get_running_loop().sock_connect(far, ("127.0.0.1", port))
        async with asyncio.TaskGroup() as both:
            both.create_task(self._carry(near, far, upwards=True))
            both.create_task(self._carry(far, near, upwards=False))
        for end in (near, far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _FLUSH_ON_CLOSE)

    async def _carry(self, source: socket.socket, sink: socket.socket, *, upwards: bool) -> None:
        """Carry one direction until ``source`` has ended; ``upwards`` means towards the
        verifier."""
        loop, flows = asyncio.get_running_loop(), self._flows
        while data := await loop.sock_recv(source, 1 << 16):
            await flows.wait()
            await loop.sock_sendall(sink, data)
        sink.shutdown(socket.SHUT_WR)
