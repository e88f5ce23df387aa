"""Where the statistics of a generated trace must lie: the fitted values, with room for chance.

Each range is what the data of ``generator_laws.py`` say of the class, widened by what differs
from one recording of the class to the next (for lte, medians of 43 to 68 ms and p99 of 163 to 540
ms). It holds for one trace of at least ``TARGET_DURATION_S`` and any seed; wan's is a day.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edgespec_sim.links.network_trace import TraceStatistics

TARGET_DURATION_S: Final = 7200.0

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Target:
    """Ranges (least, most), both included."""

    rtt_median_s: Range
    rtt_p95_s: Range
    rtt_p99_s: Range
    autocorrelation: Range
    loss: Range
    outages_per_hour: Range
    outage_median_s: Range
    """Only of a trace that has outages."""

    def misses(self, statistics: TraceStatistics, duration_s: float) -> list[str]:
        """The statistics outside their range, each as name, value and range."""
        values = {
            "rtt_median_s": statistics.rtt_median_s,
            "rtt_p95_s": statistics.rtt_p95_s,
            "rtt_p99_s": statistics.rtt_p99_s,
            "autocorrelation": statistics.autocorrelation,
            "loss": statistics.loss,
            "outages_per_hour": statistics.outage_count * 3600.0 / duration_s,
        }
        if statistics.outage_count:
            values["outage_median_s"] = statistics.outage_median_s
        found = []
        for name, value in values.items():
            least, most = getattr(self, name)
            if not least <= value <= most:
                found.append(f"{name} is {value:.4g}, not in [{least:g}, {most:g}]")
        return found


TARGETS: Final[dict[str, Target]] = {
    "wifi": Target(
        (0.0025, 0.004), (0.005, 0.03), (0.06, 0.12), (-0.1, 0.1), (0, 0), (0, 0), (0, 0)
    ),
    "lte": Target(
        (0.045, 0.067), (0.085, 0.16), (0.16, 0.4), (0.27, 0.6), (0.002, 0.005), (0, 8), (1, 45)
    ),
    "5g": Target(
        (0.015, 0.018), (0.021, 0.026), (0.025, 0.07), (-0.1, 0.2), (0, 0), (0, 4), (1, 4)
    ),
    "starlink": Target(
        (0.023, 0.036), (0.038, 0.062), (0.045, 0.085), (0.9, 1), (0.001, 0.005), (0, 2.5), (1, 10)
    ),
    "broadband": Target(
        (0.014, 0.03), (0.024, 0.05), (0.035, 0.09), (0.3, 0.8), (0.0004, 0.002), (0, 0), (0, 0)
    ),
    "wan": Target((0.0085, 0.02), (0.06, 0.1), (0.075, 0.136), (0.9, 1), (0, 0), (0, 0), (0, 0)),
}
