"""The pages for people: the chat at ``/`` and the status at ``/status``.

Each page is one document with its style and its script inside. Its content security policy lets
these two run and nothing else, and admits requests to the endpoint alone. A page holds no number
and no text before its script has fetched them, so it needs no API key.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgespec.device.status import StatusSource
from edgespec.endpoint.service import Endpoint

_ASSETS: Final = Path(__file__).parent / "assets"
CHAT: Final = "chat"
STATUS: Final = "status"
_SCRIPTS: Final[Mapping[str, Sequence[str]]] = {
    CHAT: ("dom", "markdown", "stream", "conversations", "replay", "chat"),
    STATUS: ("dom", "status"),
}
"""Scripts of each page, in the order in which they run."""
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def chat_route() -> Route:
    """Return the route of the chat, which reaches the endpoint by its API alone."""
    return Route("/", _serve(CHAT))


def status_routes(status: StatusSource, endpoint: Endpoint | None = None) -> list[Route]:
    """Return the routes of the status page, for an application that runs in the agent's event loop.
    The page shows addresses, counts and reasons, and no text of requests or outputs."""

    async def serve_numbers(request: Request) -> Response:
        status.refresh_for_display()
        after = request.query_params.get("after", "0")
        after_event = int(after) if re.fullmatch("[0-9]{1,15}", after) else 0
        numbers = status.snapshot(after_event).as_json()
        if endpoint is not None:
            numbers["endpoint"] = _endpoint_status(endpoint)
        return JSONResponse(numbers, headers=_HEADERS)

    return [Route("/status", _serve(STATUS)), Route("/status.json", serve_numbers)]


def rendered_page(name: str) -> tuple[bytes, str]:
    """Return a page and its content security policy."""
    page, style = (_read(f"{name}.{kind}") for kind in ("html", "css"))
    script = "".join(_read(f"{one}.js") for one in _SCRIPTS[name])
    page = page.replace("STYLE", style).replace("SCRIPT", script)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none';"
        f" style-src '{_csp_digest(style)}'; script-src '{_csp_digest(script)}'"
    )
    return page.encode(), policy


def _serve(name: str) -> Any:
    page, policy = rendered_page(name)
    headers = {**_HEADERS, "Content-Security-Policy": policy}

    async def serve_page(request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    return serve_page


def _endpoint_status(endpoint: Endpoint) -> dict[str, Any]:
    models = [
        {"name": one.name, "context_length": one.context_length, "parent": one.parent}
        for one in endpoint.models.listed
    ]
    return {
        "models": models,
        "needs_key": bool(endpoint.key),
        "can_chat": endpoint.tokenizer.chat_template() is not None,
        "generations_running": endpoint.admission.running,
        "max_concurrent": endpoint.settings.max_concurrent,
        "requests_waiting": endpoint.admission.waiting,
        "failures": endpoint.failures.latest,
    }


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _csp_digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
