"""What a device is told of its part in a pass: the commit, and what a row costs now."""

from __future__ import annotations

from edgespec.core.protocol.messages import MAX_PRICE, Commit, FinishReason, Open
from edgespec.core.verifier.attachment import Attachment
from edgespec.core.verifier.inbox import DraftInbox
from edgespec.core.verifier.priced_share import PricedShare
from edgespec.core.verifier.score_keeper import ScoreKeeper
from edgespec.core.verifier.session_events import RunningPass, VerifyCounters


class PassReport:
    """Makes the commits of one session, and counts its passes."""

    def __init__(
        self,
        request: Open,
        inbox: DraftInbox,
        device: Attachment,
        scores: ScoreKeeper,
        counters: VerifyCounters,
        share: PricedShare,
    ) -> None:
        self._scored = bool(request.logprobs)
        self._drafting, self._share = request.drafting, share
        self._inbox, self._device, self._scores = inbox, device, scores
        self._counters = counters

    def commit(
        self,
        position: int,
        tokens: tuple[int, ...],
        accepted: int,
        finish: FinishReason | None,
        done: RunningPass,
        row_price: int,
        now: float,
    ) -> Commit:
        """The commit of these tokens, of which the device drafted ``accepted``. A device that
        drafts on hears its part of the price of a row; ``row_price`` 0: there is none to tell."""
        rows, verify_us = done.request.drafted, round((now - done.started_at) * 1e6)
        price = credit = None
        self._share.note_pass(done.started_at, now)
        row_price = round(row_price * self._share.value)
        if row_price and verify_us and self._drafting and finish is None:
            price = row_price
            credit = 0 if self._inbox.best_chance < row_price / MAX_PRICE else None
        stale, (echo, held_us) = self._inbox.take_stale(), self._device.take_echo(now)
        self._counters.count(rows, accepted, stale)
        queue_us = round(done.queue_s * 1e6)
        logprobs = self._scores.of(position, len(tokens)) if self._scored else ()
        return Commit(  # in the order of its fields: with their names it takes thrice as long
            position,
            tokens,
            accepted,
            stale,
            queue_us,
            verify_us,
            rows,
            echo,
            held_us,
            finish,
            price,
            credit,
            logprobs,
        )
