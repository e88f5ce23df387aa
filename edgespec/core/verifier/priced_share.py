"""Which part of a row's price a session has to pay, by what a right draft saves it.

Theory of operation. The price (``row_price.py``) is made for sessions that decode on in every pass:
a token more in a pass saves them a pass. One that waits for its drafts (``RunAhead.NEVER``) is
saved the wait as well, while its rows cost the others the same. So its drafts pay as soon as they
are right with

    least chance = price * pass_s / round_s,    round_s = pass_s + what it waits between passes

Worked example: passes of 25 ms begin 75 ms after the commit before, over a link of 70 ms; where a
row asks others for 0.8, this session drafts from 0.2 on. Without this it would be told to draft
nothing, and have one token a round trip.
"""

from __future__ import annotations

from edgespec.core.protocol.estimators import MovingAverage
from edgespec.core.protocol.messages import Open, RunAhead


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
