"""Run-ahead: may the verifier start a pass of a session that has no draft waiting?

Theory of operation. A pass without a draft commits one token, as plain streaming does. Waiting
for a draft instead pays only when it comes soon: the pass then commits more. ``never`` is split
decoding as the literature has it (and is bounded by a patience, so that a silent device cannot
stop its own stream); ``always`` is plain streaming that drafts may speed up; ``auto`` waits when
the next useful draft is expected within a share of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgespec.core.protocol.messages import RunAhead
from edgespec.core.statically_frozen import statically_frozen


@statically_frozen
class RunAheadView:
    """What is known when a pass could start and no draft is waiting; times as ``now``."""

    now: float
    idle_since: float
    """When the session last committed, or was opened."""
    pass_s: float
    """Expected length of a pass."""
    expected_at: float | None
    """When the next useful draft should arrive; None if unknown."""
    no_draft_coming: bool
    """The device said that no draft is coming."""
    hit_rate: float = 0.0
    """How often a pass with drafts found the target's token among their first nodes."""
    runs_anyway: bool = False
    """A pass of other sessions starts now; who does not take part waits for its end."""


class RunAheadPolicy(Protocol):
    def start_at(self, view: RunAheadView) -> float:
        """The time from which a pass without a draft may start; ``view.now`` or less means now."""


@dataclass(frozen=True, slots=True)
class NeverRunAhead:
    """The verifier waits for a draft until the device says that none is coming, or for
    ``patience_s``."""

    patience_s: float = 2.0

    def start_at(self, view: RunAheadView) -> float:
        return view.now if view.no_draft_coming else view.idle_since + self.patience_s


@dataclass(frozen=True, slots=True)
class AlwaysRunAhead:
    """The verifier never waits for a draft."""

    def start_at(self, view: RunAheadView) -> float:
        return view.now


@dataclass(frozen=True, slots=True)
class AutoRunAhead:
    """The verifier waits for an expected draft, but no longer than it is likely to be worth.

    The longest wait is a share of a pass that grows with the chance that the draft is right: share
    = (hit rate - ``unsure``) / (``sure`` - ``unsure``), between ``least_share`` and 1. A hit rate
    of 0.89 gives (0.89 - 0.84) / (0.94 - 0.84) = half a pass. Waiting costs its time when the draft
    then misses, running on costs a pass of GPU work: in virtual time (docs/measurements.md) waiting
    a whole pass costs nothing at a rate above 0.92 and 5 % of the speed at 0.8.

    Where others have a pass now, waiting costs that whole pass: whoever joins it has a token more
    when it ends, and what the device drafts meanwhile is there for the next one all the same. With
    chains of two right at 0.8 each, two passes then bring 1 + 1 + 0.8 * 0.8 = 2.6 tokens, and one
    pass missed for the sake of the other 1 + 0.8 + 0.8 * 0.8 = 2.4.
    """

    least_share: float = 0.0
    unsure: float = 0.84
    sure: float = 0.94
    slack_share: float = 0.1
    """How overdue (in passes) an expected draft may be before it is given up."""

    def start_at(self, view: RunAheadView) -> float:
        if view.no_draft_coming or view.expected_at is None or view.runs_anyway:
            return view.now
        latest = view.idle_since + self._share(view.hit_rate) * view.pass_s
        if view.expected_at > latest:
            return view.now
        return min(latest, view.expected_at + self.slack_share * view.pass_s)

    def _share(self, hit_rate: float) -> float:
        certainty = (hit_rate - self.unsure) / (self.sure - self.unsure)
        return min(1.0, max(self.least_share, certainty))


def run_ahead_policy(kind: RunAhead) -> RunAheadPolicy:
    match kind:
        case RunAhead.NEVER:
            return NeverRunAhead()
        case RunAhead.ALWAYS:
            return AlwaysRunAhead()
        case RunAhead.AUTO:
            return AutoRunAhead()
