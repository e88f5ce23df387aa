"""Memory for the bodies of requests: one sum over all clients, from the first byte of a body until
its request was read.

A body occupies memory only as its bytes arrive, so a client that announces a large body and sends
nothing occupies nothing. Large bodies together may occupy three quarters of the memory, so that
small requests always find room. One client may occupy three quarters too, unless all clients are on
this machine. If there is no room, the body that has received nothing for longest is dropped. If all
of them still receive bytes, the new one is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from edgespec.endpoint.request_json import ApiError

SMALL_BYTES: Final = 1 << 18
"""Bodies up to this size may use the last quarter of the memory. Larger ones are parsed one at a
time, since their parsed values take many times as much memory as their text."""
STALLED_S: Final = 2.0
"""Age of the last received bytes from which a body may be dropped to make room for another."""
_SHARE: Final = 0.75
_RETRY_AFTER_S: Final = 1


class Body:
    """The received bytes of one request. ``BodyRoom.open`` creates it; it occupies memory until
    ``close``, which its user calls when the parsed values are no longer needed."""

    def __init__(self, room: BodyRoom, client: str, drop: Callable[[], None]) -> None:
        self._room, self.client, self._drop = room, client, drop
        self.content = bytearray()
        self.held_bytes = 0
        self.is_receiving = True
        """Whether more bytes are expected. Only such a body is dropped to make room for another."""
        self.was_dropped = False
        self.received_at_s = room.now()

    @property
    def is_large(self) -> bool:
        return self.held_bytes > SMALL_BYTES

    def add(self, data: bytes) -> None:
        """Append received bytes. Raises ``ApiError`` 503 if there is no room for them."""
        self._room.occupy(self, len(data))
        self.content += data

    def take_content(self) -> bytes:
        """Return all bytes and drop the copy here. The memory counts as occupied until
        ``close``."""
        self.is_receiving = False
        content, self.content = bytes(self.content), bytearray()
        return content

    def copy_content(self) -> bytes:
        """Return all bytes and keep them for another time, until ``close``."""
        self.is_receiving = False
        return bytes(self.content)

    def drop(self) -> None:
        """Close this body to make room for another, and call its ``drop`` callback."""
        self.was_dropped = True
        self.close()
        self._drop()

    def close(self) -> None:
        """Release the memory. A second call does nothing."""
        self.is_receiving = False
        self.content = bytearray()
        self._room.release(self)


class BodyRoom:
    """Memory for bodies, ``max_bytes`` in all. Unless ``shared_by_clients``, one client may occupy
    everything."""

    def __init__(
        self,
        max_bytes: int,
        *,
        shared_by_clients: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes, self._is_shared, self.now = max_bytes, shared_by_clients, now
        self.held_bytes = 0
        self._bodies: set[Body] = set()

    def open(self, client: str, announced_bytes: int, drop: Callable[[], None]) -> Body:
        """Return an empty body for a request of ``client`` that announces this length (0 if none).

        ``drop`` is called if the body is dropped while its bytes still arrive. Raises ``ApiError``
        503 if there is no room for the announced length now; then no byte of the body needs to be
        read."""
        body = Body(self, client, drop)
        self._make_room(body, announced_bytes)
        self._bodies.add(body)
        return body

    def occupy(self, body: Body, size_bytes: int) -> None:
        """Occupy memory for further bytes of ``body``. Raises ``ApiError`` 503 if there is none."""
        body.received_at_s = self.now()
        self._make_room(body, size_bytes)
        body.held_bytes += size_bytes
        self.held_bytes += size_bytes

    def release(self, body: Body) -> None:
        if body in self._bodies:
            self._bodies.remove(body)
            self.held_bytes -= body.held_bytes
            body.held_bytes = 0

    def _make_room(self, body: Body, size_bytes: int) -> None:
        while (refusal := self._find_refusal(body, size_bytes)) is not None:
            stalled = [
                one
                for one in self._bodies_of(refusal.client)
                if one is not body and one.is_receiving and one.held_bytes
                if self.now() - one.received_at_s >= STALLED_S
            ]
            if not stalled:
                raise ApiError(503, refusal.text, code="bodies_full", retry_after_s=_RETRY_AFTER_S)
            min(stalled, key=lambda one: one.received_at_s).drop()

    def _find_refusal(self, body: Body, size_bytes: int) -> _Refusal | None:
        """Return why ``body`` cannot grow by this much, or None if it can."""
        is_large = body.held_bytes + size_bytes > SMALL_BYTES
        share = int(_SHARE * self.max_bytes)
        limit = share if is_large else self.max_bytes
        if self.held_bytes + size_bytes > limit:
            why = (
                f"the requests that are being read hold {self.held_bytes} bytes of the {limit}"
                f" that {'large ' if is_large else ''}bodies may hold"
                " (endpoint.max_bodies_bytes): try again"
            )
            return _Refusal(why, None)
        of_client = sum(one.held_bytes for one in self._bodies_of(body.client))
        if self._is_shared and of_client + size_bytes > share:
            why = (
                f"the requests of this client that are being read hold {of_client} bytes of the"
                f" {share} that one client may hold (of endpoint.max_bodies_bytes): try again"
            )
            return _Refusal(why, body.client)
        return None

    def _bodies_of(self, client: str | None) -> list[Body]:
        """Return the bodies of this client, or of all clients if it is None."""
        return [one for one in self._bodies if client in (None, one.client)]


@dataclass(frozen=True, slots=True)
class _Refusal:
    text: str
    client: str | None
    """The client whose own bodies fill its share. None: the bodies of all clients fill the
    memory."""
