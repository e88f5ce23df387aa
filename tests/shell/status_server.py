"""An agent's status page for tests, served over HTTP on a free port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette

from edgespec.agent.status import StatusSource
from edgespec.endpoint.status_page import status_routes


@contextlib.asynccontextmanager
async def status_page(source: StatusSource) -> AsyncIterator[str]:
    """Yields the address of the page, with a slash at its end."""
    app = Starlette(routes=status_routes(source))
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            assert not serving.done(), "the server did not start"
            await asyncio.sleep(0)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        await serving
        await source.close()
