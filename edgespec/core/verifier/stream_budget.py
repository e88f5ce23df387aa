"""How fast one peer may send, ask and connect before it has to wait for its turn.

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
                   more than the base rate, earned or not; the quiet ones are read at once. So no
                   stream is held below the base rate, and n of them are read at most
                   max(2,000, 100 n) times a second in the long run.
    CallBudget     calls (new streams, questions for ``Info``) of one peer and of all peers. A call
                   beyond the rate waits in line; one that would wait too long is to be refused.

Worked numbers. A device with draft steps of 1 ms and passes of 30 ms sends at most 30 messages a
pass. Behind a commit of 7 tokens it earns min(16 + 2 * 7, 30) = 30 and the base rate adds 3, so it
is never slowed. A stream that sends in a loop while its text moves a token every 3 ms earns
min(18, 3) a commit: after its burst of 128 it is read at 1,100 messages a second, however fast it
sends; ten such streams share 2,000 a second.

Invariants: waits are finite and never negative; no bucket holds more than its burst; at most
``max_peers`` peers are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The budget of calls. Rates are per second."""

    peer_rate: float
    peer_burst: float
    total_rate: float
    total_burst: float
    max_wait_s: float
    """Who would wait longer than this is refused; so the line holds ``max_wait_s * rate`` calls."""
    max_peers: int = 1_024


# An open and its cancel cost some 3 ms of the verifier. 200 devices that start at once behind one
# address are all let in after (200 - 128) / 20 = 3.6 s.
OPEN_LIMITS = CallLimits(
    peer_rate=20.0, peer_burst=128.0, total_rate=60.0, total_burst=256.0, max_wait_s=10.0
)
# A device asks twice before it chooses a verifier.
INFO_LIMITS = CallLimits(
    peer_rate=25.0, peer_burst=50.0, total_rate=50.0, total_burst=100.0, max_wait_s=1.0
)


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

    def take(self, amount: float, now: float) -> None:
        """Take ``amount`` tokens, also when there are fewer."""
        if now > self._at:
            level = self._level + (now - self._at) * self._rate
            self._level, self._at = (level if level < self._burst else self._burst), now
        self._level -= amount

    def add(self, amount: float, now: float) -> None:
        """Put ``amount`` tokens in; what is over the burst is lost."""
        self._level = min(self._burst, self.level(now) + amount)

    def limit_debt(self, most: float) -> None:
        """Forget the part of a debt that exceeds ``most`` tokens."""
        self._level = max(self._level, -most)

    def wait_s(self, now: float) -> float:
        """Seconds until the debt is paid; 0 without one."""
        level = self._level if now <= self._at else self.level(now)
        return 0.0 if level >= 0.0 else -level / self._rate


class UplinkBudget:
    """What all streams of a verifier may send. Make one ``StreamBudget`` for each stream."""

    def __init__(self, limits: UplinkLimits, now: float) -> None:
        self.limits = limits
        self._total = TokenBucket(limits.total_message_rate, limits.total_burst, now)
        self._most_debt = limits.max_total_debt_s * limits.total_message_rate

    def open(self, now: float) -> StreamBudget:
        """The budget of a new stream, full."""
        return StreamBudget(self, now)

    def take(self, now: float) -> None:
        """Count one message of any stream."""
        self._total.take(1.0, now)
        self._total.limit_debt(self._most_debt)

    def wait_s(self, now: float) -> float:
        """How long a busy stream has to wait for the others' sake."""
        return self._total.wait_s(now)


class StreamBudget:
    """What one stream may send: ask ``spend`` after each message read, and tell each commit."""

    __slots__ = ("_base", "_earned_at", "_limits", "_messages", "_nodes", "_shared")

    def __init__(self, shared: UplinkBudget, now: float) -> None:
        limits = shared.limits
        self._shared, self._limits = shared, limits
        self._messages = TokenBucket(limits.message_rate, limits.message_burst, now)
        self._nodes = TokenBucket(limits.node_rate, limits.node_burst, now)
        # What the messages would be without the earnings: it tells the busy from the quiet.
        self._base = TokenBucket(limits.message_rate, limits.message_burst, now)
        self._earned_at = now

    def spend(self, nodes: int, now: float) -> float:
        """A message with ``nodes`` nodes was read: seconds to wait before reading the next."""
        self._messages.take(1.0, now)
        self._nodes.take(nodes, now)
        self._shared.take(now)
        self._base.take(1.0, now)
        self._base.limit_debt(0.0)
        wait_s = self._messages.wait_s(now)
        if (nodes_wait_s := self._nodes.wait_s(now)) > wait_s:
            wait_s = nodes_wait_s
        if self._base.level(now) < self._limits.message_burst / 2:  # a busy stream
            wait_s = max(wait_s, self._shared.wait_s(now))
        return wait_s

    def earn(self, tokens: int, max_nodes: int, now: float) -> None:
        """A commit of ``tokens`` tokens was sent. ``max_nodes``: how many the device may have
        outstanding, so how many it may send anew when all of its tree died. A commit without
        tokens earns nothing."""
        if tokens == 0:
            return
        limits, elapsed_s = self._limits, max(0.0, now - self._earned_at)
        self._earned_at = now
        messages = limits.messages_per_commit + limits.messages_per_token * tokens
        self._messages.add(min(messages, limits.earned_message_rate * elapsed_s), now)
        self._nodes.add(min(max_nodes, limits.earned_node_rate * elapsed_s), now)


class CallBudget:
    """The line in which calls wait for their turn, one for each peer and one for all."""

    def __init__(self, limits: CallLimits, now: float) -> None:
        self.limits = limits
        self._total = TokenBucket(limits.total_rate, limits.total_burst, now)
        self._peers: OrderedDict[str, TokenBucket] = OrderedDict()

    @property
    def peer_count(self) -> int:
        """Peers remembered."""
        return len(self._peers)

    def turn(self, peer: str, now: float) -> float:
        """Seconds until the call that ``peer`` makes now has its turn, 0 for at once. More than
        ``limits.max_wait_s``: it has no place in the line and is to be refused with this advice."""
        bucket = self._bucket(peer, now)
        wait_s = max(
            _wait_after(bucket, self.limits.peer_rate, now),
            _wait_after(self._total, self.limits.total_rate, now),
        )
        if wait_s <= self.limits.max_wait_s:
            bucket.take(1.0, now)
            self._total.take(1.0, now)
        return wait_s

    def _bucket(self, peer: str, now: float) -> TokenBucket:
        """The peer's bucket. The peer that has called least lately is forgotten for a new one:
        whoever changes its address all the time still meets the total."""
        bucket = self._peers.get(peer)
        if bucket is None:
            if len(self._peers) >= self.limits.max_peers:
                self._peers.popitem(last=False)
            bucket = TokenBucket(self.limits.peer_rate, self.limits.peer_burst, now)
            self._peers[peer] = bucket
        self._peers.move_to_end(peer)
        return bucket


def _wait_after(bucket: TokenBucket, rate: float, now: float) -> float:
    """How long one would wait who took one token now."""
    return max(0.0, (1.0 - bucket.level(now)) / rate)
