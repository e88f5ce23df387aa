"""An agent's status page for tests, served over HTTP on a free port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.device.status import StatusSource
from edgespec.endpoint.app import status_routes


def _asking(app: ASGIApp, key: str) -> ASGIApp:
    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        shown = Headers(scope=scope).get("authorization")
        fine = scope["path"] == "/" or shown == f"Bearer {key}"
        await (app if fine else Response(status_code=401))(scope, receive, send)

    return guard


@contextlib.asynccontextmanager
async def status_page(source: StatusSource, key: str = "") -> AsyncIterator[str]:
    """Yields the address of the page, with a slash at its end; with a ``key`` its numbers are for
    those who show it."""
    app: ASGIApp = Starlette(routes=status_routes(source))
    if key:
        app = _asking(app, key)
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
