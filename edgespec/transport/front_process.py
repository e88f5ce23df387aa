"""A front process: ``python -m edgespec.transport.front_process LIFE_DESCRIPTOR PIPE_DESCRIPTOR``.

Theory of operation. It takes the calls of devices by gRPC on the verifier's port, which it shares
with the other front processes, and carries their bytes to and from the verifier's process
(``front_frames.py``). It decides nothing: who is let in, what is read when, and how a call ends is
the service's business (``grpc_server.py``), which sees each call as a ``FrontCall``. Only calls of
health and reflection are answered here.

It is started and ended by the verifier's process (``front_group.py``) and by nobody else; signals
that ask to stop are for that one. The end of the verifier's process ends this one three times over:
the pipe ends, a thread reads another one that carries nothing, and on Linux the kernel kills the
child (``prctl(2)``, PR_SET_PDEATHSIG), which works as well on a process that hangs or was stopped.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from functools import partial
from typing import Any

import grpc
from grpc.aio import EOF

from edgespec.transport import door, trace_parent
from edgespec.transport import front_frames as frames
from edgespec.transport.call_end import GONE, abort_call
from edgespec.transport.call_line import CallLine
from edgespec.transport.front_frames import FrameError, FramePipe
from edgespec.transport.front_orders import Orders, decode_identity
from edgespec.transport.grpc_listener import ANSWERED, STREAMED, GrpcListener, ServeCall
from edgespec.transport.grpc_options import server_options
from edgespec.transport.tls import ServerTls
from edgespec.transport.wire_limits import WireLimits

_LOG = logging.getLogger(__name__)
_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SET_PARENT_DEATH_SIGNAL = 1
_HEADERS = (door.HEADER, trace_parent.HEADER)
_MAX_LINE = 4_000
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class _Call:
    """One call of a device, from this side of the pipe; ``request`` None: it streams both ways."""

    def __init__(
        self, number: int, context: Any, pipe: FramePipe, method: str, request: bytes | None
    ) -> None:
        self._number, self._context = number, context
        self._method, self._request = method, request
        self._send = partial(pipe.send, number=number)
        self._gather = partial(pipe.gather, frames.MESSAGE, number)
        self._wrote = partial(pipe.note, number)
        self._loop = asyncio.get_running_loop()
        self._may_read = frames.UNREAD
        self._room: asyncio.Future[None] | None = None
        self._orders: deque[bytes | None] = deque()
        """Messages to write; None: the initial metadata."""
        self._news: asyncio.Future[None] | None = None
        self._status: asyncio.Future[bytes] = self._loop.create_future()
        self._reply = b""
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> bytes:
        """Until the verifier ends the call; the reply of a unary one. Raises what ``abort`` does,
        and ``CancelledError`` when the device is gone."""
        self._open()
        if self._request is not None:
            self._send(frames.MESSAGE, body=self._request)
        else:
            self._tasks = [
                self._loop.create_task(self._read_on()),
                self._loop.create_task(self._write_on()),
            ]
        try:
            await self._until_ended()
        finally:
            for task in self._tasks:
                task.cancel()
        return self._reply

    async def _until_ended(self) -> None:
        try:
            code, details, metadata = json.loads(await self._status)
        except asyncio.CancelledError:
            self._send(frames.GONE, body=b"the device is gone")
            raise
        if code:
            advice = tuple((name, value) for name, value in metadata)
            await abort_call(self._context, _STATUS[code], details, advice)

    def _open(self) -> None:
        # Asked first: grpcio 1.85 reads freed memory when asked after the call has ended.
        peer = str(self._context.peer())
        shown = [
            [name, value]
            for name, value in self._context.invocation_metadata() or ()
            if name in _HEADERS and isinstance(value, str)
        ]
        self._send(frames.OPEN, body=json.dumps([self._method, peer, shown]).encode())

    # --- what the verifier says ------------------------------------------------------------

    def write(self, payload: bytes | None) -> None:
        if self._request is not None:
            self._reply = payload or b""
            return
        self._orders.append(payload)
        _wake(self._news)

    def read_more(self) -> None:
        self._may_read += 1
        _wake(self._room)

    def end(self, status: bytes) -> None:
        if not self._status.done():
            self._status.set_result(status)

    # --- the device's side -----------------------------------------------------------------

    async def _read_on(self) -> None:
        try:
            while True:
                while not self._may_read:
                    self._room = self._loop.create_future()
                    await self._room
                payload = await self._context.read()
                if payload is EOF:
                    self._send(frames.HALF_CLOSED)
                    return
                self._may_read -= 1
                self._gather(payload)
        except GONE as error:
            self._lost(error)
        except Exception as error:
            _LOG.exception("reading a call failed")
            self._lost(error)

    async def _write_on(self) -> None:
        try:
            while True:
                while not self._orders:
                    self._news = self._loop.create_future()
                    await self._news
                payload = self._orders.popleft()
                if payload is None:
                    await self._context.send_initial_metadata(())
                else:
                    await self._context.write(payload)
                    self._wrote()
        except GONE as error:
            self._lost(error)
        except Exception as error:
            _LOG.exception("writing to a call failed")
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        """gRPC says that the device is gone; its handler is cancelled by and by."""
        self._send(frames.GONE, body=str(error).encode(errors="replace"))
        self.end(json.dumps([grpc.StatusCode.CANCELLED.value[0], "", []]).encode())


class Front:
    """This process: the listener and the calls that it has taken."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._calls: dict[int, _Call] = {}
        self._count = 0
        self._listener: GrpcListener | None = None
        self._tls: ServerTls | None = None
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent = 0
        """Intervals of pings without one."""

    async def run(self) -> None:
        """Until the verifier says so, or is gone."""
        loop = asyncio.get_running_loop()
        _, self._pipe = await loop.create_connection(
            lambda: FramePipe(self._hear, self._lost, frames.WROTE), sock=self._end
        )
        logging.root.addHandler(_ToVerifier(loop, self._pipe))
        await self._over.wait()

    async def _take(self, context: Any, method: str, request: bytes | None = None) -> bytes:
        self._count += 1
        number = self._count
        call = self._calls[number] = _Call(number, context, self._pipe, method, request)
        try:
            return await call.run()
        finally:
            del self._calls[number]

    async def _speculate(self, _requests: Any, context: Any) -> None:
        await self._take(context, STREAMED)

    async def _answer(self, method: str, request: bytes, context: Any) -> bytes:
        return await self._take(context, method, request)

    def _hear(self, kind: int, number: int, body: bytes) -> None:
        if number and kind != frames.STOP:
            call = self._calls.get(number)
            if call is None:  # it has ended in the meantime
                return
            if kind == frames.WRITE:
                call.write(body)
            elif kind == frames.GREET:
                call.write(None)
            elif kind == frames.END:
                call.end(body)
            else:
                raise FrameError(f"frame {kind} came for a call")
        elif kind == frames.READ:
            for read in frames.numbers_in(body):
                if (reader := self._calls.get(read)) is not None:
                    reader.read_more()
        elif kind == frames.PING:
            self._silent = 0
            self._pipe.send(frames.PONG)
        elif kind == frames.LISTEN:
            self._begin(self._listen(Orders.decode(body)))
        elif kind == frames.IDENTITY and self._tls is not None:
            self._tls.replace(decode_identity(body))
        elif kind == frames.DRAIN and self._listener is not None:
            self._begin(self._listener.drain())
        elif kind == frames.STOP:
            self._begin(self._stop(number / 1e3))
        else:
            raise FrameError(f"frame {kind} came at no time for it")

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, orders: Orders) -> None:
        logging.root.setLevel(orders.log_level)
        try:
            self._listener = listener = await self._listening(orders)
        except Exception as error:
            why = str(error) or type(error).__name__
            self._pipe.send(frames.REFUSED, body=why.encode(errors="replace"))
            return
        gc.collect()
        gc.freeze()  # as the verifier's own process does, and for its reasons
        gc.set_threshold(20_000, 20, 50)
        self._pipe.send(frames.LISTENING)
        await self._watch(listener, orders.ping_every_s)

    async def _listening(self, orders: Orders) -> GrpcListener:
        self._tls = None if orders.identity is None else ServerTls(orders.identity)
        limits = WireLimits(max_message_bytes=orders.max_message_bytes)
        listener = GrpcListener(
            orders.address,
            server_options(limits, orders.keepalive, shared_port=True),
            None if self._tls is None else self._tls.credentials,
        )
        line = CallLine(orders.side_calls, asyncio.get_running_loop().time)
        methods: dict[str, ServeCall] = {name: partial(self._answer, name) for name in ANSWERED}
        await listener.start({**methods, STREAMED: self._speculate}, line)
        return listener

    async def _watch(self, listener: GrpcListener, every_s: float) -> None:
        """Have the health tell of a verifier that hangs: it cannot do that itself. Counted and not
        timed, as ``front_child.py`` does."""
        serving = True
        while True:
            await asyncio.sleep(every_s)
            self._silent += 1
            if serving != (self._silent < frames.MOST_PINGS):
                serving = not serving
                _LOG.warning("the verifier %s", "answers again" if serving else "does not answer")
                await listener.report(serving=serving)

    async def _stop(self, grace_s: float) -> None:
        if self._listener is not None:
            await self._listener.stop(grace_s)
        self._over.set()

    def _lost(self, _why: str) -> None:
        os._exit(0)  # The verifier is no more: nobody wants anything of this process.


class _ToVerifier(logging.Handler):
    """Has the verifier's process log what is logged here, so that there is one log."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pipe: FramePipe) -> None:
        super().__init__()
        self._loop, self._pipe = loop, pipe

    def emit(self, record: logging.LogRecord) -> None:
        """Send the line, from whatever thread it comes."""
        try:
            body = self.format(record)[:_MAX_LINE].encode(errors="replace")
            send = partial(self._pipe.send, frames.SAID, record.levelno, body)
            self._loop.call_soon_threadsafe(send)
        except RuntimeError:  # the loop has ended
            self.handleError(record)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _end_with_verifier(life: int) -> None:
    os.read(life, 1)  # Nothing ever comes: it returns when the verifier's process is no more.
    os._exit(0)


def main() -> None:
    """Run this process."""
    for number in _STOPPING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    life, end = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    threading.Thread(target=_end_with_verifier, args=(life,), daemon=True).start()

    async def run() -> None:
        await Front(end).run()
        os._exit(0)  # the library's threads are not waited for

    asyncio.run(run())


if __name__ == "__main__":
    main()
