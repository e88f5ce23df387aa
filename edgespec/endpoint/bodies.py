"""Memory for the bodies of requests: one sum over all clients, from the first byte until a request
was read.

A body takes room as its bytes come, so a client that announces much and sends nothing holds
nothing. Large bodies may take three quarters of the room, so that small requests always find some;
so may one client, unless all clients are on this machine. Where there is no room, the body whose
bytes have stopped coming for longest is dropped; if all of them move on, the new one is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from edgespec.endpoint.request_json import ApiError

SMALL_BYTES: Final = 1 << 18
"""Bodies up to this size may use the last quarter of the room. Larger ones are read one after the
other, since the values in them take many times as much memory as their text."""
STALLED_S: Final = 2.0
"""A body whose last bytes came longer ago is dropped if another one needs its room."""
_SHARE: Final = 0.75
_RETRY_AFTER_S: Final = 1


class Body:
    """The bytes of one request that came so far. ``close`` it when its values are not used any
    more; until then it takes room. Make it with ``BodyRoom.open``."""

    def __init__(self, room: BodyRoom, client: str, drop: Callable[[], None]) -> None:
        self._room, self.client, self._drop = room, client, drop
        self.content = bytearray()
        self.held_bytes = 0
        self.is_coming = True
        """Whether more bytes are expected: only such a body is dropped for another one."""
        self.was_dropped = False
        self.moved_s = room.now()

    @property
    def is_large(self) -> bool:
        return self.held_bytes > SMALL_BYTES

    def add(self, data: bytes) -> None:
        """Append bytes that came. Raises ``ApiError`` 503 if there is no room for them."""
        self._room.take(self, len(data))
        self.content += data

    def whole(self) -> bytes:
        """Return all bytes, and let go of them here: the room stays taken until ``close``."""
        self.is_coming = False
        content, self.content = bytes(self.content), bytearray()
        return content

    def drop(self) -> None:
        """End this body for another one's sake."""
        self.was_dropped = True
        self.close()
        self._drop()

    def close(self) -> None:
        """Give the room back; a second call does nothing."""
        self.is_coming = False
        self.content = bytearray()
        self._room.give_back(self)


class BodyRoom:
    """Room for ``most_bytes`` of bodies; ``shared_by_clients`` false: one client may have all."""

    def __init__(
        self,
        most_bytes: int,
        *,
        shared_by_clients: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_bytes, self._shared, self.now = most_bytes, shared_by_clients, now
        self.held_bytes = 0
        self._bodies: set[Body] = set()

    def open(self, client: str, announced_bytes: int, drop: Callable[[], None]) -> Body:
        """Return an empty body for a request of ``client`` that announces this length (0 if none).

        ``drop`` is called if the body has to go while its bytes still come. Raises ``ApiError`` 503
        if there is no room for that length now: nothing of the request needs to be read then."""
        body = Body(self, client, drop)
        self._make_room(body, announced_bytes)
        self._bodies.add(body)
        return body

    def take(self, body: Body, size_bytes: int) -> None:
        """Take room for further bytes of ``body``. Raises ``ApiError``."""
        body.moved_s = self.now()
        self._make_room(body, size_bytes)
        body.held_bytes += size_bytes
        self.held_bytes += size_bytes

    def give_back(self, body: Body) -> None:
        if body in self._bodies:
            self._bodies.remove(body)
            self.held_bytes -= body.held_bytes
            body.held_bytes = 0

    def _make_room(self, body: Body, size_bytes: int) -> None:
        while (why := self._why_not(body, size_bytes)) is not None:
            stalled = [
                one
                for one in self._of(why.client)
                if one is not body and one.is_coming and one.held_bytes
                if self.now() - one.moved_s >= STALLED_S
            ]
            if not stalled:
                raise ApiError(503, why.text, code="bodies_full", retry_after_s=_RETRY_AFTER_S)
            min(stalled, key=lambda one: one.moved_s).drop()

    def _why_not(self, body: Body, size_bytes: int) -> _NoRoom | None:
        """Say why ``body`` cannot grow by this much, or return None if it can."""
        is_large = body.held_bytes + size_bytes > SMALL_BYTES
        share = int(_SHARE * self.most_bytes)
        limit = share if is_large else self.most_bytes
        if self.held_bytes + size_bytes > limit:
            why = (
                f"the requests that are being read hold {self.held_bytes} bytes of the {limit}"
                f" that {'large ' if is_large else ''}bodies may hold: try again"
            )
            return _NoRoom(why, None)
        own = sum(one.held_bytes for one in self._of(body.client))
        if self._shared and own + size_bytes > share:
            why = (
                f"the requests of this client that are being read hold {own} bytes of the"
                f" {share} that one client may hold: try again"
            )
            return _NoRoom(why, body.client)
        return None

    def _of(self, client: str | None) -> list[Body]:
        """Return the bodies of this client; None: of all."""
        return [one for one in self._bodies if client in (None, one.client)]


@dataclass(frozen=True, slots=True)
class _NoRoom:
    text: str
    client: str | None
    """The client whose own bodies fill its share; None if it is the sum over all clients."""
