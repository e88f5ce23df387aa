"""A shielded call runs an operation to its end, however often the caller that waits is cancelled.

Drivers wait with deadlines, and a deadline cancels. But a cancelled ``read()`` of grpc.aio cancels
the whole RPC on the client and loses a message on the server. So the operation runs in a task of
its own, and the next caller gets the result that a cancelled one left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class InterruptedOperation(ConnectionError):
    """The operation has no result: it was cancelled, or ``unless`` came first."""


class ShieldedCall(Generic[_T]):
    """Runs one operation at a time, for one caller at a time."""

    def __init__(self) -> None:
        self._task: asyncio.Task[_T] | None = None

    @property
    def busy(self) -> bool:
        """Whether an operation is under way, or has a result that nobody took."""
        return self._task is not None

    def begin(
        self,
        operation: Coroutine[Any, Any, _T],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        """Start ``operation``, for which nobody need wait; ``ended`` hears what it raised, None
        for a good end. None may be under way."""
        assert self._task is None
        self._task = task = asyncio.create_task(operation)

        def forget(done: asyncio.Task[_T]) -> None:
            if self._task is task:
                self._task = None
            if done.cancelled():
                ended(InterruptedOperation("the operation was cancelled"))
            else:
                ended(done.exception())

        task.add_done_callback(forget)

    async def take(
        self,
        operation: Callable[[], Awaitable[_T]],
        unless: asyncio.Future[Any] | None = None,
        timeout_s: float | None = None,
    ) -> _T:
        """The result of the operation under way, or of a new one if there is none. Each result is
        returned once.

        Raises what the operation raised, ``InterruptedOperation``, and ``TimeoutError`` after
        ``timeout_s``: the operation then goes on, as after a cancelled call.
        """
        if self._task is None:
            self._task = asyncio.create_task(_coroutine(operation))
            self._task.add_done_callback(_retrieve)
        task = await self._wait(self._task, unless, timeout_s)
        if task.cancelled():
            raise InterruptedOperation("the operation was cancelled")
        return task.result()

    async def settle(
        self, unless: asyncio.Future[Any] | None = None, timeout_s: float | None = None
    ) -> None:
        """Wait for the operation that a cancelled caller left under way, and drop its result.

        Raises ``InterruptedOperation`` and ``TimeoutError``, as ``take`` does.
        """
        if self._task is not None:
            await self._wait(self._task, unless, timeout_s)

    async def _wait(
        self, task: asyncio.Task[_T], unless: asyncio.Future[Any] | None, timeout_s: float | None
    ) -> asyncio.Task[_T]:
        futures = (task,) if unless is None else (task, unless)
        done, _ = await asyncio.wait(
            futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise TimeoutError(f"the operation took more than {timeout_s} s")
        if not task.done():
            raise InterruptedOperation("interrupted")
        self._task = None
        return task


async def _coroutine(operation: Callable[[], Awaitable[_T]]) -> _T:
    return await operation()


def _retrieve(task: asyncio.Task[_T]) -> None:
    """Mark the error as seen: when no caller comes back, asyncio must not report it as lost."""
    if not task.cancelled():
        task.exception()
