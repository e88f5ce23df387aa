"""A device measures its link, its own steps and the verifier's passes, and keeps the means here."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.core.protocol.estimators import AcceptanceEstimator, MovingAverage, SlopeEstimator
from edgespec.core.protocol.messages import MAX_PRICE, Commit


@dataclass(slots=True)
class RowPrice:
    """What the verifier last said that a draft node costs. It outlives a generation: hand the same
    one to the next ``DraftSession`` with this verifier."""

    least_chance: float = 0.0
    """A node that is less likely to be right does not pay for its row."""
    credit: int | None = None
    """Nodes that may be outstanding; None: as many as the limits say."""

    def hear(self, commit: Commit) -> None:
        """A commit of a pass came: what it leaves out costs nothing, or is unlimited."""
        self.least_chance = (commit.row_price or 0) / MAX_PRICE
        self.credit = commit.credit


# So often what a row costs is looked at anew, in so many steps, every other one of several leaves.
_LOOK_EVERY, _LOOK_STEPS = 256, 8


class RowTimes:
    """What a draft step of one row takes, and what each further row adds. It depends on machine and
    model, and outlives a generation: hand the same one to the next ``DraftSession``.

    Formula: the slope of step times over rows, and the mean of step times less that of their
    further rows. Steps of 1 and 4 rows that take 8 and 11 ms, in turn, give 1 ms a row and 8 ms.
    """

    def __init__(self) -> None:
        self.row_s: float | None = None
        """None until steps of several rows were timed."""
        self.one_s = MovingAverage()
        self._slope, self._count = SlopeEstimator(), 0

    def add(self, rows: int, seconds: float) -> None:
        self._count += 1
        self._slope.add(rows, seconds)
        found = self._slope.get()
        if found is not None:
            self.row_s = max(0.0, found)
        if self.row_s is not None:
            self.one_s.add(max(0.0, seconds - self.row_s * (rows - 1)))

    @property
    def looking(self) -> bool:
        """The next step should have several leaves, whether they pay or not."""
        turn = self._count % _LOOK_EVERY
        return turn < _LOOK_STEPS and turn % 2 == 1


@dataclass(slots=True)
class DraftEstimates:
    """The device's view of its world. All times are seconds, and unknown until first measured."""

    rtt_s: MovingAverage = field(default_factory=MovingAverage)
    step_s: MovingAverage = field(default_factory=MovingAverage)
    rows: RowTimes = field(default_factory=RowTimes)
    """What one more row adds to a draft step."""
    pass_s: MovingAverage = field(default_factory=MovingAverage)
    commit_s: MovingAverage = field(default_factory=MovingAverage)
    """From one commit to the next, as they arrive."""
    commit_tokens: MovingAverage = field(default_factory=MovingAverage)
    row_s: SlopeEstimator = field(default_factory=SlopeEstimator)
    """What one more draft node adds to a pass."""
    price: RowPrice = field(default_factory=RowPrice)
    acceptance: AcceptanceEstimator = field(default_factory=AcceptanceEstimator)
