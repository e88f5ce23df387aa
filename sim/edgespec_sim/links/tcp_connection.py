"""A TCP connection in virtual time: packets both ways over links that lose some, messages in order.

Theory of operation. Each end has a sender and a receiver; packets of one end carry bytes of its
stream and the receiver's answer about the other one. Messages are stretches of the stream, and are
delivered when all before them has arrived: what is lost holds up everything behind it, of whichever
session, as on the one HTTP/2 connection of a device. Each message is a packet of its own, as gRPC
was seen to do (1.1 a message, of 16 sessions in one pass), unless the window makes them wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import Link, PathCounts
from edgespec_sim.links.tcp_receiver import TcpReceiver
from edgespec_sim.links.tcp_segments import Acknowledgement
from edgespec_sim.links.tcp_sender import TcpSender

MESSAGE_BYTES: Final = 14
"""HTTP/2's frame header and gRPC's prefix; the rest of the framing is a packet's."""


class PacketLink(Protocol):
    def packet(self, now_s: float, size_bytes: int, /) -> float | None:
        """When a packet handed over now arrives; None: it is lost."""


class Lossless:
    """A link that loses nothing, for packets."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def packet(self, now_s: float, size_bytes: int) -> float | None:
        return self._link.arrival(now_s, size_bytes)


class TcpConnection:
    """``up`` and ``down`` are its paths. ``delays_s``: what packets take besides their links, each
    way; ``message_s``: what a message takes at its ends besides."""

    def __init__(
        self,
        queue: EventQueue,
        up: Sequence[PacketLink],
        down: Sequence[PacketLink],
        delays_s: tuple[float, float] = (0.0, 0.0),
        message_s: float = 0.0,
    ) -> None:
        self.device = _End(queue, up, delays_s[0], message_s)
        self.verifier = _End(queue, down, delays_s[1], message_s)
        self.device.peer, self.verifier.peer = self.verifier, self.device
        self.up, self.down = TcpPath(self.device), TcpPath(self.verifier)


class TcpPath:
    """One direction of a connection, as a ``Path``."""

    def __init__(self, end: _End) -> None:
        self._end = end
        self.counts = PathCounts()

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self.counts.enter(size_bytes)

        def arrive() -> None:
            self.counts.leave(size_bytes)
            deliver()

        self._end.write(size_bytes + MESSAGE_BYTES, arrive)


class _End:
    """One end: what it writes goes over ``links`` to its peer."""

    peer: _End

    def __init__(
        self, queue: EventQueue, links: Sequence[PacketLink], delay_s: float, message_s: float
    ) -> None:
        self.sender, self.receiver = TcpSender(), TcpReceiver()
        self.packets = self.lost = 0
        self._queue, self._links, self._delay_s = queue, tuple(links), delay_s
        self._message_s = message_s
        self._written = 0
        self._messages: deque[tuple[int, Callable[[], None]]] = deque()
        """Under way from here: the byte behind each, and what delivers it."""
        self._wake_s = math.inf

    def write(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self._written += size_bytes
        self._messages.append((self._written, deliver))
        self._send(self.sender.write(self._queue.now, size_bytes))

    def _send(self, ranges: Sequence[tuple[int, int]]) -> None:
        for start, end in ranges:
            self.receiver.sent_data(self._queue.now)
            self._packet(start, end)
        self._set_timer()

    def _packet(self, start: int, end: int) -> None:
        self.packets += 1
        ack = self.receiver.answer()
        self._over(0, end - start, lambda: self.peer.arrive(start, end, ack))

    def _over(self, hop: int, size_bytes: int, arrive: Callable[[], None]) -> None:
        """Over the link of that number and those behind it."""
        if hop == len(self._links):
            self._queue.after(self._delay_s, arrive)
            return
        arrival_s = self._links[hop].packet(self._queue.now, size_bytes)
        if arrival_s is None:
            self.lost += 1
        elif hop + 1 == len(self._links):
            self._queue.at(arrival_s + self._delay_s, arrive)
        else:
            self._queue.at(arrival_s, lambda: self._over(hop + 1, size_bytes, arrive))

    def arrive(self, start: int, end: int, ack: Acknowledgement) -> None:
        """A packet of the peer; an empty one if ``start`` is ``end``."""
        now_s = self._queue.now
        outgoing = self.sender.acknowledged(now_s, ack)
        answer = False
        if end > start:
            answer = self.receiver.arrived(now_s, start, end)
            self.peer.deliver(self.receiver.upto)
        self._send(outgoing)
        if answer and not outgoing:
            self._packet(0, 0)
        self._set_timer()

    def deliver(self, upto: int) -> None:
        """Everything before byte ``upto`` of this end's stream has arrived."""
        while self._messages and self._messages[0][0] <= upto:
            self._queue.after(self._message_s, self._messages.popleft()[1])

    def _set_timer(self) -> None:
        due_s = min(self.sender.timer_s, self.receiver.timer_s)
        if due_s < self._wake_s:
            self._wake_s = due_s
            self._queue.at(due_s, self._wake)

    def _wake(self) -> None:
        now_s = self._queue.now
        if now_s != self._wake_s:
            return  # an earlier one was wanted meanwhile
        self._wake_s = math.inf
        if self.receiver.timer_s <= now_s:
            self.receiver.timer_ran()
            self._packet(0, 0)
        if self.sender.timer_s <= now_s:
            self._send(self.sender.timer_ran(now_s))
        self._set_timer()
