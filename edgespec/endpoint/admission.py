"""So many texts are generated beside each other, so many requests wait, the rest is refused.

Who waits is served in the order of arrival, also where a later request would fit sooner.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edgespec.endpoint.errors import ApiError

RETRY_AFTER_S = 1


class Admission:
    """``capacity`` texts run, ``max_waiting`` requests wait."""

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self.capacity, self._max_waiting = capacity, max_waiting
        self.running = 0
        """Texts that have their turn."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._closed: ApiError | None = None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, texts: int) -> AsyncIterator[None]:
        """Room for so many texts, at most ``capacity``, while this is open. Raises ``ApiError``:
        429 where the queue is full, and what ``close`` was given."""
        await self._enter(texts)
        try:
            yield
        finally:
            self.running -= texts
            self._let_in()

    def check(self, texts: int = 1) -> None:
        """Raises ``ApiError`` 429 where so many texts would have to wait and the queue is full. Ask
        before the work that a request is: it is for nothing where this holds."""
        has_room = not self._waiting and self.running + texts <= self.capacity
        if not has_room and len(self._waiting) >= self._max_waiting:
            raise ApiError(
                429,
                f"{self.running} texts run and {len(self._waiting)} requests wait, of at most"
                f" {self.capacity} and {self._max_waiting}: try again",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )

    def close(self, why: ApiError) -> None:
        """From now on nobody gets a turn, those who wait included; who has one keeps it."""
        self._closed = why
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(why)

    async def _enter(self, texts: int) -> None:
        assert 0 < texts <= self.capacity
        if self._closed is not None:
            raise self._closed
        self.check(texts)
        if not self._waiting and self.running + texts <= self.capacity:
            self.running += texts
            return
        entry = (texts, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        except BaseException:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif entry[1].done() and not entry[1].cancelled() and entry[1].exception() is None:
                self.running -= texts  # the turn came in the very moment of the cancellation
            self._let_in()
            raise

    def _let_in(self) -> None:
        while self._waiting and self.running + self._waiting[0][0] <= self.capacity:
            texts, future = self._waiting.popleft()
            if not future.done():
                self.running += texts
                future.set_result(None)
