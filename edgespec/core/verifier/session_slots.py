"""How many sessions a verifier holds, and which one makes room for a new one.

A session is *useless* while its device is gone, or has left tokens unacknowledged for
``PATIENCE_S``: a device that comes back resumes from what it holds, so ending such a session costs
it time and nothing else. When all slots are taken, or all of one peer or credential, the session
(of theirs) that has been useless longest gives its slot to the newcomer; when none is, the newcomer
is refused. Thus devices that open sessions and read nothing cannot keep others out. Who is refused
because the verifier is full hears its place in line (``refused_line.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgespec.core.protocol.messages import Fault, FaultCode
from edgespec.core.verifier.credential import Credential
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.refused_line import RefusedLine
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
        self.credential_of: dict[str, Credential] = {}
        """Whose each session is, by key."""
        self._peer_of: dict[str, str] = {}
        self._refused = RefusedLine()

    def take(self, key: str, peer: str, credential: Credential, now: float) -> None:
        """The session now counts for the peer and the credential."""
        self._peer_of[key], self.credential_of[key] = peer, credential
        self._refused.entered(key, now)

    def free(self, key: str) -> None:
        """The session is over."""
        self._peer_of.pop(key, None)
        self.credential_of.pop(key, None)

    def displaced_by(
        self, key: str, peer: str, credential: Credential, now: float
    ) -> str | Fault | None:
        """What has to happen before the session may be opened: nothing (None), the end of the
        session of this key, or the refusal of the newcomer."""
        limits, name = self._limits, credential.name
        if most := credential.max_sessions:
            mine = [one for one, owner in self.credential_of.items() if owner.name == name]
            if len(mine) >= most:
                why = f"{len(mine)} sessions of key {name!r} are open, its limit (max_sessions)"
                return self._longest_useless(mine, now) or Fault(FaultCode.OVERLOADED, why, 1.0)
        if limits.max_sessions_per_peer:
            mine = [one for one, owner in self._peer_of.items() if owner == peer]
            if len(mine) >= limits.max_sessions_per_peer:
                why = f"{len(mine)} sessions of {peer} are open, its limit (max_sessions_per_peer)"
                return self._longest_useless(mine, now) or Fault(FaultCode.OVERLOADED, why, 1.0)
        if len(self._sessions) >= limits.max_sessions:
            displaced = self._longest_useless(self._sessions, now)
            return displaced or self._refused.refuse(key, limits.max_sessions, now)
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
