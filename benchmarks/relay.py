"""A TCP relay on this machine: a way to the verifier that has an address of its own and can fail.

Peers are told apart by their address, so clients of one machine need relays to be several peers.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any


class Relay:
    """Carries connections to 127.0.0.1:``port``, there seen as coming from ``source``.

    Use as an async context manager; ``address`` is where it listens.
    """

    def __init__(self, port: int, source: str = "127.0.0.1") -> None:
        self.address = ""
        self.connections = 0
        """Carried so far."""
        self._port, self._source = port, source
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """End all connections at once, as the death of a process does."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    def stop_carrying(self) -> None:
        """Be a black hole: connections stay, nothing passes any more in either direction."""
        self._flows.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            far = await asyncio.open_connection(
                "127.0.0.1", self._port, local_addr=(self._source, 0)
            )
        except OSError:  # no verifier there
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self.connections += 1
        self._writers.add(far[1])
        for one_way in ((reader, far[1]), (far[0], writer)):
            task = asyncio.create_task(self._carry(*one_way))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()
