"""The HTTP server: which connections and requests it accepts, its time limits, and its orderly
stop.

A connection on which nothing moves is closed: a request that does not arrive, or a response that is
not read. If there are too many connections, the one that has been idle for longest is closed. A
client that still sends after it was answered can read its response: the rest of its request is read
and dropped for a while, since closing a connection with unread bytes resets it.

Three checks need only the head of a request. On loopback, ``Host`` must name this machine, because
a web page whose own name resolves to 127.0.0.1 (DNS rebinding) sends another. An ``Origin`` must be
this endpoint's, this machine's or an allowed one. An API key, if one is configured, is required for
everything but ``/health`` and the pages. The key is compared in constant time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import socket
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, Final

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from edgespec.config.common import host_of, is_loopback
from edgespec.config.device import ANY_ORIGIN, EndpointSection
from edgespec.endpoint import messages, ollama
from edgespec.endpoint.recent_failures import RecentFailures
from edgespec.endpoint.request_json import ApiError
from edgespec.endpoint.service import Endpoint
from edgespec.operating_system import max_open_files
from edgespec.telemetry.logs import request_id

HEALTH: Final = "/health"
_PATHS_WITHOUT_KEY: Final = (HEALTH, "/", "/status")
"""Paths that need no API key. The pages contain no numbers and ask their user for the key."""
FAILURES: Final = "edgespec.failures"
"""Key of an ASGI scope: the ``RecentFailures`` of the endpoint. Absent where none are recorded."""
OLLAMA_PREFIX: Final = "/api/"
_MESSAGES_PATH: Final = re.compile(r"(/v1)?/messages(/|$)")
_MESSAGES_VERSION: Final = "anthropic-version"
OWN_ORIGINS: Final = (
    *("http://localhost:*", "https://localhost:*", "http://127.0.0.1:*", "https://127.0.0.1:*"),
    *("http://[::1]:*", "https://[::1]:*", "app://*", "file://*", "tauri://*"),
    *("capacitor://localhost", "ionic://localhost", "vscode-webview://*", "vscode-file://*"),
)
"""Origins of pages that this machine serves, and of applications installed on it. No page of the
web can have one of them, since a browser sends a page's own scheme and host. So they are trusted
like other programs of this machine. ``null`` is not among them, because any page can have it."""
EXTENSION_ORIGINS: Final = (
    "chrome-extension://*",
    "moz-extension://*",
    "safari-web-extension://*",
)
"""Origins of browser extensions. An extension may read and change pages of the web, so it is
admitted only where ``allow_local_apps`` is set."""
_NO_ORIGIN: Final = "(?!)"
_CHECKS_PER_LIMIT: Final = 4
_MAX_CHECK_INTERVAL_S: Final = 5.0
MAX_CONNECTIONS: Final = 512
_BACKLOG: Final = 512
"""Connections that the operating system queues until they are accepted."""
_ACCEPTED_AT_ONCE: Final = 8
"""Connections accepted before the event loop goes on. A surplus connection takes three turns of the
loop to close, so at most a few times as many descriptors are open beyond the limit."""
_UNREAD_BYTES: Final = 1 << 15
"""Unread bytes after which a client counts as not reading: in this process, and once more in the
operating system."""
_OTHER_DESCRIPTORS: Final = 96
"""Descriptors of the process that are reserved for files, verifiers and the event loop."""
# Time for the final events of streams that are cut off, before the server closes.
_CUT_OFF_WITHIN_S: Final = 2.0
_START_POLL_S: Final = 0.005


def is_for_messages(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's clients, which send their API's version."""
    return _MESSAGES_VERSION in Headers(scope=scope) or bool(_MESSAGES_PATH.match(scope["path"]))


def error_response(
    error: ApiError, scope: Scope, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Record an error, and return the response for it in the shape of the API to which the request
    belongs."""
    record_failure(error, scope)
    status, body = error.status, error.body
    if scope["path"].startswith(OLLAMA_PREFIX):
        status, body = ollama.error_reply(error)
    elif is_for_messages(scope):
        status, body = messages.error_reply(error)
    all_headers = {**error.headers, **(headers or {})}
    return JSONResponse(body, status_code=status, headers=all_headers)


def record_failure(error: ApiError, scope: Scope) -> None:
    """Record a failed request for the status page."""
    failures: RecentFailures | None = scope.get(FAILURES)
    if failures is not None:
        failures.add(scope["path"], error, request_id.get())


def has_key(headers: Headers, key: str) -> bool:
    """Return whether a request has the API key, as a bearer or as Anthropic's clients send it."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    sent_keys = [bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    equal = [hmac.compare_digest(_digest(one), _digest(key)) for one in sent_keys]
    return any(equal)


class Guard:
    """ASGI middleware that checks the head of every request. An empty ``key`` requires no API
    key. ``max_body_bytes`` is the largest body that a request may announce."""

    def __init__(
        self, app: ASGIApp, key: str, settings: EndpointSection, max_body_bytes: int
    ) -> None:
        self._app, self._key, self._settings = app, key, settings
        self._max_body_bytes = max_body_bytes
        self._origins = re.compile(origin_pattern(settings))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets; a server without lifespan events sends no other type
        try:
            self._check(scope, Headers(scope=scope))
        except ApiError as error:
            # The body was not read, so the connection cannot carry another request.
            response = error_response(error, scope, {"Connection": "close"})
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        settings, host = self._settings, headers.get("host", "")
        name = host_of(host)
        is_local = bool(name) and is_loopback(name)
        if is_loopback(settings.host) and not is_local and name not in settings.allow_hosts:
            why = f"this endpoint is for this machine only, and is not called {name[:200]!r}"
            raise ApiError(403, f"{why}; see endpoint.allow_hosts", code="foreign_host")
        origin = headers.get("origin")
        is_own = origin is not None and bool(host) and origin.partition("://")[2] == host
        if origin is not None and not (is_own or self._origins.fullmatch(origin)):
            raise foreign_origin(origin)
        needs_no_key = scope["path"] in _PATHS_WITHOUT_KEY or scope["method"] == "OPTIONS"
        if self._key and not needs_no_key and not has_key(headers, self._key):
            why = "no key was shown: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            if "authorization" in headers or "x-api-key" in headers:
                why = "the key shown is not the right one"
            raise ApiError(401, why, code="invalid_api_key")
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may have seen another end of this request, and the rest as the next one.
            why = "the request has both Content-Length and Transfer-Encoding"
            raise ApiError(400, why, code="two_lengths")
        encoding = headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            why = f"the request has Content-Encoding {encoding[:40]!r}: send it without compression"
            raise ApiError(415, why, code="unsupported_encoding")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_body_bytes:
            raise too_large(self._max_body_bytes, length)


def origin_pattern(settings: EndpointSection) -> str:
    """Return the regular expression of accepted origins: the configured ones; the pages and
    applications of this machine if the endpoint is on loopback or ``allow_local_apps`` is set; and
    with that also browser extensions."""
    admits_apps = settings.allow_local_apps
    own = OWN_ORIGINS if admits_apps or is_loopback(settings.host) else ()
    extensions = EXTENSION_ORIGINS if admits_apps else ()
    origins = (*own, *extensions, *settings.allow_origins)
    return "|".join(map(_origin_regex, origins)) or _NO_ORIGIN


def _origin_regex(pattern: str) -> str:
    """Return the regular expression of a pattern like ``https://*.chat.example`` or
    ``http://localhost:*``. With ``:*`` the port is optional."""
    if pattern == ANY_ORIGIN:
        return ".*"
    scheme, _, rest = pattern.lower().partition("://")
    rest = rest.removesuffix({"http": ":80", "https": ":443"}.get(scheme, ":"))
    host, any_port = rest.removesuffix(":*"), rest.endswith(":*")
    written = "[^/:@]*".join(map(re.escape, host.split("*")))
    return f"{re.escape(scheme)}://{written}" + ("(:[0-9]+)?" if any_port else "")


def foreign_origin(origin: str) -> ApiError:
    """Return the error for a web page whose origin is not allowed."""
    why = f"pages of {origin[:200]!r} may not ask here"
    remedy = "it is let in by --allow-origin ORIGIN (endpoint.allow_origins)"
    if re.fullmatch("|".join(map(_origin_regex, (*OWN_ORIGINS, *EXTENSION_ORIGINS))), origin):
        remedy += ", or with all local pages, applications and extensions by --allow-local-apps"
    if origin == "null":
        remedy = "a page without an origin is let in only by --allow-origin '*', with all others"
    return ApiError(403, f"{why}; {remedy}", code="foreign_origin")


def too_large(limit: int, size: object) -> ApiError:
    """Return the error for a body of ``size`` bytes, where ``limit`` are allowed."""
    why = f"the request has {size} bytes, but at most {limit} are read (endpoint.max_body_bytes)"
    return ApiError(413, f"{why}: send less, such as smaller pictures", code="too_large")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).digest()


class WatchedConnection(H11Protocol):
    """One of at most ``max_connections`` connections. ``settings`` limits the time for a request's
    head to arrive and for unread output to be read. A subclass sets both."""

    max_connections: ClassVar[int]
    settings: ClassVar[EndpointSection]
    cycle: RequestResponseCycle | None  # type: ignore[assignment]
    """The request that is answered, or was answered last. uvicorn declares it without None, but it
    is None before the first request."""
    _waiting_since = 0.0
    """Time at which the current wait began, or of the last response."""
    _awaited_before: int | None = None
    """Value of ``_awaited_bytes`` at the last check."""
    _timer: asyncio.TimerHandle | None = None
    _is_lingering = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw_transport = transport
        # A client that does not read is noticed when these buffers are full. The operating system's
        # default buffer would take megabytes, which is more than most outputs.
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        transport.set_write_buffer_limits(_UNREAD_BYTES)
        super().connection_made(_LingeringTransport(transport, self))
        self._waiting_since = self.loop.time()
        self._check_progress()
        if not self._has_room():
            self.app = _refuse_connection

    def data_received(self, data: bytes) -> None:
        if not self._is_lingering:
            super().data_received(data)

    def start_lingering(self) -> bool:
        """Return whether a connection that should close must be read for a while longer, because
        its client has not sent all of its request. The next check closes it for good."""
        if self._is_lingering or self.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            return False
        self._is_lingering, self._waiting_since = True, self.loop.time()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._waiting_since = self.loop.time()
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        is_answered = self.cycle is None or self.cycle.response_complete
        unread = self.transport.get_write_buffer_size()
        return (is_answered or self.transport.is_closing()) and not unread

    @property
    def _awaited_bytes(self) -> int | None:
        """Number of unread bytes; 0 while the server waits for a request; None while the client
        waits for the server."""
        unread = self.transport.get_write_buffer_size()
        return unread or (0 if self.is_idle else None)

    def _check_progress(self) -> None:
        now_s, awaited = self.loop.time(), self._awaited_bytes
        if awaited is None or awaited != self._awaited_before:
            self._waiting_since = now_s if awaited != 0 else self._waiting_since
            self._awaited_before = awaited
        head_s, write_s = self.settings.body_within_s, self.settings.write_within_s
        within_s = write_s if awaited else head_s
        if awaited is not None and now_s - self._waiting_since >= within_s:
            self.transport.abort()
            return
        interval_s = min(min(head_s, write_s) / _CHECKS_PER_LIMIT, _MAX_CHECK_INTERVAL_S)
        self._timer = self.loop.call_later(interval_s, self._check_progress)

    def _has_room(self) -> bool:
        """Return whether this connection is within the limit. If there are too many, the one that
        has been idle for longest is closed. Connections that are closing do not count."""
        connections = (one for one in self.connections if isinstance(one, WatchedConnection))
        open_connections = [one for one in connections if not one._is_closing]
        if len(open_connections) <= self.max_connections:
            return True
        others = [one for one in open_connections if one is not self and one.is_idle]
        if not others:
            return False
        min(others, key=lambda one: one._waiting_since).transport.abort()
        return True

    @property
    def _is_closing(self) -> bool:
        return self._raw_transport.is_closing() and not self._raw_transport.get_write_buffer_size()


class _LingeringTransport(asyncio.Transport):
    """Transport of a connection, with the members that uvicorn and ``WatchedConnection`` use. While
    the client still sends a request that was already answered, ``close`` only ends the sending
    half."""

    def __init__(self, transport: asyncio.Transport, connection: WatchedConnection) -> None:
        self._transport, self._connection = transport, connection
        self._half_closed = False

    def close(self) -> None:
        if self._transport.is_closing() or not self._connection.start_lingering():
            self._transport.close()
            return
        self._half_closed = True
        self._transport.write_eof()
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._half_closed or self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return self._transport.get_extra_info(name, default)


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    why = "too many connections are open, and requests are being answered on all of them"
    error = ApiError(503, why, code="too_many_connections", retry_after_s=1)
    response = error_response(error, scope, {"Connection": "close"})
    await response(scope, receive, send)


def connection_limit() -> int:
    """Return the limit on connections: ``MAX_CONNECTIONS``, or fewer if the limit on open files
    (``ulimit -n``) is low. Windows has no such limit."""
    allowed = max_open_files()
    if allowed is None:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, allowed - _OTHER_DESCRIPTORS))


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the command line."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class EndpointServer:
    """Serves ``app`` on ``listeners``, which all have one port. Call ``start``, then ``stop``.

    ``died`` is set if the server ends by itself. ``endpoint`` None: the app has no generations that
    need draining. ``max_connections`` limits the connections; None: ``most_connections()``."""

    def __init__(
        self,
        endpoint: Endpoint | None,
        app: ASGIApp,
        listeners: Sequence[socket.socket],
        settings: EndpointSection,
        *,
        max_connections: int | None = None,
    ) -> None:
        self._endpoint, self._listeners = endpoint, tuple(listeners)
        self.port = int(listeners[0].getsockname()[1])
        self._drain_s = settings.drain_s
        bounds = {"max_connections": max_connections or connection_limit(), "settings": settings}
        config = uvicorn.Config(
            app,
            http=type("Connection", (WatchedConnection,), bounds),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # responses carry client errors; other failures are logged
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
        return len(self._server.server_state.connections)

    async def start(self) -> None:
        """Return once requests are accepted. Raises the error that keeps the server from
        starting."""
        self._task = asyncio.create_task(self._server.serve(sockets=list(self._listeners)))
        self._task.add_done_callback(lambda task: self.died.set())
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended before it began")
            await asyncio.sleep(_START_POLL_S)
        for one in self._listeners:
            one.listen(_BACKLOG)  # asyncio used backlog for both; this one is larger

    async def stop(self, drain_s: float | None = None) -> None:
        """Refuse new requests, let running ones go on for ``drain_s`` seconds (None: as
        configured), cut off the rest with an error, and close. A second call does nothing."""
        if self._task is None:
            return
        task, self._task = self._task, None
        endpoint = self._endpoint
        if endpoint is not None:
            endpoint.begin_stop()
            await _wait_until_idle(endpoint, self._drain_s if drain_s is None else drain_s)
            if endpoint.running_count:
                endpoint.cut_off_requests()
                await _wait_until_idle(endpoint, _CUT_OFF_WITHIN_S)
        self._server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
        if endpoint is not None:
            endpoint.close()


async def _wait_until_idle(endpoint: Endpoint, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await endpoint.idle.wait()
