"""Who may hold a stream: a bounded table of slots that one peer or one key cannot fill alone.

Theory of operation. A stream takes a slot when it comes and gives it back when it ends. It is
*idle* until its Open has arrived. There are ``max_streams`` slots. A stream counts for its owners:
the peer it comes from and, where keys are asked for, the credential of its key. One owner may hold
a share of the slots; a credential with a limit of sessions no more than twice these and
``SPARE_STREAMS``, since a device may come back before its last stream is known to be dead.

When a new stream finds no slot, an idle one has to leave in its favour: the oldest one of the owner
that has reached its bound, else the oldest one of the peer that has most idle streams. Where no
such stream is idle the new one is refused.

Invariants: at most ``max_streams`` streams hold a slot, and no owner more than its bound; a stream
whose Open has arrived never loses its slot to another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from edgespec.core.verifier.credential import ANYBODY, Credential

SPARE_STREAMS: Final = 8
_KEY: Final = "key "
_S = TypeVar("_S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Entry(Generic[_S]):
    """What became of a stream that asked for a slot."""

    refusal: str | None = None
    """Why it got none, with the bound and the value."""
    evicted: _S | None = None
    """The idle stream that lost its slot and has to be ended."""


class StreamSlots(Generic[_S]):
    """Slots for ``max_streams`` streams; one owner holds at most ``peer_share`` of them, and at
    least one. Raises ``ValueError`` for a share outside (0, 1]."""

    def __init__(self, max_streams: int, peer_share: float) -> None:
        if max_streams < 1:
            raise ValueError(f"max_streams is {max_streams}, but must be at least 1")
        if not 0.0 < peer_share <= 1.0:
            raise ValueError(f"peer_share is {peer_share}, but must be in (0, 1]")
        self.max_streams = max_streams
        self.peer_streams = max(1, math.floor(max_streams * peer_share))
        self._owners_of: dict[_S, tuple[str, ...]] = {}
        """The peer first."""
        self._held: Counter[str] = Counter()
        # In the order of arrival.
        self._idle: dict[str, dict[_S, None]] = {}

    def __len__(self) -> int:
        return len(self._owners_of)

    def enter(self, stream: _S, peer: str, credential: Credential = ANYBODY) -> Entry[_S]:
        """Take a slot for a new stream of ``peer``, which showed the key of ``credential``."""
        bounds = {peer: self.peer_streams}
        if credential.name:
            bounds[f"{_KEY}{credential.name!r}"] = self._key_streams(credential)
        owners = tuple(bounds)
        full = [owner for owner in owners if self._held[owner] >= bounds[owner]]
        if not full and len(self) < self.max_streams:
            self._take(stream, owners)
            return Entry()
        # Where both owners are full, an idle stream that counts for both has to leave.
        yielding = self._oldest_idle(full) if full else self._oldest_idle([self._most_idle()])
        if yielding is None:
            for owner in full:
                if bounds[owner] < self.max_streams:
                    held = f"{self._held[owner]} streams of {owner} are open"
                    return Entry(f"{held}, the limit is {bounds[owner]}")
            return Entry(f"{len(self)} streams are open, the limit is {self.max_streams}")
        self.leave(yielding)
        self._take(stream, owners)
        return Entry(evicted=yielding)

    def opened(self, stream: _S) -> None:
        """The stream's Open has arrived. A stream without a slot is ignored."""
        self._forget_idle(stream, self._owners_of.get(stream, ()))

    def leave(self, stream: _S) -> None:
        """Give the stream's slot back. A stream without a slot is ignored."""
        owners = self._owners_of.pop(stream, ())
        self._forget_idle(stream, owners)
        for owner in owners:
            self._held[owner] -= 1
            if not self._held[owner]:
                del self._held[owner]

    def _key_streams(self, credential: Credential) -> int:
        """How many streams the credential may hold."""
        if not credential.max_sessions:
            return self.peer_streams
        return min(self.peer_streams, 2 * credential.max_sessions + SPARE_STREAMS)

    def _take(self, stream: _S, owners: tuple[str, ...]) -> None:
        self._owners_of[stream] = owners
        for owner in owners:
            self._held[owner] += 1
            self._idle.setdefault(owner, {})[stream] = None

    def _forget_idle(self, stream: _S, owners: tuple[str, ...]) -> None:
        for owner in owners:
            idle = self._idle.get(owner)
            if idle is not None:
                idle.pop(stream, None)
                if not idle:
                    del self._idle[owner]

    def _most_idle(self) -> str:
        peers = [owner for owner in self._idle if not owner.startswith(_KEY)]
        return max(peers, key=lambda peer: len(self._idle[peer]), default="")

    def _oldest_idle(self, owners: list[str]) -> _S | None:
        """The oldest idle stream that counts for all of these."""
        first, *others = (self._idle.get(owner, {}) for owner in owners)
        return next((one for one in first if all(one in other for other in others)), None)
