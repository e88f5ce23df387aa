"""A link that holds what comes down, so that a test can count round trips without a clock.

If a request reaches the verifier while everything that came down since some moment is held, it
needed no answer since then. If the first token then reaches the device while everything that goes
up is held, it needed nothing else. Both together are one round trip, however slow the machine is.
"""

from __future__ import annotations

import asyncio
import socket

from tests.kit.gate import Gate


class HeldLink(Gate):
    """A gate that carries each direction only while it is not held.

    ``accepted`` counts the connections. With ``hold_at_flight`` the way down of each connection is
    held by itself once the device sends for the n-th time after it had received something: in the
    handshake of TLS 1.3 the second flight is the one that may carry requests."""

    def __init__(self, port: int | None) -> None:
        super().__init__(port)
        self.up_bytes = self.down_bytes = 0
        self.hold_at_flight = 0
        """0: no connection is held by itself."""
        self._flights: dict[socket.socket, _Flights] = {}
        """Flights by each end of a connection."""
        self._ways = {True: asyncio.Event(), False: asyncio.Event()}
        for way in self._ways.values():
            way.set()

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def hold(self, *, upwards: bool) -> None:
        """Hold one direction from now on."""
        self._ways[upwards].clear()

    def release(self, *, upwards: bool) -> None:
        """Carry one direction again, with what was held."""
        self._ways[upwards].set()
        if not upwards:
            self.hold_at_flight = 0
            for one in self._flights.values():
                one.may_come_down.set()

    async def _connection(self, near: socket.socket, far: socket.socket, port: int) -> None:
        self._flights[near] = self._flights[far] = _Flights()
        try:
            await super()._connection(near, far, port)
        finally:
            del self._flights[near], self._flights[far]

    async def _carry(self, source: socket.socket, sink: socket.socket, *, upwards: bool) -> None:
        loop, flights = asyncio.get_running_loop(), self._flights[source]
        while data := await loop.sock_recv(source, 1 << 16):
            if upwards and flights.has_received:
                flights.has_received = False
                flights.count += 1
                if flights.count == self.hold_at_flight:
                    flights.may_come_down.clear()
            if not upwards:
                await flights.may_come_down.wait()
            await self._ways[upwards].wait()
            await loop.sock_sendall(sink, data)
            if upwards:
                self.up_bytes += len(data)
            else:
                self.down_bytes += len(data)
                flights.has_received = True
        sink.shutdown(socket.SHUT_WR)


class _Flights:
    """How often the device has sent on one connection after it had received something."""

    def __init__(self) -> None:
        self.count, self.has_received = 0, True
        self.may_come_down = asyncio.Event()
        self.may_come_down.set()
