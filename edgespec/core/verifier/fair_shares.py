"""Who may have how much of a rate that many want: max-min fair shares between payers.

Theory of operation. A *payer* is whoever a cost is charged to: the credential of a key or, where no
keys are asked for, an address, however many streams it has. The costs of all payers together may be
``rate`` a second. Those who want less than a fair share have what they want, and the others share
the rest equally; with u what the former spend, and k of the latter,

    share = max((rate - sum of u) / k, least_rate)

and who is alone has no limit (``free_alone``). Each payer has a bucket that fills at the share, up
to ``burst``; what is taken beyond its level is a debt. Whoever owes waits ``debt / share`` seconds,
and that is all: within its share nobody waits, whatever the others do. What was spent is looked at
every ``SLOT_S`` seconds: who owes then wants more than its share, of the others the want is what
they spent. A payer that has spent nothing for ``idle_s`` and owes nothing is forgotten.

Worked example. ``rate`` 500, ``least_rate`` 100. Twenty devices send 10 messages a second each, one
key floods: it has 500 - 200 = 300 a second. With 64 devices it would have none, and has 100.

``grace`` lets the innocent of a guilty payer go on: who asks with a grace waits for the part of
the debt that exceeds it. A flood on few streams is held where the debt begins, and quiet streams of
the same payer, which have a grace, never meet it.

Invariants: waits are never negative, and no longer than ``max_wait_s`` and the time in which two
bursts fill. A payer that is not alone and asks at m places, each time before it spends at most c
there, spends at most burst + m * c + t * share in t seconds, as long as m * c is less than the
share of ``max_wait_s``. At most ``max_payers`` payers are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

SLOT_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """Rates are costs a second."""

    rate: float
    """Of all payers together."""
    least_rate: float
    """Of each, however many there are."""
    burst: float = 256.0
    first: float = 256.0
    """The level of a payer that nobody remembers; at most ``burst``."""
    free_alone: bool = True
    """Nobody waits while there is no other payer."""
    max_wait_s: float = 10.0
    """Debts beyond this and a burst are forgotten: a device that hears nothing is soon gone."""
    idle_s: float = 2.0
    max_payers: int = 2_048


@dataclass(slots=True)
class _Account:
    level: float
    filled_at: float
    spent_at: float
    spent: float = 0.0
    """In this slot."""


class FairShares:
    """Charge costs with ``spend``; ask ``wait_s`` before the next one."""

    def __init__(self, limits: ShareLimits, now: float) -> None:
        assert limits.rate > 0.0
        assert limits.least_rate > 0.0
        assert 0.0 <= limits.first <= limits.burst
        self.limits = limits
        self.share = limits.rate
        """Costs a second that each payer may have now."""
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        """Who has spent least lately comes first."""
        self._slot_began_at = now

    def __len__(self) -> int:
        return len(self._accounts)

    def spend(self, payer: str, cost: float, now: float, grace: float = 0.0) -> float:
        """Charge ``cost`` to ``payer``, whether or not it has so much; then ``wait_s``."""
        if now - self._slot_began_at >= SLOT_S:
            self._turn(now)
        account = self._accounts.get(payer) or self._account(payer, now)
        self._fill(account, now)
        account.level -= cost
        account.spent += cost
        account.spent_at = now
        self._accounts.move_to_end(payer)
        if account.level >= 0.0:  # as nearly always
            return 0.0
        if self._alone:  # and takes from nobody
            account.level = 0.0
            return 0.0
        most_debt = self.limits.burst + self.limits.max_wait_s * self.share
        account.level = max(account.level, -most_debt)
        return max(0.0, -grace - account.level) / self.share

    def earn(self, payer: str, amount: float, now: float) -> None:
        """Give ``payer`` something besides its share; what is over the burst is lost."""
        account = self._accounts.get(payer)
        if account is not None:
            self._fill(account, now)
            account.level = min(self.limits.burst, account.level + amount)

    def wait_s(self, payer: str, now: float, cost: float = 0.0, grace: float = 0.0) -> float:
        """Seconds until ``payer`` can pay ``cost`` out of its share and ``grace``; 0 for at
        once."""
        self._turn(now)
        account = self._accounts.get(payer)
        if account is None:  # its share is not reckoned yet; it is no less than this
            share = self.limits.rate / (len(self._accounts) + 1)
            share = max(self.limits.least_rate, share)
            return max(0.0, cost - grace - self.limits.first) / share
        if account.level >= cost - grace or self._alone:
            return 0.0
        self._fill(account, now)
        return max(0.0, cost - grace - account.level) / self.share

    @property
    def _alone(self) -> bool:
        return self.limits.free_alone and len(self._accounts) == 1

    def _fill(self, account: _Account, now: float) -> None:
        if now > account.filled_at:
            level, most = account.level + (now - account.filled_at) * self.share, self.limits.burst
            account.level, account.filled_at = (level if level < most else most), now

    def _account(self, payer: str, now: float) -> _Account:
        account = self._accounts.get(payer)
        if account is None:
            if len(self._accounts) >= self.limits.max_payers:
                self._accounts.popitem(last=False)
            account = self._accounts[payer] = _Account(self.limits.first, now, now)
        return account

    def _turn(self, now: float) -> None:
        """Reckon the share anew when a slot is over."""
        took_s = now - self._slot_began_at
        if took_s < SLOT_S:
            return
        self._slot_began_at = now
        idle_since = now - self.limits.idle_s
        for payer, account in tuple(self._accounts.items()):
            self._fill(account, now)
            if account.spent_at <= idle_since and account.level >= 0.0:
                del self._accounts[payer]
        self._reckon(took_s)

    def _reckon(self, took_s: float) -> None:
        wants = [inf if a.level < 0.0 else a.spent / took_s for a in self._accounts.values()]
        self.share = max(self.limits.least_rate, fair_share(self.limits.rate, wants))
        for account in self._accounts.values():
            account.spent = 0.0


def fair_share(rate: float, wants: Sequence[float]) -> float:
    """The share at which all who want more than it, and the others with what they want, have
    ``rate`` together (max-min fairness). Where they want less: what is left for the greediest."""
    rest, share = rate, rate
    for place, want in enumerate(sorted(wants)):
        share = rest / (len(wants) - place)
        if want > share:
            break
        rest -= want
    return share
