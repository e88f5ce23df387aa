"""What watches one verifier, to be handed to its parts when they are built."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.telemetry.loop_lag import LoopLag
from edgespec.telemetry.read_waits import ReadWaits
from edgespec.telemetry.stream_meter import StreamMeter
from edgespec.telemetry.traffic_counts import TrafficCounts


@dataclass(frozen=True, slots=True)
class Watch:
    """``streams`` is told what the engine does, ``traffic`` what the wire carries, ``lag`` asks the
    event loop, ``waits`` hears which streams are not read for a while."""

    streams: StreamMeter = field(default_factory=StreamMeter)
    traffic: TrafficCounts = field(default_factory=TrafficCounts)
    lag: LoopLag = field(default_factory=LoopLag)
    waits: ReadWaits = field(default_factory=ReadWaits)
