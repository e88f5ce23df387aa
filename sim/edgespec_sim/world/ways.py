"""What is known of the way between a device and a verifier: its delay, capacity, air, energy.

Everything here is asked and nothing is changed: a device's view before it chooses a verifier, what
a small message takes on a good day, what the round trip is now, what sending costs the radio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from edgespec.core.association.policies import LinkView
from edgespec_sim.scenario.network_sections import LinkSection
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.cells import Cells
from edgespec_sim.world.link_instances import LinkInstances
from edgespec_sim.world.metered_stream import Sending
from edgespec_sim.world.radio_network import RadioNetwork

# A phone's uplink while it holds a grant; only for energy, and only where no capacity is given.
_ASSUMED_UP_BITS_PER_S = 20e6


class Ways:
    """``stations``: the number of each verifier's. ``radio`` and ``cells`` are None in a world
    without."""

    def __init__(
        self,
        scenario: Scenario,
        links: Mapping[str, LinkInstances],
        stations: Mapping[str, int],
        radio: RadioNetwork | None,
        cells: Cells | None,
    ) -> None:
        self._scenario, self._links, self._stations = scenario, links, stations
        self._radio, self._cells = radio, cells
        self._wired: dict[tuple[str, str], LinkView] = {}
        """What does not change: asked for by each request, of each verifier."""

    def links(self, group: str, verifier: str) -> tuple[str, ...]:
        """Names of the links from device to verifier."""
        kind = self._kind(verifier)
        return self._scenario.devices[group].path + self._scenario.verifiers[kind].path

    def fixed_s(self, group: str, verifier: str) -> float:
        """What each way takes at least, whatever the links do."""
        kind = self._kind(verifier)
        distance_ms = self._scenario.distances_ms.get(group, {}).get(kind, 0.0)
        return distance_ms / 2e3 + self._scenario.message_ms / 1e3

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

    def least_ways_s(self, group: str, verifier: str) -> tuple[float, float]:
        """What a small message takes up and down on a good day."""
        names = self.links(group, verifier)
        fixed_s = self.fixed_s(group, verifier) + self._access_s / 2.0
        up_s = sum(self._links[name].least_ways_s[0] for name in names)
        down_s = sum(self._links[name].least_ways_s[1] for name in names)
        return fixed_s + up_s, fixed_s + down_s

    def round_trip_s(self, group: str, number: int, verifier: str, now_s: float) -> float:
        """Of a small message there and back now, without queues, jitter and loss."""
        fixed_s = 2 * self.fixed_s(group, verifier) + self._access_s
        fixed_s += self._backhaul_rtt_s(number, verifier)
        return fixed_s + sum(
            self._links[name].round_trip_s(number, now_s) for name in self.links(group, verifier)
        )

    def sending(self, group: str, number: int, verifier: str) -> Callable[[int], Sending]:
        """What a message of a size makes the device's radio do."""
        if self._radio is not None:
            return partial(self._on_air, self._radio, number, verifier)
        path = self._scenario.devices[group].path
        section = self._links[path[0]].section if path else LinkSection()
        bits_per_s = min(section.up_mbps * 1e6, _ASSUMED_UP_BITS_PER_S)
        framing = section.framing_bytes
        return lambda size_bytes: Sending((size_bytes + framing) * 8 / bits_per_s, 0.0)

    # --- parts -----------------------------------------------------------------------------

    def _on_air(self, radio: RadioNetwork, number: int, verifier: str, size_bytes: int) -> Sending:
        return radio.sending(number, self._station(number, verifier), size_bytes)

    def _wired_view(self, group: str, verifier: str) -> LinkView:
        links = [self._links[name] for name in self.links(group, verifier)]
        rtt_s = 2 * self.fixed_s(group, verifier) + sum(link.typical_rtt_s for link in links)
        up = min((link.section.up_mbps for link in links), default=math.inf)
        down = min((link.section.down_mbps for link in links), default=math.inf)
        return LinkView(rtt_s, up * 1e6, down * 1e6, None)

    def _station(self, number: int, verifier: str) -> int:
        """Whose air a device is on when it uses that verifier."""
        return self._stations[verifier] if self._cells is None else self._cells.of(number)

    def _backhaul_rtt_s(self, number: int, verifier: str) -> float:
        return 0.0 if self._cells is None else self._cells.backhaul_rtt_s(number, verifier)

    def _kind(self, verifier: str) -> str:
        if verifier in self._scenario.verifiers:
            return verifier
        return verifier.rpartition("-")[0]

    @property
    def _access_s(self) -> float:
        """Round trip on the air, if there is any."""
        radio = self._scenario.radio
        return 0.0 if radio is None else radio.access_ms / 1e3
