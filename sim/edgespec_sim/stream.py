"""One generation's stream in virtual time: two one-way links, delivered in order, breakable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edgespec.core.messages import Commit, Downlink, Draft, Uplink
from edgespec_sim.event_queue import EventQueue


class OneWay(Protocol):
    def arrival(self, now: float, size_bytes: int) -> float:
        """When a message of this size that leaves now arrives; never before an earlier one."""


@dataclass(slots=True)
class FixedDelay:
    """A constant one-way delay."""

    delay_s: float

    def arrival(self, now: float, size_bytes: int) -> float:
        return now + self.delay_s


# A typical message; links without a bandwidth ignore it.
_MESSAGE_BYTES = 40


class Stream:
    """Drafts and commits arrive twice whenever ``duplicate`` says so; neither may do harm.

    ``to_verifier`` and ``to_device`` are called as messages arrive; both ends hear of a cut."""

    def __init__(
        self,
        queue: EventQueue,
        up: OneWay,
        down: OneWay,
        duplicate: Callable[[], bool] = lambda: False,
    ) -> None:
        self._queue, self._up, self._down, self._duplicate = queue, up, down, duplicate
        self.open = True
        self.to_verifier: Callable[[Uplink], None] = lambda message: None
        self.to_device: Callable[[Downlink], None] = lambda message: None
        self.lost_at_verifier: Callable[[], None] = lambda: None
        self.lost_at_device: Callable[[str], None] = lambda why: None

    def send_up(self, message: Uplink) -> None:
        copies = 1 + (isinstance(message, Draft) and self._duplicate())
        for _ in range(copies):
            at = self._up.arrival(self._queue.now, _MESSAGE_BYTES)
            self._queue.at(at, lambda: self._arrive_up(message))

    def send_down(self, message: Downlink) -> None:
        copies = 1 + (isinstance(message, Commit) and self._duplicate())
        for _ in range(copies):
            at = self._down.arrival(self._queue.now, _MESSAGE_BYTES)
            self._queue.at(at, lambda: self._arrive_down(message))

    def _arrive_up(self, message: Uplink) -> None:
        if self.open:
            self.to_verifier(message)

    def _arrive_down(self, message: Downlink) -> None:
        if self.open:
            self.to_device(message)

    def cut(self, device_notice_s: float, verifier_notice_s: float) -> None:
        """The link breaks now: what is under way is lost, and each end notices in its own time."""
        if self.open:
            self.open = False
            self._queue.after(verifier_notice_s, lambda: self.lost_at_verifier())
            self._queue.after(device_notice_s, lambda: self.lost_at_device("link cut"))

    def close_from_device(self) -> None:
        """The device lets go: what it sent before still arrives, then the verifier hears of it."""
        self.to_device = lambda message: None
        self.lost_at_device = lambda why: None
        at = self._up.arrival(self._queue.now, 0)
        self._queue.at(at, self._end_at_verifier)

    def close_from_verifier(self) -> None:
        self.to_verifier = lambda message: None
        self.lost_at_verifier = lambda: None
        at = self._down.arrival(self._queue.now, 0)
        self._queue.at(at, self._end_at_device)

    def _end_at_verifier(self) -> None:
        if self.open:
            self.open = False
            self.lost_at_verifier()

    def _end_at_device(self) -> None:
        if self.open:
            self.open = False
            self.lost_at_device("the verifier closed the stream")
