"""What watches one verifier, to be handed to its parts when they are built."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.telemetry.loop_lag import LoopLag
from edgespec.telemetry.stream_meter import StreamMeter
from edgespec.telemetry.traffic_counts import TrafficCounts


@dataclass(frozen=True, slots=True)
class Watch:
    """``streams`` is told what the engine does, ``traffic`` what the wire carries, ``lag`` asks the
    event loop."""

    streams: StreamMeter = field(default_factory=StreamMeter)
    traffic: TrafficCounts = field(default_factory=TrafficCounts)
    lag: LoopLag = field(default_factory=LoopLag)
