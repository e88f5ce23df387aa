"""The thread that draft steps run in, which a step that never comes back cannot keep alive.

The pools of ``concurrent.futures`` will not do: the interpreter joins their threads when it ends,
so a model that hangs would keep the process from ending, whatever the user presses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DraftThread(Executor):
    """Runs what is submitted, one after the other; ends with ``close``, or with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Raises ``RuntimeError`` after ``close``, and where the system has no thread left."""
        if self._closed:
            raise RuntimeError("the drafter is closed")
        return self._put(lambda: fn(*args, **kwargs))

    def close(self, last: Callable[[], None], within_s: float) -> bool:
        """Drop what has not begun, run ``last`` behind what has, and take nothing more. Waits for
        that so long at most; False: ``last`` still waits for a step. Raises what ``last`` raises. A
        second call does nothing."""
        if self._closed:
            return True
        self._closed = True
        if self._thread is None:
            last()
            return True
        with suppress(Empty):
            while (dropped := self._work.get_nowait()) is not None:
                dropped.future.cancel()
        done = self._put(last)
        self._work.put(None)
        if not wait([done], within_s).done:
            return False
        self._thread.join()
        done.result()
        return True

    def _put(self, run: Callable[[], _T]) -> Future[_T]:
        if self._thread is None:
            thread = threading.Thread(
                target=_go_on, args=(self._work,), name=self._name, daemon=True
            )
            thread.start()
            self._thread = thread
        future: Future[_T] = Future()
        self._work.put(_Work(future, run))
        return future


class _Work:
    def __init__(self, future: Future[Any], run: Callable[[], Any]) -> None:
        self.future, self._run = future, run

    def do(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            found = self._run()
        except BaseException as error:  # whoever submitted it hears of it
            self.future.set_exception(error)
            del self  # or the error's traceback holds the future, and that the error
        else:
            self.future.set_result(found)


def _go_on(queue: SimpleQueue[_Work | None]) -> None:
    while (work := queue.get()) is not None:
        work.do()
        del work
