"""The price of a row: the least acceptance probability at which a draft node is worth its row.

Theory of operation. A row that is added to a pass lengthens the pass for every session that waits
for its end. Let a pass with the verifier's own draft steps before it take T seconds, and
``decode_s`` seconds if the time of its prompt rows is left out. Let a row take r seconds. Let N
sessions decode, W sessions wait with their prompts, and the pass commit ``tokens`` tokens. One more
token in a pass saves its session a share of T. A row costs each of the N + W sessions r seconds, in
which they would commit tokens or feed prompts. So a node pays if its acceptance probability is at
least

    cost = r * tokens * (1 + W / N) / decode_s

(goodput, as in SmartSpec, arXiv 2406.14066, with prompts beside it). This maximises the *mean*
speed. A session whose drafts are rejected only has longer passes from it: rows that just pay
lengthen all passes by cost / (1 - cost). So that such a session is no slower than without any
drafts, the price is

    least chance = cost * (1 + cost)

Worked example: rows take 0.15 ms, and passes of 34 ms spend 9 ms on prompts and commit 48 tokens.
Then cost = 0.15 * 48 / 25 = 0.29, and the least chance is 0.37. A first candidate that is accepted
with probability 0.8 is worth its row, and so are the second and the third behind it (0.64, 0.51).

Until ``_LEAST_PASSES`` passes were timed, no node is worth its row while prompts wait. When the
number of rows no longer varies, the last measured time of a row decays by ``_FADES`` per pass, so
that drafts are tried again eventually.
"""

from __future__ import annotations

from typing import Final

from edgespec.core.protocol.estimators import MovingAverage, SlopeEstimator
from edgespec.core.protocol.messages import Open, RunAhead

UNPRICED_LOOKUP_CHANCE: Final = 0.5
"""Least acceptance probability of the verifier's own nodes while the time of a row is not known."""

# Least share of a pass that is attributed to decoding. Prompt rows are assumed to take as long as
# other rows, which may overestimate them.
_LEAST_DECODING: Final = 0.25
_LEAST_PASSES: Final = 8
_FADES: Final = 0.98
# Mean number of waiting prompts from which on prompts count as waiting.
_FEW: Final = 1.0


class RowPriceEstimator:
    """Estimates the price of a row from the passes of one verifier."""

    def __init__(self) -> None:
        self._pass_s = MovingAverage()
        self._slope_s = SlopeEstimator()
        self._row_s: float | None = None
        self._tokens = MovingAverage()
        self._round_s, self._drafting_s = MovingAverage(), 0.0
        self._prompt_rows, self._server_rows = MovingAverage(), MovingAverage()
        self._decoding, self._prompts_waiting = MovingAverage(), MovingAverage()

    @property
    def pass_s(self) -> float | None:
        """Moving average of the duration of passes that sampled, in seconds; None before the
        first."""
        return self._pass_s.get(0.0) if self._pass_s.count else None

    @property
    def row_s(self) -> float:
        """Seconds that one more row adds to a pass; 0 while that is unknown."""
        return self._row_s or 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens per pass of a session, at least one."""
        return max(1.0, self._tokens.get(1.0) / max(1.0, self._decoding.get(1.0)))

    @property
    def bare_pass_s(self) -> float:
        """Mean seconds of a pass without its prompt rows and without the verifier's own nodes."""
        return self._pass_s_without(self._prompt_rows.get(0.0) + self._server_rows.get(0.0))

    def _pass_s_without(self, rows: float) -> float:
        pass_s = self._pass_s.get(0.0)
        return max(pass_s - self.row_s * rows, _LEAST_DECODING * pass_s)

    @property
    def waiting_per_decoding(self) -> float:
        """Sessions that wait for the end of a pass, for each session that decodes in it."""
        return 1.0 + self._prompts_waiting.get(0.0) / max(1.0, self._decoding.get(1.0))

    def longest_pass_s(self, rows: int) -> float:
        """Return the longest duration that a pass of ``rows`` rows counts for. A longer one says
        that the machine stood still, and nothing about rows."""
        return self._slope_s.longest(rows)

    def note_queue(self, decoding: int, prompts: int) -> None:
        """Record how many decoding sessions and how many sessions with a prompt wait for a pass."""
        self._decoding.add(decoding)
        self._prompts_waiting.add(prompts)

    def note_pass(
        self,
        rows: int,
        prompt_rows: int,
        took_s: float,
        target_s: float | None = None,
        server_rows: int = 0,
    ) -> None:
        """Record a finished pass that sampled.

        ``took_s`` is its whole duration, ``target_s`` the target's part of it. The time of a row is
        learned from the target's part, since a busy event loop that is late to handle the result
        must not make rows look expensive. ``server_rows`` of the rows were nodes of the verifier's
        own.
        """
        self._pass_s.add(took_s)
        self._round_s.add(self._drafting_s)
        self._drafting_s = 0.0
        self._slope_s.add(rows, took_s if target_s is None else target_s)
        self._prompt_rows.add(prompt_rows)
        self._server_rows.add(server_rows)
        slope_s = self._slope_s.get()
        if slope_s is not None:
            self._row_s = max(0.0, slope_s)
        elif self._row_s is not None:
            self._row_s *= _FADES

    def note_round(self, took_s: float) -> None:
        """Record a round of the server model before the next pass."""
        self._drafting_s += took_s

    def note_tokens(self, tokens: int) -> None:
        """Record the tokens that the pass committed, over all its sessions."""
        self._tokens.add(tokens)

    @property
    def least_chance(self) -> float:
        """The price of a row: a draft node less likely to be accepted does not pay for its row.

        While the time of a row is unknown it is 0; or 1 if the first passes have prompts waiting.
        """
        if self._row_s is None and self._pass_s.count < _LEAST_PASSES:
            return 1.0 if self._prompts_waiting.get(0.0) > _FEW else 0.0
        time_s = self._pass_s_without(self._prompt_rows.get(0.0)) + self._round_s.get(0.0)
        if time_s <= 0.0:
            return 0.0
        cost = self.row_s * self._tokens.get(0.0) * self.waiting_per_decoding / time_s
        return cost * (1.0 + cost)

    @property
    def least_lookup_chance(self) -> float:
        """The price of a row for the verifier's own nodes, at least ``UNPRICED_LOOKUP_CHANCE``
        while the time of a row is unknown."""
        least = self.least_chance
        return max(least, UNPRICED_LOOKUP_CHANCE) if self._row_s is None else least


class PricedShare:
    """Computes the part of a row's price that a session has to pay; 1 for a session that runs
    ahead.

    A session that waits for its drafts (``RunAhead.NEVER``) also saves the wait, while its rows
    cost the others the same. It pays pass_s / (pass_s + time it waits between passes), and nothing
    while that is not known.
    """

    def __init__(self, request: Open) -> None:
        self._waits = request.run_ahead is RunAhead.NEVER
        self._share = MovingAverage()
        self._committed_at: float | None = None

    @property
    def value(self) -> float:
        return self._share.get(0.0) if self._waits else 1.0

    def note_pass(self, started_at: float, now: float) -> None:
        before, self._committed_at = self._committed_at, now
        if self._waits and before is not None and now > before:
            self._share.add(min(1.0, (now - started_at) / (now - before)))
