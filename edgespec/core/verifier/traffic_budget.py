"""Limits how fast one peer may send before it has to wait.

Theory of operation. A message costs the verifier about 0.1 ms, so a peer that sends in a loop takes
time from all others. Nothing is dropped: the machine only returns how long the driver has to wait
before it reads on, and the transport's flow control holds the sender meanwhile. All limits are
token buckets: an amount taken beyond a bucket's level is a debt, which is paid after ``debt /
rate`` seconds.

    StreamBudget   Messages of one stream, by number and size. It also *earns* at each commit,
                   because an honest device drafts as fast as the text moves: 16 messages and 2 per
                   token, but never more than 1 for each millisecond since the last commit.
    UplinkBudget   All streams together. Its debt is paid only by the busy streams, which send
                   more than the base rate, earned or not; the quiet ones are read at once. So n
                   streams are read at most max(2,000, 100 n) times per second in the long run.
                   Where several payers send, each is held to its fair share (``FairShares``),
                   which commits add to; a quiet stream has a second burst as its grace.

Worked example: a device with draft steps of 1 ms and passes of 30 ms sends at most 30 messages per
pass. A commit of 7 tokens earns min(16 + 2 * 7, 30) = 30 messages, so the device is never slowed.

Waits are finite and never negative; no bucket holds more than its burst.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import Final

SLOT_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """Limits of ``FairShares``. Rates are in cost units per second."""

    rate: float
    least_rate: float
    """Least rate of each payer, however many there are."""
    burst: float = 256.0
    initial_level: float = 256.0
    """Initial level of a payer that is not in the table; at most ``burst``."""
    unlimited_if_alone: bool = True
    """True if a payer does not wait while there is no other payer."""
    max_wait_s: float = 10.0
    """Longest wait: debts beyond this and a burst are forgotten, since a device that receives
    nothing soon disconnects."""
    idle_s: float = 2.0
    max_payers: int = 2_048


@dataclass(slots=True)
class _Account:
    level: float
    filled_at: float
    spent_at: float
    spent: float = 0.0


class FairShares:
    """Max-min fair shares of a rate between payers: charge with ``spend``, or call ``wait_s``
    first.

    A *payer* is the credential of an API key or, on a verifier without API keys, an address,
    however many streams it has. Payers who need less than a fair share of ``rate`` get what they
    need; the others share the rest equally, at least ``least_rate`` each. A payer that is alone has
    no limit. Each payer has a bucket that fills at the share. A payer in debt waits ``debt /
    share`` seconds. Within its share a payer never waits, whatever the others do. The share is
    recomputed every ``SLOT_S`` seconds.

    With a ``grace`` a payer waits only for the part of its debt that exceeds the grace. So a flood
    on few streams is held where the debt begins, and quiet streams of the same payer are not
    affected.

    No wait is longer than ``max_wait_s`` plus the time in which two bursts fill.
    """

    def __init__(self, limits: ShareLimits, now: float) -> None:
        assert limits.rate > 0.0
        assert limits.least_rate > 0.0
        assert 0.0 <= limits.initial_level <= limits.burst
        self.limits = limits
        self.share = limits.rate
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        """Accounts by payer, the one that has spent least recently in front."""
        self._slot_began_at = now

    def __len__(self) -> int:
        return len(self._accounts)

    def spend(self, payer: str, cost: float, now: float, grace: float = 0.0) -> float:
        """Charge ``cost`` to ``payer``, even beyond its level, and return the seconds that it has
        to wait."""
        if now - self._slot_began_at >= SLOT_S:
            self._start_slot(now)
        account = self._accounts.get(payer) or self._add_account(payer, now)
        self._fill(account, now)
        account.level -= cost
        account.spent += cost
        account.spent_at = now
        self._accounts.move_to_end(payer)
        if account.level >= 0.0:  # the usual case
            return 0.0
        if self._is_alone:  # takes from no other payer
            account.level = 0.0
            return 0.0
        max_debt = self.limits.burst + self.limits.max_wait_s * self.share
        account.level = max(account.level, -max_debt)
        return max(0.0, -grace - account.level) / self.share

    def earn(self, payer: str, amount: float, now: float) -> None:
        """Add ``amount`` to the bucket of ``payer`` besides its share; an excess over the burst is
        lost."""
        account = self._accounts.get(payer)
        if account is not None:
            self._fill(account, now)
            account.level = min(self.limits.burst, account.level + amount)

    def wait_s(self, payer: str, now: float, cost: float = 0.0, grace: float = 0.0) -> float:
        """Return the seconds until ``payer`` can pay ``cost`` out of its share and ``grace``."""
        self._start_slot(now)
        account = self._accounts.get(payer)
        if account is None:  # not in the share yet, which is at least this
            share = self.limits.rate / (len(self._accounts) + 1)
            share = max(self.limits.least_rate, share)
            return max(0.0, cost - grace - self.limits.initial_level) / share
        if account.level >= cost - grace or self._is_alone:
            return 0.0
        self._fill(account, now)
        return max(0.0, cost - grace - account.level) / self.share

    @property
    def _is_alone(self) -> bool:
        return self.limits.unlimited_if_alone and len(self._accounts) == 1

    def _fill(self, account: _Account, now: float) -> None:
        if now > account.filled_at:
            level, most = account.level + (now - account.filled_at) * self.share, self.limits.burst
            account.level, account.filled_at = (level if level < most else most), now

    def _add_account(self, payer: str, now: float) -> _Account:
        if len(self._accounts) >= self.limits.max_payers:
            self._accounts.popitem(last=False)
        account = self._accounts[payer] = _Account(self.limits.initial_level, now, now)
        return account

    def _start_slot(self, now: float) -> None:
        took_s = now - self._slot_began_at
        if took_s < SLOT_S:
            return
        self._slot_began_at = now
        idle_since = now - self.limits.idle_s
        for payer, account in tuple(self._accounts.items()):
            self._fill(account, now)
            if account.spent_at <= idle_since and account.level >= 0.0:
                del self._accounts[payer]
        wants = [inf if a.level < 0.0 else a.spent / took_s for a in self._accounts.values()]
        self.share = max(self.limits.least_rate, fair_share(self.limits.rate, wants))
        for account in self._accounts.values():
            account.spent = 0.0


def fair_share(rate: float, wants: Sequence[float]) -> float:
    """Return the max-min fair share of ``rate`` for payers that want these rates.

    It is the share at which payers that want more get the share, the others get what they want, and
    all together get ``rate``. If all want less than ``rate`` together, it is the rate that is left
    for the payer with the highest want.
    """
    wanted = [min(want, rate) for want in wants]
    spare = rate - math.fsum(wanted)
    if spare >= 0.0:
        return spare + max(wanted, default=0.0)
    # The excess over the share must go: the same water-filling, on the negated wants.
    return -water_level(-spare, [-want for want in wanted])


def water_level(volume: float, floors: Sequence[float]) -> float:
    """Return the level at which ``volume`` of water stands over ``floors``.

    At this level the sum of ``level - floor`` over all floors below it is ``volume``. The level is
    at least the lowest floor.
    """
    level = total = volume
    for count, floor in enumerate(sorted(floors), 1):
        if count > 1 and floor >= level:
            break
        total += floor
        level = total / count
    return level


@dataclass(frozen=True, slots=True)
class UplinkLimits:
    """The budget of the messages that streams send. Rates are per second."""

    message_rate: float = 100.0
    message_burst: float = 128.0
    """Equals the number of nodes that a device may have outstanding, with one node per message."""
    messages_per_commit: float = 16.0
    """An honest device replaces a dead tree after a miss: about 12 to 16 steps are worth
    drafting."""
    messages_per_token: float = 2.0
    """An honest device drafts as much further as the text has moved."""
    earned_message_rate: float = 1_000.0
    """Upper bound of the earnings: a draft step takes at least about 1 ms."""
    total_message_rate: float = 2_000.0
    """Rate of all streams together: about a fifth of one core."""
    total_burst: float = 2_000.0
    max_total_debt_s: float = 0.25
    """Longest wait of a busy stream for the sake of the others."""
    shares: ShareLimits = field(default_factory=lambda: ShareLimits(500.0, 100.0))
    """Fair shares of API keys, in messages: all together may take a twentieth of one core."""
    address_rate: float = 1_000.0
    """Least rate of an address on a verifier without API keys, since it may be a whole site."""
    bytes_per_message: float = 1_024.0
    """A message of this many bytes costs its stream and its payer twice as much as an empty one."""
    messages_per_open: float = 8.0
    """Messages that a new stream costs its payer."""
    share_per_commit: float = 0.5
    """Messages that a commit adds to its payer's share: every eighth token is acknowledged."""
    share_per_hit: float = 4.0
    """Messages that a commit adds instead if it accepted a draft node: devices send two to four
    messages per pass."""


class TokenBucket:
    """A level that fills at ``rate`` per second up to ``burst``, and may be overdrawn."""

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        assert rate > 0.0
        assert burst > 0.0
        self._rate, self._burst, self._level, self._at = rate, burst, burst, now

    def level(self, now: float) -> float:
        return self.consume(0.0, now)

    def consume(self, amount: float, now: float) -> float:
        """Take ``amount`` tokens, even if there are fewer, and return the level that is left."""
        level = self._level
        if now > self._at:
            level += (now - self._at) * self._rate
            if level > self._burst:
                level = self._burst
            self._at = now
        self._level = level = level - amount
        return level

    def add(self, amount: float, now: float) -> None:
        """Add ``amount`` tokens; an excess over the burst is lost."""
        if self.consume(-amount, now) > self._burst:
            self._level = self._burst

    def limit_debt(self, most: float) -> None:
        """Forget the part of a debt that exceeds ``most`` tokens."""
        self._level = max(self._level, -most)

    def wait_s(self, now: float, amount: float = 0.0) -> float:
        """Return the seconds until there are ``amount`` tokens; by default, until the debt is
        paid."""
        level = self.consume(0.0, now)
        return 0.0 if level >= amount else (amount - level) / self._rate


def limits_without_keys(limits: UplinkLimits) -> UplinkLimits:
    """Return the limits of a verifier without API keys, whose payers are addresses."""
    least, shares = limits.address_rate, limits.shares
    if least <= shares.least_rate:
        return limits
    return replace(limits, shares=replace(shares, rate=max(least, shares.rate), least_rate=least))


class WaitReason(Enum):
    STREAM = "stream"
    """The stream itself sent more than one stream may."""
    CREDENTIAL = "credential"
    """Its API key, or its address on a verifier without API keys, has used its share."""
    TOTAL = "total"
    """All streams together send too much, and this stream is a busy one."""
    QUEUE = "line"
    """The stream is new, and too many are opened."""


# Bound once, since they are used for every message: in Python 3.11 an attribute look-up on the
# class is a function call.
STREAM, CREDENTIAL, TOTAL, QUEUE = WaitReason


class UplinkBudget:
    """The budget of what all streams of a verifier may send; ``open`` makes the budget of one
    stream."""

    def __init__(
        self,
        limits: UplinkLimits,
        now: float,
        on_wait: Callable[[WaitReason, float], None] | None = None,
    ) -> None:
        self.limits = limits
        self.shares = FairShares(limits.shares, now)
        self.on_wait = on_wait or (lambda reason, wait_s: None)
        """Called for each wait, as ``on_wait(reason, seconds)``."""
        self.total = TokenBucket(limits.total_message_rate, limits.total_burst, now)
        self.max_debt = limits.max_total_debt_s * limits.total_message_rate

    def open(self, now: float, payer: str = "") -> StreamBudget:
        return StreamBudget(self, now, payer)

    def charge_open(self, payer: str, now: float, most_s: float) -> float:
        """Return the seconds to wait before a new stream of ``payer`` is served.

        The stream is charged, unless the wait exceeds ``most_s``, in which case it is to be
        refused.
        """
        wait_s = self.shares.wait_s(payer, now, grace=self.limits.shares.burst)
        if wait_s <= most_s:
            self.shares.spend(payer, self.limits.messages_per_open, now)
        return wait_s


class StreamBudget:
    """The budget of what one stream may send.

    Call ``spend`` after each message that is read, and ``earn`` for each commit that is sent.
    """

    __slots__ = ("_base", "_earned_at", "_limits", "_messages", "_payer", "_shared")

    def __init__(self, shared: UplinkBudget, now: float, payer: str) -> None:
        limits = shared.limits
        self._shared, self._limits, self._payer = shared, limits, payer
        self._messages = TokenBucket(limits.message_rate, limits.message_burst, now)
        # The level without earnings distinguishes busy streams from quiet ones.
        self._base = TokenBucket(limits.message_rate, limits.message_burst, now)
        self._earned_at = now

    def spend(self, now: float, size: float = 0) -> float:
        """Charge a message of ``size`` bytes and return the seconds to wait before the next one is
        read."""
        limits, shared = self._limits, self._shared
        cost = 1.0 + size / limits.bytes_per_message
        reason, wait_s = STREAM, 0.0
        if self._messages.consume(cost, now) < 0.0:
            wait_s = self._messages.wait_s(now)
        if shared.total.consume(1.0, now) < 0.0:
            shared.total.limit_debt(shared.max_debt)
        base = self._base.consume(1.0, now)
        if base < 0.0:
            self._base.limit_debt(0.0)
        busy = base < limits.message_burst / 2
        if busy and (total_s := shared.total.wait_s(now)) > wait_s:
            reason, wait_s = TOTAL, total_s
        grace = 0.0 if busy else limits.shares.burst
        if (share_s := shared.shares.spend(self._payer, cost, now, grace)) > wait_s:
            reason, wait_s = CREDENTIAL, share_s
        if wait_s > 0.0:
            shared.on_wait(reason, wait_s)
        return wait_s

    def earn(self, tokens: int, now: float, accepted: int = 0) -> None:
        """Add what a commit of ``tokens`` tokens earns, of which the device had drafted
        ``accepted``. A commit without tokens earns nothing."""
        if tokens == 0:
            return
        limits, elapsed_s = self._limits, max(0.0, now - self._earned_at)
        self._earned_at = now
        messages = limits.messages_per_commit + limits.messages_per_token * tokens
        most = limits.earned_message_rate * elapsed_s
        self._messages.add(messages if messages < most else most, now)
        share = limits.share_per_hit if accepted else limits.share_per_commit
        self._shared.shares.earn(self._payer, share, now)


@dataclass(frozen=True, slots=True)
class CallLimits:
    peer_rate: float
    peer_burst: float
    total_rate: float
    total_burst: float
    max_wait_s: float
    """Longest wait of a call; a call that would wait longer is refused. So at most ``max_wait_s *
    rate`` calls wait."""
    max_peers: int = 1_024


# An open and its cancel cost about 3 ms of the verifier. 200 devices that start at once behind one
# address are all admitted after (200 - 128) / 20 = 3.6 s.
OPEN_LIMITS = CallLimits(
    peer_rate=20.0, peer_burst=128.0, total_rate=60.0, total_burst=256.0, max_wait_s=10.0
)

# A device calls ``Info`` twice before it chooses a verifier.
INFO_LIMITS = CallLimits(
    peer_rate=25.0, peer_burst=50.0, total_rate=50.0, total_burst=100.0, max_wait_s=1.0
)

# Calls that a caller within its share may make at once, however many others wait.
_CALLS_SAVED = 4.0
_CALLER_IDLE_S = 10.0


class CallBudget:
    """The queue in which calls (new streams, calls of ``Info``) wait: one per peer and one for all.

    A peer within its fair share of the total never waits for the sake of others, so only the
    flooding peer waits for its own flood. At most ``max_peers`` peers are remembered.
    """

    def __init__(self, limits: CallLimits, now: float) -> None:
        self.limits = limits
        self._total = TokenBucket(limits.total_rate, limits.total_burst, now)
        self._peers: OrderedDict[str, TokenBucket] = OrderedDict()
        # A new peer starts with an empty bucket, so changing the address gains nothing.
        shares = ShareLimits(
            limits.total_rate,
            limits.total_rate / limits.max_peers,
            burst=_CALLS_SAVED,
            initial_level=0.0,
            unlimited_if_alone=False,
            idle_s=_CALLER_IDLE_S,
            max_payers=limits.max_peers,
        )
        self._shares = FairShares(shares, now)

    def charge_call(self, peer: str, now: float, payer: str | None = None) -> float:
        """Return the seconds that the call which ``peer`` makes now has to wait, 0 for at once.

        More than ``limits.max_wait_s`` means that the call is to be refused, with this as its retry
        advice. ``payer`` is the payer whose share the call uses, if that is not the peer.
        """
        bucket, payer = self._bucket(peer, now), peer if payer is None else payer
        total_s = self._total.wait_s(now, 1.0)
        if total_s > 0.0:  # shares matter only then
            total_s = min(total_s, self._shares.wait_s(payer, now, cost=1.0))
        wait_s = max(total_s, bucket.wait_s(now, 1.0))
        if wait_s <= self.limits.max_wait_s:
            bucket.consume(1.0, now)
            self._total.consume(1.0, now)
            self._shares.spend(payer, 1.0, now)
        return wait_s

    def _bucket(self, peer: str, now: float) -> TokenBucket:
        """Return the peer's bucket, replacing the one that was used least recently if the table is
        full.

        A peer that keeps changing its address still meets the total.
        """
        bucket = self._peers.get(peer)
        if bucket is None:
            if len(self._peers) >= self.limits.max_peers:
                self._peers.popitem(last=False)
            bucket = TokenBucket(self.limits.peer_rate, self.limits.peer_burst, now)
            self._peers[peer] = bucket
        self._peers.move_to_end(peer)
        return bucket
