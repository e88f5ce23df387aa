"""One stream's life on the device: connect, send and receive until either side lets go.

After ``close`` nothing of this link reaches the session any more, so a new link can be opened at
once. What was handed to ``send`` before ``close`` still leaves. Whatever a transport raises becomes
a ``LinkDown``: a link never ends without a word while the session counts on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from edgespec.core.device.events import Connected, DraftEvent, LinkDown
from edgespec.core.ports import DeviceStream, LinkError, Transport
from edgespec.core.protocol.messages import Uplink

# How long a broken pipe waits for the verifier's own word on why it hung up.
_LAST_WORD_S: Final = 1.0
_log = logging.getLogger(__name__)


class Link:
    """``notify`` gets ``Connected``, each message, and at most one ``LinkDown``, which is last."""

    def __init__(self, transport: Transport, notify: Callable[[DraftEvent], None]) -> None:
        self._transport, self._notify = transport, notify
        # The session's window bounds what is sent ahead of the verifier's answers.
        self._outgoing: asyncio.Queue[Uplink | None] = asyncio.Queue()
        self._live = True
        self._connecting: asyncio.Task[DeviceStream] | None = None
        self.task = asyncio.create_task(self._run())

    def send(self, message: Uplink) -> None:
        self._outgoing.put_nowait(message)

    def close(self) -> None:
        """Let go after what was sent; at once if the stream is not there yet."""
        self._live = False
        self._outgoing.put_nowait(None)
        if self._connecting is not None:
            self._connecting.cancel()

    def _tell(self, event: DraftEvent) -> None:
        if self._live:
            self._live = not isinstance(event, LinkDown)
            self._notify(event)

    async def _run(self) -> None:
        try:
            stream = await self._connect()
            if stream is not None:
                await self._use(stream)
        except asyncio.CancelledError:
            self._tell(LinkDown("the link's task was cancelled"))
            raise
        except Exception as error:
            self._tell(link_down(error))

    async def _connect(self) -> DeviceStream | None:
        """The stream; None when ``close`` came first."""
        self._connecting = asyncio.ensure_future(self._transport.connect())
        try:
            await asyncio.wait([self._connecting])
        finally:
            connecting, self._connecting = self._connecting, None
            connecting.cancel()
        return None if connecting.cancelled() else connecting.result()

    async def _use(self, stream: DeviceStream) -> None:
        reader = asyncio.create_task(self._read(stream))
        reader.add_done_callback(self._reading_ended)
        try:
            self._tell(Connected())
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
        while True:
            self._tell(await stream.receive())

    def _reading_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()) is not None:
            self._tell(link_down(error))
            self._outgoing.put_nowait(None)


def link_down(error: BaseException) -> LinkDown:
    """What the session hears of it. An error of the operating system may pass; no retry makes a
    message fit the wire's bounds (``ValueError``), or mends a bug."""
    match error:
        case LinkError(retryable=retryable, again_s=again_s):
            return LinkDown(str(error), retryable, again_s)
        case OSError():
            return LinkDown(f"{type(error).__name__}: {error}")
        case ValueError():
            return LinkDown(str(error), retryable=False)
        case _:
            _log.error("the transport failed", exc_info=error)
            why = f"the transport failed: {type(error).__name__}: {error}"
            return LinkDown(why, retryable=False)
