"""Who gives up key-value blocks when a pass needs more than are free.

Theory of operation. A cache is only a cache: a session that loses its blocks computes its committed
tokens again when there is room, and its text does not change. So nothing ever fails for memory, it
waits. Blocks are taken, as long as the asker's committed tokens need them, from

    1. sessions whose device is gone, those gone longest first;
    2. sessions that wait for their device to acknowledge, those waiting longest first;
    3. sessions opened after the asker, the newest first.

Draft nodes never cost anybody a block. Sessions of the pass that is being formed are spared. The
order of opening is total, so the oldest session that has work can always run, and no two sessions
take blocks from each other in turns.

A session without blocks enters only when its whole committed prefix fits, and not before one that
was opened earlier and waits too: a long prompt is not overtaken for ever by short ones. Who could
not run even with room, because it is over its rate, keeps nobody out. An eviction frees only what
nobody else holds, so a session whose blocks all have other holders is spared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.block_ledger import BlockLedger, BlockNames
from edgespec.core.verifier.session import VerifySession

OwnerOf = Callable[[str], str]
"""Sessions with equal owners may share."""


class PrefixSharing:
    """Sessions whose texts begin alike use the same cached blocks: nobody computes them again.

    What passes have fed is published block by block. A session that enters takes hold of the
    longest chain of blocks that bear the first names of its prefix, and feeds what is behind them:

        1. Published are fed tokens of passes that went well, and only full blocks. The row of an
           accepted node is moved before the next pass; until that one went well nobody knows.
        2. At least one token of a prefix is fed, or nothing could be sampled.
        3. Nobody writes into a published block, so there is nothing to copy on write.
        4. What a session held that failed in the target is not given to others any more.

    A session that still feeds its prompt looks before every pass whether others have come further
    (``catch_up``), and sits out a pass that computes for another what it would compute next, unless
    it could sample in it (``waits``): ten devices with one long prompt cost little more than one.

    ``owner_of`` is asked once, when a session enters for the first time."""

    def __init__(self, ledger: BlockLedger, owner_of: OwnerOf) -> None:
        self._ledger, self._owner_of = ledger, owner_of
        self._names: dict[str, BlockNames] = {}
        self.filling: set[bytes] = set()
        """Names of the blocks that the pass being formed will fill; cleared before it is formed."""

    def enter(self, key: str, prefix: CommittedPrefix) -> int | None:
        """A session without cached rows takes hold of what is there for it; how many tokens that
        are. None if it holds blocks already, since its first pass failed."""
        names = self._names.get(key)
        if names is None or names.prefix is not prefix:  # another session of this id is over
            self._ledger.release(key)
            names = BlockNames(prefix, self._ledger.block_tokens, self._owner_of(key))
            self._names[key] = names
        if self._ledger.held(key):
            return None
        names.published = 0
        return self._take(key, names, 0)

    def catch_up(self, key: str, start: int) -> int:
        """A session with ``start`` cached rows takes hold of what others have published behind
        them; how many rows it has then."""
        names = self._names[key]
        place = start // self._ledger.block_tokens
        found = self._take(key, names, place) if place < self._shareable(names) else 0
        return place * self._ledger.block_tokens + found if found else start

    def waits(self, key: str, start: int, most: int) -> bool:
        """Whether a session that may feed ``most`` rows gets as far without feeding any."""
        names, size = self._names[key], self._ledger.block_tokens
        if not self.filling or start + most >= names.prefix.length:
            return False
        place = start // size
        stop = place
        while stop < self._shareable(names) and names.name(stop) in self.filling:
            stop += 1
        return stop > place and (stop + 1) * size > start + most

    def joins(self, key: str, first: int, stop: int) -> None:
        """The pass being formed will fill the session's blocks ``first`` to ``stop - 1``."""
        self.filling.update(map(self._names[key].name, range(first, stop)))

    def publish(self, key: str, length: int) -> None:
        """A pass went well, so the first ``length`` rows of the session are what they should be."""
        names, count = self._names.get(key), length // self._ledger.block_tokens
        if names is None or count <= names.published:
            return
        for place in range(names.published, min(count, self._ledger.held(key))):
            self._ledger.publish(key, place, names.name(place))
        names.published = count

    def forget(self, key: str) -> None:
        self._names.pop(key, None)

    def _take(self, key: str, names: BlockNames, place: int) -> int:
        """Hold the published blocks from ``place`` on; how many tokens they are."""
        blocks: list[int] = []
        for next_place in range(place, self._shareable(names)):
            block = self._ledger.find(names.name(next_place))
            if block is None:
                break
            blocks.append(block)
        if blocks:
            self._ledger.adopt(key, place, blocks)
            names.published = max(names.published, place + len(blocks))
        return len(blocks) * self._ledger.block_tokens

    def _shareable(self, names: BlockNames) -> int:
        """How many blocks of a text may be another's: all full ones that leave a token to feed."""
        return (names.prefix.length - 1) // self._ledger.block_tokens


Sessions = Mapping[str, VerifySession]


class CacheKeeper:
    """``sessions`` is the engine's own table, in the order of opening. ``ledger`` None: the target
    has room for all that is admitted, and nothing is counted. ``owner_of`` None: nobody shares."""

    def __init__(
        self, ledger: BlockLedger | None, sessions: Sessions, owner_of: OwnerOf | None = None
    ) -> None:
        self.ledger = ledger
        self.evictions = 0
        self.preemptions = 0
        self.prefix_query_tokens = self.prefix_hit_tokens = 0
        """Committed tokens of sessions that entered a shared cache, and those that were there."""
        self.evicted: list[str] = []
        """Sessions that lost their blocks since the scheduler last looked; it clears the list."""
        self.sessions = sessions
        self.over_rate: Callable[[str], bool] = lambda key: False
        """Whether a session waits for its credential's rate; the engine knows."""
        self._sharing: PrefixSharing | None = None
        if ledger is not None and owner_of is not None:
            self._sharing = PrefixSharing(ledger, owner_of)

    def rows_for(
        self, key: str, most: int, spared: Collection[str], waiting: int, now: float
    ) -> int:
        """How many rows, at most ``most``, the session may have in the pass that is being formed.

        0 when not even its next committed token fits, or when a session of the pass computes what
        this one would. ``spared`` are the sessions of the pass so far, ``waiting`` is how many may
        still join: a block is left to each. Others lose blocks only if there is no other way."""
        if self.ledger is None:
            return most
        session, ledger = self.sessions[key], self.ledger
        if session.cache_length == 0 and not self._enter(session, key, spared, now):
            return 0
        if self._sharing is not None:
            if not spared:
                self._sharing.filling.clear()
            decodes = session.prefix.length - session.cache_length == 1
            if not decodes and self._waits(self._sharing, session, most, now):
                return 0
        start, held, free = session.cache_length, ledger.held(key), ledger.free_count
        for spare in (free - waiting, min(1, free)):
            room = (held + max(0, spare)) * ledger.block_tokens - start
            if room > 0:
                return min(most, room)
        if not self._make_room(key, start + 1, spared, now):
            return 0
        return min(most, (ledger.held(key) + 1) * ledger.block_tokens - start)

    def reserve(self, key: str, length: int) -> tuple[int, ...]:
        """The table of a session with ``length`` rows in the pass, which fit by ``rows_for``."""
        if self.ledger is None:
            return ()
        fits = self.ledger.reserve(key, length)
        assert fits, f"{length} rows of a session do not fit, {self.ledger.free_count} blocks free"
        table = self.ledger.table(key)
        if (session := self.sessions.get(key)) is not None:  # else it is a probe
            size, committed = self.ledger.block_tokens, session.prefix.length
            first = session.cache_length // size
            stop = (length if length < committed else committed) // size
            for block in table[first:]:
                assert self.ledger.writable(block), "a shared block would be written"
            if stop > first and self._sharing is not None:
                self._sharing.joins(key, first, stop)
        return table

    def settle(self, request: PassRequest, length: int) -> None:
        """The session's part of a pass went well: what it fed is of use to others, and of its rows
        only the first ``length`` are still of use to itself."""
        if self._sharing is not None:
            self._sharing.publish(request.key, request.cache_length + len(request.feed))
        if self.ledger is not None:
            self.ledger.trim(request.key, length)

    def distrust(self, key: str) -> None:
        """The session failed in the target: nobody else shall get what it held."""
        if self.ledger is not None:
            self.ledger.withdraw(key)

    def release(self, key: str) -> None:
        if self._sharing is not None:
            self._sharing.forget(key)
        if self.ledger is not None:
            self.ledger.release(key)

    # --- the rule --------------------------------------------------------------------------

    def _enter(self, session: VerifySession, key: str, spared: Collection[str], now: float) -> bool:
        """Reserve the whole committed prefix of a session without blocks, if it is its turn."""
        assert self.ledger is not None
        for other_key, other in self.sessions.items():
            if other_key == key:
                break
            outside = other.missing_rows and not self.ledger.held(other_key)
            if outside and other_key not in spared and not self.over_rate(other_key):
                return False
        length = session.prefix.length
        cached = None if self._sharing is None else self._sharing.enter(key, session.prefix)
        if not self._make_room(key, length, spared, now) or not self.ledger.reserve(key, length):
            self.ledger.release(key)
            return False
        if cached is not None:
            self.prefix_query_tokens += length
            self.prefix_hit_tokens += cached
        if cached:
            session.handle(ev.Cached(cached), now)
        return True

    def _waits(self, sharing: PrefixSharing, session: VerifySession, most: int, now: float) -> bool:
        """Take what others have cached for a session meanwhile; whether it waits for more."""
        key, start = session.request.session_id, session.cache_length
        length = sharing.catch_up(key, start)
        if length > start:
            self.prefix_hit_tokens += length - start
            session.handle(ev.Cached(length), now)
        return sharing.waits(key, length, most)

    def _make_room(self, key: str, length: int, spared: Collection[str], now: float) -> bool:
        """Evict as few as the rule allows until ``length`` rows fit; nobody, if that is in vain."""
        assert self.ledger is not None
        short = self.ledger.missing(key, length) - self.ledger.free_count
        if short <= 0:
            return True
        victims: list[str] = []
        left: dict[int, int] = {}  # holders that each of the victims' blocks would have left
        for victim in self._victims(key, spared, now):
            victims.append(victim)
            for block in self.ledger.table(victim):
                left[block] = left.get(block, self.ledger.holder_count(block)) - 1
                short -= not left[block]
            if short <= 0:
                break
        else:
            return False
        for victim in victims:
            if all(left[block] for block in self.ledger.table(victim)):
                continue  # its blocks all stay with others
            self.ledger.release(victim)
            self.sessions[victim].handle(ev.Cached(0), now)
            self.evictions += 1
            self.preemptions += self.sessions[victim].missing_rows > 0
            self.evicted.append(victim)
        return True

    def _victims(self, key: str, spared: Collection[str], now: float) -> list[str]:
        """Who may lose blocks to ``key``, in the order in which they do."""
        assert self.ledger is not None
        found: list[tuple[int, float, str]] = []  # of these kinds in turn, each in its order
        met = False
        holders = frozenset(self.ledger.holders)
        for opened, (other_key, other) in enumerate(self.sessions.items()):
            if other_key == key:
                met = True
            elif other_key not in holders or other_key in spared:
                continue
            elif other.device.detached_at is not None:
                found.append((0, other.device.detached_at, other_key))
            elif other.device.unread_since is not None:
                found.append((1, other.device.unread_since, other_key))
            elif met:
                found.append((2, -opened, other_key))
        return [victim for _, _, victim in sorted(found)]
