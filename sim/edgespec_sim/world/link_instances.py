"""One link of a scenario in as many instances as it has devices: queues, weather, models.

Theory of operation. Queues last as long as the world, one for all devices or one each; models, with
their order of messages, as long as a stream or a connection. Outages and handovers of a device are
drawn once, before anything moves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path as FilePath

from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec.telemetry.run_summary import Interruption, LinkLoad
from edgespec_sim.links.cross_traffic import LoadedQueue
from edgespec_sim.links.from_trace import TraceLinks
from edgespec_sim.links.tcp_connection import MESSAGE_BYTES
from edgespec_sim.scenario.network_sections import LinkSection
from edgespec_sim.traces.statistics import TraceStatistics
from edgespec_sim.world.audit import AuditedLoadedQueue, AuditedQueue
from edgespec_sim.world.link_load import Queues, load_of
from edgespec_sim.world.link_trace import number_of, trace_of
from edgespec_sim.world.weather import Weather, recorded_outages


class LinkInstances:
    """One link of the scenario, in as many instances as it has devices."""

    def __init__(
        self, section: LinkSection, duration_s: float, seed: str, folder: FilePath, audited: bool
    ) -> None:
        self.section = section
        self._duration_s, self._seed, self._audited = duration_s, seed, audited
        self._trace = trace_of(section, seed, duration_s, folder)
        self._traced = (
            TraceLinks.of(self._trace, up_share=section.up_share) if self._trace else None
        )
        self._queues: dict[int, Queues] = {}
        self._weather: dict[int, Weather] = {}
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
        section, seed = self.section, number_of(f"{self._seed}/stream/{stream}")
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
        section, seed = self.section, number_of(f"{self._seed}/queue/{key}")
        if self._traced is not None and self._traced.up_capacity is not None:
            return self._traced.queues(self._offset_s(key))
        make = _audited_queue if self._audited else _queue
        return (
            make(section.up_mbps * 1e6, section.cross_up, seed),
            make(section.down_mbps * 1e6, section.cross_down, seed + 1),
        )

    def _offset_s(self, number: int) -> float:
        return self.section.trace_spread_s * number

    def _weather_of(self, number: int) -> Weather:
        if number not in self._weather:
            seed = f"{self._seed}/handover/{number}"
            self._weather[number] = Weather.of(self.section, self._duration_s, seed)
        return self._weather[number]

    # --- what a reader is told -------------------------------------------------------------

    def round_trip_s(self, number: int, now_s: float) -> float:
        """Now, without queues and jitter."""
        if self._traced is None:
            return self.section.rtt_ms / 1e3
        at_s = now_s + self._offset_s(number)
        return self._traced.up_delay.at(at_s) + self._traced.down_delay.at(at_s)

    def interruptions(self, number: int) -> list[Interruption]:
        told = self._weather_of(number).interruptions(self.section)
        if self._traced is not None:
            offset_s = self._offset_s(number)
            told += recorded_outages(self._traced.outages, offset_s, self._duration_s)
        return told

    def load(self, name: str) -> LinkLoad | None:
        """None where the capacity is not known, or nothing was sent."""
        traced = self._traced
        measured = traced is not None and traced.up_capacity is not None
        return load_of(
            name, self.section, tuple(self._queues.values()), self._duration_s, measured=measured
        )


def _queue(bits_per_s: float, share: float, seed: int) -> SharedQueue:
    return LoadedQueue(bits_per_s, share, seed=seed) if share else SharedQueue(bits_per_s)


def _audited_queue(bits_per_s: float, share: float, seed: int) -> SharedQueue:
    if bits_per_s == math.inf:
        return SharedQueue()
    return AuditedLoadedQueue(bits_per_s, share, seed) if share else AuditedQueue(bits_per_s)
