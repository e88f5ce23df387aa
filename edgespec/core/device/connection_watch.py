"""When a connection counts as dead, and is replaced by another one to the same verifier.

Theory of operation. A connection may die without a sign: the device slept, changed its network, or
an address translator forgot it. What is sent is then lost, and the transport's own pings need
seconds to notice. So a connection that is in use is *suspect* if nothing was received on it for a
moment, or if it is used after a pause. A suspect one is probed with a call of ``Info``. If the
answer does not come at once, another connection is made beside it, and probed as well. The first
answer decides: that of the old connection lets it go on, that of the new one replaces it.

The old connection has a head start of ``patience_s`` and needs no handshakes, so it loses only if
it is dead, however long the round trip is. A verifier that is too busy to answer answers neither
probe and keeps the connection; a network that is down brings no answer either, and then the new
connection is begun again every ``attempt_s``, so that one is under way when the network is back.
A connection that never brought anything is not watched: its first attempt has its own time limit.

    RESTING -> WATCHING -> PROBING -> RACING -> WATCHING or RESTING

Invariants: at most one probe and one new connection are under way; nothing is sent while the
connection is not in use; every probe that is not answered and every race that is not decided is
followed by a longer pause, up to ``longest_quiet_s``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, assert_never

from edgespec.core.statically_frozen import statically_frozen


class WatchState(Enum):
    """State of a ``ConnectionWatch``."""

    RESTING = "resting"
    """Nothing uses the connection."""
    WATCHING = "watching"
    """It is used, and not suspect."""
    PROBING = "probing"
    """A probe is under way."""
    RACING = "racing"
    """The probe was not answered in time, and a new connection is being made."""


RESTING, WATCHING, PROBING, RACING = WatchState


@dataclass(frozen=True, slots=True)
class WatchPolicy:
    """Times of a ``ConnectionWatch``, in seconds."""

    idle_s: float = 10.0
    """Seconds without a message after which the next use probes the connection. Address translators
    keep one for half a minute at least, but a laptop changes its network in seconds."""
    quiet_s: float = 1.0
    """Seconds without a message on a used connection after which it is probed. Passes of large
    targets take less, so usual streams need no probe. Each probe in a row waits twice as long."""
    longest_quiet_s: float = 12.0
    """Longest wait for the next probe of a connection that is used and quiet."""
    patience_s: float = 0.5
    """Seconds that a probe has before a new connection is begun."""
    attempt_s: float = 2.0
    """Seconds after which a new connection that brought no answer is begun anew. A lost SYN packet
    is sent again after 1 s, and the next one only after 3 s."""
    max_attempts: int = 30
    """New connections in a row until the race ends, for a generation that waits for a minute."""


# --- events ---------------------------------------------------------------------------------


@statically_frozen
class Used:
    """A stream or a call begins on the connection.

    ``is_probe``: it is a call whose end is reported as ``ProbeEnded``, so that a suspect connection
    needs no other probe."""

    is_probe: bool = False


@statically_frozen
class Unused:
    """No call and no stream is on the connection any more."""


@statically_frozen
class MessageReceived:
    """The verifier sent something over the connection."""


@statically_frozen
class ProbeEnded:
    """The probe has ended. ``is_answered`` False: no answer came, and none will."""

    is_answered: bool


@statically_frozen
class FreshAnswered:
    """The probe over the new connection was answered."""


@statically_frozen
class FreshFailed:
    """The new connection could not be made."""


@statically_frozen
class Replaced:
    """The connection was replaced for another reason."""


@statically_frozen
class WatchTick:
    """The deadline was reached."""


WatchEvent = (
    Used
    | Unused
    | MessageReceived
    | ProbeEnded
    | FreshAnswered
    | FreshFailed
    | Replaced
    | WatchTick
)


# --- actions --------------------------------------------------------------------------------


@statically_frozen
class Probe:
    """Make a call of ``Info`` over the connection; ``ProbeEnded`` follows."""


@statically_frozen
class ConnectFresh:
    """Make a new connection and probe it; ``FreshAnswered`` or ``FreshFailed`` follows."""


@statically_frozen
class DropFresh:
    """Close the new connection; no event of it may follow."""


@statically_frozen
class Replace:
    """Close the connection, with what runs on it, and use the new one instead."""


WatchAction = Probe | ConnectFresh | DropFresh | Replace
Actions = tuple[WatchAction, ...]
_NONE: Final[Actions] = ()


class ConnectionWatch:
    """Watches one connection. ``deadline`` is when to send ``WatchTick``; None: never."""

    def __init__(self, policy: WatchPolicy | None = None) -> None:
        self.state = RESTING
        self.deadline: float | None = None
        self._policy = policy or WatchPolicy()
        self._quiet_s = self._policy.quiet_s
        """Seconds without a message until the next probe."""
        self._received_at: float | None = None
        """Time of the latest message; None before the first one."""
        self._is_used = self._is_probing = False
        self._attempts = 0
        """New connections since the latest message."""

    def handle(self, event: WatchEvent, now: float) -> Actions:
        match event:
            case Used(is_probe):
                return self._on_used(is_probe, now)
            case Unused():
                self._is_used = False
                if self.state is WATCHING:
                    self._rest()
                return _NONE
            case MessageReceived():
                return self._on_received(now, self._policy.quiet_s)
            case ProbeEnded(is_answered):
                self._is_probing = False
                if not is_answered:
                    return self._race(now) if self.state is PROBING else _NONE
                longer_s = min(2 * self._quiet_s, self._policy.longest_quiet_s)
                return self._on_received(now, longer_s)
            case FreshAnswered():
                if self.state is not RACING:
                    return _NONE
                self._is_probing = False
                self._on_received(now, self._policy.quiet_s, is_racing=False)
                return (Replace(),)
            case FreshFailed():
                if self.state is RACING:
                    self._pause(now)
                return _NONE
            case Replaced():
                dropped = (DropFresh(),) if self.state is RACING else _NONE
                self._is_probing, self._received_at = False, None
                self._rest()
                return dropped
            case WatchTick():
                return self._on_tick(now)
            case _:
                assert_never(event)

    def _on_used(self, is_probe: bool, now: float) -> Actions:
        self._is_used = True
        if self.state is not RESTING or self._received_at is None:
            return _NONE
        if now - self._received_at < self._policy.idle_s:
            self._watch(now)
            return _NONE
        return self._probe(now, is_under_way=is_probe or self._is_probing)

    def _on_received(self, now: float, quiet_s: float, *, is_racing: bool = True) -> Actions:
        dropped = (DropFresh(),) if self.state is RACING and is_racing else _NONE
        self._received_at, self._quiet_s, self._attempts = now, quiet_s, 0
        if self._is_used:
            self._watch(now)
        else:
            self._rest()
        return dropped

    def _on_tick(self, now: float) -> Actions:
        if self.deadline is None or now < self.deadline:
            return _NONE
        if self.state is WATCHING:
            return self._probe(now, is_under_way=self._is_probing)
        if not self._is_used:
            dropped = (DropFresh(),) if self.state is RACING else _NONE
            self._rest()
            return dropped
        if self.state is PROBING:
            return self._race(now)
        if self._attempts >= self._policy.max_attempts:
            self._pause(now)
            return (DropFresh(),)
        return (DropFresh(), *self._race(now))

    def _probe(self, now: float, *, is_under_way: bool) -> Actions:
        self.state, self._is_probing = PROBING, True
        self.deadline = now + self._policy.patience_s
        return _NONE if is_under_way else (Probe(),)

    def _race(self, now: float) -> Actions:
        self.state, self.deadline = RACING, now + self._policy.attempt_s
        self._attempts += 1
        return (ConnectFresh(),)

    def _watch(self, now: float) -> None:
        self.state, self.deadline = WATCHING, now + self._quiet_s

    def _pause(self, now: float) -> None:
        """Wait for the next probe, longer than for this one."""
        self._quiet_s = min(2 * self._quiet_s, self._policy.longest_quiet_s)
        self._watch(now)

    def _rest(self) -> None:
        self.state, self.deadline = RESTING, None
