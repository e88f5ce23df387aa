"""The links of a scenario, and the paths of each device's messages through them.

Theory of operation. A path leads over several links. A shared link has one queue each way for all
devices; any other link has one queue each way for each device. Queues last as long as the world.
Link models, which keep messages in order, last as long as a stream. Hops that only take time are
added up, so that they cost no events. If packets are lost on a path, a device has one
``TcpConnection`` to a verifier, and delays apply to its packets.

With radio, the first hop is the air (``radio_network.py``), where devices and stations have
numbers. The path of a phone that changes cells continues over the backhaul (``Cells``). Scenarios
allow no TCP connections there, because their packets would have to change their path.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path as FilePath

from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.columns import Columns, TableKind
from edgespec_sim.links.formats import read_trace
from edgespec_sim.links.generators import generate
from edgespec_sim.links.grants_5g import DeviceAir, WayWaits, mean_waits_s
from edgespec_sim.links.network_trace import (
    NetworkTrace,
    TraceError,
    TraceStatistics,
    find_file,
)
from edgespec_sim.links.path import (
    HopPath,
    Link,
    LoadedQueue,
    Path,
    Queues,
    TraceSchedules,
    make_both_links,
)
from edgespec_sim.links.tcp import MESSAGE_BYTES, PacketLink, TcpConnection
from edgespec_sim.run_summary import LinkLoad
from edgespec_sim.scenario.sections import LinkSection, RadioSection, Scenario
from edgespec_sim.sessions import Stream
from edgespec_sim.world.parts import LinkPart
from edgespec_sim.world.radio_network import ACCESS_S, Cells, Hop, RadioNetwork
from edgespec_sim.world.recorded_mobility import Mobility, RecordedWalk, read_mobility
from edgespec_sim.world.site import LinkView

# --- the trace that a link of a scenario names -------------------------------------------------

_GENERATE = "generate:"


def load_trace(
    section: LinkSection, seed: str, duration_s: float, folder: FilePath
) -> NetworkTrace | None:
    """Return the trace of a link, with ``rtt_ms`` on top of its delays; None without a trace.
    Raises ``TraceError`` or ``ValueError``."""
    if not section.trace:
        return None
    if section.trace.startswith(_GENERATE):
        kind = section.trace.removeprefix(_GENERATE)
        trace = generate(kind, number_from_seed(seed), max(60.0, min(2 * duration_s, 3600.0)))
    else:
        path = find_file(section.trace, folder)
        try:
            state = path.stat()
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
        trace = _read(
            path, section.trace_columns, section.trace_format, (state.st_mtime_ns, state.st_size)
        )
    if section.rtt_ms and trace.rtt_s is not None:
        trace = replace(trace, rtt_s=tuple(s + section.rtt_ms / 1e3 for s in trace.rtt_s))
    return trace


@lru_cache(maxsize=4)
def _read(path: FilePath, columns: str, format: str, state: tuple[int, int]) -> NetworkTrace:
    """Read a trace file. Every arm and seed needs it, so it is cached; ``state`` changes with the
    file."""
    named = Columns.of(columns, TableKind.NETWORK) if columns else None
    return read_trace(path, named, format)


def load_mobility(section: RadioSection, folder: FilePath) -> Mobility | None:
    """Return the recorded movement of the devices; None without one. Raises ``TraceError`` or
    ``ValueError``."""
    if not section.mobility:
        return None
    path = find_file(section.mobility, folder)
    try:
        state = path.stat()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    return _read_mobility(
        path,
        section.mobility_columns,
        section.mobility_format,
        (state.st_mtime_ns, state.st_size),
    )


@lru_cache(maxsize=2)
def _read_mobility(path: FilePath, columns: str, format: str, state: tuple[int, int]) -> Mobility:
    """Read recorded movement. It is cached as traces are."""
    named = Columns.of(columns, TableKind.MOBILITY) if columns else None
    return read_mobility(path, named, format)


def number_from_seed(seed: str) -> int:
    """Return a number made from a text seed."""
    return random.Random(seed).getrandbits(31)


# --- interruptions of a device's path ----------------------------------------------------------

Gaps = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class LinkInterruptions:
    """Handovers and outages of a link as one device experiences them."""

    handovers_s: tuple[float, ...]
    outages_s: Gaps
    """Outages in order, with the interruptions of handovers included."""

    @classmethod
    def draw(cls, section: LinkSection, duration_s: float, seed: str) -> LinkInterruptions:
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
        return cls(tuple(times_s), _merge_intervals(gaps))


def _merge_intervals(gaps: list[tuple[float, float]]) -> Gaps:
    """Sort intervals, and merge those that overlap."""
    joined: list[tuple[float, float]] = []
    for start_s, end_s in sorted(gaps):
        if joined and start_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end_s, joined[-1][1]))
        else:
            joined.append((start_s, end_s))
    return tuple(joined)


# --- one link of a scenario, with its parts for each device ------------------------------------


class LinkInstances:
    """The queues, models and interruptions of one link. A device's outages and handovers are drawn
    once, before its first stream."""

    def __init__(
        self,
        section: LinkSection,
        duration_s: float,
        seed: str,
        folder: FilePath,
        part: LinkPart | None = None,
    ) -> None:
        """``part`` makes the links in place of the section."""
        air = section.radio_5g
        if air is not None and air.is_free:
            section, air = replace(section, radio_5g=None), None
        self.section, self.part = section, part
        self._air = air
        self._airs: dict[int, DeviceAir] = {}
        """The 5G air of each device, which lasts as long as the world."""
        self._duration_s, self._seed = duration_s, seed
        trace = load_trace(section, seed, duration_s, folder)
        self._traced = TraceSchedules.from_trace(trace) if trace else None
        self._queues: dict[int, Queues] = {}
        self._interruptions: dict[int, LinkInterruptions] = {}
        least_rtt_s = section.rtt_ms / 1e3
        self.typical_rtt_s = section.rtt_ms / 1e3 + 2 * section.jitter_ms / 1e3
        bare = LinkSection(rtt_ms=section.rtt_ms, framing_bytes=section.framing_bytes)
        self.is_plain = part is None and replace(section, shared=False) == bare
        """Whether the link only takes time."""
        self.is_lossy = section.loss > 0.0
        if trace is not None:
            self.is_lossy = trace.loss is not None and max(trace.loss) > 0.0
            if trace.rtt_s is not None:
                least_rtt_s = min(trace.rtt_s)
                self.typical_rtt_s = TraceStatistics.of(trace).rtt_median_s
        if air is not None:
            self.typical_rtt_s += math.fsum(mean_waits_s(air))
        self.least_way_s = least_rtt_s * 0.5 if part is None else 0.0
        """Least one-way time of a small message."""

    def make_hops(self, number: int, stream: int) -> list[tuple[Link, Link]]:
        """Return the hops up and down of one stream of one device, outwards: the air, if there is
        one, and the link itself."""
        links = self.make_links(number, stream)
        if self._air is None:
            return [links]
        air = self._find_air(number)
        return [(air.up, air.down), links]

    def make_packet_hops(self, number: int, stream: int) -> list[tuple[PacketLink, PacketLink]]:
        """Return the same hops for the packets of a TCP connection."""
        models = self.make_models(number, stream, packets=True)
        if self._air is None:
            return [models]
        air = self._find_air(number)
        return [(air.up, air.down), models]

    def air_waits(self, number: int) -> tuple[WayWaits, WayWaits] | None:
        """Return how long the messages of a device waited on the air so far, up and down. None
        without an air."""
        if self._air is None:
            return None
        air = self._find_air(number)
        return air.up.waits, air.down.waits

    def _find_air(self, number: int) -> DeviceAir:
        assert self._air is not None
        if number not in self._airs:
            seed = number_from_seed(f"{self._seed}/air/{number}")
            self._airs[number] = DeviceAir(self._air, seed, self.section.framing_bytes)
        return self._airs[number]

    def make_links(self, number: int, stream: int) -> tuple[Link, Link]:
        """Return the ways up and down for one stream of one device, from an own part or from the
        section's models."""
        if self.part is None:
            return self.make_models(number, stream)
        return self.part.make_links(number, number_from_seed(f"{self._seed}/stream/{stream}"))

    def make_models(
        self, number: int, stream: int, *, packets: bool = False
    ) -> tuple[LinkModel, LinkModel]:
        """Return the models up and down for one stream of one device. ``packets`` means that it
        carries the packets of a TCP connection, which have their own framing."""
        framing_bytes = self.section.framing_bytes
        if packets:
            framing_bytes = max(0, framing_bytes - MESSAGE_BYTES)
        section, seed = self.section, number_from_seed(f"{self._seed}/stream/{stream}")
        queues, outages_s = self._find_queues(number), self.interruptions(number).outages_s
        settings = LinkSettings(overhead_bytes=framing_bytes, outages_s=outages_s)
        traced, jitter_s = self._traced, section.jitter_ms / 1e3
        if traced is None or traced.delay is None:
            settings = replace(settings, one_way_s=self.least_way_s, jitter_s=jitter_s)
        if traced is None:
            return make_both_links(replace(settings, loss=section.loss), seed, queues)
        offset_s = self._offset_s(number)
        return traced.make_links(offset_s=offset_s, seed=seed, queues=queues, beside=settings)

    def _find_queues(self, number: int) -> Queues:
        key = 0 if self.section.shared else number
        if key not in self._queues:
            self._queues[key] = self._make_queues(key)
        return self._queues[key]

    def _make_queues(self, key: int) -> Queues:
        section, seed = self.section, number_from_seed(f"{self._seed}/queue/{key}")
        up, down = section.up_mbps * 1e6, section.down_mbps * 1e6
        queues = (
            LoadedQueue(up, section.cross_up, seed=seed) if section.cross_up else SharedQueue(up),
            LoadedQueue(down, section.cross_down, seed=seed + 1)
            if section.cross_down
            else SharedQueue(down),
        )
        return self._traced.make_queues(self._offset_s(key), queues) if self._traced else queues

    def _offset_s(self, number: int) -> float:
        return self.section.trace_spread_s * number

    def interruptions(self, number: int) -> LinkInterruptions:
        if number not in self._interruptions:
            seed = f"{self._seed}/handover/{number}"
            self._interruptions[number] = LinkInterruptions.draw(
                self.section, self._duration_s, seed
            )
        return self._interruptions[number]

    def measure_load(self, name: str) -> LinkLoad | None:
        """Return the load of the link: the share of time in which messages occupied its queues, as
        the mean over them, plus the share of other traffic. None if the capacity has no limit (and
        no trace measured it), or no message was sent."""
        section, queues = self.section, tuple(self._queues.values())
        traced = self._traced
        measured = traced is not None and (traced.up_capacity or traced.down_capacity) is not None
        if not queues or (not measured and min(section.up_mbps, section.down_mbps) == math.inf):
            return None
        up, down = (
            min(
                1.0,
                math.fsum(queue.reserved_s for queue in way) / (len(way) * self._duration_s)
                + cross,
            )
            for way, cross in zip(
                zip(*queues, strict=True), (section.cross_up, section.cross_down), strict=True
            )
        )
        return LinkLoad(name, up, down)


# Headers of a call on an HTTP/2 connection that had one before; they precede its first message.
_HEADERS_BYTES = 60


class Network:
    """The paths between devices and verifiers.

    A device connects once to a verifier; later streams share the connection at no cost. With
    ``connected`` the first stream costs nothing either, since the connection is older than the
    world. A verifier that starts again has no connections. If packets are lost, the connection is a
    TCP connection, simulated packet by packet. A handover that changes a device's address ends all
    of its connections, and cuts the running stream."""

    def __init__(
        self,
        queue: EventQueue,
        scenario: Scenario,
        seed: str,
        folder: FilePath,
        parts: Mapping[str, LinkPart] | None = None,
    ) -> None:
        """``parts`` are links of the caller's own, by name."""
        own = parts or {}
        self._queue, self._scenario = queue, scenario
        verifiers = [
            scenario.verifier_name(kind, number)
            for kind, section in scenario.verifiers.items()
            for number in range(section.count)
        ]
        self._stations = {name: index for index, name in enumerate(verifiers)}
        self._radio: RadioNetwork | None = None
        self.cells: Cells | None = None
        """The cell of each device, if the scenario has handovers between cells."""
        self._access_s = 0.0
        """Round-trip time on the air, if there is any."""
        if (radio := scenario.radio) is not None:
            self._access_s, devices = ACCESS_S, scenario.device_count
            mobility = load_mobility(radio, folder)
            self._radio = RadioNetwork(
                queue,
                radio,
                devices,
                len(verifiers),
                f"{seed}/radio",
                None if mobility is None else RecordedWalk(mobility, devices, radio.area_m),
            )
            if radio.handover is not None:
                self.cells = Cells(queue, self._radio, radio.handover, self._stations)
        self._links = {
            name: LinkInstances(
                section, scenario.duration_s, f"{seed}/link/{name}", folder, own.get(name)
            )
            for name, section in scenario.links.items()
        }
        self._fixed_s = scenario.message_ms / 1e3
        """Least one-way time of a message, besides the links."""
        self._streams = 0
        self._connected: dict[tuple[int, str], tuple[int, TcpConnection | None]] = {}
        """Connections by device and verifier: the number of the verifier's start at which each was
        made, and its TCP connection, or None if no packets are lost on its path."""
        self._broken: set[tuple[int, str]] = set()
        """Devices and verifiers whose first connection a handover has ended."""
        self._cut: dict[int, Stream] = {}
        """The streams that a handover of their device would cut."""
        self._wired: dict[tuple[str, str], LinkView] = {}
        """The constant part of each view, cached because every request needs it for each
        verifier."""
        self._check_parts()
        self._schedule_breaks()

    def _check_parts(self) -> None:
        """Raise ``ValueError`` if packets are lost on a path with an own link, which takes whole
        messages."""
        for group in self._scenario.devices:
            for verifier in self._stations:
                links = {name: self._links[name] for name in self.link_names(group, verifier)}
                own = [name for name, link in links.items() if link.part is not None]
                lossy = [name for name, link in links.items() if link.is_lossy]
                if own and lossy:
                    raise ValueError(
                        f"parts.links has {own[0]}, but packets are lost on {lossy[0]}, which is on"
                        " the same path: an own link takes whole messages"
                    )

    def _schedule_breaks(self) -> None:
        first = 0
        for group, section in self._scenario.devices.items():
            numbers = range(first, first + section.count)
            for number, link in itertools.product(numbers, self._breaking_links(group)):
                for at_s in link.interruptions(number).handovers_s:
                    self._queue.at(at_s, partial(self._break_connections, number))
            first += section.count

    def _breaking_links(self, group: str) -> list[LinkInstances]:
        """Return the links of a group whose handovers break connections."""
        links = [self._links[name] for name in self._scenario.devices[group].path]
        return [one for one in links if one.section.handover and one.section.handover.breaks]

    def _break_connections(self, number: int) -> None:
        # Verifiers without requests so far are included: the device may be connected to them too.
        self._broken |= {(number, name) for name in self._stations}
        self._connected = {key: one for key, one in self._connected.items() if key[0] != number}
        if (stream := self._cut.get(number)) is not None:
            stream.cut(0.0, 1.0, "the address changed at a handover")

    def register_stream(self, group: str, number: int, stream: Stream) -> None:
        """Register the stream that a handover of the device would cut, if there are such
        handovers."""
        if self._breaking_links(group):
            self._cut[number] = stream

    def route(
        self, group: str, number: int, verifier: str, start: int = 0
    ) -> tuple[Path, Path, float]:
        """Return the paths up and down for one stream of device ``number``, and the seconds for
        connecting: ``connect_trips`` round trips for the first stream, nothing for later ones that
        share its connection. ``start`` is the number of starts of the verifier's process, from 1; a
        connection to an earlier process is gone."""
        self._streams += 1
        key, names, connect_s = (number, verifier), self.link_names(group, verifier), 0.0
        known = self._connected.get(key)
        if known is None or known[0] != start:
            is_older = self._scenario.connected and start <= 1 and key not in self._broken
            if known is not None or not is_older:
                rtt_s = self.view(group, number, verifier).rtt_s
                connect_s = self._scenario.connect_trips * rtt_s
            lossy = any(self._links[name].is_lossy for name in names)
            made = self._make_connection(number, verifier, names) if lossy else None
            known = self._connected[key] = start, made
        if (connection := known[1]) is not None:
            connection.up.send(_HEADERS_BYTES, lambda: None)  # Their arrival has no effect.
            return connection.up, connection.down, connect_s
        make = partial(self._make_paths, number, verifier, names, self._streams)
        up, down = make() if self.cells is None else self.cells.follow(number, make)
        return up, down, connect_s

    def air_waits(self, group: str, number: int) -> tuple[WayWaits, WayWaits] | None:
        """Return how long the messages of a device waited on the 5G air of its own links so far, up
        and down. None if no link has such an air."""
        links = (self._links[name] for name in self._scenario.devices[group].path)
        found = [waits for link in links if (waits := link.air_waits(number)) is not None]
        if not found:
            return None
        up, down = (
            WayWaits(sum(one.messages for one in way), math.fsum(one.seconds for one in way))
            for way in zip(*found, strict=True)
        )
        return up, down

    def measure_loads(self) -> tuple[LinkLoad, ...]:
        duration_s = self._scenario.duration_s
        loads = [link.measure_load(name) for name, link in self._links.items()]
        if self._radio is not None:
            loads += self._radio.measure_loads(tuple(self._stations), duration_s)
        if self.cells is not None:
            loads += self.cells.measure_loads(duration_s)
        return tuple(load for load in loads if load is not None)

    # --- properties of a path, without side effects -----------------------------------------

    def link_names(self, group: str, verifier: str) -> tuple[str, ...]:
        """Return the names of the links from a device to a verifier."""
        known = verifier in self._scenario.verifiers
        kind = verifier if known else verifier.rpartition("-")[0]
        return self._scenario.devices[group].path + self._scenario.verifiers[kind].path

    def view(self, group: str, number: int, verifier: str) -> LinkView:
        """Return what a device could know of a path: its typical round trip and capacities."""
        view = self._wired.get((group, verifier))
        if view is None:
            view = self._wired[group, verifier] = self._wired_view(group, verifier)
        if self._radio is None:
            return view
        station, backhaul_rtt_s = self._stations[verifier], 0.0
        if self.cells is not None:
            station = self.cells.cell_of(number)
            backhaul_rtt_s = self.cells.backhaul_rtt_s(number, verifier)
        up, down = self._radio.bits_per_s(number, station)
        return LinkView(
            view.rtt_s + self._access_s + backhaul_rtt_s,
            min(view.up_bits_per_s, up),
            min(view.down_bits_per_s, down),
        )

    def least_way_s(self, group: str, verifier: str) -> float:
        """Return the least one-way time of a small message."""
        names = self.link_names(group, verifier)
        links_s = math.fsum(self._links[name].least_way_s for name in names)
        return self._fixed_s + self._access_s / 2.0 + links_s

    def _wired_view(self, group: str, verifier: str) -> LinkView:
        links = [self._links[name] for name in self.link_names(group, verifier)]
        rtt_s = 2 * self._fixed_s + math.fsum(link.typical_rtt_s for link in links)
        up = min((link.section.up_mbps for link in links), default=math.inf)
        down = min((link.section.down_mbps for link in links), default=math.inf)
        return LinkView(rtt_s, up * 1e6, down * 1e6)

    # --- parts -----------------------------------------------------------------------------

    def _make_paths(
        self, number: int, verifier: str, names: Sequence[str], stream: int
    ) -> tuple[Path, Path]:
        """Return the paths up and down of one stream, for the device's current cell."""
        links = [self._links[name] for name in names]
        plain_s = self._fixed_s + math.fsum(link.least_way_s for link in links if link.is_plain)
        hops: list[tuple[Link, Link]] = [*self._air_hops(number, verifier)]
        for link in links:
            if not link.is_plain:
                hops += link.make_hops(number, stream)
        up = HopPath(self._queue, [up for up, _ in hops], plain_s)
        return up, HopPath(self._queue, [down for _, down in reversed(hops)], plain_s)

    def _air_hops(self, number: int, verifier: str) -> list[Hop]:
        if self.cells is not None:
            return self.cells.hops(number, verifier)
        return [self._radio.hop(number, self._stations[verifier])] if self._radio else []

    def _make_connection(self, number: int, verifier: str, names: Sequence[str]) -> TcpConnection:
        links = [self._links[name] for name in names]
        plain_s = math.fsum(link.least_way_s for link in links if link.is_plain)
        hops: list[tuple[PacketLink, PacketLink]] = [*self._air_hops(number, verifier)]
        for link in links:
            if not link.is_plain:
                hops += link.make_packet_hops(number, self._streams)
        ways = [up for up, _ in hops], [down for _, down in reversed(hops)]
        return TcpConnection(self._queue, *ways, plain_s, self._fixed_s)
