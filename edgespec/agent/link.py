"""One stream's life on the device: connect, send and receive until either side lets go.

After ``close`` nothing of this link reaches the session any more, so a new link can be opened at
once. What was handed to ``send`` before ``close`` still leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgespec.core.draft_events import Connected, DraftEvent, LinkDown
from edgespec.core.messages import Uplink
from edgespec.ports import DeviceStream, LinkError, Transport


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
        self._connecting = asyncio.create_task(self._transport.connect())
        await asyncio.wait([self._connecting])
        connecting, self._connecting = self._connecting, None
        if connecting.cancelled():
            return
        error = connecting.exception()
        if isinstance(error, LinkError):
            self._tell(LinkDown(str(error), error.retryable))
            return
        stream = connecting.result()
        reader = asyncio.create_task(self._read(stream))
        try:
            self._tell(Connected())
            while (message := await self._outgoing.get()) is not None:
                await stream.send(message)
        except ValueError as unfit:  # no retry makes a message fit the wire's bounds
            self._tell(LinkDown(str(unfit), retryable=False))
        except LinkError as broken:
            # A fault the verifier sent before it hung up says more than the broken pipe does.
            await asyncio.wait([reader], timeout=1.0)
            self._tell(LinkDown(str(broken), broken.retryable))
        finally:
            reader.cancel()
            await asyncio.wait([reader])
            await stream.close()

    async def _read(self, stream: DeviceStream) -> None:
        try:
            while True:
                self._tell(await stream.receive())
        except LinkError as error:
            self._tell(LinkDown(str(error), error.retryable))
            self._outgoing.put_nowait(None)
