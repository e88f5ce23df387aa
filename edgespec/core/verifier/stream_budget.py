"""How fast one peer may send before it has to wait for its turn.

Theory of operation. A message costs the verifier about 0.1 ms wherever it comes from, so a peer
that sends in a loop takes time from everybody. Nothing is dropped and nothing is refused here: the
machine only says how long the driver has to wait before it reads on, and the transport's flow
control holds the sender meanwhile. All of it is made of token buckets: a bucket of ``burst`` tokens
fills at ``rate`` a second; what is taken beyond its level is a debt, and waiting ``debt / rate``
seconds pays it.

    StreamBudget   messages and nodes of one stream. It also *earns* at each commit, because an
                   honest device drafts as fast as the text moves: 16 messages and 2 a token, but
                   never more than 1 message (4 nodes) for each millisecond since the last commit.
    UplinkBudget   all streams together. Its debt is paid by the busy streams alone, those that send
                   more than the base rate, earned or not; the quiet ones are read at once. So n
                   streams are read at most max(2,000, 100 n) times a second in the long run.
                   Where several payers send, each is held to its fair share (``fair_shares.py``),
                   which commits add to; a quiet stream has a second burst as its grace.

Worked numbers. A device with draft steps of 1 ms and passes of 30 ms sends at most 30 messages a
pass. Behind a commit of 7 tokens it earns min(16 + 2 * 7, 30) = 30 and the base rate adds 3, so it
is never slowed. A stream that sends in a loop while its text moves a token every 3 ms earns
min(18, 3) a commit: after its burst of 128 it is read at 1,100 messages a second, however fast it
sends; ten such streams share 2,000 a second.

Invariants: waits are finite and never negative; no bucket holds more than its burst.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from edgespec.core.verifier.fair_shares import FairShares, ShareLimits


@dataclass(frozen=True, slots=True)
class UplinkLimits:
    """The budget of what streams send. Rates are per second."""

    message_rate: float = 100.0
    message_burst: float = 128.0
    """As many as the nodes a device may have outstanding, one to a message."""
    node_rate: float = 2_000.0
    node_burst: float = 1_024.0
    messages_per_commit: float = 16.0
    """An honest device replaces a dead tree after a miss: some 12 to 16 steps worth drafting."""
    messages_per_token: float = 2.0
    """It also drafts as much further as the text moved."""
    earned_message_rate: float = 1_000.0
    """No earnings beyond this: a draft step takes at least about 1 ms."""
    earned_node_rate: float = 4_000.0
    total_message_rate: float = 2_000.0
    """All streams together: about a fifth of one core."""
    total_burst: float = 2_000.0
    max_total_debt_s: float = 0.25
    """A busy stream waits no longer than this for the sake of the others."""
    shares: ShareLimits = field(default_factory=lambda: ShareLimits(500.0, 100.0))
    """Of keys, in messages: those of all together may take a twentieth of one core."""
    address_rate: float = 1_000.0
    """Where there are no keys, the least rate of an address: it may be a whole site."""
    bytes_per_message: float = 1_024.0
    """A message of so many bytes costs its payer as much again as an empty one."""
    messages_per_open: float = 8.0
    """What a new stream costs its payer."""
    share_per_commit: float = 0.5
    """Messages that a commit adds to the share of its payer: devices acknowledge every eighth
    token."""
    share_per_hit: float = 4.0
    """Instead, where a draft was right: devices gather their drafts to two to four messages a
    pass."""


class TokenBucket:
    """A level that fills at ``rate`` a second up to ``burst``, and may be overdrawn."""

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        assert rate > 0.0
        assert burst > 0.0
        self._rate, self._burst, self._level, self._at = rate, burst, burst, now

    def level(self, now: float) -> float:
        """Tokens at hand; negative: a debt."""
        if now > self._at:
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
            self._at = now
        return self._level

    def take(self, amount: float, now: float) -> float:
        """Take ``amount`` tokens, also when there are fewer; the level that is left."""
        level = self._level
        if now > self._at:
            level += (now - self._at) * self._rate
            if level > self._burst:
                level = self._burst
            self._at = now
        self._level = level = level - amount
        return level

    def add(self, amount: float, now: float) -> None:
        """Put ``amount`` tokens in; what is over the burst is lost."""
        level = self._level
        if now > self._at:
            level += (now - self._at) * self._rate
            self._at = now
        level += amount
        self._level = level if level < self._burst else self._burst

    def limit_debt(self, most: float) -> None:
        """Forget the part of a debt that exceeds ``most`` tokens."""
        self._level = max(self._level, -most)

    def wait_s(self, now: float) -> float:
        """Seconds until the debt is paid; 0 without one."""
        level = self._level if now <= self._at else self.level(now)
        return 0.0 if level >= 0.0 else -level / self._rate


def without_keys(limits: UplinkLimits) -> UplinkLimits:
    """The limits of a verifier whose payers are addresses."""
    least, shares = limits.address_rate, limits.shares
    if least <= shares.least_rate:
        return limits
    return replace(limits, shares=replace(shares, rate=max(least, shares.rate), least_rate=least))


class Wait(Enum):
    """For whose sake a stream is not read for a while."""

    STREAM = "stream"
    """Its own: it sent more than one stream may."""
    CREDENTIAL = "credential"
    """Its key, or its address where there are no keys, has had its share."""
    TOTAL = "total"
    """All streams together send too much, and it is a busy one."""
    LINE = "line"
    """It is new, and too many are opened."""


# Asked for at every message: in Python 3.11 a look into the class is a function call.
STREAM, CREDENTIAL, TOTAL, LINE = Wait


class UplinkBudget:
    """What all streams of a verifier may send. Make one ``StreamBudget`` for each stream."""

    def __init__(
        self,
        limits: UplinkLimits,
        now: float,
        waits: Callable[[Wait, float], None] | None = None,
    ) -> None:
        self.limits = limits
        self.shares = FairShares(limits.shares, now)
        self.waits = waits or (lambda reason, wait_s: None)
        """Hears of each wait for which reason and how long, in seconds."""
        self._total = TokenBucket(limits.total_message_rate, limits.total_burst, now)
        self._most_debt = limits.max_total_debt_s * limits.total_message_rate

    def open(self, now: float, payer: str = "") -> StreamBudget:
        """The budget of a new stream, full; what it costs is charged to ``payer``."""
        return StreamBudget(self, now, payer)

    def turn(self, payer: str, now: float, most_s: float) -> float:
        """Seconds to wait before a new stream of ``payer`` is served. It is charged unless that is
        more than ``most_s``, when it is to be refused."""
        wait_s = self.shares.wait_s(payer, now, grace=self.limits.shares.burst)
        if wait_s <= most_s:
            self.shares.spend(payer, self.limits.messages_per_open, now)
        return wait_s

    def take(self, now: float) -> None:
        """Count one message of any stream."""
        if self._total.take(1.0, now) < 0.0:
            self._total.limit_debt(self._most_debt)

    def wait_s(self, now: float) -> float:
        """How long a busy stream has to wait for the others' sake."""
        return self._total.wait_s(now)


class StreamBudget:
    """What one stream may send: ask ``spend`` after each message read, and tell each commit."""

    __slots__ = ("_base", "_earned_at", "_limits", "_messages", "_nodes", "_payer", "_shared")

    def __init__(self, shared: UplinkBudget, now: float, payer: str) -> None:
        limits = shared.limits
        self._shared, self._limits, self._payer = shared, limits, payer
        self._messages = TokenBucket(limits.message_rate, limits.message_burst, now)
        self._nodes = TokenBucket(limits.node_rate, limits.node_burst, now)
        # What the messages would be without the earnings: it tells the busy from the quiet.
        self._base = TokenBucket(limits.message_rate, limits.message_burst, now)
        self._earned_at = now

    def spend(self, nodes: int, now: float, size: int = 0) -> float:
        """A message of ``size`` bytes with ``nodes`` nodes was read: seconds to wait before reading
        the next."""
        limits, shared = self._limits, self._shared
        reason, wait_s = STREAM, 0.0
        messages, left_nodes = self._messages.take(1.0, now), self._nodes.take(nodes, now)
        if messages < 0.0 or left_nodes < 0.0:
            wait_s = max(self._messages.wait_s(now), self._nodes.wait_s(now))
        shared.take(now)
        base = self._base.take(1.0, now)
        if base < 0.0:
            self._base.limit_debt(0.0)
        busy = base < limits.message_burst / 2
        if busy and (total_s := shared.wait_s(now)) > wait_s:
            reason, wait_s = TOTAL, total_s
        grace = 0.0 if busy else limits.shares.burst
        cost = 1.0 + size / limits.bytes_per_message
        if (share_s := shared.shares.spend(self._payer, cost, now, grace)) > wait_s:
            reason, wait_s = CREDENTIAL, share_s
        if wait_s > 0.0:
            shared.waits(reason, wait_s)
        return wait_s

    def earn(self, tokens: int, max_nodes: int, now: float, accepted: int = 0) -> None:
        """A commit of ``tokens`` tokens was sent. ``max_nodes``: how many the device may have
        outstanding, so how many it may send anew when all of its tree died. ``accepted``: how many
        of the tokens it had drafted. A commit without tokens earns nothing."""
        if tokens == 0:
            return
        limits, elapsed_s = self._limits, max(0.0, now - self._earned_at)
        self._earned_at = now
        messages = limits.messages_per_commit + limits.messages_per_token * tokens
        most = limits.earned_message_rate * elapsed_s
        self._messages.add(messages if messages < most else most, now)
        most = limits.earned_node_rate * elapsed_s
        self._nodes.add(max_nodes if max_nodes < most else most, now)
        share = limits.share_per_hit if accepted else limits.share_per_commit
        self._shared.shares.earn(self._payer, share, now)
