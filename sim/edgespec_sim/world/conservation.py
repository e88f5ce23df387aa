"""What no world may do, judged at every step.

    cause      a message arrives after it was sent, not before its path's fixed time has passed;
               a commit only if the verifier has committed its tokens
    prefix     what a device holds is never longer than what its verifier has committed
    order      a stream delivers what it was given: once, in order, nothing else
    capacity   slots of a queue do not overlap, and none is shorter than its bits need; a radio
               cell's queue is one of airtime
    machines   each works on one pass at a time
    energy     no drafter works, and no radio sends, for longer than the time there was
    bytes      sent = delivered + under way + lost with a broken stream

Everything is computed anew from what is seen here, not taken from the counters of the simulator.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from edgespec.core.protocol.messages import Commit, Downlink
from edgespec.core.verifier.session import VerifySession
from edgespec_sim.links.path import LoadedQueue

# -----------------------------------------------------------------------------------------------
# The books an auditor keeps of one queue or machine, and the error for a law that was broken.
# Every slot that was given out is written down and judged at once: it may not overlap another,
# and it may not be shorter than what it holds needs. ``conservation.py`` judges messages in the
# same way.


FindSession = Callable[[str], VerifySession | None]
"""The session of that key at the verifier; None: it is over, or lost in a restart."""
SLACK_S = 1e-9
"""What rounding may do to a sum of times."""
_REMEMBERED_SLOTS = 4096


class ConservationError(AssertionError):
    """The simulated world broke one of its laws: a bug in the simulator or in the product."""


def broken(now_s: float, what: str) -> ConservationError:
    """Asked for only where a law is broken: millions of messages break none."""
    return ConservationError(f"at {now_s:.6f} s: {what}")


def require(law: bool, now_s: float, what: str) -> None:
    if not law:
        raise broken(now_s, what)


class Slots:
    """The slots of one queue or machine, as an auditor keeps them."""

    def __init__(self, what: str = "messages leave through one queue") -> None:
        self._what = what
        self._slots: list[tuple[float, float]] = []

    def add(self, start_s: float, end_s: float, least_s: float) -> None:
        if end_s - start_s < least_s - SLACK_S:
            why = f"a slot of {end_s - start_s:.9f} s holds what needs {least_s:.9f}"
            raise broken(start_s, f"{why}: {self._what}")
        slots = self._slots
        if len(slots) == _REMEMBERED_SLOTS:
            del slots[: _REMEMBERED_SLOTS // 2]
        if not slots or slots[-1][1] <= start_s:  # behind all others, as usual
            slots.append((start_s, end_s))
            return
        index = bisect.bisect(slots, (start_s, end_s))
        before = slots[index - 1][1] if index else start_s
        after = slots[index][0] if index < len(slots) else end_s
        if before > start_s + SLACK_S or end_s > after + SLACK_S:
            raise broken(start_s, f"two {self._what} at the same time")
        slots.insert(index, (start_s, end_s))


class AuditedQueue(LoadedQueue):
    """A queue whose every slot is judged, those of cross traffic as well."""

    def __init__(self, bits_per_s: float, share: float = 0.0, seed: int = 0) -> None:
        super().__init__(bits_per_s, share, seed=seed)
        self._audit, self._rate = Slots(), bits_per_s

    def take(self, start_s: float, end_s: float, size_bytes: int) -> None:
        self._audit.add(start_s, end_s, size_bytes * 8 / self._rate)
        super().take(start_s, end_s, size_bytes)


@dataclass(slots=True)
class Way:
    """One direction of a stream; ``least_s``: what it takes at least."""

    what: str
    least_s: float
    under_way: deque[tuple[object, float, int]] = field(default_factory=deque)
    sent_bytes: int = 0
    delivered_bytes: int = 0

    def sent(self, message: object, now_s: float, size_bytes: int) -> None:
        self.under_way.append((message, now_s, size_bytes))
        self.sent_bytes += size_bytes

    def arrived(self, message: object, now_s: float) -> None:
        what, least_s = self.what, self.least_s
        if not self.under_way:
            raise broken(now_s, f"{what}: a message arrived that nobody sent")
        expected, sent_s, size_bytes = self.under_way.popleft()
        took_s = now_s - sent_s
        if message is not expected:
            raise broken(now_s, f"{what}: {message} overtook {expected}")
        if took_s < least_s - SLACK_S:
            why = f"took {took_s:.6f} s, but the path alone takes {least_s:.6f}"
            raise broken(now_s, f"{what}: {why}")
        self.delivered_bytes += size_bytes

    def check(self, now_s: float) -> None:
        under_way = sum(size_bytes for _, _, size_bytes in self.under_way)
        require(
            self.sent_bytes == self.delivered_bytes + under_way,
            now_s,
            f"{self.what}: {self.sent_bytes} bytes sent, {self.delivered_bytes} delivered, "
            f"{under_way} under way",
        )


class StreamWatch:
    """Sees every message of one stream leave and arrive; ``up_s`` and ``down_s`` are what the ways
    take at least."""

    def __init__(
        self, session: FindSession, device: str, key: str, up_s: float, down_s: float
    ) -> None:
        self._session, self._key = session, key
        self.device = device
        self.on_air_s: deque[float] = deque()
        """Air time of each message that has not arrived: it may still wait to be sent."""
        self.up, self._down = Way(f"{key} up", up_s), Way(f"{key} down", down_s)

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
        if session is None:  # over, or lost in a restart
            return
        end = commit.position + len(commit.tokens)
        if end > session.prefix.length:
            why = f"tokens up to {end} {verb}, {session.prefix.length} committed"
            raise broken(now_s, f"{self._key}: {why}")


class Conservation:
    """The watches of one world."""

    def __init__(self) -> None:
        self._watches: list[StreamWatch] = []

    def watch(
        self, session: FindSession, device: str, key: str, up_s: float, down_s: float
    ) -> StreamWatch:
        watch = StreamWatch(session, device, key, up_s, down_s)
        self._watches.append(watch)
        return watch

    def check_device(
        self, name: str, now_s: float, drafting_s: float, airtime_s: float, step_s: float
    ) -> None:
        """``step_s``: how long the last draft step may go on behind the end."""
        require(
            drafting_s <= now_s + step_s + SLACK_S,
            now_s,
            f"{name} drafted for {drafting_s:.3f} s",
        )
        airtime_s -= sum(sum(one.on_air_s) for one in self._watches if one.device == name)
        require(airtime_s <= now_s + step_s, now_s, f"{name} sent for {airtime_s:.3f} s")

    def check_end(self, now_s: float) -> None:
        for watch in self._watches:
            watch.check(now_s)
