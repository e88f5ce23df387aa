"""How an agent is, for a person with a browser: ``/``, and ``/status.json`` behind it.

The page is one file: its style and script stand in it, and the content security policy names them
by their hashes, so nothing else runs and nothing is fetched but ``/status.json``. That is polled
once a second while the page is visible, with the number of the last event seen, so each event
travels once. A fetch tells the source that somebody looks: only then are idle verifiers asked.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgespec.device.status import StatusSource

_ASSETS: Final = Path(__file__).parent / "status"
_FIRST_ANSWER_S: Final = 0.5
"""How long the first fetch waits for the verifiers to answer."""
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def status_routes(status: StatusSource) -> list[Route]:
    """The routes of the page, for an application that runs in the agent's event loop. Whoever may
    fetch them sees addresses and counts, and no text."""
    page, policy = rendered_page()
    headers = {**_HEADERS, "Content-Security-Policy": policy}

    async def show(request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def numbers(request: Request) -> Response:
        asking = status.ask_soon()
        after = request.query_params.get("after", "0")
        if asking is not None and not status.asked:
            await asyncio.wait([asking], timeout=_FIRST_ANSWER_S)
        return JSONResponse(status.snapshot(_count(after)).as_json(), headers=_HEADERS)

    return [Route("/", show), Route("/status.json", numbers)]


def rendered_page() -> tuple[bytes, str]:
    """The page and the content security policy that lets it, and nothing else, run."""
    style, script = (_read(f"page.{kind}") for kind in ("css", "js"))
    page = _read("page.html").replace("STYLE", style).replace("SCRIPT", script)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none';"
        f" style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    )
    return page.encode(), policy


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _count(text: str) -> int:
    """0 for whatever is no count."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0
