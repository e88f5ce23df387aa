"""How often one peer may call before it has to wait in line: new streams, questions for ``Info``.

Theory of operation. One line for each peer and one for all, both token buckets. A call beyond the
rate waits for its turn; one that would wait too long is to be refused. Nobody waits for the others'
sake who is within its fair share of the total (``fair_shares.py``), so the line that a flood makes
is its own.

Invariants: waits are finite and never negative; at most ``max_peers`` peers are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from edgespec.core.verifier.fair_shares import FairShares, ShareLimits
from edgespec.core.verifier.stream_budget import TokenBucket


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


# What a caller that has kept to its share may ask at once, however many others are in line.
_CALLS_SAVED = 4.0
_CALLER_IDLE_S = 10.0


class CallBudget:
    """The line in which calls wait for their turn, one for each peer and one for all."""

    def __init__(self, limits: CallLimits, now: float) -> None:
        self.limits = limits
        self._total = TokenBucket(limits.total_rate, limits.total_burst, now)
        self._peers: OrderedDict[str, TokenBucket] = OrderedDict()
        # Who comes anew has nothing, so that a peer gains nothing by changing its address.
        shares = ShareLimits(
            limits.total_rate,
            limits.total_rate / limits.max_peers,
            burst=_CALLS_SAVED,
            first=0.0,
            free_alone=False,
            idle_s=_CALLER_IDLE_S,
            max_payers=limits.max_peers,
        )
        self._shares = FairShares(shares, now)

    @property
    def peer_count(self) -> int:
        """Peers remembered."""
        return len(self._peers)

    def turn(self, peer: str, now: float, payer: str | None = None) -> float:
        """Seconds until the call that ``peer`` makes now has its turn, 0 for at once. More than
        ``limits.max_wait_s``: it has no place in the line and is to be refused with this advice.
        ``payer`` is whose share it is, where that is not the peer's."""
        bucket, payer = self._bucket(peer, now), peer if payer is None else payer
        total_s = _wait_after(self._total, self.limits.total_rate, now)
        if total_s > 0.0:  # else nobody looks at shares
            total_s = min(total_s, self._shares.wait_s(payer, now, cost=1.0))
        wait_s = max(total_s, _wait_after(bucket, self.limits.peer_rate, now))
        if wait_s <= self.limits.max_wait_s:
            bucket.take(1.0, now)
            self._total.take(1.0, now)
            self._shares.spend(payer, 1.0, now)
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
