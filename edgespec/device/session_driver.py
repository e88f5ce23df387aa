"""One generation on asyncio: a ``DraftSession`` with a real link, a real drafter and a real clock.

This file decides nothing. Draft steps run in the drafter's own thread (``drafter_pool.py``), so a
reply that arrives during a step is read at once; the step's result comes back as an event like any
other. Nothing dies silently: whatever is raised while an event is handled or an action carried out
ends the generation with a ``Fail`` that the caller hears. And nobody waits for a draft once the
text is complete: a step that still runs is cancelled and ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, assert_never

from edgespec.core.device import events as ev
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import DeviceStream, LinkError
from edgespec.core.protocol.messages import Cancel, FinishReason, Uplink
from edgespec.device.drafter_pool import DrafterLease
from edgespec.telemetry.logs import log_failure
from edgespec.telemetry.trace import Tracer

# How long a broken pipe waits for the verifier's own word on why it hung up.
_LAST_WORD_S: Final = 1.0

_log = logging.getLogger(__name__)
Dial = Callable[[], Coroutine[Any, Any, DeviceStream]]
"""Opens a stream to a verifier; raises ``LinkError``."""


class Link:
    """``notify`` gets ``Connected``, each message, and at most one ``LinkDown``, which is last."""

    def __init__(self, connect: Dial, notify: Callable[[ev.DraftEvent], None]) -> None:
        self._dial, self._notify = connect, notify
        # The session's window bounds what is sent ahead of the verifier's answers.
        self._outgoing: asyncio.Queue[Uplink | None] = asyncio.Queue()
        self._live = self._connecting = True
        self.task = asyncio.create_task(self._run())

    def send(self, message: Uplink) -> None:
        self._outgoing.put_nowait(message)

    def close(self) -> None:
        """Let go after what was sent; at once if the stream is not there yet."""
        if self._connecting and self._live:  # else the dial has failed, and says so right now
            self.task.cancel()
        self._live = False
        self._outgoing.put_nowait(None)

    def _tell(self, event: ev.DraftEvent) -> None:
        if self._live:
            self._live = not isinstance(event, ev.LinkDown)
            self._notify(event)

    async def _run(self) -> None:
        try:
            stream = await self._dial()
            self._connecting = False
            await self._use(stream)
        except asyncio.CancelledError:
            self._tell(ev.LinkDown("the link's task was cancelled"))
            raise
        except Exception as error:
            self._tell(link_down(error))

    async def _use(self, stream: DeviceStream) -> None:
        reader = asyncio.create_task(self._read(stream))
        try:
            self._tell(ev.Connected())
            while (message := await self._outgoing.get()) is not None:
                await stream.send(message)
        except LinkError:
            # A fault the verifier sent before it hung up says more than the broken pipe does.
            await asyncio.wait([reader], timeout=_LAST_WORD_S)
            raise
        finally:
            reader.cancel()
            await asyncio.wait([reader])
            with contextlib.suppress(Exception):  # it is let go of either way
                await stream.close()

    async def _read(self, stream: DeviceStream) -> None:
        try:
            while True:
                self._tell(await stream.receive())
        except Exception as error:
            self._tell(link_down(error))
            self._outgoing.put_nowait(None)


def link_down(error: BaseException) -> ev.LinkDown:
    """What the session hears of it. An error of the operating system may pass; no retry makes a
    message fit the wire's bounds (``ValueError``), or mends a bug."""
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


# How long leaving a generation early waits for its last messages to leave.
LETTING_GO_S: Final = 1.0

Outcome = ev.Deliver | ev.Finish | ev.Fail


class SessionDriver:
    """Runs ``session`` until it finishes or fails; iterate ``outcomes`` to follow it.

    ``drafter`` None: the session must have been opened without drafting."""

    def __init__(
        self, session: DraftSession, connect: Dial, drafter: DrafterLease | None, tracer: Tracer
    ) -> None:
        self.session, self._connect = session, connect
        self._drafter, self._tracer = drafter, tracer
        # Holds at most a few entries a token, and max_tokens bounds those.
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._link: Link | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._steps: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        """No outcome will follow the last one; a running draft step is not wanted any more."""

    @property
    def running(self) -> set[asyncio.Task[None]]:
        """The tasks that have not ended yet."""
        return self._links | self._steps

    async def outcomes(self) -> AsyncIterator[Outcome]:
        """Deliveries, and the ``Finish`` or ``Fail`` that ends them."""
        self._handle(ev.Start())
        while True:
            outcome = await self._outcomes.get()
            yield outcome
            if isinstance(outcome, ev.Finish | ev.Fail):
                return

    def stop(self, reason: FinishReason) -> None:
        """End the generation; the ``Finish`` follows."""
        self._handle(ev.Stop(reason))

    async def close(self) -> None:
        """Let go of everything. A generation that was left early waits a moment for its last
        messages to leave; a draft step that runs is not waited for (``running``)."""
        if self._over:
            return
        self._handle(ev.Stop())
        if self._links:
            await asyncio.wait(self._links, timeout=LETTING_GO_S)

    # --- the session -----------------------------------------------------------------------

    def _handle(self, event: ev.DraftEvent) -> None:
        """Never raises: what goes wrong becomes the generation's ``Fail``."""
        if self._over:
            return
        try:
            now, key = time.monotonic(), self.session.request.session_id
            self._tracer.record(now, "device", key, "event", event)
            for action in self.session.handle(event, now):
                self._tracer.record(now, "device", key, "action", action)
                self._do(action)
            self._arm()
        except Exception as error:
            self._fail(error)

    def _do(self, action: ev.DraftAction) -> None:
        match action:
            case ev.Connect():
                self._link = Link(self._connect, self._handle)
                self._watch(self._link.task, self._links)
            case ev.Disconnect():
                if self._link is not None:
                    self._link.close()
                    self._link = None
            case ev.Transmit(message):
                if self._link is not None:
                    self._link.send(message)
            case ev.StartStep():
                self._watch(asyncio.create_task(self._draft(action)), self._steps)
            case ev.Deliver():
                self._outcomes.put_nowait(action)
            case ev.Finish() | ev.Fail():
                self._end(action)
            case _:
                assert_never(action)

    def _end(self, last: ev.Finish | ev.Fail) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._drafter is not None:
            self._drafter.end()
        # What it came to: whoever sums a trace up need not count again.
        key, counters = self.session.request.session_id, self.session.counters
        self._tracer.record(time.monotonic(), "device", key, "event", counters)
        self._outcomes.put_nowait(last)

    def _fail(self, error: BaseException) -> None:
        """A bug, here or in a part that was handed in. The verifier is told as far as possible."""
        if self._over:
            return
        what = "the device's side of a generation failed"
        log_failure(_log, what, error=error, may_quote_client=True)
        self._end(ev.Fail(f"the device failed: {type(error).__name__}: {error}"))
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(Exception):
                link.send(Cancel())
                link.close()

    async def _draft(self, step: ev.StartStep) -> None:
        assert self._drafter is not None
        self._handle(await self._drafter.step(step))

    def _watch(self, task: asyncio.Task[None], kind: set[asyncio.Task[None]]) -> None:
        """Keep ``task`` alive, and hear of it when it ends in a way that it should not."""

        def ended(task: asyncio.Task[None]) -> None:
            kind.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(error)

        kind.add(task)
        task.add_done_callback(ended)

    def _arm(self) -> None:
        """Have ``_on_timer`` called by the deadline. Deadlines mostly move on, so a timer that is
        set for an earlier moment stays."""
        deadline = self.session.deadline
        if deadline is None or self._over:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, deadline - time.monotonic())
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        deadline = self.session.deadline
        if deadline is not None and deadline <= time.monotonic():
            self._handle(ev.Tick())
        else:
            self._arm()
