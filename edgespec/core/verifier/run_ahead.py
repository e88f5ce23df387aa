"""Run-ahead: whether the verifier starts a pass of a session that has no draft waiting.

Such a pass commits one token, as plain streaming does. Waiting for a draft pays only if the draft
arrives soon. ``ArrivalEstimator`` estimates when it arrives; a policy decides until when to wait.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from edgespec.core.protocol.estimators import AcceptanceEstimator, DecayedRate, MovingAverage
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.statically_frozen import statically_frozen
from edgespec.core.verifier.kept_drafts import make_chances

MAX_HISTORIES: Final = 64
"""Most histories that a verifier keeps; the one whose last session is oldest is dropped first."""

# Weight of the newest sample in the averages of one session, and in the averages over many.
_SESSION_WEIGHT, _HISTORY_WEIGHT = 0.25, 0.1
# Memory of the share of expected drafts that arrived, and the trials for which its prior counts.
_SESSION_MEMORY, _HISTORY_MEMORY, _PRIOR_TRIALS = 0.9, 0.98, 4.0


class DraftHistory:
    """Averages over the drafts of earlier sessions, with which a new session's estimates begin.

    A generation is often over after ten passes, so a session that began without estimates would
    spend most of its passes to learn what the session before had learned.
    """

    def __init__(self) -> None:
        self.response_s = MovingAverage(_HISTORY_WEIGHT)
        self.response_depth = MovingAverage(_HISTORY_WEIGHT)
        self.interval_s = MovingAverage(_HISTORY_WEIGHT)
        self.places = MovingAverage(_HISTORY_WEIGHT)
        self.arrivals = DecayedRate(_HISTORY_MEMORY, _PRIOR_TRIALS)
        self.acceptance = AcceptanceEstimator()
        self.kept_chances = make_chances()


class DraftHistories:
    """The histories of a verifier.

    Sessions share a history if their devices probably draft alike: they have the same credential,
    both sample or neither does, and their verifier waits for drafts in the same way. All sessions
    without a key share theirs. A history holds times and rates only, nothing of an output.
    """

    def __init__(self) -> None:
        self._histories: OrderedDict[tuple[str, bool, RunAhead], DraftHistory] = OrderedDict()

    def get(self, credential_name: str, *, samples: bool, run_ahead: RunAhead) -> DraftHistory:
        """Return the history that such sessions share; it is empty for the first session."""
        key = credential_name, samples, run_ahead
        history = self._histories.setdefault(key, DraftHistory())
        self._histories.move_to_end(key)
        if len(self._histories) > MAX_HISTORIES:
            self._histories.popitem(last=False)
        return history


def _begin_average(history: MovingAverage) -> MovingAverage:
    """Return a session's average whose first sample is the mean of the history."""
    average = MovingAverage(_SESSION_WEIGHT)
    if history.count:
        average.add(history.get(0.0))
    return average


class ArrivalEstimator:
    """Estimates when the next useful draft of a session arrives.

    After a miss the device must first receive the commit and draft anew; the delay is the
    *response*. Otherwise drafts come at the device's own rhythm; the delay between two drafts is
    the *gap*. The estimate is the time of the last event plus the moving average of the response or
    the gap.

    A distant device has drafts in flight when a commit leaves the tree empty. Such a draft is still
    useful if it fits the output. It was not made in response to that commit, so it ends the miss as
    a gap, and no response counts as shorter than a round trip.
    """

    def __init__(self, history: DraftHistory | None = None) -> None:
        self._history = history = history or DraftHistory()
        self._response_s = _begin_average(history.response_s)
        self._depth = _begin_average(history.response_depth)
        self._gap_s = MovingAverage(_SESSION_WEIGHT)
        self._interval_s = _begin_average(history.interval_s)
        self._places = _begin_average(history.places)
        self._arrivals = DecayedRate(_SESSION_MEMORY, _PRIOR_TRIALS)
        self._missed_at: float | None = None
        self._arrived_at: float | None = None
        self._awaited: tuple[float, float] | None = None
        """Begin and end of the time in which a draft is expected; None if none is."""

    @property
    def arrival_rate(self) -> float:
        """Share of the expected drafts that arrived within a pass; 1 before the first.

        A draft that is expected may come to nothing: while it is under way the verifier decodes on,
        and the draft has to foresee those tokens. Text lookup has nothing to send after most
        misses."""
        return self._arrivals.rate(self._history.arrivals.rate(1.0))

    @property
    def place_s(self) -> float | None:
        """Time in which the device drafts one more place, in seconds; None if it is not known.

        This is the mean time between two drafts, or between a miss and the draft after it, over the
        mean number of places in a draft. It includes the round trip after a miss, so a distant
        device counts as slow.
        """
        places = self._places.get(0.0)
        return self._interval_s.get(0.0) / places if places > 0.0 else None

    @property
    def usual_response_s(self) -> float:
        """Usual delay of the first draft after a miss, in seconds; 0 before one has arrived."""
        return self._response_s.get(0.0)

    @property
    def response_s(self) -> float:
        """Usual delay of the first draft after a miss, in seconds; 0 if the next draft is not such
        a one."""
        return 0.0 if self._missed_at is None else self._response_s.get(0.0)

    @property
    def response_depth(self) -> float:
        """Usual depth of the first draft after a miss, in nodes; 1 before one has arrived."""
        return self._depth.get(1.0)

    def on_possible_pass(self, idle_since: float, pass_s: float) -> None:
        """Note that a pass could start without a draft. If one is expected or overdue, it counts as
        arrived if it comes within ``pass_s`` of ``idle_since``, when the session last committed.

        That does not depend on whether the session waits: a draft that arrives during a pass is
        judged against the same tokens."""
        if self._awaited is not None:
            if self._awaited[0] == idle_since:
                return
            self._count_awaited(arrived=False)
        expected_at, end = self.expected_at(), idle_since + pass_s
        if expected_at is not None and expected_at <= end:
            self._awaited = idle_since, end

    def _count_awaited(self, *, arrived: bool) -> None:
        for rate in (self._arrivals, self._history.arrivals):
            rate.add(arrived)
        self._awaited = None

    def on_miss(self, now: float) -> None:
        """Note that a commit left the tree without a node, so the device must draft anew."""
        if self._missed_at is None:
            self._missed_at = now

    def on_useful_draft(
        self, now: float, depth: int = 1, places: int = 1, *, responds: bool = True
    ) -> None:
        """Note that a draft with a usable node arrived, after which the tree is ``depth`` nodes
        deep. The draft has candidates for ``places`` places. ``responds`` is whether the device had
        received the commit of the miss, if there was a miss, when it made the draft."""
        history = self._history
        if self._awaited is not None:
            self._count_awaited(arrived=now <= self._awaited[1])
        if not responds:
            self._missed_at = None
        since = self._arrived_at if self._missed_at is None else self._missed_at
        if since is not None:
            for average in (self._interval_s, history.interval_s):
                average.add(now - since)
            for average in (self._places, history.places):
                average.add(places)
        if self._missed_at is not None:
            for average in (self._response_s, history.response_s):
                average.add(now - self._missed_at)
            for average in (self._depth, history.response_depth):
                average.add(depth)
        elif self._arrived_at is not None:
            self._gap_s.add(now - self._arrived_at)
        self._missed_at, self._arrived_at = None, now

    def expected_at(self) -> float | None:
        """Return when the next useful draft is expected, or None if nothing was measured yet."""
        if self._missed_at is not None:
            response_s = self._response_s.get(-1.0)
            return self._missed_at + response_s if response_s >= 0 else None
        if self._arrived_at is None or self._gap_s.count == 0:
            return None
        return self._arrived_at + self._gap_s.get(0.0)


OVERDUE_SHARE: Final = 0.1
"""How overdue an expected draft may be, in passes, before the session stops waiting for it.

After a miss a draft may instead be overdue by the usual response time, since chains differ in
length. It may not where the server model would match it in less than that time.
"""


@statically_frozen
class RunAheadView:
    """The state that a run-ahead policy sees when a pass could start and no draft is waiting.

    Times are on the same clock as ``now``, in seconds.
    """

    now: float
    idle_since: float
    """Time when the session last committed, or was opened."""
    pass_s: float
    expected_at: float | None
    no_draft_coming: bool
    hit_rate: float = 0.0
    """Share of the passes with device nodes in which a device node was accepted."""
    runs_anyway: bool = False
    """True if a pass of other sessions starts now; a session that declines waits until it ends."""
    response_depth: float = 1.0
    """Usual depth of the first draft after a miss, in nodes."""
    response_s: float = 0.0
    """Usual delay of the first draft after a miss; 0 if the next draft is not such a one."""
    server_draft_s: float = math.inf
    """Time in which the server model would propose as much as the device's next draft is expected
    to bring; infinite if it does not draft now."""
    arrival_rate: float = 1.0
    """Share of the expected drafts that arrived within a pass."""


RunAheadPolicy = Callable[[RunAheadView], float]
"""Returns the time from which a pass without a draft may start; ``view.now`` or less means now."""


def never_run_ahead(view: RunAheadView, patience_s: float = 2.0) -> float:
    """Wait for a draft until the device announces that none is coming, or for ``patience_s``.

    This is split decoding as in the literature. The limit exists so that a silent device cannot
    stop its own stream. Two seconds are longer than a draft takes over a satellite link, and
    shorter than the time after which a device gives up on its verifier.
    """
    return view.now if view.no_draft_coming else view.idle_since + patience_s


def always_run_ahead(view: RunAheadView) -> float:
    """Start at once: plain streaming, which drafts that are there in time speed up."""
    return view.now


def auto_run_ahead(view: RunAheadView, unsure: float = 0.84, sure: float = 0.94) -> float:
    """Wait for an expected draft, but no longer than the draft is likely to be worth.

    Let a node be accepted with probability a, the hit rate. A verifier that runs ahead finds the
    next miss in 1 + a passes: the first pass commits one token, and with probability a the device's
    chain still stands behind it. A verifier that waits for a chain of k nodes finds the next miss
    in 1 + a**k passes. So waiting for a - a**k passes breaks even: 0 for a single node, 0.69 of a
    pass for ten nodes at a = 0.8.

    Where nearly all nodes are accepted a longer wait does no harm. The limit is then the share (a -
    ``unsure``) / (``sure`` - ``unsure``) of a pass, clipped to [0, 1]. Waiting a whole pass for one
    node costs nothing at a rate above 0.92, and 5 % of the speed at 0.8 (virtual time,
    docs/measurements/policy.md).

    A wait is in vain if no draft arrives. Let a draft arrive with probability p (``arrival_rate``)
    after e passes, and save s passes. A wait of at most p * s passes gains p * (s - e) where it
    arrives and costs (1 - p) * p * s where not, p * (p * s - e) in all. So it begins only where the
    draft is expected within p * s.

    No wait begins for a draft that the server model can match before it arrives, and none goes on
    for an overdue draft that the server model can match in less than the usual response time.

    If others have a pass now, the session takes part at once: waiting would cost that whole pass,
    and what the device drafts meanwhile can still be used in the next pass.
    """
    if view.no_draft_coming or view.expected_at is None or view.runs_anyway:
        return view.now
    rate, pass_s = view.hit_rate, view.pass_s
    saved = rate - math.pow(rate, view.response_depth)
    share = view.arrival_rate * max(saved, min(1.0, (rate - unsure) / (sure - unsure)))
    latest = view.idle_since + share * pass_s
    if view.expected_at > min(latest, view.now + view.server_draft_s):
        return view.now
    response_s = view.response_s if view.response_s <= view.server_draft_s else 0.0
    return min(latest, view.expected_at + max(OVERDUE_SHARE * pass_s, response_s))


RUN_AHEAD: Final[Mapping[RunAhead, RunAheadPolicy]] = {
    RunAhead.NEVER: never_run_ahead,
    RunAhead.ALWAYS: always_run_ahead,
    RunAhead.AUTO: auto_run_ahead,
}
