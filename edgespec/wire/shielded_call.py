"""A shielded call runs an operation to its end, even if the waiting caller is cancelled.

Drivers wait with deadlines, and a deadline cancels. But a cancelled ``read()`` of grpc.aio cancels
the whole RPC on the client and loses a message on the server. So the operation runs in a task of
its own, and the next caller receives the result that a cancelled one left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class InterruptedOperation(ConnectionError):
    """The operation has no result: it was cancelled, or ``unless`` was done first."""


class ShieldedCall(Generic[_T]):
    """Runs one operation at a time, for one caller at a time."""

    def __init__(self) -> None:
        self._task: asyncio.Task[_T] | None = None

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    def start(
        self, operation: Coroutine[Any, Any, _T], failed: Callable[[BaseException], None]
    ) -> None:
        """Start ``operation`` without waiting for it.

        ``failed`` is called with its error if there is one. No other operation may be running."""
        assert self._task is None
        self._task = task = asyncio.create_task(operation)

        def forget(done: asyncio.Task[_T]) -> None:
            if self._task is task:
                self._task = None
            if done.cancelled():
                failed(InterruptedOperation("the operation was cancelled"))
            elif (error := done.exception()) is not None:
                failed(error)

        task.add_done_callback(forget)

    async def run(
        self,
        operation: Callable[[], Coroutine[Any, Any, _T]],
        unless: asyncio.Future[Any] | None = None,
    ) -> _T:
        """Return the result of the running operation, or of a new one if there is none.

        Each result is returned once. Raises the operation's error, and ``InterruptedOperation``."""
        if self._task is None:
            self._task = asyncio.create_task(operation())
            # When no caller comes back, asyncio must not report an error as lost.
            self._task.add_done_callback(lambda done: done.cancelled() or done.exception())
        task = await self._wait(self._task, unless)
        if task.cancelled():
            raise InterruptedOperation("the operation was cancelled")
        return task.result()

    async def wait_finished(self, unless: asyncio.Future[Any] | None = None) -> None:
        """Wait for the operation that a cancelled caller left running, and drop its result.

        Raises ``InterruptedOperation``."""
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
