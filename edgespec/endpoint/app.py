"""The endpoint as an ASGI application: which path is what."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Final

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from edgespec import __version__
from edgespec.config.security import is_loopback
from edgespec.device.status import StatusSource
from edgespec.endpoint.counts import registry_of
from edgespec.endpoint.errors import ApiError, no_such_model
from edgespec.endpoint.generation_route import GenerationRoute
from edgespec.endpoint.guard import HEALTH, Guard, error_response, shows_key
from edgespec.endpoint.models import ALIAS, ServedModel
from edgespec.endpoint.service import Endpoint
from edgespec.endpoint.status_page import status_routes
from edgespec.telemetry.agent_metrics import AgentCollector

_WITHOUT_EVENTS: Final = 1 << 62
_log = logging.getLogger(__name__)


def build_app(endpoint: Endpoint, status: StatusSource | None = None) -> ASGIApp:
    """All routes, guarded. With ``status`` there are the page of it and the agent's metrics."""
    places = _Places(endpoint, status)
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", GenerationRoute(endpoint, endpoint.chat), methods=["POST"]),
        Route("/v1/completions", GenerationRoute(endpoint, endpoint.completion), methods=["POST"]),
        Route("/v1/models", places.models),
        Route("/v1/models/{name:path}", places.model),
        Route(HEALTH, places.health),
        Route("/metrics", places.metrics),
        Route("/version", places.version),
        *(() if status is None else status_routes(status)),
    ]
    app: ASGIApp = Starlette(
        routes=routes,
        exception_handlers={ApiError: _refused, HTTPException: _no_such_place, Exception: _failed},
    )
    settings = endpoint.settings
    app = Guard(
        app,
        key=endpoint.key,
        on_loopback=is_loopback(settings.host),
        allow_hosts=settings.allow_hosts,
        allow_origins=settings.allow_origins,
        max_body_bytes=settings.max_body_bytes,
    )
    if settings.allow_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allow_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After",),
        )
    return app


def health_of(endpoint: Endpoint) -> dict[str, Any]:
    """What ``/health`` says: ``status`` is ``ok``, ``waiting`` (no verifier is ready) or
    ``stopping``."""
    ready = endpoint.verifiers.ready
    status = "stopping" if endpoint.stopping else "ok" if ready else "waiting"
    return {
        "status": status,
        "version": __version__,
        "model": endpoint.models.name,
        "verifiers": [one.as_json() for one in endpoint.verifiers.statuses],
        "texts_running": endpoint.admission.running,
        "requests_waiting": endpoint.admission.waiting,
    }


class _Places:
    """The routes that do not generate."""

    def __init__(self, endpoint: Endpoint, status: StatusSource | None) -> None:
        self._endpoint, self._status = endpoint, status
        self._registry = registry_of(endpoint.counts, endpoint.gauges)
        if status is not None:
            self._registry.register(AgentCollector(partial(status.snapshot, _WITHOUT_EVENTS)))

    async def health(self, request: Request) -> Response:
        """Without the key only whether it serves."""
        found = health_of(self._endpoint)
        key = self._endpoint.key
        if key and not shows_key(request.headers, key):
            found = {"status": found["status"]}
        return JSONResponse(found, status_code=503 if self._endpoint.stopping else 200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        if self._status is not None:
            self._status.ask_soon()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"Content-Type": content_type})

    async def models(self, request: Request) -> Response:
        listed = self._endpoint.models.listed
        data = [self._model(one.name, one) for one in listed]
        return JSONResponse({"object": "list", "data": data or [self._model(self._usual)]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        chosen = await self._endpoint.choose_model(name)
        if chosen.served is None and name not in (self._usual, ALIAS):
            raise no_such_model(name, (self._usual,))
        return JSONResponse(self._model(self._usual, chosen.served))

    @property
    def _usual(self) -> str:
        return self._endpoint.models.name

    def _model(self, name: str, served: ServedModel | None = None) -> dict[str, Any]:
        """As OpenAI has it, with the fields that vLLM's server adds; ``name`` where nobody has told
        yet."""
        return {
            "id": name if served is None else served.name,
            "object": "model",
            "created": self._endpoint.started,
            "owned_by": "edgespec",
            "parent": None if served is None else served.parent,
            "max_model_len": None if served is None else served.context_length,
        }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _no_such_place(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    why = {
        404: f"there is no {what} here; see /v1/models, /v1/chat/completions, /v1/completions",
        405: f"{what} is not how this is asked",
    }
    found = ApiError(error.status_code, why.get(error.status_code, error.detail))
    return error_response(found, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    _log.error("answering a request failed", exc_info=error)
    return error_response(ApiError(500, f"the endpoint failed: {type(error).__name__}"))
