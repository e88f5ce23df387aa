"""Who may hold a stream: a bounded table of slots that one peer cannot fill alone.

Theory of operation. A stream takes a slot when it comes and gives it back when it ends. It is
*idle* until its Open has arrived. There are ``max_streams`` slots, and one peer may hold a share of
them. When a new stream finds no slot, an idle one has to leave in its favour: the peer's own
oldest one when the peer has reached its share, else the oldest one of the peer that has most idle
streams. Where no stream is idle the new one is refused.

Invariants: at most ``max_streams`` streams hold a slot, and at most ``peer_streams`` of one peer;
a stream whose Open has arrived never loses its slot to another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

_S = TypeVar("_S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Entry(Generic[_S]):
    """What became of a stream that asked for a slot."""

    refusal: str | None = None
    """Why it got none, with the bound and the value."""
    evicted: _S | None = None
    """The idle stream that lost its slot and has to be ended."""


class StreamSlots(Generic[_S]):
    """Slots for ``max_streams`` streams; one peer holds at most ``peer_share`` of them, and at
    least one. Raises ``ValueError`` for a share outside (0, 1]."""

    def __init__(self, max_streams: int, peer_share: float) -> None:
        if max_streams < 1:
            raise ValueError(f"max_streams is {max_streams}, but must be at least 1")
        if not 0.0 < peer_share <= 1.0:
            raise ValueError(f"peer_share is {peer_share}, but must be in (0, 1]")
        self.max_streams = max_streams
        self.peer_streams = max(1, math.floor(max_streams * peer_share))
        self._peer_of: dict[_S, str] = {}
        self._held: Counter[str] = Counter()
        # In the order of arrival.
        self._idle: dict[str, dict[_S, None]] = {}

    def __len__(self) -> int:
        return len(self._peer_of)

    def enter(self, stream: _S, peer: str) -> Entry[_S]:
        """Take a slot for a new stream of ``peer``."""
        evicted: _S | None = None
        if self._held[peer] >= self.peer_streams:
            evicted = self._oldest_idle(peer)
        elif len(self._peer_of) >= self.max_streams:
            evicted = self._oldest_idle(self._most_idle())
        else:
            self._take(stream, peer)
            return Entry()
        if evicted is None:
            held = self._held[peer]
            if held >= self.peer_streams < self.max_streams:
                return Entry(f"{held} streams of {peer} are open, the limit is {self.peer_streams}")
            return Entry(f"{len(self)} streams are open, the limit is {self.max_streams}")
        self.leave(evicted)
        self._take(stream, peer)
        return Entry(evicted=evicted)

    def opened(self, stream: _S) -> None:
        """The stream's Open has arrived. A stream without a slot is ignored."""
        if stream in self._peer_of:
            self._forget_idle(stream, self._peer_of[stream])

    def leave(self, stream: _S) -> None:
        """Give the stream's slot back. A stream without a slot is ignored."""
        peer = self._peer_of.pop(stream, None)
        if peer is None:
            return
        self._forget_idle(stream, peer)
        self._held[peer] -= 1
        if not self._held[peer]:
            del self._held[peer]

    def _take(self, stream: _S, peer: str) -> None:
        self._peer_of[stream] = peer
        self._held[peer] += 1
        self._idle.setdefault(peer, {})[stream] = None

    def _forget_idle(self, stream: _S, peer: str) -> None:
        idle = self._idle.get(peer)
        if idle is not None:
            idle.pop(stream, None)
            if not idle:
                del self._idle[peer]

    def _most_idle(self) -> str:
        return max(self._idle, key=lambda peer: len(self._idle[peer]), default="")

    def _oldest_idle(self, peer: str) -> _S | None:
        return next(iter(self._idle.get(peer, ())), None)
