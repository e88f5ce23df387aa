"""What interrupts a device's way: outages and handovers, drawn once, before anything moves."""

from __future__ import annotations

import random
from dataclasses import dataclass

from edgespec.core.link_model import OutageSchedule
from edgespec.telemetry.run_summary import Interruption
from edgespec_sim.scenario.network_sections import LinkSection

OUTAGE, HANDOVER = "outage", "handover"
_MOST = 1000
Gaps = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Weather:
    """What one device sees of a link over time."""

    handovers_s: tuple[float, ...]
    outages_s: Gaps
    """In order, those of handovers included."""

    @classmethod
    def of(cls, section: LinkSection, duration_s: float, seed: str) -> Weather:
        gaps = [(one.at_s, one.at_s + one.for_s) for one in section.outages]
        times_s: list[float] = []
        handover = section.handover
        if handover is not None:
            dice = random.Random(seed)
            at_s = dice.uniform(0.0, handover.every_s)
            while at_s < duration_s:
                times_s.append(at_s)
                at_s += handover.every_s * dice.uniform(0.75, 1.25)
            if handover.gap_ms:
                gaps += [(at_s, at_s + handover.gap_ms / 1e3) for at_s in times_s]
        return cls(tuple(times_s), _joined(gaps))

    def interruptions(self, section: LinkSection) -> list[Interruption]:
        """As a reader is told: outages apart from handovers, each with its gap."""
        told = [Interruption(one.at_s, one.at_s + one.for_s, OUTAGE) for one in section.outages]
        gap_s = section.handover.gap_ms / 1e3 if section.handover is not None else 0.0
        return told + [Interruption(at_s, at_s + gap_s, HANDOVER) for at_s in self.handovers_s]


def recorded_outages(
    schedule: OutageSchedule | None, offset_s: float, until_s: float
) -> list[Interruption]:
    """Those of a trace that repeats, entered ``offset_s`` into it; at most a thousand."""
    told: list[Interruption] = []
    at_s = 0.0
    while schedule is not None and schedule.intervals_s and at_s < until_s and len(told) < _MOST:
        found = schedule.next_after(at_s + offset_s)
        if found is None or found[0] - offset_s >= until_s:
            break
        told.append(Interruption(max(0.0, found[0] - offset_s), found[1] - offset_s, OUTAGE))
        at_s = max(found[1] - offset_s, at_s + 1e-6)
    return told


def _joined(gaps: list[tuple[float, float]]) -> Gaps:
    """In order, and one where they overlap."""
    joined: list[tuple[float, float]] = []
    for start_s, end_s in sorted(gaps):
        if joined and start_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end_s, joined[-1][1]))
        else:
            joined.append((start_s, end_s))
    return tuple(joined)
