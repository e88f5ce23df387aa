"""A device keeps what it has learned about its draft and its link between generations."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.core.device.confidence import ConfidenceEstimator
from edgespec.core.device.draft_lengths import LengthOutcomes
from edgespec.core.device.row_times import RowTimes


@dataclass(slots=True)
class Learned:
    """Hand the same one to the next ``DraftSession``: the sessions keep it up."""

    rows: RowTimes = field(default_factory=RowTimes)
    lengths: LengthOutcomes = field(default_factory=LengthOutcomes)
    confidence: ConfidenceEstimator = field(default_factory=ConfidenceEstimator)
