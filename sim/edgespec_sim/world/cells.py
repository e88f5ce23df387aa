"""The ways of phones that change their cells: the air of the cell each is attached to, and the
backhaul from there to its verifier.

Theory of operation. A station has one line to all others, a queue each way; what a phone sends to
another station's verifier leaves its cell by that cell's line, and comes back by it. Keys and
values of a session take the line out of the station that has them. At a change of cell the paths of
the phone's stream are made anew (``links/handover.py``), all others stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec.telemetry.run_summary import LinkLoad
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.handover import Handover
from edgespec_sim.links.path import Link, Path
from edgespec_sim.radio.attachment import Change
from edgespec_sim.scenario.handover_sections import CellHandoverSection
from edgespec_sim.world.audit import AuditedQueue
from edgespec_sim.world.radio_network import RadioNetwork

Paths = tuple[Path, Path]
"""Up and down."""


class Cells:
    """``stations``: the number of each verifier's. ``changed`` hears of changes of cell, after the
    paths have been changed."""

    def __init__(
        self,
        queue: EventQueue,
        radio: RadioNetwork,
        section: CellHandoverSection,
        stations: Mapping[str, int],
        *,
        audited: bool = False,
    ) -> None:
        self._queue, self._radio, self.section, self._stations = queue, radio, section, stations
        self.gap_s = section.gap_ms / 1e3
        self._one_way_s = section.backhaul.rtt_ms / 2e3
        bits_per_s = section.backhaul.mbps * 1e6
        make = AuditedQueue if audited else SharedQueue
        self._lines = [(make(bits_per_s), make(bits_per_s)) for _ in stations]
        """Of each station: out and in."""
        self._riding: dict[int, tuple[Handover, Handover, Callable[[], Paths]]] = {}
        """Of each device its last stream's paths, and how to make them anew."""
        self.changed: Callable[[Change], None] = lambda change: None
        radio.on_change = self._change

    def of(self, number: int) -> int:
        """The cell of a device."""
        return int(self._radio.serving[number])

    def hops(self, number: int, verifier: str) -> list[tuple[Link, Link]]:
        """Up and down from a device as it is attached now to the verifier's station."""
        cell, station = self.of(number), self._stations[verifier]
        air = self._radio.hop(number, cell)
        if cell == station:
            return [air]
        settings = LinkSettings(one_way_s=self._one_way_s)
        out, back = self._lines[cell]
        return [air, (LinkModel(settings, out), LinkModel(settings, back))]

    def backhaul_rtt_s(self, number: int, verifier: str) -> float:
        """0 where the verifier stands in the device's own cell."""
        return 0.0 if self.of(number) == self._stations[verifier] else 2.0 * self._one_way_s

    def ride(self, number: int, make: Callable[[], Paths]) -> Paths:
        """The paths of a new stream, which follow the device from cell to cell."""
        up, down = (Handover(self._queue, path, self.gap_s) for path in make())
        self._riding[number] = (up, down, make)
        return up, down

    def transfer_s(self, size_bytes: int) -> float:
        """What keys and values take from one station to another that have the line to
        themselves."""
        return self._one_way_s + size_bytes * 8 / (self.section.backhaul.mbps * 1e6)

    def transfer(self, verifier: str, size_bytes: int) -> float:
        """Send them from that verifier's station now; when they are there."""
        out, _ = self._lines[self._stations[verifier]]
        line = LinkModel(LinkSettings(one_way_s=self._one_way_s), out)
        return line.arrival(self._queue.now, size_bytes)

    def loads(self, duration_s: float) -> list[LinkLoad]:
        """Of each station's line: up is out of the station."""
        return [
            LinkLoad(
                f"backhaul of {name}",
                *(min(1.0, queue.sent_s / duration_s) for queue in self._lines[number]),
            )
            for name, number in self._stations.items()
        ]

    def _change(self, change: Change) -> None:
        riding = self._riding.get(change.device)
        if riding is not None:
            up, down, make = riding
            for path, new in zip((up, down), make(), strict=True):
                path.change(new)
        self.changed(change)
