"""Who gives up key-value blocks when a pass needs more than are free.

Theory of operation. A cache is only a cache: a session that loses its blocks computes its committed
tokens again when there is room, and its text does not change. So nothing ever fails for memory, it
waits. Blocks are taken, as long as the asker's committed tokens need them, from

    1. sessions whose device is gone, those gone longest first;
    2. sessions that wait for their device to acknowledge, those waiting longest first;
    3. sessions opened after the asker, the newest first.

Draft nodes never cost anybody a block: they get what is free. Sessions of the pass that is being
formed are spared. The order of opening is total, so the oldest session that has work can always
run, and no two sessions take blocks from each other in turns.

A session without blocks (new, or evicted) enters only when its whole committed prefix fits, so that
it is not evicted half-way through its prompt, and no session enters before one that was opened
earlier and waits too: a long prompt is not overtaken for ever by short ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.core.verifier.session import VerifySession

Sessions = Mapping[str, VerifySession]


class CacheKeeper:
    """``sessions`` is the engine's own table, in the order of opening. ``ledger`` None: the target
    has room for everything that the engine admits, and nothing is counted."""

    def __init__(self, ledger: BlockLedger | None, sessions: Sessions) -> None:
        self.ledger = ledger
        self.evictions = 0
        """How often a session had to give up its blocks."""
        self.preemptions = 0
        """Of these, how often one that had work."""
        self.evicted: list[str] = []
        """Sessions that lost their blocks since the scheduler last looked; it clears the list."""
        self.sessions = sessions

    def rows_for(
        self, key: str, most: int, spared: Collection[str], waiting: int, now: float
    ) -> int:
        """How many rows, at most ``most``, the session may have in the pass that is being formed.

        0 when not even its next committed token fits. ``spared`` are the sessions of the pass so
        far, ``waiting`` is how many may still join: a block is left to each. Others lose blocks
        only if there is no other way.
        """
        if self.ledger is None:
            return most
        session, ledger = self.sessions[key], self.ledger
        start = session.cache_length
        if start == 0 and not self._enter(session, key, spared, now):
            return 0
        for spare in (ledger.free_count - waiting, min(1, ledger.free_count)):
            room = (ledger.held(key) + max(0, spare)) * ledger.block_tokens - start
            if room > 0:
                return min(most, room)
        if not self._make_room(key, start + 1, spared, now):
            return 0
        return min(most, (ledger.held(key) + 1) * ledger.block_tokens - start)

    def reserve(self, key: str, length: int) -> tuple[int, ...]:
        """The table of a session that has ``length`` rows in the pass; ``rows_for`` said that they
        fit."""
        if self.ledger is None:
            return ()
        fits = self.ledger.reserve(key, length)
        assert fits, f"{length} rows of a session do not fit, {self.ledger.free_count} blocks free"
        return self.ledger.table(key)

    def trim(self, key: str, length: int) -> None:
        """After a pass: only ``length`` rows of the session are still of use."""
        if self.ledger is not None:
            self.ledger.trim(key, length)

    def release(self, key: str) -> None:
        """The session is over."""
        if self.ledger is not None:
            self.ledger.release(key)

    # --- the rule --------------------------------------------------------------------------

    def _enter(self, session: VerifySession, key: str, spared: Collection[str], now: float) -> bool:
        """Reserve the whole committed prefix of a session without blocks, if it is its turn."""
        assert self.ledger is not None
        for other_key, other in self.sessions.items():
            if other_key == key:
                break
            outside = not self.ledger.held(other_key)
            if outside and other.wants_pass and other_key not in spared:
                return False
        length = session.prefix.length
        return self._make_room(key, length, spared, now) and self.ledger.reserve(key, length)

    def _make_room(self, key: str, length: int, spared: Collection[str], now: float) -> bool:
        """Evict as few as the rule allows until ``length`` rows fit; nobody, if that is in vain."""
        assert self.ledger is not None
        short = self.ledger.missing(key, length) - self.ledger.free_count
        if short <= 0:
            return True
        victims: list[str] = []
        for victim in self._victims(key, spared, now):
            victims.append(victim)
            short -= self.ledger.held(victim)
            if short <= 0:
                break
        else:
            return False
        for victim in victims:
            self.ledger.release(victim)
            self.sessions[victim].handle(ev.Evicted(), now)
            self.evictions += 1
            self.preemptions += self.sessions[victim].wants_pass
            self.evicted.append(victim)
        return True

    def _victims(self, key: str, spared: Collection[str], now: float) -> list[str]:
        """Who may lose blocks to ``key``, in the order in which they do."""
        assert self.ledger is not None
        gone: list[tuple[float, str]] = []
        waiting: list[tuple[float, str]] = []
        newer: list[str] = []
        met = False
        holders = frozenset(self.ledger.holders)
        for other_key, other in self.sessions.items():
            if other_key == key:
                met = True
            elif other_key not in holders or other_key in spared:
                continue
            elif other.device.detached_at is not None:
                gone.append((other.device.detached_at, other_key))
            elif other.device.unread_since is not None:
                waiting.append((other.device.unread_since, other_key))
            elif met:
                newer.append(other_key)
        return [
            *(victim for _, victim in sorted(gone)),
            *(victim for _, victim in sorted(waiting)),
            *reversed(newer),
        ]
