"""The driver of a ``ConnectionWatch``: probes, timers, and the connection that is made beside a
suspect one. It decides nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, assert_never

from edgespec.core.device import connection_watch as cw
from edgespec.core.ports import LinkError
from edgespec.telemetry.logs import log_failure

_log = logging.getLogger(__name__)


class WatchedConnection:
    """Watches the connection of one transport.

    Args:
        probe: Makes a call of ``Info`` over the connection. Raises ``LinkError``.
        connect_fresh: Makes a new connection, probes it and returns it; it closes the connection if
            it is cancelled or fails. Raises ``LinkError`` and ``OSError``.
        replace: Uses a connection that ``connect_fresh`` made from now on.
        policy: Times. None: the usual ones.
    """

    def __init__(
        self,
        probe: Callable[[], Awaitable[object]],
        connect_fresh: Callable[[], Awaitable[Any]],
        replace: Callable[[Any], None],
        policy: cw.WatchPolicy | None = None,
    ) -> None:
        self._watch = cw.ConnectionWatch(policy)
        self._probe, self._connect_fresh, self._replace = probe, connect_fresh, replace
        self._uses = 0
        """Number of streams and calls on the connection."""
        self._probing: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._found: Any = None
        """The new connection, once it has answered."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def begin_use(self, *, is_probe: bool = False) -> None:
        """Note a stream or a call that begins. ``end_use`` must follow."""
        self._uses += 1
        self._handle(cw.Used(is_probe))

    def end_use(self) -> None:
        self._uses -= 1
        if not self._uses:
            self._handle(cw.Unused())

    @contextmanager
    def used_by_call(self) -> Iterator[None]:
        """Note a unary call, whose answer shows whether the connection is alive."""
        self.begin_use(is_probe=True)
        try:
            yield
        except LinkError as error:
            self._handle(cw.ProbeEnded(error.alive))
            raise
        else:
            self.note_message()
        finally:
            self.end_use()

    def note_message(self) -> None:
        """Note that the verifier has sent something."""
        self._handle(cw.MessageReceived())

    def note_replaced(self) -> None:
        """Note that the connection was replaced for another reason."""
        self._drop_probe()
        self._handle(cw.Replaced())

    async def close(self) -> None:
        """Cancel everything."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = [one for one in (self._probing, self._connecting) if one is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _handle(self, event: cw.WatchEvent) -> None:
        if self._is_closed:
            return
        for action in self._watch.handle(event, time.monotonic()):
            self._carry_out(action)
        self._set_timer()

    def _carry_out(self, action: cw.WatchAction) -> None:
        match action:
            case cw.Probe():
                self._probing = asyncio.create_task(self._run_probe())
            case cw.ConnectFresh():
                self._connecting = asyncio.create_task(self._run_fresh())
            case cw.DropFresh():
                if self._connecting is not None:
                    self._connecting.cancel()
                    self._connecting = None
            case cw.Replace():
                found, self._found, self._connecting = self._found, None, None
                self._drop_probe()
                self._replace(found)
            case _:
                assert_never(action)

    def _drop_probe(self) -> None:
        """Cancel the probe of a connection that is not used any more."""
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None

    async def _run_probe(self) -> None:
        is_answered = True
        try:
            await self._probe()
        except LinkError as error:
            is_answered = error.alive
        except Exception as error:
            what = "the probe of a connection failed"
            log_failure(_log, what, error=error, may_quote_client=False)
            is_answered = False
        self._handle(cw.ProbeEnded(is_answered))

    async def _run_fresh(self) -> None:
        try:
            found = await self._connect_fresh()
        except Exception as error:
            if not isinstance(error, (LinkError, OSError)):
                what = "a new connection beside a suspect one failed"
                log_failure(_log, what, error=error, may_quote_client=False)
            if self._connecting is asyncio.current_task():
                self._handle(cw.FreshFailed())
            return
        self._found = found
        self._handle(cw.FreshAnswered())

    def _set_timer(self) -> None:
        """Set the timer for the deadline. A deadline mostly moves later, so a timer that is set for
        an earlier time stays, and finds nothing to do."""
        deadline = self._watch.deadline
        if deadline is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, deadline - time.monotonic())
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle(cw.WatchTick())
