"""A TCP gate before a verifier: whoever is behind it can be killed and replaced in no time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any


class Gate:
    """Carries connections to 127.0.0.1:``port``; None: nobody is there, they are reset.

    Use as an async context manager; ``address`` is where it listens.
    """

    def __init__(self, port: int | None) -> None:
        self.address, self.port = "", port
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Gate:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        self.kill()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """As the death of a process: connections are reset, and nobody is there until ``port`` is
        set again."""
        self.port = None
        for writer in tuple(self._writers):
            writer.transport.abort()

    def swallow(self) -> None:
        """From now on connections come about, and nothing passes in either direction."""
        self._flows.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self.port is None:
                raise ConnectionRefusedError
            far = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
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
