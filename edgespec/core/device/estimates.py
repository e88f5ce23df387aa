"""A device measures its link, its own steps and the verifier's passes, and keeps the means here."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.core.protocol.estimators import AcceptanceEstimator, MovingAverage, SlopeEstimator


@dataclass(slots=True)
class DraftEstimates:
    """The device's view of its world. All times are seconds, and unknown until first measured."""

    rtt_s: MovingAverage = field(default_factory=MovingAverage)
    step_s: MovingAverage = field(default_factory=MovingAverage)
    pass_s: MovingAverage = field(default_factory=MovingAverage)
    commit_s: MovingAverage = field(default_factory=MovingAverage)
    """From one commit to the next, as they arrive."""
    commit_tokens: MovingAverage = field(default_factory=MovingAverage)
    row_s: SlopeEstimator = field(default_factory=SlopeEstimator)
    """What one more draft node adds to a pass."""
    acceptance: AcceptanceEstimator = field(default_factory=AcceptanceEstimator)
