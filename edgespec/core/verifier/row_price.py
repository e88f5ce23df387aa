"""What a draft's row costs the others now: the least chance of being right with which it pays.

Theory of operation. A row that is added to a pass makes everybody who waits for the pass wait
longer. Let a pass take T seconds with the verifier's own draft steps before it, ``decode_s``
without its prompt rows, a row take r, N sessions decode, W wait with their prompts, and the pass
commit ``tokens``. A token more in a pass saves its session a share of T; a row costs N + W sessions
r seconds each, and what prompts bring in that time. So a node pays when its chance of being right
is at least

    cost = r * tokens * (1 + W / N) / decode_s

(goodput, as in SmartSpec, arXiv 2406.14066, with prompts beside it). That makes the *mean* best.
Those whose drafts miss have only the longer passes of it: a wrong row lengthens all of them by cost
/ (1 - cost). So that they are no slower than without anybody's drafts, it asks

    least chance = cost * (1 + cost)

Worked example: rows of 0.15 ms in passes of 34 ms, 9 ms of them for prompts, that commit 48 tokens:
cost = 0.15 * 48 / 25 = 0.29, least chance 0.37. A first choice that is right with 0.8 is worth it,
and so are the second and the third behind it (0.64, 0.51).

Until ``_LEAST_PASSES`` passes were timed, nobody drafts while prompts wait. When rows vary no more,
what was last measured fades by ``_FADES`` a pass, so that drafts are tried again one day.
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
        self._round_s, self._drafting_s = MovingAverage(), 0.0
        self._prompt_rows, self._served_rows = MovingAverage(), MovingAverage()
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

    @property
    def undrafted_s(self) -> float:
        """What a pass takes without its prompt rows and the verifier's own guesses."""
        return self._without(self._prompt_rows.get(0.0) + self._served_rows.get(0.0))

    def _without(self, rows: float) -> float:
        pass_s = self._pass_s.get(0.0)
        return max(pass_s - self.row_s * rows, _LEAST_DECODING * pass_s)

    @property
    def held_up(self) -> float:
        """How many sessions wait for the end of a pass, for each that decodes in it."""
        return 1.0 + self._prompts_waiting.get(0.0) / max(1.0, self._decoding.get(1.0))

    def note_line(self, decoding: int, prompts: int) -> None:
        """So many sessions stand in line for a pass: those that decode, and those with a prompt."""
        self._decoding.add(decoding)
        self._prompts_waiting.add(prompts)

    def note_pass(
        self,
        rows: int,
        prompt_rows: int,
        took_s: float,
        target_s: float | None = None,
        served: int = 0,
    ) -> None:
        """A pass that sampled is over. It took ``took_s``, of which the target ``target_s``: rows
        are the dearer the longer the target takes for more of them, not the longer a busy event
        loop takes to hear of it. ``served`` rows were guesses of the verifier's own."""
        self._pass_s.add(took_s)
        self._round_s.add(self._drafting_s)
        self._drafting_s = 0.0
        self._slope_s.add(rows, took_s if target_s is None else target_s)
        self._prompt_rows.add(prompt_rows)
        self._served_rows.add(served)
        slope_s = self._slope_s.get()
        if slope_s is not None:
            self._row_s = max(0.0, slope_s)
        elif self._row_s is not None:
            self._row_s *= _FADES

    def note_round(self, took_s: float) -> None:
        """The verifier's own draft model ran before the next pass."""
        self._drafting_s += took_s

    def note_tokens(self, tokens: int) -> None:
        """It committed so many, of all its sessions."""
        self._tokens.add(tokens)

    @property
    def least_chance(self) -> float:
        """A draft node less likely to be right than this does not pay for its row. While the time
        of a row is not known, it is 0, and 1 where the first prompts wait."""
        if self._row_s is None and self._pass_s.count < _LEAST_PASSES:
            return 1.0 if self._prompts_waiting.get(0.0) > _FEW else 0.0
        time_s = self._without(self._prompt_rows.get(0.0)) + self._round_s.get(0.0)
        if time_s <= 0.0:
            return 0.0
        cost = self.row_s * self._tokens.get(0.0) * self.held_up / time_s
        return cost * (1.0 + cost)

    @property
    def least_guess(self) -> float:
        """The same for guesses of the verifier's own: without a price rows are dear."""
        least = self.least_chance
        return max(least, UNPRICED_GUESS) if self._row_s is None else least


class PricedShare:
    """``value`` is the part of a row's price that a session has to pay: 1 for one that decodes on.

    One that waits for its drafts (``RunAhead.NEVER``) is saved the wait as well, while its rows
    cost the others the same: so it pays pass_s / (pass_s + what it waits between passes), and
    nothing while that is not known."""

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
