"""Ways for a message from one end to the other, as events: one hop or several.

Theory of operation. A path takes messages and delivers each once, in order. Over several hops each
arrival is an event, at which the message is handed to the next link: so a queue that paths share
sees messages in the order in which they reach it, not in that in which they set out. Paths count
what went in and came out, so that a checker can see that nothing was lost, made up or overtaken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from edgespec_sim.event_queue import EventQueue


class Link(Protocol):
    def arrival(self, now_s: float, size_bytes: int, /) -> float:
        """When a message handed over now arrives; never before an earlier one."""


class Path(Protocol):
    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` when a message sent now has arrived: once, and in order of sending."""


class PathCounts:
    """Messages and bytes in and out; what lies between is in flight."""

    __slots__ = ("bytes_in", "bytes_out", "messages_in", "messages_out")

    def __init__(self) -> None:
        self.messages_in = self.messages_out = 0
        self.bytes_in = self.bytes_out = 0

    @property
    def messages_in_flight(self) -> int:
        return self.messages_in - self.messages_out

    @property
    def bytes_in_flight(self) -> int:
        return self.bytes_in - self.bytes_out

    def enter(self, size_bytes: int) -> None:
        self.messages_in += 1
        self.bytes_in += size_bytes

    def leave(self, size_bytes: int) -> None:
        self.messages_out += 1
        self.bytes_out += size_bytes


class OneHop:
    """A path over one link, and ``fixed_s`` on top."""

    def __init__(self, queue: EventQueue, link: Link, fixed_s: float = 0.0) -> None:
        self._queue, self._link, self._fixed_s = queue, link, fixed_s
        self.counts = PathCounts()

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self.counts.enter(size_bytes)
        arrival_s = self._link.arrival(self._queue.now, size_bytes) + self._fixed_s
        self._queue.at(arrival_s, lambda: self._arrive(size_bytes, deliver))

    def _arrive(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self.counts.leave(size_bytes)
        deliver()


class ManyHops:
    """A path over links one after the other, at least one, and ``fixed_s`` behind the last."""

    def __init__(self, queue: EventQueue, links: Sequence[Link], fixed_s: float = 0.0) -> None:
        if not links:
            raise ValueError("a path has 0 links, but at least 1 goes")
        self._queue, self._links, self._fixed_s = queue, tuple(links), fixed_s
        self.counts = PathCounts()

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self.counts.enter(size_bytes)
        self._onto(0, size_bytes, deliver)

    def _onto(self, hop: int, size_bytes: int, deliver: Callable[[], None]) -> None:
        if hop == len(self._links):
            self.counts.leave(size_bytes)
            deliver()
            return
        arrival_s = self._links[hop].arrival(self._queue.now, size_bytes)
        if hop + 1 == len(self._links):
            arrival_s += self._fixed_s
        self._queue.at(arrival_s, lambda: self._onto(hop + 1, size_bytes, deliver))
