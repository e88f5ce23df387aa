"""gRPC in processes of its own: the listener of a verifier with front processes.

Theory of operation. ``count`` processes listen on one port (SO_REUSEPORT; the kernel shares new
connections out) and carry the bytes of all calls to this process, which runs the same service as
without them. So what all streams have in common - who is let in, slots, shares, lines, drain,
counts - stays here, in one place; what gRPC costs for each message is paid on other cores.

This process holds the port itself, without listening, from before the first of them starts to its
own end: so no other daemon gets in between, and the port is found free once (``_held``). A front
process that ends, or hangs, breaks its streams, which their devices resume, and is started anew:
after a while that doubles each time it does not last. When none has listened for long enough,
``lost`` hears of it: a verifier that nobody can reach had better end and be started again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from edgespec.core.verifier.call_budget import INFO_LIMITS, CallLimits
from edgespec.transport.call_line import CallLine
from edgespec.transport.front_child import FrontChild
from edgespec.transport.front_frames import PING_EVERY_S
from edgespec.transport.front_orders import Orders
from edgespec.transport.grpc_listener import Methods
from edgespec.transport.grpc_options import Keepalive
from edgespec.transport.tls import ServerIdentity
from edgespec.transport.wire_limits import WireLimits

_LOG = logging.getLogger(__name__)
MAX_FRONTS: Final = 64
_STARTS_WITHIN_S: Final = 120.0
_FIRST_WAIT_S: Final = 0.1
_LAST_WAIT_S: Final = 10.0
# A process that has lasted so long is none that cannot last.
_LASTED_S: Final = 30.0
_NONE_FOR_S: Final = 60.0


class FrontProcesses:
    """A ``Listener`` of ``count`` processes on ``host`` and ``port`` (0: any free one).

    ``identity`` is what they show (None: plaintext), ``lost`` hears when there is none any more.
    Of the rates of ``side_calls`` each process has its part. Linux only.
    """

    def __init__(
        self,
        count: int,
        host: str,
        port: int,
        *,
        limits: WireLimits | None = None,
        keepalive: Keepalive | None = None,
        identity: ServerIdentity | None = None,
        side_calls: CallLimits = INFO_LIMITS,
        ping_every_s: float = PING_EVERY_S,
        lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        if not 1 <= count <= MAX_FRONTS:
            raise ValueError(f"{count} front processes, but there must be 1 to {MAX_FRONTS}")
        self._count, self._host, self._port, self._told = count, host, port, lost
        each = replace(
            side_calls,
            total_rate=side_calls.total_rate / count,
            total_burst=max(1.0, side_calls.total_burst / count),
        )
        level = logging.getLogger().getEffectiveLevel()
        size = (limits or WireLimits()).max_message_bytes
        self._orders = Orders(
            "", size, keepalive or Keepalive(), each, level, identity, ping_every_s
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fronts: set[FrontChild] = set()
        """Those that listen."""
        self._keepers: list[asyncio.Task[None]] = []
        self._held: socket.socket | None = None
        self._draining = False
        self._none_since: float | None = None

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of those that listen."""
        return tuple(sorted(front.process.pid for front in self._fronts))

    async def start(self, methods: Methods, _line: CallLine) -> int:
        """Start all processes and wait until they listen; the port. Raises ``OSError``."""
        self._loop = asyncio.get_running_loop()
        self._methods = methods
        self._held = _hold(self._host, self._port)
        port: int = self._held.getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._orders = replace(self._orders, address=f"{host}:{port}")
        try:
            started = await asyncio.gather(
                *(self._listening() for _ in range(self._count)), return_exceptions=True
            )
            for one in started:
                if isinstance(one, BaseException):
                    raise one
        except BaseException:
            await self.stop(0.0)
            raise
        for front in list(self._fronts):
            self._keepers.append(self._loop.create_task(self._keep(front)))
        return port

    def present(self, identity: ServerIdentity) -> None:
        """From now on this is shown to whoever connects; from any thread."""
        if self._loop is None:
            self._present(identity)
        else:
            self._loop.call_soon_threadsafe(self._present, identity)

    def _present(self, identity: ServerIdentity) -> None:
        self._orders = replace(self._orders, identity=identity)
        for front in self._fronts:
            front.present(identity)

    async def drain(self) -> None:
        """Report NOT_SERVING; calls go on. Who ends now is not started again."""
        self._draining = True
        for front in self._fronts:
            front.drain()

    async def stop(self, grace_s: float) -> None:
        """Cut what is left after ``grace_s`` seconds, and end all processes."""
        self._draining = True
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        fronts, self._fronts = self._fronts, set()
        ends = await asyncio.gather(
            *(front.stop(grace_s) for front in fronts), return_exceptions=True
        )
        for end in ends:
            if isinstance(end, BaseException):
                _LOG.error("a front process could not be ended: %s", end)
        if self._held is not None:
            self._held.close()
            self._held = None

    async def _listening(self) -> FrontChild:
        """A process that listens. Raises ``OSError``; then there is none."""
        front = FrontChild(self._orders, self._methods)
        try:
            await front.talk()
            async with asyncio.timeout(_STARTS_WITHIN_S):
                await front.listening
        except BaseException as error:
            await front.close()
            if isinstance(error, TimeoutError):
                why = f"a front process did not listen within {_STARTS_WITHIN_S:g} s"
                raise OSError(why) from None
            raise
        if self._orders.identity is not front.identity:  # replaced while it started
            assert self._orders.identity is not None
            front.present(self._orders.identity)
        if self._draining:  # begun while it started
            front.drain()
        self._fronts.add(front)
        self._none_since = None
        return front

    async def _keep(self, front: FrontChild | None) -> None:
        """Keep one process listening, until cancelled or drained."""
        assert self._loop is not None
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                if front is not None:
                    began, current, front = self._loop.time(), front, None
                    await self._until_ended(current)
                    if self._loop.time() - began >= _LASTED_S:
                        wait_s = _FIRST_WAIT_S
                if self._draining:
                    return
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LAST_WAIT_S)
                front = await self._listening()
                _LOG.warning("front process %d listens", front.process.pid)
            except Exception as error:  # also of the end of the last one: no thread to wait in
                _LOG.error("no front process could be started: %s", error)
                self._look_for_any()

    async def _until_ended(self, front: FrontChild) -> None:
        await asyncio.wait((front.ended,))
        self._fronts.discard(front)
        try:
            count, why = front.call_count, await front.last_words()
            _LOG.error(
                "front process %d is gone: %s; it had %d calls", front.process.pid, why, count
            )
        finally:
            await front.close()
        self._look_for_any()

    def _look_for_any(self) -> None:
        """Whether a process has listened lately."""
        assert self._loop is not None
        if self._fronts or self._draining:
            return
        if self._none_since is None:
            self._none_since = self._loop.time()
        elif self._loop.time() - self._none_since >= _NONE_FOR_S:
            self._told(f"no front process has listened for {_NONE_FOR_S:g} s")


def _hold(host: str, port: int) -> socket.socket:
    """A socket that has the port and does not listen. Nobody else gets it but processes of this
    user that share it (SO_REUSEPORT), and it is had only when nobody has it. Raises ``OSError``."""
    if sys.platform != "linux":
        raise OSError(f"front processes share a port as Linux does, and this is {sys.platform}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family)
    try:
        # For the bind alone: connections of a former verifier may still be closing.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        held.close()
        why = error.strerror or str(error)
        raise OSError(f"cannot listen on {host}:{port} (is it in use?): {why}") from error
    return held
