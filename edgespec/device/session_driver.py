"""One generation on asyncio: a ``DraftSession`` with a real link, a real drafter and a real clock.

This file decides nothing. Draft steps run in the drafter's own thread (``drafter_pool.py``), so a
reply that arrives during a step is read at once. The result of the step comes back as an event like
any other. Every error ends in a ``Fail`` that the caller receives, whether it was raised while an
event was handled or while an action was carried out. A finished generation does not wait for its
draft step: the step is cancelled and ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, assert_never

from edgespec.core.device import events as ev
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import DeviceStream, LinkError
from edgespec.core.protocol.messages import Cancel, FinishReason, Opened, Uplink
from edgespec.device.drafter_pool import DrafterLease
from edgespec.device.sleeping import LOOK_EVERY_S, AwakeClock
from edgespec.telemetry.logs import log_failure
from edgespec.telemetry.trace import Tracer

# Seconds that a broken connection waits for the verifier's own reason, which may still arrive.
_LAST_FAULT_TIMEOUT_S: Final = 1.0

_log = logging.getLogger(__name__)
Dial = Callable[[], Coroutine[Any, Any, DeviceStream]]
"""Opens a stream to a verifier; raises ``LinkError``."""


class Link:
    """One stream to a verifier, from dialing to closing.

    ``notify`` receives ``Connected``, each message, and at most one ``LinkDown``, which is the
    last."""

    def __init__(self, connect: Dial, notify: Callable[[ev.DraftEvent], None]) -> None:
        self._connect, self._notify = connect, notify
        # The session's window bounds the messages that are sent ahead of the verifier's answers.
        self._outgoing: asyncio.Queue[Uplink | None] = asyncio.Queue()
        self._is_open = self._is_connecting = True
        self.task = asyncio.create_task(self._run())

    def send(self, message: Uplink) -> None:
        self._outgoing.put_nowait(message)

    def close(self) -> None:
        """Close the stream after the messages sent so far; at once if it is not open yet."""
        # Otherwise the dial has failed and reports that itself.
        if self._is_connecting and self._is_open:
            self.task.cancel()
        self._is_open = False
        self._outgoing.put_nowait(None)

    def _pass_on(self, event: ev.DraftEvent) -> None:
        if self._is_open:
            self._is_open = not isinstance(event, ev.LinkDown)
            self._notify(event)

    async def _run(self) -> None:
        try:
            stream = await self._connect()
            self._is_connecting = False
            await self._send_messages(stream)
        except asyncio.CancelledError:
            self._pass_on(ev.LinkDown("the link's task was cancelled"))
            raise
        except Exception as error:
            self._pass_on(link_down(error))

    async def _send_messages(self, stream: DeviceStream) -> None:
        reader = asyncio.create_task(self._read_messages(stream))
        try:
            self._pass_on(ev.Connected(stream.verifier))
            while (message := await self._outgoing.get()) is not None:
                await stream.send(message)
        except LinkError:
            # A fault that the verifier sent before it hung up explains more than the error does.
            await asyncio.wait([reader], timeout=_LAST_FAULT_TIMEOUT_S)
            raise
        finally:
            reader.cancel()
            await asyncio.wait([reader])
            # An error while closing changes nothing: the stream is not used any more.
            with contextlib.suppress(Exception):
                await stream.close()

    async def _read_messages(self, stream: DeviceStream) -> None:
        try:
            while True:
                self._pass_on(await stream.receive())
        except Exception as error:
            self._pass_on(link_down(error))
            self._outgoing.put_nowait(None)


def link_down(error: BaseException) -> ev.LinkDown:
    """Return the event for an error of the transport.

    An error of the operating system may pass. No retry helps against a message that exceeds the
    wire's bounds (``ValueError``), or against a bug."""
    match error:
        case LinkError(retryable=retryable, again_s=again_s):
            return ev.LinkDown(str(error), retryable, again_s)
        case OSError():
            return ev.LinkDown(f"{type(error).__name__}: {error}")
        case ValueError():
            return ev.LinkDown(str(error), retryable=False)
        case _:
            log_failure(_log, "the transport failed", error=error, may_quote_client=True)
            why = f"the transport failed: {type(error).__name__}: {error}"
            return ev.LinkDown(why, retryable=False)


# Seconds that a generation that was left early waits for its last messages to leave.
CLOSE_TIMEOUT_S: Final = 1.0

Outcome = ev.Deliver | ev.Finish | ev.Fail


class SessionDriver:
    """Runs ``session`` until it finishes or fails; iterate over ``outcomes`` to follow it.

    ``drafter`` may be None only if the session was opened without drafting. A time in which the
    process does not run is none for the session: it reaches no deadline and measures nothing."""

    def __init__(
        self,
        session: DraftSession,
        connect: Dial,
        drafter: DrafterLease | None,
        tracer: Tracer,
        clock: AwakeClock | None = None,
    ) -> None:
        self.session, self._connect = session, connect
        self._drafter, self._tracer = drafter, tracer
        # This queue holds a few entries for each token at most, and max_tokens bounds the tokens.
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._link: Link | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._steps: set[asyncio.Task[None]] = set()
        self._clock = clock or AwakeClock()
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False
        """Whether the last outcome was queued. A running draft step is not needed any more then."""
        self.was_opened = asyncio.Event()
        """Set when a verifier has opened the session, or when the generation has ended."""

    @property
    def running_tasks(self) -> set[asyncio.Task[None]]:
        """Tasks that have not ended yet."""
        return self._links | self._steps

    async def outcomes(self) -> AsyncIterator[Outcome]:
        """Yield the deliveries, and at last a ``Finish`` or a ``Fail``."""
        self._handle(ev.Start())
        while True:
            outcome = await self._outcomes.get()
            yield outcome
            if isinstance(outcome, ev.Finish | ev.Fail):
                return

    def stop(self, reason: FinishReason) -> None:
        """End the generation; its ``Finish`` follows."""
        self._handle(ev.Stop(reason))

    async def close(self) -> None:
        """Release everything.

        A generation that was left early waits a moment for its last messages to leave. A running
        draft step is not waited for; see ``running_tasks``."""
        if self._has_ended:
            return
        self._handle(ev.Stop())
        if self._links:
            await asyncio.wait(self._links, timeout=CLOSE_TIMEOUT_S)

    # --- the session -----------------------------------------------------------------------

    def _handle(self, event: ev.DraftEvent) -> None:
        """Pass ``event`` to the session and carry out its actions.

        Never raises: an error becomes the generation's ``Fail``."""
        if self._has_ended:
            return
        try:
            now, key = self._clock.now(), self.session.request.session_id
            self._tracer.record(now, "device", key, "event", event)
            for action in self.session.handle(event, now):
                self._tracer.record(now, "device", key, "action", action)
                self._carry_out(action)
            if isinstance(event, Opened):
                self.was_opened.set()
            self._set_timer()
        except Exception as error:
            self._fail(error)

    def _carry_out(self, action: ev.DraftAction) -> None:
        match action:
            case ev.Connect():
                self._link = Link(self._connect, self._handle)
                self._keep(self._link.task, self._links)
            case ev.Disconnect():
                if self._link is not None:
                    self._link.close()
                    self._link = None
            case ev.Transmit(message):
                if self._link is not None:
                    self._link.send(message)
            case ev.StartStep():
                self._keep(asyncio.create_task(self._draft(action)), self._steps)
            case ev.Deliver():
                self._outcomes.put_nowait(action)
            case ev.Finish() | ev.Fail():
                self._finish(action)
            case _:
                assert_never(action)

    def _finish(self, last: ev.Finish | ev.Fail) -> None:
        self._has_ended = True
        self.was_opened.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._drafter is not None:
            self._drafter.end()
        # The trace ends with the counters, so that its readers need not count again.
        key, counters = self.session.request.session_id, self.session.counters
        self._tracer.record(self._clock.now(), "device", key, "event", counters)
        self._outcomes.put_nowait(last)

    def _fail(self, error: BaseException) -> None:
        """End the generation because of a bug here or in a part that was passed in.

        The verifier receives a ``Cancel`` if that is possible."""
        if self._has_ended:
            return
        what = "the device's side of a generation failed"
        log_failure(_log, what, error=error, may_quote_client=True)
        self._finish(ev.Fail(f"the device failed: {type(error).__name__}: {error}"))
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(Exception):
                link.send(Cancel())
                link.close()

    async def _draft(self, step: ev.StartStep) -> None:
        assert self._drafter is not None
        self._handle(await self._drafter.step(step))

    def _keep(self, task: asyncio.Task[None], kind: set[asyncio.Task[None]]) -> None:
        """Keep ``task`` alive, and fail the generation if it ends with an error."""

        def check_task(task: asyncio.Task[None]) -> None:
            kind.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(error)

        kind.add(task)
        task.add_done_callback(check_task)

    def _set_timer(self) -> None:
        """Set a timer that calls ``_on_timer`` at the deadline, or when the clock has to be read.

        Deadlines mostly move later, so a timer that is set for an earlier time stays."""
        deadline = self.session.deadline
        if deadline is None or self._has_ended:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + min(LOOK_EVERY_S, max(0.0, deadline - self._clock.now()))
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        deadline = self.session.deadline
        if deadline is not None and deadline <= self._clock.now():
            self._handle(ev.Tick())
        else:
            self._set_timer()
