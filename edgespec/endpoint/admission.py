"""Admission of requests: at most ``capacity`` generations run at a time, the queue is bounded, and
both are shared between clients.

A client is an address, because all clients of an endpoint use the same API key. An IPv6 client is
the first 64 bits of its address, because one machine can vary the rest. A free slot goes to the
client with the fewest running generations. Among clients with equally many, and among the requests
of one client, the oldest request goes first.

A generation keeps its slot until its output is written, so a client that never reads would keep a
slot for ever. While other requests wait, such a client is disconnected after ``unread_within_s``.
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
"""The client whose request the running task serves."""
_IPV6_PREFIX: Final = 64
_QUEUE_SHARE: Final = 0.75
"""Largest share of the queue that one client may fill, if clients share the endpoint."""


def client_address(scope: Mapping[str, Any]) -> str:
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
class _WaitingRequest:
    client: str
    tokens: int
    number: int
    """Position in the order of arrival."""
    granted: asyncio.Future[None]


class Admission:
    """A bounded number of slots for generations, and the queue in front of them.

    Args:
        capacity: Generations that run at a time.
        max_waiting: Requests that wait for a slot.
        max_waiting_tokens: Prompt tokens of all waiting requests.
        within_s: Seconds that a request waits for a slot.
        most_of_client: Generations of one client that run at a time. With None the limit is
            ``capacity``, and one client may also fill the whole queue.
        unread_within_s: Seconds for which the client of a running generation may read nothing while
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
        self._max_of_client = capacity if most_of_client is None else most_of_client
        is_shared = self._max_of_client < capacity
        self._max_waiting_of_client = (
            max(1, int(_QUEUE_SHARE * max_waiting)) if is_shared else max_waiting
        )
        self._max_waiting_tokens, self._within_s = max_waiting_tokens, within_s
        self._unread_within_s = unread_within_s
        self._running: Counter[str] = Counter()
        """Generations that hold a slot, by client."""
        self._queue: list[_WaitingRequest] = []
        self._arrivals = 0
        self._writes: dict[asyncio.Timeout, float] = {}
        """Writes that wait for their client to read, with the times at which they began."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed: ApiError | None = None

    @property
    def running(self) -> int:
        """Number of generations that hold a slot."""
        return self._running.total()

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._queue)

    async def enter(self, tokens: int = 0, *, begun: bool = False) -> None:
        """Wait for a slot for one generation of the current client; ``leave`` gives it back.

        ``tokens`` is the length of the prompt. If another generation of the same request has
        ``begun``, a full queue does not refuse this one. Raises ``ApiError`` 429 if the queue is
        full or no slot becomes free in time, and the error that was passed to ``close``."""
        if self._closed is not None:
            raise self._closed
        client = current_client.get()
        if self._has_room(client):
            self._running[client] += 1
            return
        if not begun:
            self.check_queue(tokens)
        try:
            async with asyncio.timeout(self._within_s):
                await self._wait_for_slot(client, tokens)
        except TimeoutError:
            why = f"no slot became free within {self._within_s:g} s (endpoint.queue_within_s)"
            raise _queue_full(f"{why}: {self._describe_load}") from None

    def leave(self) -> None:
        """Give back the slot of a generation of the current client that has ended."""
        self._release(current_client.get())

    def check_queue(self, tokens: int = 0) -> None:
        """Raise ``ApiError`` 429 if a request of the current client with a prompt of this many
        tokens would have to wait and the queue is full. The endpoint calls this before it spends
        work on a request."""
        client = current_client.get()
        if self._has_room(client):
            return
        of_client = sum(one.client == client for one in self._queue)
        waiting_tokens = sum(one.tokens for one in self._queue)
        if self.waiting >= self._max_waiting:
            raise _queue_full(
                f"{self._describe_load}, of at most {self.capacity} and {self._max_waiting}"
            )
        if of_client >= self._max_waiting_of_client:
            share = f"{of_client} of them this client's, of at most {self._max_waiting_of_client}"
            raise _queue_full(f"{self._describe_load}, {share}")
        if self.waiting and waiting_tokens + tokens > self._max_waiting_tokens:
            raise _queue_full(
                f"prompts of {waiting_tokens} tokens wait, and {tokens} more are above the limit of"
                f" {self._max_waiting_tokens} (endpoint.max_queue_tokens)"
            )

    def _has_room(self, client: str) -> bool:
        """Return whether a generation of this client may run at once."""
        rank = (self._running[client], self._arrivals)
        others = (self._rank(one) for one in self._first_in_line())
        return (
            self._is_within_share(client)
            and self.running < self.capacity
            and not any(one.client == client for one in self._queue)
            and all(rank < other for other in others)
        )

    @property
    def _describe_load(self) -> str:
        return f"{self.running} generations run and {self.waiting} requests wait"

    @contextmanager
    def watch_write(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Mark a write of a running generation. If another request waits and the client reads
        nothing for too long, ``limit`` expires early."""
        self._writes[limit] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._writes.pop(limit, None)

    def close(self, why: ApiError) -> None:
        """Refuse every further slot, also to waiting requests. Running generations keep theirs."""
        self._closed = why
        for one in self._queue:
            if not one.granted.done():
                one.granted.set_exception(why)
        self._queue.clear()

    async def _wait_for_slot(self, client: str, tokens: int) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        one = _WaitingRequest(client, tokens, self._arrivals, granted)
        self._arrivals += 1
        self._queue.append(one)
        self._expire_stalled_writes()
        try:
            await granted
        except asyncio.CancelledError:
            if one in self._queue:
                self._queue.remove(one)
                self._grant_slots()
            elif granted.done() and not granted.cancelled() and granted.exception() is None:
                self._release(client)
            raise

    def _release(self, client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._grant_slots()

    def _grant_slots(self) -> None:
        """Give free slots to waiting requests."""
        self._queue = [one for one in self._queue if not one.granted.cancelled()]
        while self.running < self.capacity and (candidates := self._first_in_line()):
            one = min(candidates, key=self._rank)
            self._queue.remove(one)
            self._running[one.client] += 1
            one.granted.set_result(None)

    def _first_in_line(self) -> list[_WaitingRequest]:
        """Return the first waiting request of each client that is below its share."""
        first: dict[str, _WaitingRequest] = {}
        for one in self._queue:
            first.setdefault(one.client, one)
        return [one for one in first.values() if self._is_within_share(one.client)]

    def _rank(self, one: _WaitingRequest) -> tuple[int, int]:
        return self._running[one.client], one.number

    def _is_within_share(self, client: str) -> bool:
        return self._running[client] < self._max_of_client

    def _expire_stalled_writes(self) -> None:
        """Expire the writes that have not moved for too long. Runs while requests wait."""
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
        self._timer = loop.call_later(next_s, self._expire_stalled_writes)


def _queue_full(why: str) -> ApiError:
    return ApiError(429, f"{why}: try again", code="queue_full", retry_after_s=RETRY_AFTER_S)
