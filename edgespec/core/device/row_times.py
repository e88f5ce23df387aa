"""A device learns what its draft steps take, by their rows."""

from __future__ import annotations

from edgespec.core.protocol.estimators import MovingAverage, SlopeEstimator

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

    @classmethod
    def known(cls, one_s: float, row_s: float) -> RowTimes:
        """What was learned before on the same machine with the same model: no step has to be spent
        on learning it again, and what is measured from now on takes its place."""
        times = cls()
        times.row_s = row_s
        times.one_s.add(one_s)
        times._count = _LOOK_STEPS
        return times

    @property
    def learned(self) -> tuple[float, float] | None:
        """(one_s, row_s) to begin with next time; None while they are not known."""
        if self.row_s is None or not self.one_s.count:
            return None
        return self.one_s.get(0.0), self.row_s

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
