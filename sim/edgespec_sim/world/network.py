"""The links of a scenario, and the way of each device's messages through them.

Theory of operation. A link that is shared has one queue each way for all devices, any other one
queue each way for each device; queues last as long as the world, links (with their order of
messages) as long as a stream. Hops that only take time are added up, so that a message costs no
event for them. Where packets are lost on the way, a device has one TCP connection to a verifier
(``connections.py``), and the delays of hops are its packets'.
With radio the first hop is the air (``radio_network.py``), which knows devices and stations by
number; of phones that change cells it goes on over the backhaul (``cells.py``), and scenarios keep
TCP connections out of there, whose packets would have to change their way.
``ways`` says what is known of each way beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path as FilePath

from edgespec.core.association.policies import LinkView
from edgespec.telemetry.run_summary import Interruption, LinkLoad, Station
from edgespec_sim.actors.stream import FixedDelay
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import Link, ManyHops, OneHop, Path
from edgespec_sim.links.tcp_connection import Lossless, PacketLink, TcpConnection
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.allocation import Allocation
from edgespec_sim.world.cells import Cells
from edgespec_sim.world.connections import AGENT, Connections
from edgespec_sim.world.link_instances import LinkInstances
from edgespec_sim.world.radio_network import RadioNetwork
from edgespec_sim.world.ways import Ways

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
        self.ways = Ways(scenario, self._links, self._stations, self._radio, self.cells)
        self.connections = Connections(queue, scenario, self._links)
        self._streams = 0

    def route(self, group: str, number: int, verifier: str) -> tuple[Path, Path, float]:
        """Paths up and down for one stream of device ``number``, and what connecting takes: a round
        trip for the first, and nothing for those that share the connection later."""
        self._streams += 1
        connect_s = self.connecting_s(group, number, verifier)
        self.connections.note(number, verifier)
        names = self.ways.links(group, verifier)
        if any(self._links[name].lossy for name in names):
            connection = self._connection(group, number, verifier, names)
            connection.up.send(_HEADERS_BYTES, _nothing)
            return connection.up, connection.down, connect_s
        make = partial(self._paths, group, number, verifier, self._streams)
        up, down = make() if self.cells is None else self.cells.ride(number, make)
        return up, down, connect_s

    def connecting_s(self, group: str, number: int, verifier: str) -> float:
        """What the device's next stream to that verifier would take to connect."""
        if self.connections.known(number, verifier):
            return 0.0
        return self.view(group, number, verifier).rtt_s

    def view(self, group: str, number: int, verifier: str) -> LinkView:
        """What a device could know of its way to that verifier."""
        return self.ways.view(group, number, verifier)

    # --- what a reader is told -------------------------------------------------------------

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

    def _paths(self, group: str, number: int, verifier: str, stream: int) -> tuple[Path, Path]:
        """Up and down of one stream, as the device is attached now."""
        up_s = down_s = self.ways.fixed_s(group, verifier)
        hops: list[tuple[Link, Link]] = []
        if self.cells is not None:
            hops += self.cells.hops(number, verifier)
        elif self._radio is not None:
            hops.append(self._radio.hop(number, self._stations[verifier]))
        for name in self.ways.links(group, verifier):
            link = self._links[name]
            if link.plain:
                up_s += link.least_ways_s[0]
                down_s += link.least_ways_s[1]
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

    def _connection(
        self, group: str, number: int, verifier: str, names: Sequence[str]
    ) -> TcpConnection:
        """The device's to the verifier, or that of all devices behind one agent."""
        shared = any(self._links[name].section.one_connection for name in names)
        make = partial(self._make_connection, group, number, verifier, names)
        return self.connections.tcp(AGENT if shared else number, verifier, make)

    def _make_connection(
        self, group: str, number: int, verifier: str, names: Sequence[str]
    ) -> TcpConnection:
        message_s = self._scenario.message_ms / 1e3
        up_s = down_s = self.ways.fixed_s(group, verifier) - message_s
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
        return TcpConnection(self._queue, *ways, (up_s, down_s), message_s)

    def _make_cells(self, audited: bool) -> Cells | None:
        radio = self._scenario.radio
        if self._radio is None or radio is None or radio.handover is None:
            return None
        return Cells(self._queue, self._radio, radio.handover, self._stations, audited=audited)

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


def _nothing() -> None:
    """Headers arrive, and nobody waits for them."""
