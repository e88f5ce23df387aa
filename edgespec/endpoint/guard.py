"""Who may ask: checked before anything of a request is read but its head.

* On loopback the ``Host`` header must name this machine. A web page whose own name is made to
  stand for 127.0.0.1 (DNS rebinding) is told apart by that name.
* A request with an ``Origin`` comes from a web page: only pages of this endpoint and those that
  were let in may ask.
* Where a key is set it must be shown, for everything but ``/health`` and the page; it is compared
  in a time that does not depend on where it differs.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.config.endpoint import ANY_ORIGIN
from edgespec.config.security import host_of, is_loopback
from edgespec.endpoint.errors import ApiError

HEALTH: Final = "/health"
_OPEN: Final = (HEALTH, "/")
"""What is shown without the key: the page at ``/`` holds no number, and asks for the key itself."""


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer that an error is."""
    every = {**error.headers, **(headers or {})}
    return JSONResponse(error.body, status_code=error.status, headers=every)


def shows_key(headers: Headers, key: str) -> bool:
    """Whether ``Authorization: Bearer KEY`` is there and right."""
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(_digest(shown.strip()), _digest(key))


class Guard:
    """ASGI middleware. ``key`` empty: none is asked for."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str,
        on_loopback: bool,
        allow_hosts: tuple[str, ...],
        allow_origins: tuple[str, ...],
        max_body_bytes: int,
    ) -> None:
        self._app, self._key = app, key
        self._on_loopback, self._allow_hosts = on_loopback, frozenset(allow_hosts)
        self._allow_origins = frozenset(allow_origins)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets; a server without lifespan events asks for nothing else
        try:
            self._check(scope, Headers(scope=scope))
        except ApiError as error:
            # The body was not read, so the connection cannot be used any further.
            response = error_response(error, {"Connection": "close"})
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        name = host_of(host)
        if self._on_loopback and not (name and is_loopback(name)) and name not in self._allow_hosts:
            raise ApiError(
                403,
                f"this endpoint is for this machine only, and is not called {name[:200]!r}; see"
                " endpoint.allow_hosts",
                code="foreign_host",
            )
        self._check_origin(headers.get("origin"), host)
        public = scope["path"] in _OPEN or scope["method"] == "OPTIONS"
        if self._key and not public and not shows_key(headers, self._key):
            shown = (
                "the key shown is not the right one"
                if "authorization" in headers
                else ("no key was shown: send it as 'Authorization: Bearer KEY'")
            )
            raise ApiError(401, shown, code="invalid_api_key")
        if "content-length" in headers and "transfer-encoding" in headers:
            # What a proxy took for the end of this request may be the middle of another's.
            raise ApiError(
                400,
                "the request has both Content-Length and Transfer-Encoding",
                code="two_lengths",
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_body_bytes:
            raise too_large(self._max_body_bytes, length)

    def _check_origin(self, origin: str | None, host: str) -> None:
        if origin is None or {origin, ANY_ORIGIN} & self._allow_origins:
            return
        if host and origin.partition("://")[2] == host:
            return
        raise ApiError(
            403,
            f"web pages of {origin[:200]!r} may not ask here; see --allow-origin",
            code="foreign_origin",
        )


def too_large(limit: int, size: object) -> ApiError:
    """For a body beyond ``limit``."""
    return ApiError(
        413, f"the request has {size} bytes, but at most {limit} are read", code="too_large"
    )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).digest()
