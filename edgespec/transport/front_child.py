"""The verifier's hold on one front process: start it, talk to it, notice its end.

What comes of a front process is looked at as what comes of a stranger: a frame that cannot be is
the end of that process, and of nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import grpc
from grpc.aio import AbortError

from edgespec.transport import front_frames as frames
from edgespec.transport.front_call import FrontCall
from edgespec.transport.front_frames import FrameError, FramePipe
from edgespec.transport.front_orders import Orders, encode_identity
from edgespec.transport.grpc_listener import STREAMED, Methods
from edgespec.transport.tls import ServerIdentity

_LOG = logging.getLogger(__name__)
MODULE: Final = "edgespec.transport.front_process"
_SOCKET_BYTES: Final = 1 << 20
_ENDS_WITHIN_S: Final = 3.0
_NOT_SERVED: Final = grpc.StatusCode.INTERNAL


class FrontChild:
    """One front process, from its start to its end. Raises ``OSError`` when it cannot be started.

    ``methods`` run the calls that it takes.
    """

    def __init__(self, orders: Orders, methods: Methods) -> None:
        self._orders, self._methods = orders, methods
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, tuple[FrontCall, asyncio.Task[None]]] = {}
        self._unanswered = 0
        self._ticking: asyncio.TimerHandle | None = None
        self.listening: asyncio.Future[None] = self._loop.create_future()
        """Raises ``OSError`` when the process cannot listen, or ends before it does."""
        self.listening.add_done_callback(_retrieve)
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """How the pipe to the process ended, for people."""
        self._on_frame: dict[int, Callable[[int, bytes], None]] = {
            frames.MESSAGE: self._on_message,
            frames.WROTE: self._on_wrote,
            frames.OPEN: self._on_open,
            frames.GONE: self._on_gone,
            frames.HALF_CLOSED: self._on_half_closed,
            frames.PONG: self._on_pong,
            frames.SAID: self._on_said,
            frames.LISTENING: self._on_listening,
            frames.REFUSED: self._on_refused,
        }
        self._end, self._life, self.process = _started()
        self._pipe = FramePipe(self._hear, self._lost, frames.READ)

    async def talk(self) -> None:
        """Connect to the process and give it its orders."""
        await self._loop.create_connection(lambda: self._pipe, sock=self._end)
        self._pipe.send(frames.LISTEN, 0, self._orders.encode())

    @property
    def identity(self) -> ServerIdentity | None:
        """What it was told to show at its start."""
        return self._orders.identity

    @property
    def call_count(self) -> int:
        """Calls that are under way."""
        return len(self._calls)

    def present(self, identity: ServerIdentity) -> None:
        """Have it show another certificate."""
        self._pipe.send(frames.IDENTITY, 0, encode_identity(identity))

    def drain(self) -> None:
        """Have its health say NOT_SERVING."""
        self._pipe.send(frames.DRAIN)

    async def stop(self, grace_s: float) -> None:
        """End it, and all calls that are left after ``grace_s`` seconds."""
        self._pipe.send(frames.STOP, round(1e3 * grace_s))
        await asyncio.wait((self.ended,), timeout=grace_s + _ENDS_WITHIN_S)
        await self.close()

    async def close(self) -> None:
        """End it at once; when this returns, the process is no more and all calls are over."""
        self._pipe.close("it was ended")
        if self._ticking is not None:
            self._ticking.cancel()
        with contextlib.suppress(OSError):
            os.close(self._life)
        self._life = -1
        self._end.close()
        if self.process.poll() is None:
            self.process.kill()
        await asyncio.to_thread(self.process.wait)
        tasks = [task for _, task in self._calls.values()]
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """For an end that cannot be waited for."""
        self.process.kill()

    async def last_words(self) -> str:
        """How the process ended, for people; after ``ended``."""
        why = self.ended.result()
        code = await asyncio.to_thread(_exit_code, self.process)
        if code is None or code == 0:
            return why
        return f"killed by signal {-code}" if code < 0 else f"{why}, exit code {code}"

    # --- frames ----------------------------------------------------------------------------

    def _hear(self, kind: int, number: int, body: bytes) -> None:
        if (heed := self._on_frame.get(kind)) is None:
            raise FrameError(f"frame {kind} is not for the verifier")
        heed(number, body)

    def _on_message(self, number: int, body: bytes) -> None:
        if (found := self._calls.get(number)) is not None:
            found[0].deliver(body)

    def _on_wrote(self, _number: int, body: bytes) -> None:
        for number in frames.numbers_in(body):
            if (found := self._calls.get(number)) is not None:
                found[0].wrote()

    def _on_half_closed(self, number: int, _body: bytes) -> None:
        if (found := self._calls.get(number)) is not None:
            found[0].half_close()

    def _on_open(self, number: int, body: bytes) -> None:
        if number in self._calls:
            raise FrameError(f"call {number} was opened twice")
        method, peer, metadata = json.loads(body)
        shown = [(str(name), str(value)) for name, value in metadata]
        call = FrontCall(number, str(peer), shown, self._pipe)
        task = self._loop.create_task(self._run(call, str(method)))
        self._calls[number] = call, task
        # Not at the end of the task's own code: one cancelled before its first turn runs none.
        task.add_done_callback(partial(self._forget, number))

    def _on_gone(self, number: int, body: bytes) -> None:
        if (found := self._calls.get(number)) is not None:
            call, task = found
            call.gone(body.decode(errors="replace"))
            task.cancel()

    def _on_pong(self, _number: int, _body: bytes) -> None:
        self._unanswered = 0

    def _on_said(self, level: int, body: bytes) -> None:
        text = body.decode(errors="replace")
        _LOG.log(level, "front process %d: %s", self.process.pid, text)

    def _on_listening(self, _number: int, _body: bytes) -> None:
        if not self.listening.done():
            self.listening.set_result(None)
            self._tick()

    def _on_refused(self, _number: int, body: bytes) -> None:
        if not self.listening.done():
            self.listening.set_exception(OSError(body.decode(errors="replace")))

    def _lost(self, why: str) -> None:
        if not self.listening.done():
            self.listening.set_exception(OSError(f"a front process ended at its start: {why}"))
        if not self.ended.done():
            self.ended.set_result(why)
        if self._ticking is not None:
            self._ticking.cancel()
        for call, task in list(self._calls.values()):
            call.gone(f"its front process is gone: {why}")
            task.cancel()

    def _tick(self) -> None:
        # Counted and not timed, so that nobody is blamed for the time in which this machine stood.
        if self._unanswered >= frames.MOST_PINGS:
            self._pipe.close(f"it did not answer {self._unanswered} pings")
            self.process.kill()
            return
        self._unanswered += 1
        self._pipe.send(frames.PING)
        self._ticking = self._loop.call_later(self._orders.ping_every_s, self._tick)

    # --- calls -----------------------------------------------------------------------------

    async def _run(self, call: FrontCall, method: str) -> None:
        """One call, to its end; whatever goes wrong ends this one only."""
        try:
            if method == STREAMED:
                await self._methods[method](None, call)
            else:
                request = await call.read()
                call.reply(await self._methods[method](request, call))
            call.end()
        except AbortError:
            pass
        except ConnectionError as error:
            _LOG.debug("a call of %s is over: %s", call.peer(), error)
        except Exception:
            _LOG.exception("a call of %s failed", call.peer())

    def _forget(self, number: int, _task: asyncio.Task[None]) -> None:
        call, _ = self._calls.pop(number)
        call.end(_NOT_SERVED, "the verifier failed")  # unless it has ended, as nearly always


def _started() -> tuple[socket.socket, int, subprocess.Popen[bytes]]:
    """A child that holds the other ends of a socket and of a pipe, and nothing else of ours; and
    our ends of both."""
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        life_read, life_write = os.pipe()
        undo.callback(os.close, life_write)
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(life_read), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                pass_fds=(life_read, theirs.fileno()),
                # A Ctrl-C in the terminal is the verifier's to heed.
                start_new_session=True,
            )
        finally:
            os.close(life_read)
            theirs.close()
        ours.setblocking(False)
        undo.pop_all()
    return ours, life_write, process


def _has_descriptor(file: Any) -> bool:
    try:
        return file is not None and file.fileno() >= 0
    except (OSError, ValueError):
        return False


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        return None


def _retrieve(future: asyncio.Future[None]) -> None:
    """Mark the error as seen: not everybody waits for it."""
    if not future.cancelled():
        future.exception()
