"""What a verifier's session knows of its device: is it there, what does it hold, when did it hear?

A session outlives its stream by the lease, so that a device can come back; and a device that does
not acknowledge holds its session up, which others pay for in slots and cache. Times are those of
the events.
"""

from __future__ import annotations

from edgespec.core.protocol.messages import Received


class Attachment:
    """``length`` is how many tokens the device held when it opened the session."""

    def __init__(self, length: int, now: float) -> None:
        self.detached_at: float | None = now
        """Since when no stream belongs to the session; None while one does."""
        self.unread_since: float | None = None
        """Since when nothing more is sent, because the device acknowledges nothing."""
        self.behind = False
        """Whether what it was to be sent before the last pass still waits to leave."""
        self.spoke_at = now
        """When the device was last sent something."""
        self.received = length
        """The device holds all tokens before this position."""
        self._echo: tuple[int, float] | None = None

    @property
    def attached(self) -> bool:
        return self.detached_at is None

    def attach(self, length: int, now: float) -> None:
        """A stream opened, and its device holds ``length`` tokens."""
        self.detached_at, self.unread_since, self._echo = None, None, None
        self.behind = False
        self.received, self.spoke_at = length, now

    def detach(self, now: float) -> None:
        """The stream is gone; nothing changes when it was gone already."""
        if self.detached_at is None:
            self.detached_at = now

    def acknowledge(self, message: Received, now: float) -> None:
        """The device says what it holds; what it holds never becomes less."""
        if message.position > self.received:
            self.received, self.unread_since = message.position, None
        if message.echo:
            self._echo = (message.echo, now)

    def note_unread(self, length: int, most: int, now: float) -> None:
        """Of ``length`` committed tokens, at most ``most`` may be unacknowledged before nothing
        more is sent."""
        if length - self.received <= most:
            self.unread_since = None
        elif self.unread_since is None:
            self.unread_since = now

    def take_echo(self, now: float) -> tuple[int, int]:
        """The echo to return, and for how many microseconds it was held; 0 without one."""
        if self._echo is None:
            return 0, 0
        (echo, held_at), self._echo = self._echo, None
        return echo, round((now - held_at) * 1e6)
