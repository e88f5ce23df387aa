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

from edgespec.core.messages import RunAhead
from edgespec.core.value import value


@value
class RunAheadView:
    """What is known when a pass could start and no draft is waiting; times as ``now``."""

    now: float
    idle_since: float
    """When the session last committed, or was opened."""
    pass_s: float
    """Expected length of a pass."""
    expected_at: float | None
    """When the next useful draft should arrive; None if unknown."""
    told_to_go: bool
    """The device said that no draft is coming."""
    hit_rate: float = 0.0
    """How often a pass with drafts found the target's token among their first nodes."""


class RunAheadPolicy(Protocol):
    def start_at(self, view: RunAheadView) -> float:
        """The time from which a pass without a draft may start; ``view.now`` or less means now."""


@dataclass(frozen=True, slots=True)
class NeverRunAhead:
    """Wait for a draft; decode on only when told to, or after ``patience_s``."""

    patience_s: float = 2.0

    def start_at(self, view: RunAheadView) -> float:
        return view.now if view.told_to_go else view.idle_since + self.patience_s


@dataclass(frozen=True, slots=True)
class AlwaysRunAhead:
    """Never wait."""

    def start_at(self, view: RunAheadView) -> float:
        return view.now


@dataclass(frozen=True, slots=True)
class AutoRunAhead:
    """Wait for an expected draft at most a share of a pass that grows with its chance of success.

    Waiting w costs w when the draft then misses; running on costs a pass of GPU work. In virtual
    time (docs/measurements.md) waiting a whole pass costs nothing at a rate above 0.92 and 5 % of
    the speed at 0.8, so the share goes from ``least_share`` to a whole pass between these.
    """

    least_share: float = 0.0
    unsure: float = 0.84
    sure: float = 0.94
    slack_share: float = 0.1
    """How overdue (in passes) an expected draft may be before it is given up."""

    def start_at(self, view: RunAheadView) -> float:
        if view.told_to_go or view.expected_at is None:
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
