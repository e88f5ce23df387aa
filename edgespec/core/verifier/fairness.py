"""Decides which sessions may take part in a pass: fair between credentials, then between sessions.

Theory of operation. A pass ends for all its sessions at once, so each session makes it longer for
all others. The time that a session adds is its *marginal time*, ``session_s + extra_rows * row_s``,
learned from recent passes (``PlaneEstimator``), and at least the time it costs the event loop
(``LOOP_S``). No credential may add more to a pass than its share:

    share_s = T / n      n credentials want the pass, and the pass takes T

So a credential with many sessions cannot slow down those with few. share_s is the ``water_level``
of base_s, the part of the pass that no session adds, over the times that the credentials want to
add. A credential alone has no limit. If all credentials want equal times, no session is held back.
Every credential may add one session.

Worked example. base_s is 20 ms, a session adds 1 ms; one credential has 200 sessions, 20
credentials have one each. Then share_s = (20 + 20) / (21 - 1) = 2 ms: two of the 200 sessions enter
a pass of 42 ms, and the other credentials keep 40 / 42 = 0.95 of the speed that they would have
without them.

The part of its share that a credential cannot use, because a whole session needs more, is carried
over as its *deficit* (Shreedhar and Varghese 1995). The sessions of a credential take turns: a
session that was left out stays ahead.

Priorities. A credential's share is computed among the credentials of its own and of higher
priority, and its sessions precede sessions of lower priority. A session that was left out of
``AGE_PASSES`` passes in a row moves to the front whatever its priority, so that none starves.
Prompts: the credential that was fed the fewest prompt rows comes first (virtual token counters,
Sheng et al. 2401.00588); a new credential starts at the least count of the credentials present.

``Credential.tokens_per_s`` fills a bucket that holds the tokens of one second (``LEAST_BURST`` at
least). Sessions of a credential whose bucket is overdrawn wait; ``wake_at`` is the time at which
the first one may go on.

Invariants: with one credential without a rate every session is admitted; of every credential that
wants the pass and is within its rate at least one session is admitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.estimators import MovingAverage, PlaneEstimator
from edgespec.core.verifier.traffic_budget import TokenBucket, water_level

AGE_PASSES = 8
"""Passes in a row that may leave a session out for its priority."""
LEAST_BURST = 8.0
"""Least tokens that a bucket holds, so that drafts of a slow credential are of use."""
MAX_ACCOUNTS = 4096
"""Accounts from which on credentials without sessions are forgotten."""
CONTENDED_S = 30.0
"""Seconds for which a credential that wanted a pass is expected to want another one."""
LOOP_S = 2e-4
"""Seconds that a session in a pass costs the event loop at least. The commit is made and written
while the next pass runs, so the durations of passes do not show this cost. The value lies between
the processor times that ``benchmarks/daemon_load.py`` measured with 64 sessions and more: 0.08 to
0.11 ms on quiet cores and 0.2 to 0.3 ms on busy ones (docs/measurements/server.md).
"""
# Tolerance for comparing bucket levels: a sum of floats may stay this short of a paid debt.
_TOKEN = 1e-6


@dataclass(slots=True)
class Account:
    """The state of one credential."""

    credential: Credential
    bucket: TokenBucket | None = None
    """Bucket of ``Credential.tokens_per_s``; None without a rate."""
    allowance_s: float = inf
    """Seconds that its sessions may still add to the pass that is being formed."""
    deficit_s: float = 0.0
    """Seconds of its share that it could not use, carried over to the next pass."""
    token_level: float = inf
    """Tokens in the bucket, less one for each of its sessions in the pass."""
    in_pass: int = 0
    """Its sessions that decode in the pass."""
    prompt_rows: float = 0.0
    """Prompt rows that it was fed, by which credentials take turns."""


class Fairness:
    """Shares of a pass between credentials.

    ``credential_of`` is the engine's own table, by session id; a session without an entry belongs
    to ``ANYBODY``.
    """

    def __init__(self, credential_of: Mapping[str, Credential]) -> None:
        self.wake_at: float | None = None
        """Time at which a session that waits only for its credential's rate may go on; None if none
        waits."""
        self._credential_of = credential_of
        self._accounts: dict[str, Account] = {}
        self._pass_time = PlaneEstimator()
        self._rows = MovingAverage(0.05)
        self._fed_credentials: set[str] = set()
        """Credentials that had a prompt in the queue for the last pass."""
        self._last_seen: tuple[str, float] | None = None
        """The credential that wanted a pass last, and when."""
        self._contended_until = -inf

    # --- before the pass -------------------------------------------------------------------

    def plan_pass(self, decoding: Sequence[str], prompts: Iterable[str], now: float) -> None:
        """Compute the shares of the pass that is being formed for these sessions, which want it."""
        self.wake_at = None
        counts: dict[str, int] = {}
        credential_of, known = self._credential_of.get, self._accounts
        for key in decoding:
            credential = credential_of(key, ANYBODY)
            name = credential.name
            if name not in known or known[name].credential is not credential:
                self._get_account(key, now)
            counts[name] = counts.get(name, 0) + 1
        for name in {self._get_account(key, now).credential.name for key in prompts}:
            counts[name] = counts.get(name, 0) + 1
        self._note_contention(counts, now)
        accounts = [self._accounts[name] for name in counts]
        for account in accounts:
            account.in_pass, account.allowance_s = 0, inf
            account.token_level = inf if account.bucket is None else account.bucket.level(now)
        wanting = [one for one in accounts if one.token_level >= -_TOKEN]
        slopes = self._pass_time.slopes
        if len(wanting) < 2 or slopes is None:
            return
        session_s = self._session_s(slopes)
        base_s = max(0.0, self._pass_time.value(0.0, 0.0) or 0.0)
        wants = {one.credential.name: counts[one.credential.name] * session_s for one in wanting}
        for priority in {one.credential.priority for one in wanting}:
            among = [one for one in wanting if one.credential.priority >= priority]
            share = water_level(base_s, [wants[one.credential.name] for one in among])
            for one in among:
                if one.credential.priority == priority:
                    _set_allowance(one, wants[one.credential.name], share, session_s)

    def is_contended(self, now: float) -> bool:
        """Return True if two credentials wanted passes within ``CONTENDED_S`` of each other, until
        that long after the last time."""
        return now < self._contended_until

    def sort_by_priority(self, keys: list[str], left_out: Mapping[str, int]) -> list[str]:
        """Return the session ids ordered by priority, otherwise in the given order.

        ``left_out`` counts how many passes in a row each session was left out of.
        """
        if len({self._credential(key).priority for key in keys}) < 2:
            return keys
        return sorted(
            keys,
            key=lambda key: (left_out.get(key, 0) < AGE_PASSES, -self._credential(key).priority),
        )

    def sort_prompts(self, keys: list[str], left_out: Mapping[str, int]) -> list[str]:
        """Return the prompts ordered by priority, then by the prompt rows that their credential was
        fed, otherwise in the given order.

        Call this once per pass, with all prompts that wait.
        """
        names = {self._credential(key).name for key in keys}
        if len(names) > 1:
            known = [self._accounts[name].prompt_rows for name in names & self._fed_credentials]
            least = min(known, default=0.0)
            for name in names - self._fed_credentials:
                self._accounts[name].prompt_rows = max(self._accounts[name].prompt_rows, least)
        self._fed_credentials = names
        if len(names) < 2:
            return keys
        rows = {name: self._accounts[name].prompt_rows for name in names}
        return self.sort_by_priority(
            sorted(keys, key=lambda key: rows[self._credential(key).name]), left_out
        )

    def admits(self, key: str, now: float, *, prompt: bool) -> bool:
        """Return whether the session may join the pass beside the sessions that were counted so
        far.

        Prompts are limited by prompt rows instead, which their credentials share by turns.
        """
        account = self._accounts[self._credential_of.get(key, ANYBODY).name]
        if account.token_level < -_TOKEN:
            if account.bucket is not None and (overdrawn := account.bucket.wait_s(now)) > 0.0:
                at = now + overdrawn
                self.wake_at = at if self.wake_at is None else min(self.wake_at, at)
            return False
        if prompt or account.in_pass == 0 or account.allowance_s == inf:
            return True
        slopes = self._pass_time.slopes
        return slopes is None or account.allowance_s >= self._session_s(slopes)

    def is_over_rate(self, key: str) -> bool:
        """Return whether the session must wait because its credential exceeded its token rate."""
        account = self._accounts.get(self._credential(key).name)
        return account is not None and account.token_level < -_TOKEN

    def charge(self, key: str, rows: int, *, prompt: bool) -> None:
        """Charge the session's credential for the rows that the session has in the pass."""
        account = self._accounts[self._credential_of.get(key, ANYBODY).name]
        account.token_level -= 1.0
        if prompt:
            account.prompt_rows += rows
            return
        account.in_pass += 1
        if account.allowance_s < inf and (slopes := self._pass_time.slopes) is not None:
            account.allowance_s -= _marginal_s(slopes, rows)
            account.deficit_s = account.allowance_s

    # --- after the pass --------------------------------------------------------------------

    def note_pass(self, sessions: int, rows: int, took_s: float) -> None:
        """Record a finished pass that sampled: its sessions, all its rows, and its duration."""
        self._pass_time.add(sessions, rows - sessions, took_s)

    def note_rows(self, rows: int) -> None:
        """Record the rows that a decoding session had in a pass."""
        self._rows.add(rows)

    def spend_tokens(self, key: str, tokens: int, now: float) -> None:
        """Charge the session's credential for the tokens that the session has committed."""
        account = self._accounts.get(self._credential_of.get(key, ANYBODY).name)
        if account is not None and account.bucket is not None:
            account.bucket.consume(tokens, now)

    # --- parts -----------------------------------------------------------------------------

    def _note_contention(self, names: Iterable[str], now: float) -> None:
        for name in names:
            if self._last_seen is not None:
                last_name, seen_at = self._last_seen
                if name != last_name and now - seen_at < CONTENDED_S:
                    self._contended_until = now + CONTENDED_S
            self._last_seen = name, now

    def _session_s(self, slopes: tuple[float, float]) -> float:
        return _marginal_s(slopes, self._rows.get(1.0))

    def _credential(self, key: str) -> Credential:
        return self._credential_of.get(key, ANYBODY)

    def _get_account(self, key: str, now: float) -> Account:
        credential = self._credential(key)
        account = self._accounts.get(credential.name)
        if account is None:
            if len(self._accounts) >= MAX_ACCOUNTS:
                self._forget_idle()
            account = self._accounts[credential.name] = Account(credential)
            account.bucket = _make_bucket(credential, now)
        elif account.credential is not credential and account.credential != credential:
            if account.credential.tokens_per_s != credential.tokens_per_s:
                account.bucket = _make_bucket(credential, now)
            account.credential = credential
        return account

    def _forget_idle(self) -> None:
        used = {credential.name for credential in self._credential_of.values()}
        for name in [name for name in self._accounts if name not in used]:
            del self._accounts[name]


def _set_allowance(account: Account, want_s: float, share: float, session_s: float) -> None:
    """Set what the credential may add to this pass, including what earlier passes left of its
    share."""
    if want_s <= share:
        account.allowance_s, account.deficit_s = inf, 0.0
        return
    carried = min(max(account.deficit_s, -share), session_s)
    account.allowance_s = account.deficit_s = carried + share


def _marginal_s(slopes: tuple[float, float], rows: float) -> float:
    """Return the seconds that a session with ``rows`` rows adds, given the plane's slopes along
    sessions and rows."""
    session_s, row_s = slopes
    return max(LOOP_S, max(0.0, session_s) + max(0.0, row_s) * (rows - 1.0))


def _make_bucket(credential: Credential, now: float) -> TokenBucket | None:
    rate = credential.tokens_per_s
    return TokenBucket(rate, max(LEAST_BURST, rate), now) if rate > 0.0 else None
