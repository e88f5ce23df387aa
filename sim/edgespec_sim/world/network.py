"""The links of a scenario, and the way of each device's messages through them.

Theory of operation. A link that is shared has one queue each way for all devices, any other one
queue each way for each device; queues last as long as the world, links (with their order of
messages) as long as a stream. Hops that only take time are added up, so that a message costs no
event for them. Outages and handovers of a device are drawn once, before anything moves. With radio
the first hop is the air (``radio_network.py``), which knows devices and stations by number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath

from edgespec.core.association.policies import LinkView
from edgespec.core.network.link_model import LinkModel, LinkSettings
from edgespec.core.network.shared_queue import SharedQueue
from edgespec.telemetry.run_summary import Interruption, LinkLoad, Station
from edgespec_sim.actors.stream import FixedDelay, Stream
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.cross_traffic import LoadedQueue
from edgespec_sim.links.from_trace import TraceLinks
from edgespec_sim.links.path import Link, ManyHops, OneHop, Path
from edgespec_sim.scenario.network_sections import LinkSection
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.traces.statistics import TraceStatistics
from edgespec_sim.world.allocation import Allocation
from edgespec_sim.world.audit import AuditedLoadedQueue, AuditedQueue
from edgespec_sim.world.cells import Cells
from edgespec_sim.world.link_load import Queues, load_of
from edgespec_sim.world.link_trace import number_of, trace_of
from edgespec_sim.world.radio_network import RadioNetwork
from edgespec_sim.world.weather import Weather, recorded_outages

# A phone's uplink while it holds a grant; only for energy, and only where no capacity is given.
_ASSUMED_UP_BITS_PER_S = 20e6


class Network:
    def __init__(
        self,
        queue: EventQueue,
        scenario: Scenario,
        seed: str,
        folder: FilePath,
        *,
        audited: bool = False,
        allocation: Allocation | None = None,
    ) -> None:
        self._queue, self._scenario = queue, scenario
        self._stations = {
            scenario.verifier_name(kind, number): index
            for index, (kind, number) in enumerate(
                (kind, number)
                for kind, section in scenario.verifiers.items()
                for number in range(section.count)
            )
        }
        self._radio = self._make_radio(seed, folder, audited, allocation)
        self.cells = self._make_cells(audited)
        """With handover: which cell each device is in."""
        self._links = {
            name: _Link(section, scenario.duration_s, f"{seed}/link/{name}", folder, audited)
            for name, section in scenario.links.items()
        }
        self._streams = 0
        self._wired: dict[tuple[str, str], LinkView] = {}
        """What does not change: asked for by each request, of each verifier."""
        self._current: dict[int, Stream] = {}
        """Of devices whose handovers break streams."""
        self._start_breaks()

    def route(self, group: str, number: int, verifier: str) -> tuple[Path, Path, float]:
        """Paths up and down for one stream of device ``number``, and what connecting takes."""
        self._streams += 1
        make = partial(self._paths, group, number, verifier, self._streams)
        up, down = make() if self.cells is None else self.cells.ride(number, make)
        return up, down, self.view(group, number, verifier).rtt_s

    def _paths(self, group: str, number: int, verifier: str, stream: int) -> tuple[Path, Path]:
        up_s = down_s = self.fixed_s(group, verifier)
        hops: list[tuple[Link, Link]] = []
        if self.cells is not None:
            hops += self.cells.hops(number, verifier)
        elif self._radio is not None:
            hops.append(self._radio.hop(number, self._stations[verifier]))
        for name in self._names(group, verifier):
            link = self._links[name]
            if link.plain:
                up_s += link.least_ways_s[0]
                down_s += link.least_ways_s[1]
            else:
                hops.append(link.models(number, stream))
        up = self._path([up for up, _ in hops], up_s)
        down = self._path([down for _, down in reversed(hops)], down_s)
        return up, down

    def view(self, group: str, number: int, verifier: str) -> LinkView:
        """What a device could know: typical round trip, capacities, signal."""
        view = self._wired.get((group, verifier))
        if view is None:
            view = self._wired[group, verifier] = self._wired_view(group, verifier)
        if self._radio is None:
            return view
        signal = self._radio.signal(number, self._station(number, verifier))
        return LinkView(
            view.rtt_s + self._access_s + self._backhaul_rtt_s(number, verifier),
            min(view.up_bits_per_s, signal.up_bits_per_s),
            min(view.down_bits_per_s, signal.down_bits_per_s),
            signal.snr_db,
        )

    def _wired_view(self, group: str, verifier: str) -> LinkView:
        names = self._names(group, verifier)
        links = [self._links[name] for name in names]
        rtt_s = 2 * self.fixed_s(group, verifier) + sum(link.typical_rtt_s for link in links)
        up = min((link.section.up_mbps for link in links), default=math.inf)
        down = min((link.section.down_mbps for link in links), default=math.inf)
        return LinkView(rtt_s, up * 1e6, down * 1e6, None)

    def least_ways_s(self, group: str, verifier: str) -> tuple[float, float]:
        """What a small message takes up and down on a good day."""
        names = self._names(group, verifier)
        fixed_s = self.fixed_s(group, verifier) + self._access_s / 2.0
        up_s = sum(self._links[name].least_ways_s[0] for name in names)
        down_s = sum(self._links[name].least_ways_s[1] for name in names)
        return fixed_s + up_s, fixed_s + down_s

    @property
    def transmit_w(self) -> float:
        """What sending takes beyond the devices' own ``radio_w``."""
        return 0.0 if self._radio is None else self._radio.transmit_w

    def airtime(self, group: str, number: int, verifier: str) -> Callable[[int], float]:
        """Seconds that a message of a size keeps the device's radio sending."""
        if self._radio is not None:
            radio = self._radio
            return lambda size: radio.airtime(number, self._station(number, verifier))(size)
        path = self._scenario.devices[group].path
        section = self._links[path[0]].section if path else LinkSection()
        bits_per_s = min(section.up_mbps * 1e6, _ASSUMED_UP_BITS_PER_S)
        framing = section.framing_bytes
        return lambda size_bytes: (size_bytes + framing) * 8 / bits_per_s

    def watch_breaks(self, group: str, number: int, stream: Stream) -> None:
        if any(self._breaks(name) for name in self._scenario.devices[group].path):
            self._current[number] = stream

    # --- what a reader is told -------------------------------------------------------------

    def round_trip_s(self, group: str, number: int, verifier: str, now_s: float) -> float:
        """Of a small message there and back now, without queues, jitter and loss."""
        fixed_s = 2 * self.fixed_s(group, verifier) + self._access_s
        fixed_s += self._backhaul_rtt_s(number, verifier)
        return fixed_s + sum(
            self._links[name].round_trip_s(number, now_s) for name in self._names(group, verifier)
        )

    def interruptions(self, group: str, number: int) -> list[Interruption]:
        """Of a device's own links."""
        path = self._scenario.devices[group].path
        return [one for name in path for one in self._links[name].interruptions(number)]

    def loads(self) -> tuple[LinkLoad, ...]:
        duration_s = self._scenario.duration_s
        loads = [link.load(name) for name, link in self._links.items()]
        if self._radio is not None:
            loads += self._radio.loads(tuple(self._stations), duration_s)
        if self.cells is not None:
            loads += self.cells.loads(duration_s)
        return tuple(load for load in loads if load is not None)

    def place_m(self, number: int) -> tuple[float, float] | None:
        return None if self._radio is None else self._radio.place_m(number)

    @property
    def stations(self) -> tuple[Station, ...]:
        """Empty without radio."""
        if self._radio is None:
            return ()
        places = self._radio.stations_m.tolist()
        return tuple(Station(name, *places[index]) for name, index in self._stations.items())

    # --- parts -----------------------------------------------------------------------------

    def _station(self, number: int, verifier: str) -> int:
        """Whose air a device is on when it uses that verifier."""
        return self._stations[verifier] if self.cells is None else self.cells.of(number)

    def _backhaul_rtt_s(self, number: int, verifier: str) -> float:
        return 0.0 if self.cells is None else self.cells.backhaul_rtt_s(number, verifier)

    def _make_cells(self, audited: bool) -> Cells | None:
        radio = self._scenario.radio
        if self._radio is None or radio is None or radio.handover is None:
            return None
        return Cells(self._queue, self._radio, radio.handover, self._stations, audited=audited)

    def _names(self, group: str, verifier: str) -> tuple[str, ...]:
        """Of the links from device to verifier."""
        kind = self._kind(verifier)
        return self._scenario.devices[group].path + self._scenario.verifiers[kind].path

    def _kind(self, verifier: str) -> str:
        if verifier in self._scenario.verifiers:
            return verifier
        return verifier.rpartition("-")[0]

    def fixed_s(self, group: str, verifier: str) -> float:
        """What each way takes at least, whatever the links do."""
        kind = self._kind(verifier)
        distance_ms = self._scenario.distances_ms.get(group, {}).get(kind, 0.0)
        return distance_ms / 2e3 + self._scenario.message_ms / 1e3

    @property
    def _access_s(self) -> float:
        """Round trip on the air, if there is any."""
        radio = self._scenario.radio
        return 0.0 if radio is None else radio.access_ms / 1e3

    def _make_radio(
        self, seed: str, folder: FilePath, audited: bool, allocation: Allocation | None
    ) -> RadioNetwork | None:
        scenario = self._scenario
        if scenario.radio is None:
            return None
        names = [
            scenario.device_name(group, number)
            for group, section in scenario.devices.items()
            for number in range(section.count)
        ]
        shares = allocation.bandwidth if allocation is not None else {}
        return RadioNetwork(
            self._queue,
            scenario.radio,
            len(names),
            len(self._stations),
            f"{seed}/radio",
            folder,
            bandwidth={number: shares[name] for number, name in enumerate(names) if name in shares},
            audited=audited,
        )

    def _path(self, links: Sequence[Link], fixed_s: float) -> Path:
        if not links:
            return FixedDelay(self._queue, fixed_s)
        if len(links) == 1:
            return OneHop(self._queue, links[0], fixed_s)
        return ManyHops(self._queue, links, fixed_s)

    def _breaks(self, name: str) -> bool:
        handover = self._links[name].section.handover
        return handover is not None and handover.breaks

    def _start_breaks(self) -> None:
        number = 0
        for section in self._scenario.devices.values():
            breaking = [self._links[name] for name in section.path if self._breaks(name)]
            for _ in range(section.count):
                for link in breaking:
                    for at_s in link.handovers_s(number):
                        self._queue.at(at_s, partial(self._break, number))
                number += 1

    def _break(self, number: int) -> None:
        stream = self._current.get(number)
        if stream is not None:
            stream.cut(0.0, 1.0, "the address changed at a handover")


class _Link:
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

    def models(self, number: int, stream: int) -> tuple[LinkModel, LinkModel]:
        """Up and down, for one stream of one device."""
        section, seed = self.section, number_of(f"{self._seed}/stream/{stream}")
        queues, outages_s = self._queues_of(number), self._weather_of(number).outages_s
        if self._traced is not None:
            return self._traced.pair(
                offset_s=self._offset_s(number),
                seed=seed,
                overhead_bytes=section.framing_bytes,
                outages_s=outages_s,
                queues=queues,
            )
        up, down = (
            LinkSettings(
                one_way_s=one_way_s,
                jitter_s=section.jitter_ms / 1e3,
                loss=section.loss,
                overhead_bytes=section.framing_bytes,
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
