"""Where a reading comes from: the status of an agent, or the metrics of a verifier, over HTTP."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from edgespec.cli.top_view.reading import (
    Reading,
    Samples,
    agent_reading,
    parse_metrics,
    verifier_reading,
)
from edgespec.config import ConfigError
from edgespec.config.security import is_loopback

STATUS, METRICS = "/status.json", "/metrics"
WITHIN_S: Final = 5.0
_MAX_BYTES: Final = 8 << 20
Fetch = Callable[[str], str]


class UnreachableError(OSError):
    """Nothing that can be read answers there; the message names the address and the reason."""


class Source:
    """Readings of ``url``, which may leave out ``http://`` and the path: then the agent's status is
    looked for first. ``key`` is shown where there is one. Raises ``ConfigError`` for no URL."""

    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        fetch: Callable[[str, str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base, self._path = _parts(url)
        self._key, self._fetch, self._clock = key, fetch or _fetched, clock
        self._before: Samples | None = None

    @property
    def needs_two(self) -> bool:
        """Whether a rate takes two readings: it does of metrics."""
        return self._path == METRICS

    def read(self) -> Reading:
        """Raises ``UnreachableError``, and ``ReadingError`` for what is neither of the two."""
        if self._path:
            return self._read(self._path)
        try:
            found = self._read(STATUS)
        except NotThereError:
            self._path = METRICS
            return self._read(METRICS)
        self._path = STATUS
        return found

    def _read(self, path: str) -> Reading:
        if path != METRICS:
            # No event has so large a number: the timeline stays where it is.
            return agent_reading(self._fetch(f"{self.base}{path}?after=999999999999999", self._key))
        now = parse_metrics(self._fetch(f"{self.base}{path}", self._key), self._clock())
        found = verifier_reading(now, self._before)
        self._before = now
        return found


class NotThereError(UnreachableError):
    """Somebody answers there, and does not know the path."""


def _parts(url: str) -> tuple[str, str]:
    """Scheme and host, and the path if it was given."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        known = False
        parts = urlsplit("")
    path = parts.path.rstrip("/")
    if not known or path not in ("", STATUS, METRICS):
        raise ConfigError(
            f"{url!r} is no address to watch; it must be HOST:PORT, or a URL that ends with"
            f" {STATUS} or {METRICS}"
        )
    return f"{parts.scheme}://{parts.netloc}", path


def _fetched(url: str, key: str) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, headers=headers)
    host = urlsplit(url).hostname or ""
    handlers = [urllib.request.ProxyHandler({})] if is_loopback(host) else []
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=WITHIN_S) as answer:
            data = answer.read(_MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                raise NotThereError(f"{url}: not found") from error
            hint = "; it wants a key: set EDGESPEC_ENDPOINT_KEY" if error.code == 401 else ""
            raise UnreachableError(f"{url}: answered {error.code}{hint}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise UnreachableError(f"{url}: {why}") from error
    if len(data) > _MAX_BYTES:
        raise UnreachableError(f"{url}: more than {_MAX_BYTES} bytes came")
    return str(data.decode("utf-8", errors="replace"))
