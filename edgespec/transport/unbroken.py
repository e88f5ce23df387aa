"""One operation at a time, run to its end however often its waiter is cancelled.

Why: a cancelled ``read()`` of grpc.aio cancels the whole call on the client and loses a message on
the server, but drivers wait with deadlines, and a deadline cancels. Here the operation goes on in a
task of its own; the next waiter finds it, or what it brought.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class InterruptedOperation(ConnectionError):
    """There will be no result: the operation was cancelled, or ``unless`` came first."""


class Unbroken(Generic[_T]):
    """Not for concurrent callers: one waiter at a time."""

    def __init__(self) -> None:
        self._task: asyncio.Task[_T] | None = None

    async def take(
        self, operation: Callable[[], Awaitable[_T]], unless: asyncio.Future[Any] | None = None
    ) -> _T:
        """The result of the operation under way, else of a new one; each is given out once.

        Raises what the operation raised, and ``InterruptedOperation``.
        """
        if self._task is None:
            self._task = asyncio.create_task(_coroutine(operation))
            self._task.add_done_callback(_retrieve)
        task = await self._wait(self._task, unless)
        if task.cancelled():
            raise InterruptedOperation("the operation was cancelled")
        return task.result()

    async def settle(self, unless: asyncio.Future[Any] | None = None) -> None:
        """Wait for what a cancelled caller left under way; forget its result."""
        if self._task is not None:
            await self._wait(self._task, unless)

    async def _wait(
        self, task: asyncio.Task[_T], unless: asyncio.Future[Any] | None
    ) -> asyncio.Task[_T]:
        futures = (task,) if unless is None else (task, unless)
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise InterruptedOperation("interrupted")
        self._task = None
        return task


async def _coroutine(operation: Callable[[], Awaitable[_T]]) -> _T:
    return await operation()


def _retrieve(task: asyncio.Task[_T]) -> None:
    """Nobody may come back for it; then its error must not be reported as never retrieved."""
    if not task.cancelled():
        task.exception()
