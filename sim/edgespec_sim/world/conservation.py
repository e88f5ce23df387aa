"""Laws that every world must obey, checked at every step.

    cause      a message arrives after it was sent, not before its path's fixed time has passed;
               a commit only if the verifier has committed its tokens
    prefix     the tokens that a device holds are never more than its verifier has committed
    order      a stream delivers what was sent: once, in order, nothing else
    energy     no drafter works for longer than the elapsed time
    bytes      sent = delivered + in transit + lost with a broken stream

Everything is computed here from the observed messages, not from the counters of the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from edgespec.core.protocol.messages import Commit, Downlink
from edgespec.core.verifier.session import VerifySession

FindSession = Callable[[str], VerifySession | None]
"""Returns the verifier's session with an id, or None if it has ended or was lost in a restart."""
SLACK_S = 1e-9
"""Tolerance for rounding errors in a sum of times."""


class ConservationError(AssertionError):
    """The simulated world broke one of its laws: a bug in the simulator or in the product."""


def broken_law(now_s: float, what: str) -> ConservationError:
    """Make the error. Its text is built only for a broken law, since millions of messages break
    none."""
    return ConservationError(f"at {now_s:.6f} s: {what}")


@dataclass(slots=True)
class DirectionWatch:
    """One direction of a stream. ``least_s`` is the least time that a message takes."""

    what: str
    least_s: float
    in_transit: deque[tuple[object, float, int]] = field(default_factory=deque)
    sent_bytes: int = 0
    delivered_bytes: int = 0

    def sent(self, message: object, now_s: float, size_bytes: int) -> None:
        self.in_transit.append((message, now_s, size_bytes))
        self.sent_bytes += size_bytes

    def arrived(self, message: object, now_s: float) -> None:
        what, least_s = self.what, self.least_s
        if not self.in_transit:
            raise broken_law(now_s, f"{what}: a message arrived that was never sent")
        expected, sent_s, size_bytes = self.in_transit.popleft()
        took_s = now_s - sent_s
        if message is not expected:
            raise broken_law(now_s, f"{what}: {message} overtook {expected}")
        if took_s < least_s - SLACK_S:
            why = f"took {took_s:.6f} s, but the path alone takes {least_s:.6f}"
            raise broken_law(now_s, f"{what}: {why}")
        self.delivered_bytes += size_bytes

    def check(self, now_s: float) -> None:
        in_transit = sum(size_bytes for _, _, size_bytes in self.in_transit)
        if self.sent_bytes != self.delivered_bytes + in_transit:
            sent = f"{self.what}: {self.sent_bytes} bytes sent, {self.delivered_bytes} delivered"
            raise broken_law(now_s, f"{sent}, {in_transit} under way")


class StreamWatch:
    """Checks every message of a stream when it is sent and when it arrives, at least ``least_s``
    later."""

    def __init__(self, session: FindSession, key: str, least_s: float) -> None:
        self._session, self._key = session, key
        self.up, self._down = (
            DirectionWatch(f"{key} up", least_s),
            DirectionWatch(f"{key} down", least_s),
        )

    def sent_down(self, message: Downlink, now_s: float, size_bytes: int) -> None:
        self._down.sent(message, now_s, size_bytes)
        if isinstance(message, Commit):
            self._check_prefix(message, now_s, "sent")

    def arrived_down(self, message: Downlink, now_s: float) -> None:
        self._down.arrived(message, now_s)
        if isinstance(message, Commit):
            self._check_prefix(message, now_s, "delivered")

    def check(self, now_s: float) -> None:
        self.up.check(now_s)
        self._down.check(now_s)

    def _check_prefix(self, commit: Commit, now_s: float, verb: str) -> None:
        session = self._session(self._key)
        if session is None:  # It has ended, or was lost in a restart.
            return
        end = commit.position + len(commit.tokens)
        if end > session.prefix.length:
            why = f"tokens up to {end} {verb}, {session.prefix.length} committed"
            raise broken_law(now_s, f"{self._key}: {why}")


def check_device(name: str, now_s: float, drafting_s: float, step_s: float) -> None:
    """Check a device's drafting time. ``step_s`` is how long the last draft step may exceed the
    end."""
    if drafting_s > now_s + step_s + SLACK_S:
        raise broken_law(now_s, f"{name} drafted for {drafting_s:.3f} s")
