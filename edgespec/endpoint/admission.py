"""Which requests may generate now: at most ``capacity`` texts at a time, in a queue of bounded
length, shared out between clients.

A client is an address, since all clients of an endpoint show the same key; of IPv6 it is the first
64 bits, which one machine may vary behind. The next turn is that of the client with the fewest
texts running; of clients with equally many, and of one client's requests, the one that came first.

A turn is kept until its texts are written, so a client that reads nothing would keep it for ever.
While others wait, such a client is dropped after ``unread_within_s``.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from edgespec.endpoint.request_json import ApiError

RETRY_AFTER_S: Final = 1
current_client: ContextVar[str] = ContextVar("edgespec_client", default="")
"""The client whose request the running task answers."""
_IPV6_PREFIX: Final = 64
_QUEUE_SHARE: Final = 0.75
"""Share of the queue that one client may fill where there are several."""


def client_of(scope: Mapping[str, Any]) -> str:
    """Return the name of the client behind an ASGI connection: its address without the port."""
    host = str((scope.get("client") or ("",))[0])
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and (mapped := address.ipv4_mapped):
        return str(mapped)
    if address.version == 4 or address.is_loopback:
        return str(address)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))


@dataclass(slots=True, eq=False)
class _Waiting:
    client: str
    tokens: int
    number: int
    """Counts up in the order of arrival."""
    granted: asyncio.Future[None]


class Admission:
    """Turns for requests.

    Args:
        capacity: Texts that run at a time.
        max_waiting: Requests that wait for a turn.
        max_waiting_tokens: Prompt tokens of all requests that wait.
        within_s: Seconds that a request waits for a turn.
        most_of_client: Texts of one client that run at a time; None: ``capacity``, and then one
            client may also fill the whole queue.
        unread_within_s: Seconds for which the client of a running text may read nothing while
            another request waits.
    """

    def __init__(
        self,
        capacity: int,
        max_waiting: int,
        *,
        max_waiting_tokens: int = 1 << 22,
        within_s: float = 600.0,
        most_of_client: int | None = None,
        unread_within_s: float = 5.0,
    ) -> None:
        self.capacity, self._max_waiting = capacity, max_waiting
        self._most_of_client = capacity if most_of_client is None else most_of_client
        is_shared = self._most_of_client < capacity
        self._most_waiting_of_client = (
            max(1, int(_QUEUE_SHARE * max_waiting)) if is_shared else max_waiting
        )
        self._max_waiting_tokens, self._within_s = max_waiting_tokens, within_s
        self._unread_within_s = unread_within_s
        self._running: Counter[str] = Counter()
        """Texts that have their turn, by client."""
        self._queue: list[_Waiting] = []
        self._arrivals = 0
        self._writes: dict[asyncio.Timeout, float] = {}
        """Writes that wait for their client to read, and since when."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed: ApiError | None = None

    @property
    def running(self) -> int:
        """Texts that have their turn."""
        return self._running.total()

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue)

    async def enter(self, tokens: int = 0, *, begun: bool = False) -> None:
        """Wait until one more text of the current client may run; call ``leave`` when it has ended.

        ``tokens`` is the length of its prompt. A request of which another text has ``begun`` is not
        refused for want of room in the queue. Raises ``ApiError``: 429 if the queue is full or no
        turn comes in time, and what ``close`` was given."""
        if self._closed is not None:
            raise self._closed
        client = current_client.get()
        if self._has_room(client):
            self._running[client] += 1
            return
        if not begun:
            self.check(tokens)
        try:
            async with asyncio.timeout(self._within_s):
                await self._granted(client, tokens)
        except TimeoutError:
            why = f"no turn came within {self._within_s:g} s (endpoint.queue_within_s)"
            raise _queue_full(f"{why}: {self._load}") from None

    def leave(self) -> None:
        """A text of the current client that had entered has ended."""
        self._give_back(current_client.get())

    def check(self, tokens: int = 0) -> None:
        """Raise ``ApiError`` 429 if a request of the current client, with a prompt of this many
        tokens, would have to wait and the queue is full. Call this before the work that a request
        is."""
        client = current_client.get()
        if self._has_room(client):
            return
        own = sum(one.client == client for one in self._queue)
        held, most = sum(one.tokens for one in self._queue), self._max_waiting_tokens
        if self.waiting >= self._max_waiting:
            raise _queue_full(f"{self._load}, of at most {self.capacity} and {self._max_waiting}")
        if own >= self._most_waiting_of_client:
            share = f"{own} of them this client's, of at most {self._most_waiting_of_client}"
            raise _queue_full(f"{self._load}, {share}")
        if self.waiting and held + tokens > most:
            why = f"prompts of {held} tokens wait, and {tokens} more are above the limit of {most}"
            raise _queue_full(f"{why} (endpoint.max_queue_tokens)")

    def _has_room(self, client: str) -> bool:
        """Return whether a text of this client may run at once."""
        mine = (self._running[client], self._arrivals)
        others = (self._place(one) for one in self._candidates())
        return (
            self._is_within_share(client)
            and self.running < self.capacity
            and not any(one.client == client for one in self._queue)
            and all(mine < other for other in others)
        )

    @property
    def _load(self) -> str:
        return f"{self.running} texts run and {self.waiting} requests wait"

    @contextmanager
    def unread(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Mark a write of a text that has its turn: if another request waits and the client reads
        nothing for too long, ``limit`` expires early."""
        self._writes[limit] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._writes.pop(limit, None)

    def close(self, why: ApiError) -> None:
        """Refuse every further turn, also to requests that wait. Who has a turn keeps it."""
        self._closed = why
        for one in self._queue:
            if not one.granted.done():
                one.granted.set_exception(why)
        self._queue.clear()

    async def _granted(self, client: str, tokens: int) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        one = _Waiting(client, tokens, self._arrivals, granted)
        self._arrivals += 1
        self._queue.append(one)
        self._watch_writes()
        try:
            await granted
        except asyncio.CancelledError:
            if one in self._queue:
                self._queue.remove(one)
                self._grant()
            elif granted.done() and not granted.cancelled() and granted.exception() is None:
                self._give_back(client)
            raise

    def _give_back(self, client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._grant()

    def _grant(self) -> None:
        """Give turns to those that wait, as far as there is room."""
        self._queue = [one for one in self._queue if not one.granted.cancelled()]
        while self.running < self.capacity and (candidates := self._candidates()):
            one = min(candidates, key=self._place)
            self._queue.remove(one)
            self._running[one.client] += 1
            one.granted.set_result(None)

    def _candidates(self) -> list[_Waiting]:
        """Return the first waiting request of each client that has not had its share."""
        first: dict[str, _Waiting] = {}
        for one in self._queue:
            first.setdefault(one.client, one)
        return [one for one in first.values() if self._is_within_share(one.client)]

    def _place(self, one: _Waiting) -> tuple[int, int]:
        return self._running[one.client], one.number

    def _is_within_share(self, client: str) -> bool:
        return self._running[client] < self._most_of_client

    def _watch_writes(self) -> None:
        """While requests wait, expire the writes that have not moved for too long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._queue:
            return
        loop = asyncio.get_running_loop()
        now, next_s = loop.time(), self._unread_within_s
        for limit, since_s in list(self._writes.items()):
            left_s = since_s + self._unread_within_s - now
            if left_s > 0.0:
                next_s = min(next_s, left_s)
            else:
                del self._writes[limit]
                limit.reschedule(now)
        self._timer = loop.call_later(next_s, self._watch_writes)


def _queue_full(why: str) -> ApiError:
    return ApiError(429, f"{why}: try again", code="queue_full", retry_after_s=RETRY_AFTER_S)
