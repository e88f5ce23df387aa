"""How many sessions a verifier holds, and which one makes room for a new one.

A session is *useless* while its device is gone, or has left tokens unacknowledged for
``PATIENCE_S``: a device that comes back resumes from what it holds, so ending such a session costs
it time and nothing else. When all slots are taken, or all of one peer, the session that has been
useless longest gives its slot to the newcomer; when none is, the newcomer is refused. Thus devices
that open sessions and read nothing cannot keep others out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgespec.core.protocol.messages import Fault, FaultCode
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.session import VerifySession

# Several round trips of a slow link: a device that reads acknowledges sooner.
PATIENCE_S = 3.0
DISPLACED = Fault(
    FaultCode.OVERLOADED,
    f"the device acknowledged nothing for {PATIENCE_S:g} s, and another needs the session's place",
    retry_after_s=1.0,
)


class SessionSlots:
    """``sessions`` is the engine's own table."""

    def __init__(self, limits: EngineLimits, sessions: Mapping[str, VerifySession]) -> None:
        self._limits, self._sessions = limits, sessions
        self._peer_of: dict[str, str] = {}

    def take(self, key: str, peer: str) -> None:
        """The session now counts for the peer."""
        self._peer_of[key] = peer

    def free(self, key: str) -> None:
        """The session is over."""
        self._peer_of.pop(key, None)

    def displaced_by(self, peer: str, now: float) -> str | Fault | None:
        """What has to happen before the peer gets one more session: nothing (None), the end of the
        session of this key, or the refusal of the newcomer."""
        limits = self._limits
        mine = [key for key, owner in self._peer_of.items() if owner == peer]
        if limits.max_sessions_per_peer and len(mine) >= limits.max_sessions_per_peer:
            why = f"{len(mine)} sessions of {peer} are open, its limit (max_sessions_per_peer)"
            return self._longest_useless(mine, now) or Fault(FaultCode.OVERLOADED, why, 1.0)
        if len(self._sessions) >= limits.max_sessions:
            why = f"all {limits.max_sessions} sessions are taken"
            return self._longest_useless(self._sessions, now) or Fault(
                FaultCode.OVERLOADED, why, retry_after_s=1.0
            )
        return None

    def _longest_useless(self, keys: Iterable[str], now: float) -> str | None:
        found: list[tuple[float, str]] = []
        for key in keys:
            device = self._sessions[key].device
            if device.detached_at is not None:
                found.append((device.detached_at, key))
            elif device.unread_since is not None and now - device.unread_since >= PATIENCE_S:
                found.append((device.unread_since, key))
        return min(found)[1] if found else None
