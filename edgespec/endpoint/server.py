"""Serves an endpoint over HTTP, from a socket that is taken at once to a stop in good order."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Generator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from edgespec.endpoint.connections import ConnectionLimits, connections_with
from edgespec.endpoint.service import Endpoint

MOST_CONNECTIONS: Final = 512
_BACKLOG: Final = 512
"""Connections that the system keeps for us until they are accepted."""
_ACCEPTED_AT_ONCE: Final = 8
"""Before the event loop goes on: it takes three turns until one that has to go is closed, so that
at most a few times as many descriptors are open beyond the most connections."""
_OTHER_DESCRIPTORS: Final = 96
"""Of what a process may have open, kept for files, verifiers and the event loop."""
# After a stream was told that it ends: for the words to leave.
_LAST_WORDS_S: Final = 2.0
_STARTED_EVERY_S: Final = 0.005


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is a free one. Raises ``OSError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(_BACKLOG)
    except BaseException:
        found.close()
        raise
    return found


def most_connections() -> int:
    """``MOST_CONNECTIONS``, or as many as the system's limit of descriptors (``ulimit -n``) has
    room for."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, allowed - _OTHER_DESCRIPTORS))


class _Server(uvicorn.Server):
    """Signals are the command line's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class EndpointServer:
    """``app`` on ``listener``; ``start``, then ``stop``. ``died`` is set if it ends by itself."""

    def __init__(
        self,
        endpoint: Endpoint,
        app: ASGIApp,
        listener: socket.socket,
        *,
        most: int | None = None,
    ) -> None:
        """``most`` connections; None: ``most_connections()``."""
        self._endpoint, self._listener = endpoint, listener
        self.port = int(listener.getsockname()[1])
        """The port listened on."""
        settings = endpoint.settings
        limits = ConnectionLimits(
            most or most_connections(), settings.body_within_s, settings.write_within_s
        )
        config = uvicorn.Config(
            app,
            http=connections_with(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # what a client did wrong it is told; our own failures are logged
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=_ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self.died = asyncio.Event()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._server.server_state.connections)

    async def start(self) -> None:
        """Returns once requests are answered. Raises what keeps the server from it."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        self._task.add_done_callback(lambda task: self.died.set())
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended before it began")
            await asyncio.sleep(_STARTED_EVERY_S)
        self._listener.listen(_BACKLOG)  # asyncio has set what is accepted at once, which is fewer

    async def stop(self, drain_s: float | None = None) -> None:
        """Take nothing new, let running requests go on for ``drain_s`` (None: as configured), tell
        the rest, close. A second call does nothing."""
        if self._task is None:
            return
        task, self._task = self._task, None
        self._endpoint.begin_stop()
        await self._until_idle(self._endpoint.settings.drain_s if drain_s is None else drain_s)
        if self._endpoint.active:
            self._endpoint.cut()
            await self._until_idle(_LAST_WORDS_S)
        self._server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)

    async def _until_idle(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._endpoint.idle()
