"""One link of a scenario in as many instances as it has devices: queues, weather, models.

Theory of operation. Queues last as long as the world, one for all devices or one each; models, with
their order of messages, as long as a stream or a connection. Outages and handovers of a device are
drawn once, before anything moves.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

from edgespec.core.network.link_model import LinkModel, LinkSettings
from edgespec.core.network.shared_queue import SharedQueue
from edgespec_sim.links.cross_traffic import LoadedQueue
from edgespec_sim.links.from_trace import TraceLinks
from edgespec_sim.links.tcp_connection import MESSAGE_BYTES
from edgespec_sim.scenario.network_sections import LinkSection
from edgespec_sim.traces.generators import generate
from edgespec_sim.traces.network_trace import NetworkTrace
from edgespec_sim.traces.readers import read_trace
from edgespec_sim.traces.statistics import TraceStatistics
from edgespec_sim.world.audit import AuditedLoadedQueue, AuditedQueue

_GENERATE = "generate:"

Queues = tuple[SharedQueue, SharedQueue]


@dataclass(slots=True)
class _Weather:
    """What one device sees of a link over time."""

    handovers_s: tuple[float, ...]
    outages_s: tuple[tuple[float, float], ...]


class LinkInstances:
    """One link of the scenario, in as many instances as it has devices."""

    def __init__(
        self, section: LinkSection, duration_s: float, seed: str, folder: FilePath, audited: bool
    ) -> None:
        self.section = section
        self._duration_s, self._seed, self._audited = duration_s, seed, audited
        self._trace = _trace(section, seed, duration_s, folder)
        self._traced = (
            TraceLinks.of(self._trace, up_share=section.up_share) if self._trace else None
        )
        self._queues: dict[int, Queues] = {}
        self._weather: dict[int, _Weather] = {}
        least_rtt_s = section.rtt_ms / 1e3
        self.typical_rtt_s = section.rtt_ms / 1e3 + 2 * section.jitter_ms / 1e3
        if self._trace is not None:
            least_rtt_s = min(self._trace.rtt_s)
            self.typical_rtt_s = TraceStatistics.of(self._trace).rtt_median_s
        self.least_ways_s = (
            least_rtt_s * section.up_share,
            least_rtt_s * (1.0 - section.up_share),
        )
        """What a small message takes up and down when nothing is in the way."""

    @property
    def plain(self) -> bool:
        """It only takes time."""
        section = self.section
        bare = LinkSection(
            rtt_ms=section.rtt_ms, up_share=section.up_share, framing_bytes=section.framing_bytes
        )
        return replace(section, shared=False) == bare

    @property
    def lossy(self) -> bool:
        if self._trace is not None:
            return self._trace.loss is not None and max(self._trace.loss) > 0.0
        return self.section.loss > 0.0

    def models(
        self, number: int, stream: int, *, packets: bool = False
    ) -> tuple[LinkModel, LinkModel]:
        """Up and down, for one stream of one device; ``packets``: it carries these."""
        framing_bytes = self.section.framing_bytes
        if packets:
            framing_bytes = max(0, framing_bytes - MESSAGE_BYTES)
        section, seed = self.section, _number(f"{self._seed}/stream/{stream}")
        queues, outages_s = self._queues_of(number), self._weather_of(number).outages_s
        if self._traced is not None:
            return self._traced.pair(
                offset_s=self._offset_s(number),
                seed=seed,
                overhead_bytes=framing_bytes,
                outages_s=outages_s,
                queues=queues,
            )
        up, down = (
            LinkSettings(
                one_way_s=one_way_s,
                jitter_s=section.jitter_ms / 1e3,
                loss=section.loss,
                overhead_bytes=framing_bytes,
                outages_s=outages_s,
                seed=link_seed,
            )
            for one_way_s, link_seed in zip(
                self.least_ways_s, (2 * seed, 2 * seed + 1), strict=True
            )
        )
        return LinkModel(up, queues[0]), LinkModel(down, queues[1])

    def handovers_s(self, number: int) -> tuple[float, ...]:
        return self._weather_of(number).handovers_s

    def _queues_of(self, number: int) -> Queues:
        key = 0 if self.section.shared else number
        if key not in self._queues:
            self._queues[key] = self._make_queues(key)
        return self._queues[key]

    def _make_queues(self, key: int) -> Queues:
        section, seed = self.section, _number(f"{self._seed}/queue/{key}")
        if self._traced is not None and self._traced.up_capacity is not None:
            return self._traced.queues(self._offset_s(key))
        make = _audited_queue if self._audited else _queue
        return (
            make(section.up_mbps * 1e6, section.cross_up, seed),
            make(section.down_mbps * 1e6, section.cross_down, seed + 1),
        )

    def _offset_s(self, number: int) -> float:
        return self.section.trace_spread_s * number

    def _weather_of(self, number: int) -> _Weather:
        if number not in self._weather:
            self._weather[number] = self._make_weather(number)
        return self._weather[number]

    def _make_weather(self, number: int) -> _Weather:
        gaps = [(one.at_s, one.at_s + one.for_s) for one in self.section.outages]
        times_s: list[float] = []
        handover = self.section.handover
        if handover is not None:
            dice = random.Random(f"{self._seed}/handover/{number}")
            at_s = dice.uniform(0.0, handover.every_s)
            while at_s < self._duration_s:
                times_s.append(at_s)
                at_s += handover.every_s * dice.uniform(0.75, 1.25)
            if handover.gap_ms:
                gaps += [(at_s, at_s + handover.gap_ms / 1e3) for at_s in times_s]
        return _Weather(tuple(times_s), _joined(gaps))


def _trace(
    section: LinkSection, seed: str, duration_s: float, folder: FilePath
) -> NetworkTrace | None:
    """Raises ``TraceError`` or ``ValueError``."""
    if not section.trace:
        return None
    if section.trace.startswith(_GENERATE):
        kind = section.trace.removeprefix(_GENERATE)
        trace = generate(kind, _number(seed), max(60.0, min(2 * duration_s, 3600.0)))
    else:
        beside = folder / section.trace
        trace = read_trace(beside if beside.is_file() else FilePath(section.trace))
    if section.rtt_ms:
        trace = replace(trace, rtt_s=tuple(s + section.rtt_ms / 1e3 for s in trace.rtt_s))
    return trace


def _queue(bits_per_s: float, share: float, seed: int) -> SharedQueue:
    return LoadedQueue(bits_per_s, share, seed=seed) if share else SharedQueue(bits_per_s)


def _audited_queue(bits_per_s: float, share: float, seed: int) -> SharedQueue:
    if bits_per_s == math.inf:
        return SharedQueue()
    return AuditedLoadedQueue(bits_per_s, share, seed) if share else AuditedQueue(bits_per_s)


def _joined(gaps: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """In order, and one where they overlap."""
    joined: list[tuple[float, float]] = []
    for start_s, end_s in sorted(gaps):
        if joined and start_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end_s, joined[-1][1]))
        else:
            joined.append((start_s, end_s))
    return tuple(joined)


def _number(seed: str) -> int:
    """A seed for what wants a number."""
    return random.Random(seed).getrandbits(31)
