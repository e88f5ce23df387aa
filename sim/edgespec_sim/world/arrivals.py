"""An open loop: the arrivals of requests at devices, their lengths, and where they wait.

Theory of operation. The whole list of arrivals is drawn before the world begins, from random
numbers that do not depend on the arm: time, device, lengths, number of the request. A Poisson
stream is drawn gap by gap. A stream whose rate follows the day is drawn by thinning one with the
highest rate (Lewis and Shedler 1979). Arrivals continue while the world drains, so that the
requests that count see the usual load until their end. A ``ArrivalDispatcher`` hands each arrival
to a free device, and keeps the others in order.

A device serves one request at a time. If requests wait at their own device, each device has its own
queue. If they take any free device, each group of devices has one queue.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.columns import Columns, TableKind
from edgespec_sim.links.network_trace import find_file
from edgespec_sim.scenario.sections import ArrivalKind, ArrivalsSection, AtDevice, Scenario
from edgespec_sim.world.recorded_arrivals import MAX_TOKENS, read_arrivals

# --- lengths of prompts and outputs ------------------------------------------------------------


def draw_length(typical: int, spread: float, dice: random.Random) -> int:
    """Draw a log-normal length around ``typical`` with relative deviation ``spread``. Without a
    spread, no random number is used."""
    if spread == 0.0 or typical == 0:
        return typical
    sigma = math.sqrt(math.log1p(spread * spread))
    return max(1, min(round(typical * dice.lognormvariate(0.0, sigma)), MAX_TOKENS))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, the same for every arm."""

    number: int
    """Number of the request, which determines its prompt."""
    at_s: float
    device: int
    prompt_tokens: int
    output_tokens: int


def draw_arrivals(scenario: Scenario, seed: str, folder: Path) -> tuple[Arrival, ...]:
    """Draw all arrivals until the end of the longest drain. Raises ``TraceError``."""
    section = scenario.arrivals
    assert section is not None
    until_s = scenario.duration_s + scenario.drain_limit_s
    groups = [group for group, devices in scenario.devices.items() for _ in range(devices.count)]
    dice = random.Random(f"{seed}/arrivals")
    arrivals = []
    for number, (at_s, prompt, output) in enumerate(_read_times(section, until_s, dice, folder)):
        device = dice.randrange(len(groups))
        load = scenario.devices[groups[device]].workload
        # Lengths are drawn even if the file has them, so that the other requests do not depend on
        # it.
        drawn = [
            draw_length(typical, load.length_spread, dice)
            for typical in (load.prompt_tokens, load.output_tokens)
        ]
        arrivals.append(Arrival(number, at_s, device, prompt or drawn[0], output or drawn[1]))
    return tuple(arrivals)


def _read_times(
    section: ArrivalsSection, until_s: float, dice: random.Random, folder: Path
) -> Iterator[tuple[float, int | None, int | None]]:
    """Yield the times of arrivals with the lengths that are recorded."""
    if section.kind is ArrivalKind.RECORDED:
        columns = Columns.of(section.columns, TableKind.WORKLOAD) if section.columns else None
        path = find_file(section.file, folder)
        for one in read_arrivals(path, columns, section.format, from_s=section.from_s):
            if one.at_s / section.speed > until_s:
                return
            yield one.at_s / section.speed, one.prompt_tokens, one.output_tokens
        return
    at_s = 0.0
    while True:
        at_s += dice.expovariate(section.highest_rate)
        if at_s > until_s:
            return
        if section.rate_at(at_s) >= dice.random() * section.highest_rate:
            yield at_s, None, None


class DeviceSlot:
    """A device as seen by a ``ArrivalDispatcher``, which calls ``serve`` only while ``busy`` is
    False."""

    def __init__(self, serve: Callable[[Arrival], None], group: str) -> None:
        self.serve, self.group, self.busy = serve, group, False


class ArrivalDispatcher:
    """Hands arrivals to devices. ``release`` must be called for each device whose request has
    ended."""

    def __init__(
        self,
        queue: EventQueue,
        arrivals: Sequence[Arrival],
        at: AtDevice,
        servers: Sequence[DeviceSlot],
    ) -> None:
        self.arrivals = arrivals
        self._queue, self._at, self._servers = queue, at, servers
        self._waiting: dict[int | str, deque[Arrival]] = {}
        self._groups: dict[str, list[int]] = {}
        for device, server in enumerate(servers):
            self._groups.setdefault(server.group, []).append(device)

    def start(self) -> None:
        for arrival in self.arrivals:
            self._queue.at(arrival.at_s, partial(self._arrive, arrival))

    @property
    def waiting(self) -> list[Arrival]:
        """Requests that no device has begun, in order of arrival."""
        found = [arrival for queue in self._waiting.values() for arrival in queue]
        return sorted(found, key=lambda arrival: arrival.number)

    def release(self, device: int) -> None:
        """Mark a device as free, and begin the next request that waits for it."""
        self._servers[device].busy = False
        queue = self._waiting.get(self._queue_key(device))
        if queue:
            self._begin(device, queue.popleft())

    def _queue_key(self, device: int) -> int | str:
        return device if self._at is AtDevice.OWN else self._servers[device].group

    def _arrive(self, arrival: Arrival) -> None:
        device = self._find_free_device(arrival.device)
        if device is None:
            self._waiting.setdefault(self._queue_key(arrival.device), deque()).append(arrival)
        else:
            self._begin(device, arrival)

    def _find_free_device(self, drawn: int) -> int | None:
        if not self._servers[drawn].busy:
            return drawn
        if self._at is AtDevice.OWN:
            return None
        alike = self._groups[self._servers[drawn].group]
        place = alike.index(drawn)
        for device in (*alike[place + 1 :], *alike[:place]):
            if not self._servers[device].busy:
                return device
        return None

    def _begin(self, device: int, arrival: Arrival) -> None:
        self._servers[device].busy = True
        self._servers[device].serve(arrival)
