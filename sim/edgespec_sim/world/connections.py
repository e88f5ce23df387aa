"""Which device is connected to which verifier, and what ends a connection.

Theory of operation. A device connects once to a verifier; later streams share the connection and
pay nothing for it. Where packets are lost that is one TCP connection, played packet by packet, or
one for all devices behind one agent. A handover that changes a device's address ends all of its
connections, and cuts the stream that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from edgespec_sim.actors.stream import Stream
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.tcp_connection import TcpConnection
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.link_instances import LinkInstances

AGENT = -1
"""In the place of a device's number: of the connection that all of them share."""


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

    def known(self, number: int, verifier: str) -> bool:
        return (number, verifier) in self._connected

    def note(self, number: int, verifier: str) -> None:
        """The device has a connection to that verifier now."""
        self._connected.add((number, verifier))

    def tcp(self, owner: int, verifier: str, make: Callable[[], TcpConnection]) -> TcpConnection:
        """The connection of ``owner``, a device or ``AGENT``; it is made where there is none."""
        if (owner, verifier) not in self._tcp:
            self._tcp[owner, verifier] = make()
        return self._tcp[owner, verifier]

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
