"""Tables of what followed what: LRU n-grams, and what the target said after each token.

Theory of operation. A *leader* remembers the last few tokens that followed it, most recent first;
leaders that were not seen for longest go first when there are too many. There are two tables:

    recycled   the leader is one token, and every row of a pass is entered, also those whose guess
               was wrong: the target's answer after it was computed all the same (Token Recycling,
               Luo et al., ACL 2025, with the target's choice in place of its top k, which a pass
               does not report)
    n-grams    the leader is a pair of neighbouring tokens, and what is committed is entered
               (Cacheback, Ma, Gim and Zhong, EMNLP 2025: n-grams used of late are used again)

Who may share them: a token that came sooner tells its reader that somebody was told the same
before. So the sessions of one named credential share both tables; a session that showed no key has
a recycled one of its own, and no n-grams, which its index for prompt lookup holds already.

Bounds: ``MOST_LEADERS`` rows of about 230 bytes, below 2 MiB a table; tables of ``MOST_OWNERS``
credentials, those that opened a session most recently.
"""

from __future__ import annotations

from collections import OrderedDict

from edgespec.core.verifier.credential import Credential

MOST_LEADERS = 8192
MOST_FOLLOWERS = 2
MOST_OWNERS = 32


class FollowerTable:
    """Rows of followers by leader; at most ``most_leaders`` of them."""

    def __init__(
        self, most_leaders: int = MOST_LEADERS, most_followers: int = MOST_FOLLOWERS
    ) -> None:
        self._most_leaders, self._most_followers = most_leaders, most_followers
        self._rows: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def after(self, leader: int) -> tuple[int, ...]:
        """What followed the leader, most recent first; empty: nothing that is remembered."""
        return self._rows.get(leader, ())

    def add(self, leader: int, token: int) -> None:
        """The token stood behind the leader just now."""
        rows = self._rows
        row = rows.get(leader)
        if row is None:
            rows[leader] = (token,)
            if len(rows) > self._most_leaders:
                rows.popitem(last=False)
            return
        rows.move_to_end(leader)
        if row[0] != token:
            others = [other for other in row if other != token]
            rows[leader] = (token, *others[: self._most_followers - 1])


class Tables:
    """What the sessions of one owner share."""

    def __init__(self, *, shared: bool) -> None:
        self.recycled = FollowerTable()
        self.ngrams = FollowerTable() if shared else None


class TablesByOwner:
    """Hands each session the tables it may use."""

    def __init__(self, most_owners: int = MOST_OWNERS) -> None:
        self._most_owners = most_owners
        self._tables: OrderedDict[str, Tables] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tables)

    def of(self, credential: Credential) -> Tables:
        """Those of the credential's name, or new ones for a session that showed no key."""
        name = credential.name
        if not name:
            return Tables(shared=False)
        if name not in self._tables:
            self._tables[name] = Tables(shared=True)
        self._tables.move_to_end(name)
        if len(self._tables) > self._most_owners:
            self._tables.popitem(last=False)
        return self._tables[name]
