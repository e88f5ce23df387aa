"""What a draft's row costs the others now: the least chance of being right with which it pays.

Theory of operation. A row that is added to a pass makes everybody who waits for the pass wait
longer. Let a pass take T seconds and feed prompts for the share q of it, a row take r, N sessions
decode, W wait with their prompts, and a session have g tokens of a pass. Requests arrive at a rate
of their own, so prompts bring a fixed number of rows a second however fast texts move, and

    T = (base + r * rows of those who decode) / (1 - q)

Two passes without the row take as long as one pass with it and a shorter one: a token more in a
pass saves its session T / g seconds, and a row costs N + W sessions r / (1 - q) seconds each, since
prompts come in that time too. So a node pays when its chance of being right is at least

    least chance = r * (N + W) * g / ((1 - q) * T) = r * tokens * (1 + W / N) / decode_s

with ``tokens`` = N * g of a pass, and ``decode_s`` = (1 - q) * T, the pass without its prompt rows
(goodput, as in SmartSpec, arXiv 2406.14066, with prompts beside it). That is what makes the *mean*
best. Those whose drafts miss have only the longer passes of it: a wrong row lengthens all of them
by cost / (1 - cost), the more the fuller the verifier is, while a right one replaces a row of a
later pass. So that they are no slower than without anybody's drafts, it asks

    least chance = cost * (1 + cost)

Worked example, an office floor: rows of 0.15 ms in passes of 34 ms, 9 ms of them for prompts, that
commit 48 tokens: cost = 0.15 * 48 / 25 = 0.29, least chance 0.37. A first choice that is right with
0.8 is worth it, and so are the second and the third behind it (0.64, 0.51). When 20 prompts wait
beside 60 sessions in passes of 37 ms that commit 60 tokens and feed prompts for 20 ms, with rows of
0.2 ms, the cost is 0.2 * 60 * 1.33 / 17 = 0.94: nothing pays, for nearly all of a pass's time is
rows by then, and a row that may be wrong takes the place of one that is not.

What is not known. Until ``_LEAST_PASSES`` passes were timed, nobody drafts while prompts wait. When
rows vary no more, what was last measured fades by ``_FADES`` a pass, so that drafts are tried again
one day; from 0.5 it takes 35 passes to 0.25.
"""

from __future__ import annotations

from typing import Final

from edgespec.core.protocol.estimators import MovingAverage, SlopeEstimator
from edgespec.core.protocol.messages import Open, RunAhead

UNPRICED_GUESS: Final = 0.5
"""What a guess of the verifier's own needs while the time of a row is not known."""

# Prompt rows are taken for no more than the rest of a pass: their price is that of all rows.
_LEAST_DECODING: Final = 0.25

_LEAST_PASSES: Final = 8

_FADES: Final = 0.98

# Prompts in line beside those who decode, in the mean.
_FEW: Final = 1.0


class RowPriceKeeper:
    """Learns from the passes of one verifier."""

    def __init__(self) -> None:
        self._pass_s = MovingAverage()
        self._slope_s = SlopeEstimator()
        self._row_s: float | None = None
        self._tokens = MovingAverage()
        self._prompt_rows = MovingAverage()
        self._decoding, self._prompts_waiting = MovingAverage(), MovingAverage()

    @property
    def pass_s(self) -> float | None:
        """Moving average of the passes that sampled; None before the first."""
        return self._pass_s.get(0.0) if self._pass_s.count else None

    @property
    def row_s(self) -> float:
        """What one more row adds to a pass; 0 while it is not known, or nothing."""
        return self._row_s or 0.0

    @property
    def pace(self) -> float:
        """Tokens that a session has of a pass, at least one."""
        return max(1.0, self._tokens.get(1.0) / max(1.0, self._decoding.get(1.0)))

    def note_line(self, decoding: int, prompts: int) -> None:
        """So many sessions stand in line for a pass: those that decode, and those with a prompt."""
        self._decoding.add(decoding)
        self._prompts_waiting.add(prompts)

    def note_pass(
        self, rows: int, prompt_rows: int, took_s: float, target_s: float | None = None
    ) -> None:
        """A pass that sampled is over. It took ``took_s``, of which the target ``target_s``: rows
        are the dearer the longer the target takes for more of them, not the longer a busy event
        loop takes to hear of it."""
        self._pass_s.add(took_s)
        self._slope_s.add(rows, took_s if target_s is None else target_s)
        self._prompt_rows.add(prompt_rows)
        slope_s = self._slope_s.get()
        if slope_s is not None:
            self._row_s = max(0.0, slope_s)
        elif self._row_s is not None:
            self._row_s *= _FADES

    def note_tokens(self, tokens: int) -> None:
        """It committed so many, of all its sessions."""
        self._tokens.add(tokens)

    @property
    def least_chance(self) -> float:
        """A draft node less likely to be right than this does not pay for its row. While the time
        of a row is not known, it is 0, and 1 where the first prompts wait."""
        if self._row_s is None and self._pass_s.count < _LEAST_PASSES:
            return 1.0 if self._prompts_waiting.get(0.0) > _FEW else 0.0
        row_s, pass_s = self.row_s, self._pass_s.get(0.0)
        if row_s <= 0.0 or pass_s <= 0.0:
            return 0.0
        decode_s = max(pass_s - row_s * self._prompt_rows.get(0.0), _LEAST_DECODING * pass_s)
        held_up = 1.0 + self._prompts_waiting.get(0.0) / max(1.0, self._decoding.get(1.0))
        cost = row_s * self._tokens.get(0.0) * held_up / decode_s
        return cost * (1.0 + cost)

    @property
    def least_guess(self) -> float:
        """The same for guesses of the verifier's own, which are made at any time: what has no price
        is taken to be dear."""
        least = self.least_chance
        return max(least, UNPRICED_GUESS) if self._row_s is None else least


# Which part of a row's price a session has to pay, by what a right draft saves it.
#
# Theory of operation. The price (``row_price.py``) is made for sessions that decode on in every
# pass: a token more in a pass saves them a pass. One that waits for its drafts (``RunAhead.NEVER``)
# is saved the wait as well, while its rows cost the others the same. So its drafts pay as soon as
# they are right with
#
#     least chance = price * pass_s / round_s,    round_s = pass_s + what it waits between passes
#
# Worked example: passes of 25 ms begin 75 ms after the commit before, over a link of 70 ms; where a
# row asks others for 0.8, this session drafts from 0.2 on. Without this it would be told to draft
# nothing, and have one token a round trip.


class PricedShare:
    """Of one session; ``value`` is 1 for one that decodes on, and 0 while nothing is known."""

    def __init__(self, request: Open) -> None:
        self._waits = request.run_ahead is RunAhead.NEVER
        self._share = MovingAverage()
        self._committed_at: float | None = None

    @property
    def value(self) -> float:
        return self._share.get(0.0) if self._waits else 1.0

    def note_pass(self, started_at: float, now: float) -> None:
        """A pass of the session that began at ``started_at`` commits ``now``."""
        before, self._committed_at = self._committed_at, now
        if self._waits and before is not None and now > before:
            self._share.add(min(1.0, (now - started_at) / (now - before)))
