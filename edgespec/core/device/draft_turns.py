"""One draft model for many generations: whose step runs next, and in which of its caches.

Theory of operation. A session *asks* for a step, and asks again when that one is over. It is given
a *turn*: steps one after another while it goes on asking, for the time that ``turn_steps`` take.
One step at a time would be fairer in the small, and useless: a draft counts only where it is ahead
of what the verifier decodes meanwhile, and a session gets ahead by drafting several tokens without
a pause. Between turns the session goes first that has had the least drafting time for its weight
(start-time fair queueing); one that did not ask for a while has saved nothing up.

A *cache* holds the keys and values of one session. With more sessions than caches, one that has
none takes over that of another and feeds its text again. It then keeps the cache for four times
the drafting time that feeding takes (``AMORTISE``), so that about a quarter goes into feeding;
earlier only an owner that draws no use from its cache loses it: because it rests while others draft
for as long, because nobody else could draft now, or because somebody has waited for two seconds of
drafting (``PATIENCE_S``) or, if that is more, for a turn of every session with its feeding.

The *weight* is what drafting brings: accepted tokens a step, beside those of the session that has
the most. At half of that or more it is 1, below it falls to ``LEAST_WEIGHT`` and no further: a
session whose drafts always come too late costs the others little, and is noticed when they do not
any more. So with n sessions none has less than 1 / (8 n) of the time, and where drafting pays alike
each has 1 / n.

A step of which nothing is heard for ``hang_s`` is given up: its session goes on without drafts. The
others wait, streaming all the same, until the step comes back after all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from edgespec.core.device import turn_events as ev
from edgespec.core.device.draft_share import DraftShare
from edgespec.core.device.turn_policy import TurnPolicy
from edgespec.core.protocol.estimators import MovingAverage

LEAST_WEIGHT = 1 / 8
AMORTISE = 4.0
"""A cache that was filled anew is kept for so many times what that took."""
PATIENCE_S = 2.0
"""Who waits while others draft for so long, or for a turn of everybody, gets a cache anyway."""
_FULL_WEIGHT_FROM = 0.5
_FILLS = 8


@dataclass(slots=True)
class _Running:
    key: str
    fills: bool
    """The cache was another session's, or nobody's."""
    heard_at: float
    given_up: bool = False


@dataclass(slots=True)
class DraftTurns:
    """Sessions are known by keys, caches by numbers from 0; ``caches`` is how many there are."""

    caches: int
    policy: TurnPolicy = field(default_factory=TurnPolicy)
    members: dict[str, DraftShare] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    """Whose text a cache holds."""
    running: _Running | None = None
    step_s: MovingAverage = field(default_factory=MovingAverage)
    fills_s: deque[float] = field(default_factory=lambda: deque(maxlen=_FILLS))
    """What the last steps took that began a cache anew."""
    _last: str = ""
    """Whose turn it is."""
    _now_s: float = 0.0
    """What the session that ran last had had by then, as ``DraftShare.had_s``."""
    _drafted_s: float = 0.0
    """Drafting time of all sessions."""

    @property
    def deadline(self) -> float | None:
        """When to send ``Tick``; None: not before something else happens."""
        running = self.running
        hopeless = running is None or running.given_up
        return None if hopeless or running is None else running.heard_at + self.policy.hang_s

    def handle(self, event: ev.TurnEvent, now: float) -> tuple[ev.TurnAction, ...]:
        match event:
            case ev.Joined(key):
                self.members.setdefault(key, DraftShare(self._now_s))
            case ev.Asked(key, accepted):
                self._asked(key, accepted)
            case ev.Left(key):
                self._left(key)
            case ev.Ended(key, took_s):
                self._ended(key, took_s)
            case ev.CacheFailed(cache):
                self._cache_failed(cache)
            case ev.Tick(heard_at):
                return self._tick(heard_at, now)
            case _:
                assert_never(event)
        return self._next(now)

    # --- events ----------------------------------------------------------------------------

    def _asked(self, key: str, accepted: int) -> None:
        member = self.members.get(key)
        if member is None:
            return  # it has left
        member.learn(accepted)
        if not member.asks:
            member.asks, member.asked_by_s = True, self._drafted_s
            if self._last != key:
                member.had_s = max(member.had_s, self._now_s)

    def _left(self, key: str) -> None:
        member = self.members.pop(key, None)
        if member is not None and member.cache is not None:
            del self.owners[member.cache]

    def _ended(self, key: str, took_s: float) -> None:
        """A step is over, well or not; ``Left`` says that it was not."""
        running, self.running = self.running, None
        assert running is not None
        assert running.key == key
        member = self.members.get(key)
        if took_s <= 0.0:  # nothing was run
            if running.fills and member is not None and member.cache is not None:
                del self.owners[member.cache]
                member.cache = None
            return
        if running.fills:
            self.fills_s.append(took_s)
        else:
            self.step_s.add(took_s)
        self._drafted_s += took_s
        if member is None:
            return
        member.turn_s += took_s
        member.cache_s += took_s
        member.drafted_by_s = self._drafted_s
        # A long prompt is no reason to keep a session waiting for as long as it took to feed.
        charged_s = min(took_s, self._turn_s) if running.fills and self.step_s.count else took_s
        member.had_s += charged_s / self._weight(member)
        member.count_step()

    def _cache_failed(self, cache: int) -> None:
        """It could not be made; the others are enough."""
        self.caches = max(1, min(self.caches, cache))
        for number in [one for one in self.owners if one >= self.caches]:
            self.members[self.owners.pop(number)].cache = None

    def _tick(self, heard_at: float, now: float) -> tuple[ev.TurnAction, ...]:
        running = self.running
        if running is None or running.given_up:
            return ()
        running.heard_at = max(running.heard_at, heard_at)
        if now < running.heard_at + self.policy.hang_s:
            return ()
        running.given_up = True
        return (ev.GiveUp(running.key, self.policy.hang_s),)

    # --- whose step is next ----------------------------------------------------------------

    def _next(self, now: float) -> tuple[ev.TurnAction, ...]:
        if self.running is not None:
            return ()
        members = self.members
        holder = members.get(self._last)
        if holder is not None and holder.asks and holder.turn_s < self._turn_s:
            if holder.cache is not None:
                return self._run(self._last, holder, holder.cache, now)
        asking = sorted((member.had_s, key) for key, member in members.items() if member.asks)
        for may_lose in (self._may_lose, self._rests):
            for _, key in asking:
                overdue = self._drafted_s - members[key].asked_by_s > self._longest_wait_s
                cache = self._cache_for(members[key], _always if overdue else may_lose)
                if cache is not None:
                    return self._run(key, members[key], cache, now)
        return ()

    def _cache_for(self, member: DraftShare, may_lose: Callable[[DraftShare], bool]) -> int | None:
        """Its own cache, a free one, or that of an owner who may lose it."""
        if member.cache is not None:
            return member.cache
        found: dict[int, DraftShare] = {}
        for cache in range(self.caches):
            if cache not in self.owners:
                return cache
            owner = self.members[self.owners[cache]]
            if may_lose(owner):
                found[cache] = owner
        # First of those who ask for nothing, then of those who have had most.
        return min(found, key=lambda one: (found[one].asks, -found[one].had_s), default=None)

    def _may_lose(self, owner: DraftShare) -> bool:
        kept_s = max(self._turn_s, AMORTISE * self._feeding_s)
        rested_s = 0.0 if owner.asks else self._drafted_s - owner.drafted_by_s
        return owner.cache_s >= kept_s or rested_s >= kept_s

    def _rests(self, owner: DraftShare) -> bool:
        return not owner.asks

    def _run(
        self, key: str, member: DraftShare, cache: int, now: float
    ) -> tuple[ev.TurnAction, ...]:
        fills = self.owners.get(cache) != key
        if fills:
            before = self.owners.get(cache)
            if before is not None:
                self.members[before].cache = None
            self.owners[cache], member.cache, member.cache_s = key, cache, 0.0
            member.drafted_by_s = self._drafted_s
        if self._last != key or member.turn_s >= self._turn_s:
            member.turn_s = 0.0
        self._last, self._now_s = key, max(self._now_s, member.had_s)
        member.asks = False
        self.running = _Running(key, fills, now)
        return (ev.Run(key, cache, fills),)

    # --- how long, and how often -----------------------------------------------------------

    @property
    def _turn_s(self) -> float:
        """How long a turn lasts: eight steps of 5 ms make 40 ms."""
        return self.policy.turn_steps * self.step_s.get(0.0)

    @property
    def _feeding_s(self) -> float:
        """What beginning a cache takes beyond a step: by the quickest of late, since a busy machine
        makes some of them take many times as long."""
        return max(0.0, min(self.fills_s, default=0.0) - self.step_s.get(0.0))

    @property
    def _longest_wait_s(self) -> float:
        return max(PATIENCE_S, len(self.members) * (self._turn_s + self._feeding_s))

    def _weight(self, member: DraftShare) -> float:
        """Formula: min(1, pay / (0.5 * best pay)), at least 1/8. A session whose drafts bring 0.1
        tokens a step beside one with 0.8 has 0.1 / 0.4 = 0.25."""
        best = max(other.pay for other in self.members.values())
        return max(LEAST_WEIGHT, min(1.0, member.pay / (_FULL_WEIGHT_FROM * best)))


def _always(owner: DraftShare) -> bool:
    return True
