"""Decides which sessions enter the KV cache, and which give up blocks when it is full.

Theory of operation. A cache is only a cache: a session that loses its blocks computes its committed
tokens again when there is room, and its text does not change. So a session never fails for lack of
memory; it waits. A session is *outside* while it wants a pass and holds no block. It enters when
its whole committed prefix fits.

Shares. The *need* of a session is the larger of the number of blocks that it holds and the number
that its prefix takes. All blocks are divided between credentials by their needs (max-min fairness,
``fair_share``). A session is *within its share* when it and the older sessions of its credential
together need no more than that share. Some sessions count as needing nothing, and so keep no other
session out: sessions whose device is gone or acknowledges nothing, and sessions outside that are
over their rate.

The order. Sessions within their share come first, together with the oldest session of each
credential whatever its need; all others follow; older sessions come before newer ones in both
parts. With one credential this is the order of opening.

The rules.

    1. A session enters if the free blocks are enough for it and for every session outside that
       precedes it. These are all outside sessions ahead of it in the order; but for a session
       within its share they are only the older sessions of its own credential, so that no
       credential delays another.
    2. If no outside session precedes it, it may take blocks from others, as few as needed: from
       sessions whose device is gone, longest gone first; then from sessions that wait for their
       device to acknowledge, longest waiting first; then from sessions behind it in the order, the
       last first. A session that grows takes blocks in the same way.
    3. A session that was refused is tried again before the next pass is formed, in the order.
       Sessions of the pass that is being formed are spared.

Consequences. All sessions within their shares fit in the cache together, unless the oldest session
of a credential needs more than its share. The order is total and the first session in it can take
every block, so some session always runs. No session starves, however long its prompt: when the
older sessions of its credential have ended it is the oldest, and from then on only sessions that
were opened before it are ahead of it. Two sessions do not take blocks from each other in turns,
since the order changes only when a session opens, ends, or outgrows its share. Draft nodes never
cost another session a block. An eviction frees only blocks that no other session holds, so a
session whose blocks all have other holders is spared. Priorities order passes, not the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.block_ledger import BlockLedger, BlockNames
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.traffic_budget import fair_share

OwnerOf = Callable[[str], str]
"""Returns the owner of a session by its id; only sessions with equal owners share blocks."""


class PrefixSharing:
    """Lets sessions whose texts begin alike use the same cached blocks, so they are computed once.

    The rows that passes have fed are published block by block. A session that enters adopts the
    longest run of published blocks that bear the leading names of its prefix, and feeds only the
    rest:

        1. Only full blocks of fed tokens are published, and only from passes that succeeded. The
           row of an accepted node is moved before the next pass, whose success confirms it.
        2. At least one token of a prefix is fed, or nothing could be sampled.
        3. A published block is never written, so no copy on write is needed.
        4. Blocks of a session that failed in the target are withdrawn.

    A session that still feeds its prompt checks before every pass whether others have published
    more of it (``catch_up``). It sits out a pass that computes for another session what it would
    compute next, unless it could sample in that pass (``should_wait``). So ten devices with one
    long prompt cost little more than one.

    ``owner_of`` is called once per session, when the session enters for the first time.
    """

    def __init__(self, ledger: BlockLedger, owner_of: OwnerOf) -> None:
        self._ledger, self._owner_of = ledger, owner_of
        self._names: dict[str, BlockNames] = {}
        self.filling: set[bytes] = set()
        """Names of the blocks that the pass being formed will fill; cleared before a pass is
        formed."""

    def enter(self, key: str, prefix: CommittedPrefix) -> int | None:
        """Adopt the published blocks for a session that has no cached rows.

        Returns the number of tokens in them, or None if the session already holds blocks because
        its first pass failed.
        """
        names = self._names.get(key)
        if names is None or names.prefix is not prefix:  # another session of this id has ended
            self._ledger.release(key)
            names = BlockNames(prefix, self._ledger.block_tokens, self._owner_of(key))
            self._names[key] = names
        if self._ledger.held_count(key):
            return None
        names.published = 0
        return self._adopt_published(key, names, 0)

    def catch_up(self, key: str, start: int) -> int:
        """Adopt blocks that others have published behind the session's ``start`` cached rows.

        Returns the number of rows that the session has cached afterwards.
        """
        names = self._names[key]
        place = start // self._ledger.block_tokens
        found = (
            self._adopt_published(key, names, place) if place < self._shareable_count(names) else 0
        )
        return place * self._ledger.block_tokens + found if found else start

    def should_wait(self, key: str, start: int, most: int) -> bool:
        """Return whether a session that may feed ``most`` rows gets at least as far by feeding
        none, since other sessions of this pass fill the blocks that it needs."""
        names, size = self._names[key], self._ledger.block_tokens
        if not self.filling or start + most >= names.prefix.length:
            return False
        place = start // size
        stop = place
        while stop < self._shareable_count(names) and names.name(stop) in self.filling:
            stop += 1
        return stop > place and (stop + 1) * size > start + most

    def note_filling(self, key: str, first: int, stop: int) -> None:
        """Note that the pass being formed fills the session's blocks ``first`` to ``stop - 1``."""
        self.filling.update(map(self._names[key].name, range(first, stop)))

    def publish(self, key: str, length: int) -> None:
        """Publish the session's full blocks within its first ``length`` rows, after a pass that
        succeeded."""
        names, count = self._names.get(key), length // self._ledger.block_tokens
        if names is None or count <= names.published:
            return
        for place in range(names.published, min(count, self._ledger.held_count(key))):
            self._ledger.publish(key, place, names.name(place))
        names.published = count

    def forget(self, key: str) -> None:
        self._names.pop(key, None)

    def _adopt_published(self, key: str, names: BlockNames, place: int) -> int:
        """Adopt the published blocks from index ``place`` on; return how many tokens they hold."""
        blocks: list[int] = []
        for next_place in range(place, self._shareable_count(names)):
            block = self._ledger.find(names.name(next_place))
            if block is None:
                break
            blocks.append(block)
        if blocks:
            self._ledger.adopt(key, place, blocks)
            names.published = max(names.published, place + len(blocks))
        return len(blocks) * self._ledger.block_tokens

    def _shareable_count(self, names: BlockNames) -> int:
        """Return how many blocks may be shared: all full blocks that leave one token to feed."""
        return (names.prefix.length - 1) // self._ledger.block_tokens


Sessions = Mapping[str, VerifySession]


@dataclass(slots=True)
class CacheOrder:
    """The order of the sessions that take part in the cache, and what it follows from."""

    line: list[str]
    """Ids of all sessions that hold a block or want one, in order."""
    place_of: dict[str, int]
    needs: dict[str, int]
    """Blocks that each session needs; a session that keeps no other out has no entry."""
    siblings: dict[str, list[str]]
    """Session ids by name of their credential, in the order of opening."""
    within_share: set[str]


class CacheScheduler:
    """Decides how the blocks of ``ledger`` are used, and shares them where texts begin alike.

    ``ledger`` is None if the target has room for all that is admitted; then nothing is counted.
    ``sessions`` is the engine's own table, in the order of opening. ``owner_of`` is None if no
    blocks are shared. ``credential_of`` is the engine's own table, by session id; a session without
    an entry belongs to ``ANYBODY``.
    """

    def __init__(
        self,
        ledger: BlockLedger | None,
        sessions: Sessions,
        owner_of: OwnerOf | None = None,
        credential_of: Mapping[str, Credential] | None = None,
    ) -> None:
        self.ledger = ledger
        self.evictions = 0
        self.preemptions = 0
        self.prefix_query_tokens = self.prefix_hit_tokens = 0
        """Committed tokens of sessions that entered a shared cache, and how many were cached
        already."""
        self.evicted: list[str] = []
        """Sessions that lost their blocks since the scheduler last looked; the scheduler clears the
        list."""
        self.sessions = sessions
        self.is_over_rate: Callable[[str], bool] = lambda key: False
        """Returns whether a session waits for its credential's rate; set by the engine."""
        self._credential_of = {} if credential_of is None else credential_of
        self._refused: set[str] = set()
        """Sessions outside that found no room when the last pass was formed."""
        self._order: CacheOrder | None = None
        """The order for the pass that is being formed; None until a session wants room in it."""
        self._ordered_sessions = 0
        """Number of sessions when ``_order`` was made."""
        self._sharing: PrefixSharing | None = None
        if ledger is not None and owner_of is not None:
            self._sharing = PrefixSharing(ledger, owner_of)

    def begin_pass(self, now: float) -> None:
        """Prepare for forming a pass: admit sessions that found no room in the last one.

        They enter before any session is offered rows, for two reasons: a session that takes part in
        a pass cannot be evicted for it, and sessions that decode are offered rows before prompts
        are.
        """
        self._order = None
        refused, self._refused = self._refused, set()
        waiting = [key for key in refused if self._is_outside(key)]
        if waiting:
            place_of = self._current_order().place_of
            for key in sorted(waiting, key=place_of.__getitem__):
                self._enter(self.sessions[key], key, (), now)

    def rows_for(
        self, key: str, most: int, spared: Collection[str], waiting: int, now: float
    ) -> int:
        """Return how many rows, at most ``most``, the session may have in the pass that is being
        formed.

        The result is 0 if not even the session's next committed token fits, or if another session
        of the pass computes what this one would. ``spared`` are the sessions of the pass so far.
        ``waiting`` is how many more may still join: one block is left for each. Other sessions lose
        blocks only if there is no other way.
        """
        if self.ledger is None:
            return most
        session, ledger = self.sessions[key], self.ledger
        if session.cache_length == 0 and not self._enter(session, key, spared, now):
            return 0
        if self._sharing is not None:
            if not spared:
                self._sharing.filling.clear()
            is_decoding = session.prefix.length - session.cache_length == 1
            if not is_decoding and self._should_wait(self._sharing, session, most, now):
                return 0
        start, held, free = session.cache_length, ledger.held_count(key), ledger.free_count
        for spare in (free - waiting, min(1, free)):
            room = (held + max(0, spare)) * ledger.block_tokens - start
            if room > 0:
                return min(most, room)
        if not self._make_room(key, start + 1, spared, now):
            return 0
        return min(most, (ledger.held_count(key) + 1) * ledger.block_tokens - start)

    def reserve(self, key: str, length: int) -> tuple[int, ...]:
        """Return the block table of a session with ``length`` rows in the pass.

        The rows must fit, as ``rows_for`` has established.
        """
        if self.ledger is None:
            return ()
        fits = self.ledger.reserve(key, length)
        assert fits, f"{length} rows of a session do not fit, {self.ledger.free_count} blocks free"
        table = self.ledger.table(key)
        if (session := self.sessions.get(key)) is not None:  # a probe has no session
            size, committed = self.ledger.block_tokens, session.prefix.length
            first = session.cache_length // size
            stop = (length if length < committed else committed) // size
            for block in table[first : -(-length // size)]:
                assert self.ledger.is_writable(block), "a shared block would be written"
            if stop > first and self._sharing is not None:
                self._sharing.note_filling(key, first, stop)
        return table

    def settle_pass(self, request: PassRequest, length: int) -> None:
        """Record the session's part of a pass that succeeded.

        What the session fed is published for others. Only its first ``length`` rows are kept.
        """
        if self._sharing is not None:
            self._sharing.publish(request.key, request.cache_length + len(request.feed))
        if self.ledger is not None:
            self.ledger.trim(request.key, length)

    def withdraw(self, key: str) -> None:
        """Withdraw the blocks of a session that failed in the target, so that no other session uses
        them."""
        if self.ledger is not None:
            self.ledger.withdraw(key)

    def release(self, key: str) -> None:
        if self._sharing is not None:
            self._sharing.forget(key)
        if self.ledger is not None:
            self.ledger.release(key)

    # --- the rules -------------------------------------------------------------------------

    def _is_outside(self, key: str) -> bool:
        """Return whether the session wants a pass, may have one, and holds no block."""
        assert self.ledger is not None
        session = self.sessions.get(key)
        wants = session is not None and session.rows_to_feed > 0
        return wants and not self.ledger.held_count(key) and not self.is_over_rate(key)

    def _current_order(self) -> CacheOrder:
        """Return the order of the sessions for the pass that is being formed. A session that fails
        and leaves while the pass is formed changes the shares of the others."""
        if self._order is None or self._ordered_sessions != len(self.sessions):
            self._order, self._ordered_sessions = self._find_order(), len(self.sessions)
        return self._order

    def _find_order(self) -> CacheOrder:
        """Return the order of the sessions that hold blocks or want some, as the head of this file
        defines it."""
        ledger = self.ledger
        assert ledger is not None
        members: list[str] = []
        needs: dict[str, int] = {}
        siblings: dict[str, list[str]] = {}
        wants: dict[str, int] = {}
        for key, session in self.sessions.items():
            held = ledger.held_count(key)
            if not held and not session.rows_to_feed:
                continue
            members.append(key)
            device = session.device
            if device.detached_at is not None or device.unacknowledged_since is not None:
                continue
            if not held and self.is_over_rate(key):
                continue
            name = self._credential_of.get(key, ANYBODY).name
            needs[key] = held + ledger.missing_count(key, session.prefix.length)
            wants[name] = wants.get(name, 0) + needs[key]
            siblings.setdefault(name, []).append(key)
        share = fair_share(ledger.block_count, [*wants.values()])
        within_share: set[str] = set()
        first_part: set[str] = set()
        for keys in siblings.values():
            first_part.add(keys[0])
            needed = 0
            for key in keys:
                needed += needs[key]
                if needed > share:
                    break
                within_share.add(key)
        first_part |= within_share
        # The sort is stable, so older sessions stay before newer ones.
        line = sorted(members, key=lambda key: key not in first_part)
        place_of = {key: place for place, key in enumerate(line)}
        return CacheOrder(
            line=line, place_of=place_of, needs=needs, siblings=siblings, within_share=within_share
        )

    def _may_enter(self, key: str) -> bool:
        """Return whether the session delays no outside session that precedes it (rule 1)."""
        assert self.ledger is not None
        order, free = self._current_order(), self.ledger.free_count
        own = self._credential_of.get(key, ANYBODY).name
        before = order.siblings.get(own, []) if key in order.within_share else order.line
        needed = self.ledger.missing_count(key, self.sessions[key].prefix.length)
        for other in before:
            if other == key:
                break
            if other in order.needs and self._is_outside(other):
                needed += order.needs[other]
                if needed > free:
                    return False
        return True

    def _enter(self, session: VerifySession, key: str, spared: Collection[str], now: float) -> bool:
        """Reserve the whole committed prefix of a session without blocks, if the rules allow it."""
        assert self.ledger is not None
        if not self.ledger.held_count(key) and not self._may_enter(key):
            self._refused.add(key)
            return False
        length = session.prefix.length
        cached = None if self._sharing is None else self._sharing.enter(key, session.prefix)
        if not self._make_room(key, length, spared, now) or not self.ledger.reserve(key, length):
            self.ledger.release(key)
            self._refused.add(key)
            return False
        if cached is not None:
            self.prefix_query_tokens += length
            self.prefix_hit_tokens += cached
        if cached:
            session.handle(ev.Cached(cached), now)
        return True

    def _should_wait(
        self, sharing: PrefixSharing, session: VerifySession, most: int, now: float
    ) -> bool:
        """Adopt what others have cached for a session meanwhile; return whether it should wait for
        more."""
        key, start = session.request.session_id, session.cache_length
        length = sharing.catch_up(key, start)
        if length > start:
            self.prefix_hit_tokens += length - start
            session.handle(ev.Cached(length), now)
        return sharing.should_wait(key, length, most)

    def _make_room(self, key: str, length: int, spared: Collection[str], now: float) -> bool:
        """Evict as few sessions as possible until ``length`` rows fit; evict none if they cannot
        fit."""
        assert self.ledger is not None
        short = self.ledger.missing_count(key, length) - self.ledger.free_count
        if short <= 0:
            return True
        victims: list[str] = []
        holders_left: dict[int, int] = {}  # holders that each block would have left
        for victim in self._victims(key, spared, now):
            victims.append(victim)
            for block in self.ledger.table(victim):
                holders_left[block] = holders_left.get(block, self.ledger.holder_count(block)) - 1
                short -= not holders_left[block]
            if short <= 0:
                break
        else:
            return False
        for victim in victims:
            if all(holders_left[block] for block in self.ledger.table(victim)):
                continue  # all its blocks stay with other holders
            self.ledger.release(victim)
            self.sessions[victim].handle(ev.Cached(0), now)
            self.evictions += 1
            self.preemptions += self.sessions[victim].rows_to_feed > 0
            self.evicted.append(victim)
        return True

    def _victims(self, key: str, spared: Collection[str], now: float) -> list[str]:
        """Return the sessions that may lose blocks to ``key``, the first to lose them first."""
        assert self.ledger is not None
        candidates: list[tuple[int, float, str]] = []  # kind, order within the kind, session id
        place_of = self._current_order().place_of
        own_place = place_of[key]
        for other_key in self.ledger.holders:
            if other_key == key or other_key in spared or other_key not in self.sessions:
                continue
            device = self.sessions[other_key].device
            if device.detached_at is not None:
                candidates.append((0, device.detached_at, other_key))
            elif device.unacknowledged_since is not None:
                candidates.append((1, device.unacknowledged_since, other_key))
            elif place_of[other_key] > own_place:
                candidates.append((2, -place_of[other_key], other_key))
        return [victim for _, _, victim in sorted(candidates)]
