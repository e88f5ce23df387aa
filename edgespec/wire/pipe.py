"""A bounded queue between two tasks, which ends with an error after the data that came before."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from edgespec.core.ports import LinkError

_T = TypeVar("_T")


class Pipe(Generic[_T]):
    """At most ``depth`` items wait in it. Cancelled calls leave it as if they had not been made."""

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}, but must be at least 1")
        self._depth = depth
        self._items: deque[_T] = deque()
        self._reason: tuple[str, bool] | None = None
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: _T) -> None:
        """Waits while the pipe is full. Raises ``LinkError`` when it has ended."""
        while self._reason is None and len(self._items) >= self._depth:
            await self._changed.wait()
        if self._reason is not None:
            raise self._error()
        self._items.append(item)
        self._wake()

    async def peek(self) -> _T:
        """The oldest item, which stays. Raises ``LinkError`` when the pipe ended and is empty."""
        while not self._items and self._reason is None:
            await self._changed.wait()
        if not self._items:
            raise self._error()
        return self._items[0]

    async def get(self) -> _T:
        """Take the oldest item. Raises ``LinkError`` when the pipe has ended and is empty."""
        item = await self.peek()
        self._items.popleft()
        self._wake()
        return item

    def end(self, reason: str, *, retryable: bool = True, drop: bool = False) -> None:
        """Nothing goes in any more; ``drop`` also loses what is inside. The first reason counts."""
        if self._reason is None:
            self._reason = (reason, retryable)
        if drop:
            self._items.clear()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _error(self) -> LinkError:
        assert self._reason is not None
        text, retryable = self._reason
        return LinkError(text, retryable=retryable)
