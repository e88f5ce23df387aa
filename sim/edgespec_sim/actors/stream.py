"""One generation's stream in virtual time: a path each way, delivered in order, breakable."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.core.protocol.messages import Commit, Downlink, Draft, Uplink
from edgespec_sim.actors.wire_size import message_bytes
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import Path


class FixedDelay:
    """A path that takes the same time for everything."""

    def __init__(self, queue: EventQueue, delay_s: float) -> None:
        self._queue, self._delay_s = queue, delay_s

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self._queue.after(self._delay_s, deliver)


def _never() -> bool:
    return False


class Stream:
    """Drafts and commits arrive twice whenever ``duplicate`` says so; neither may do harm.

    ``to_verifier`` and ``to_device`` are called as messages arrive; both ends hear of a cut."""

    __slots__ = (
        "_down",
        "_duplicate",
        "_queue",
        "_up",
        "lost_at_device",
        "lost_at_verifier",
        "open",
        "to_device",
        "to_verifier",
    )

    def __init__(
        self, queue: EventQueue, up: Path, down: Path, duplicate: Callable[[], bool] = _never
    ) -> None:
        self._queue, self._up, self._down, self._duplicate = queue, up, down, duplicate
        self.open = True
        self.to_verifier: Callable[[Uplink], None] = lambda message: None
        self.to_device: Callable[[Downlink], None] = lambda message: None
        self.lost_at_verifier: Callable[[], None] = lambda: None
        self.lost_at_device: Callable[[str], None] = lambda why: None

    def send_up(self, message: Uplink) -> None:
        size = message_bytes(message)
        self._up.send(size, lambda: self._arrive_up(message))
        if isinstance(message, Draft) and self._duplicate():
            self._up.send(size, lambda: self._arrive_up(message))

    def send_down(self, message: Downlink) -> None:
        size = message_bytes(message)
        self._down.send(size, lambda: self._arrive_down(message))
        if isinstance(message, Commit) and self._duplicate():
            self._down.send(size, lambda: self._arrive_down(message))

    def _arrive_up(self, message: Uplink) -> None:
        if self.open:
            self.to_verifier(message)

    def _arrive_down(self, message: Downlink) -> None:
        if self.open:
            self.to_device(message)

    def cut(self, device_notice_s: float, verifier_notice_s: float, why: str = "link cut") -> None:
        """The link breaks now: what is under way is lost, and each end notices in its own time."""
        if self.open:
            self.open = False
            self._queue.after(verifier_notice_s, lambda: self.lost_at_verifier())
            self._queue.after(device_notice_s, lambda: self.lost_at_device(why))

    def close_from_device(self) -> None:
        """The device lets go: what it sent before still arrives, then the verifier hears of it."""
        self.to_device = lambda message: None
        self.lost_at_device = lambda why: None
        self._up.send(0, self._end_at_verifier)

    def close_from_verifier(self) -> None:
        self.to_verifier = lambda message: None
        self.lost_at_verifier = lambda: None
        self._down.send(0, self._end_at_device)

    def _end_at_verifier(self) -> None:
        if self.open:
            self.open = False
            self.lost_at_verifier()

    def _end_at_device(self) -> None:
        if self.open:
            self.open = False
            self.lost_at_device("the verifier closed the stream")
