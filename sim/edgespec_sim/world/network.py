"""The links of a scenario, and the way of each device's messages through them.

Theory of operation. A link that is shared has one queue each way for all devices, any other one
queue each way for each device; queues last as long as the world, links (with their order of
messages) as long as a stream. Hops that only take time are added up, so that a message costs no
event for them. Where packets are lost on the way, a device has one TCP connection to a verifier
(``Connections``), and the delays of hops are its packets'.
With radio the first hop is the air (``radio_network.py``), which knows devices and stations by
number; of phones that change cells it goes on over the backhaul (``Cells``), and scenarios keep
TCP connections out of there, whose packets would have to change their way.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path as FilePath

from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.formats import read_trace
from edgespec_sim.links.generators import generate
from edgespec_sim.links.network_trace import NetworkTrace, TraceStatistics, file_named
from edgespec_sim.links.path import Link, LoadedQueue, ManyHops, OneHop, Path, TraceLinks
from edgespec_sim.links.tcp import MESSAGE_BYTES, Lossless, PacketLink, TcpConnection
from edgespec_sim.run_summary import LinkLoad
from edgespec_sim.scenario.sections import LinkSection, Scenario
from edgespec_sim.sessions import FixedDelay, Stream
from edgespec_sim.world.radio_network import ACCESS_S, Cells, RadioNetwork
from edgespec_sim.world.site import LinkView

Queues = tuple[SharedQueue, SharedQueue]
"""Up and down."""

# --- the trace that a link of a scenario names -------------------------------------------------
# from a file, or generated.


_GENERATE = "generate:"


def trace_of(
    section: LinkSection, seed: str, duration_s: float, folder: FilePath
) -> NetworkTrace | None:
    """None without one. Raises ``TraceError`` or ``ValueError``."""
    if not section.trace:
        return None
    if section.trace.startswith(_GENERATE):
        kind = section.trace.removeprefix(_GENERATE)
        trace = generate(kind, number_of(seed), max(60.0, min(2 * duration_s, 3600.0)))
    else:
        trace = read_trace(file_named(section.trace, folder))
    if section.rtt_ms:
        trace = replace(trace, rtt_s=tuple(s + section.rtt_ms / 1e3 for s in trace.rtt_s))
    return trace


def number_of(seed: str) -> int:
    """A seed for what wants a number."""
    return random.Random(seed).getrandbits(31)


# --- what interrupts a device's way ------------------------------------------------------------
# outages and handovers, drawn once, before anything moves.


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


def _joined(gaps: list[tuple[float, float]]) -> Gaps:
    """In order, and one where they overlap."""
    joined: list[tuple[float, float]] = []
    for start_s, end_s in sorted(gaps):
        if joined and start_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end_s, joined[-1][1]))
        else:
            joined.append((start_s, end_s))
    return tuple(joined)


# --- one link of a scenario in as many instances as it has devices -----------------------------
# queues, weather, models.
# Queues last as long as the world, one for all devices or one each; models, with their order of
# messages, as long as a stream or a connection. Outages and handovers of a device are drawn once,
# before anything moves.


class LinkInstances:
    """One link of the scenario, in as many instances as it has devices."""

    def __init__(
        self, section: LinkSection, duration_s: float, seed: str, folder: FilePath
    ) -> None:
        self.section = section
        self._duration_s, self._seed = duration_s, seed
        self._trace = trace_of(section, seed, duration_s, folder)
        self._traced = TraceLinks.of(self._trace) if self._trace else None
        self._queues: dict[int, Queues] = {}
        self._weather: dict[int, Weather] = {}
        least_rtt_s = section.rtt_ms / 1e3
        self.typical_rtt_s = section.rtt_ms / 1e3 + 2 * section.jitter_ms / 1e3
        if self._trace is not None:
            least_rtt_s = min(self._trace.rtt_s)
            self.typical_rtt_s = TraceStatistics.of(self._trace).rtt_median_s
        self.least_ways_s = (least_rtt_s * 0.5, least_rtt_s * 0.5)
        """What a small message takes up and down when nothing is in the way."""

    @property
    def plain(self) -> bool:
        """It only takes time."""
        section = self.section
        bare = LinkSection(rtt_ms=section.rtt_ms, framing_bytes=section.framing_bytes)
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
        up, down = section.up_mbps * 1e6, section.down_mbps * 1e6
        queues = (
            LoadedQueue(up, section.cross_up, seed=seed) if section.cross_up else SharedQueue(up),
            LoadedQueue(down, section.cross_down, seed=seed + 1)
            if section.cross_down
            else SharedQueue(down),
        )
        return self._traced.queues(self._offset_s(key), queues) if self._traced else queues

    def _offset_s(self, number: int) -> float:
        return self.section.trace_spread_s * number

    def _weather_of(self, number: int) -> Weather:
        if number not in self._weather:
            seed = f"{self._seed}/handover/{number}"
            self._weather[number] = Weather.of(self.section, self._duration_s, seed)
        return self._weather[number]

    def load(self, name: str) -> LinkLoad | None:
        """How busy it was, by the time for which messages occupied its queues: the mean over them,
        with the share of other people's traffic. None where the capacity has no limit (unless the
        trace measured it), or nobody sent."""
        section, queues = self.section, tuple(self._queues.values())
        traced = self._traced
        measured = traced is not None and (traced.up_capacity or traced.down_capacity) is not None
        if not queues or (not measured and min(section.up_mbps, section.down_mbps) == math.inf):
            return None
        up, down = (
            min(1.0, sum(queue.sent_s for queue in way) / (len(way) * self._duration_s) + cross)
            for way, cross in zip(
                zip(*queues, strict=True), (section.cross_up, section.cross_down), strict=True
            )
        )
        return LinkLoad(name, up, down)


# --- which device is connected to which verifier, and what ends a connection -------------------
# A device connects once to a verifier; later streams share the connection and pay nothing for it.
# Where packets are lost that is one TCP connection, played packet by packet. A handover that
# changes a device's address ends all of its connections, and cuts the stream that runs.


class Connections:
    """Handovers that break connections are on the queue from the start."""

    def __init__(
        self, queue: EventQueue, scenario: Scenario, links: Mapping[str, LinkInstances]
    ) -> None:
        self._scenario, self._links = scenario, links
        self._connected: set[tuple[int, str]] = set()
        """Devices and verifiers that have a connection."""
        self._tcp: dict[tuple[int, str], TcpConnection] = {}
        self._current: dict[int, Stream] = {}
        """Of devices whose handovers break streams."""
        self._schedule(queue)

    def meet(self, number: int, verifier: str) -> bool:
        """The device has a connection to that verifier from now on; whether it had one before."""
        known = (number, verifier) in self._connected
        self._connected.add((number, verifier))
        return known

    def tcp(self, number: int, verifier: str, make: Callable[[], TcpConnection]) -> TcpConnection:
        """The device's connection; it is made where there is none."""
        if (number, verifier) not in self._tcp:
            self._tcp[number, verifier] = make()
        return self._tcp[number, verifier]

    def watch(self, group: str, number: int, stream: Stream) -> None:
        """This is the stream that a handover of the device would cut, if one can."""
        if any(self._breaks(name) for name in self._scenario.devices[group].path):
            self._current[number] = stream

    def _breaks(self, name: str) -> bool:
        handover = self._links[name].section.handover
        return handover is not None and handover.breaks

    def _schedule(self, queue: EventQueue) -> None:
        number = 0
        for section in self._scenario.devices.values():
            breaking = [self._links[name] for name in section.path if self._breaks(name)]
            for _ in range(section.count):
                for link in breaking:
                    for at_s in link.handovers_s(number):
                        queue.at(at_s, partial(self._break, number))
                number += 1

    def _break(self, number: int) -> None:
        self._connected = {key for key in self._connected if key[0] != number}
        for key in [key for key in self._tcp if key[0] == number]:
            del self._tcp[key]
        stream = self._current.get(number)
        if stream is not None:
            stream.cut(0.0, 1.0, "the address changed at a handover")


# Of a call on an HTTP/2 connection that has had one before: they leave before its first message.
_HEADERS_BYTES = 60


class Network:
    def __init__(self, queue: EventQueue, scenario: Scenario, seed: str, folder: FilePath) -> None:
        self._queue, self._scenario = queue, scenario
        self._stations = {
            scenario.verifier_name(kind, number): index
            for index, (kind, number) in enumerate(
                (kind, number)
                for kind, section in scenario.verifiers.items()
                for number in range(section.count)
            )
        }
        self._radio: RadioNetwork | None = None
        self.cells: Cells | None = None
        """With handover: which cell each device is in."""
        if (radio := scenario.radio) is not None:
            devices, stations = scenario.device_count, len(self._stations)
            self._radio = RadioNetwork(queue, radio, devices, stations, f"{seed}/radio")
            if radio.handover is not None:
                self.cells = Cells(queue, self._radio, radio.handover, self._stations)
        self._links = {
            name: LinkInstances(section, scenario.duration_s, f"{seed}/link/{name}", folder)
            for name, section in scenario.links.items()
        }
        self.connections = Connections(queue, scenario, self._links)
        self._streams = 0
        self._wired: dict[tuple[str, str], LinkView] = {}
        """What does not change of ways: asked for by each request, of each verifier."""

    def route(self, group: str, number: int, verifier: str) -> tuple[Path, Path, float]:
        """Paths up and down for one stream of device ``number``, and what connecting takes: a round
        trip for the first, and nothing for those that share the connection later."""
        self._streams += 1
        known = self.connections.meet(number, verifier)
        connect_s = 0.0 if known else self.view(group, number, verifier).rtt_s
        names = self.names(group, verifier)
        if any(self._links[name].lossy for name in names):
            connect = partial(self._make_connection, number, verifier, names)
            connection = self.connections.tcp(number, verifier, connect)
            connection.up.send(_HEADERS_BYTES, lambda: None)  # nobody waits for them
            return connection.up, connection.down, connect_s
        make = partial(self._paths, group, number, verifier, self._streams)
        up, down = make() if self.cells is None else self.cells.ride(number, make)
        return up, down, connect_s

    def loads(self) -> tuple[LinkLoad, ...]:
        duration_s = self._scenario.duration_s
        loads = [link.load(name) for name, link in self._links.items()]
        if self._radio is not None:
            loads += self._radio.loads(tuple(self._stations), duration_s)
        if self.cells is not None:
            loads += self.cells.loads(duration_s)
        return tuple(load for load in loads if load is not None)

    # --- what is known of a way: asked for, and nothing is changed -------------------------

    def names(self, group: str, verifier: str) -> tuple[str, ...]:
        """Names of the links from device to verifier."""
        known = verifier in self._scenario.verifiers
        kind = verifier if known else verifier.rpartition("-")[0]
        return self._scenario.devices[group].path + self._scenario.verifiers[kind].path

    @property
    def fixed_s(self) -> float:
        """What each way takes at least, whatever the links do."""
        return self._scenario.message_ms / 1e3

    def view(self, group: str, number: int, verifier: str) -> LinkView:
        """What a device could know: typical round trip and capacities."""
        view = self._wired.get((group, verifier))
        if view is None:
            view = self._wired[group, verifier] = self._wired_view(group, verifier)
        if self._radio is None:
            return view
        station, backhaul_rtt_s = self._stations[verifier], 0.0
        if self.cells is not None:
            station = self.cells.of(number)
            backhaul_rtt_s = self.cells.backhaul_rtt_s(number, verifier)
        up, down = self._radio.bits_per_s(number, station)
        return LinkView(
            view.rtt_s + self._access_s + backhaul_rtt_s,
            min(view.up_bits_per_s, up),
            min(view.down_bits_per_s, down),
        )

    def least_ways_s(self, group: str, verifier: str) -> tuple[float, float]:
        """What a small message takes up and down on a good day."""
        names = self.names(group, verifier)
        fixed_s = self.fixed_s + self._access_s / 2.0
        up_s = sum(self._links[name].least_ways_s[0] for name in names)
        down_s = sum(self._links[name].least_ways_s[1] for name in names)
        return fixed_s + up_s, fixed_s + down_s

    def _wired_view(self, group: str, verifier: str) -> LinkView:
        links = [self._links[name] for name in self.names(group, verifier)]
        rtt_s = 2 * self.fixed_s + sum(link.typical_rtt_s for link in links)
        up = min((link.section.up_mbps for link in links), default=math.inf)
        down = min((link.section.down_mbps for link in links), default=math.inf)
        return LinkView(rtt_s, up * 1e6, down * 1e6)

    @property
    def _access_s(self) -> float:
        """Round trip on the air, if there is any."""
        return 0.0 if self._scenario.radio is None else ACCESS_S

    # --- parts -----------------------------------------------------------------------------

    def _paths(self, group: str, number: int, verifier: str, stream: int) -> tuple[Path, Path]:
        """Up and down of one stream, as the device is attached now."""
        hops: list[tuple[Link, Link]] = []
        if self.cells is not None:
            hops += self.cells.hops(number, verifier)
        elif self._radio is not None:
            hops.append(self._radio.hop(number, self._stations[verifier]))
        up_s = down_s = self.fixed_s
        for link in map(self._links.__getitem__, self.names(group, verifier)):
            if link.plain:
                up_s, down_s = up_s + link.least_ways_s[0], down_s + link.least_ways_s[1]
            else:
                hops.append(link.models(number, stream))
        up = self._path([up for up, _ in hops], up_s)
        down = self._path([down for _, down in reversed(hops)], down_s)
        return up, down

    def _path(self, links: Sequence[Link], fixed_s: float) -> Path:
        if not links:
            return FixedDelay(self._queue, fixed_s)
        if len(links) == 1:
            return OneHop(self._queue, links[0], fixed_s)
        return ManyHops(self._queue, links, fixed_s)

    def _make_connection(self, number: int, verifier: str, names: Sequence[str]) -> TcpConnection:
        hops: list[tuple[PacketLink, PacketLink]] = []
        if self._radio is not None:
            up, down = self._radio.hop(number, self._stations[verifier])
            hops.append((Lossless(up), Lossless(down)))
        up_s = down_s = 0.0
        for link in map(self._links.__getitem__, names):
            if link.plain:
                up_s, down_s = up_s + link.least_ways_s[0], down_s + link.least_ways_s[1]
            else:
                hops.append(link.models(number, self._streams, packets=True))
        ways = [up for up, _ in hops], [down for _, down in reversed(hops)]
        return TcpConnection(self._queue, *ways, (up_s, down_s), self.fixed_s)
