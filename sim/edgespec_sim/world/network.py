"""The links of a scenario, and the way of each device's messages through them.

Theory of operation. A link that is shared has one queue each way for all devices, any other one
queue each way for each device; queues last as long as the world, links (with their order of
messages) as long as a stream. Hops that only take time are added up, so that a message costs no
event for them. Where packets are lost on the way, a device has one TCP connection to a verifier,
which its streams share and a broken one ends, and the delays of hops are its packets'.
With radio the first hop is the air (``radio_network.py``), which knows devices and stations by
number; of phones that change cells it goes on over the backhaul (``cells.py``), and scenarios keep
TCP connections out of there, whose packets would have to change their way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path as FilePath

from edgespec.core.association.policies import LinkView
from edgespec.telemetry.run_summary import Interruption, LinkLoad, Station
from edgespec_sim.actors.stream import FixedDelay, Stream
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import Link, ManyHops, OneHop, Path
from edgespec_sim.links.tcp_connection import Lossless, PacketLink, TcpConnection
from edgespec_sim.scenario.network_sections import LinkSection
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.allocation import Allocation
from edgespec_sim.world.cells import Cells
from edgespec_sim.world.link_instances import LinkInstances
from edgespec_sim.world.radio_network import RadioNetwork

# A phone's uplink while it holds a grant; only for energy, and only where no capacity is given.
_ASSUMED_UP_BITS_PER_S = 20e6

# Of a call on an HTTP/2 connection that has had one before: they leave before its first message.
_HEADERS_BYTES = 60


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
            name: LinkInstances(
                section, scenario.duration_s, f"{seed}/link/{name}", folder, audited
            )
            for name, section in scenario.links.items()
        }
        self._streams = 0
        self._wired: dict[tuple[str, str], LinkView] = {}
        """What does not change: asked for by each request, of each verifier."""
        self._connected: set[tuple[int, str]] = set()
        """Devices and verifiers that have a connection."""
        self._connections: dict[tuple[int, str], TcpConnection] = {}
        self._current: dict[int, Stream] = {}
        """Of devices whose handovers break streams."""
        self._start_breaks()

    def route(self, group: str, number: int, verifier: str) -> tuple[Path, Path, float]:
        """Paths up and down for one stream of device ``number``, and what connecting takes: a round
        trip for the first, and nothing for those that share the connection later."""
        self._streams += 1
        connect_s = self.connecting_s(group, number, verifier)
        self._connected.add((number, verifier))
        names = self._names(group, verifier)
        if any(self._links[name].lossy for name in names):
            connection = self._connection(group, number, verifier, names)
            connection.up.send(_HEADERS_BYTES, _nothing)
            return connection.up, connection.down, connect_s
        make = partial(self._paths, group, number, verifier, self._streams)
        up, down = make() if self.cells is None else self.cells.ride(number, make)
        return up, down, connect_s

    def connecting_s(self, group: str, number: int, verifier: str) -> float:
        """What the device's next stream to that verifier would take to connect."""
        if (number, verifier) in self._connected:
            return 0.0
        return self.view(group, number, verifier).rtt_s

    def _paths(self, group: str, number: int, verifier: str, stream: int) -> tuple[Path, Path]:
        """Up and down of one stream, as the device is attached now."""
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

    def _connection(
        self, group: str, number: int, verifier: str, names: Sequence[str]
    ) -> TcpConnection:
        """The device's to the verifier, or that of all devices behind one agent."""
        shared = any(self._links[name].section.one_connection for name in names)
        key = (-1 if shared else number, verifier)
        if key not in self._connections:
            message_s = self._scenario.message_ms / 1e3
            up_s = down_s = self.fixed_s(group, verifier) - message_s
            hops: list[tuple[PacketLink, PacketLink]] = []
            if self._radio is not None:
                up, down = self._radio.hop(number, self._stations[verifier])
                hops.append((Lossless(up), Lossless(down)))
            for name in names:
                link = self._links[name]
                if link.plain:
                    up_s += link.least_ways_s[0]
                    down_s += link.least_ways_s[1]
                else:
                    hops.append(link.models(number, self._streams, packets=True))
            ways = [up for up, _ in hops], [down for _, down in reversed(hops)]
            self._connections[key] = TcpConnection(self._queue, *ways, (up_s, down_s), message_s)
        return self._connections[key]

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
        self._connected = {key for key in self._connected if key[0] != number}
        for key in [key for key in self._connections if key[0] == number]:
            del self._connections[key]
        stream = self._current.get(number)
        if stream is not None:
            stream.cut(0.0, 1.0, "the address changed at a handover")


def _nothing() -> None:
    """Headers arrive, and nobody waits for them."""
