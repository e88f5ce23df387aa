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

import csv
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from edgespec.config.files import open_to_read
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.network_trace import TraceError, find_file
from edgespec_sim.scenario.sections import ArrivalKind, ArrivalsSection, AtDevice, Scenario

# --- recorded arrivals: CSV with a header ------------------------------------------------------
# The columns are ``time_s``, or ``timestamp`` (seconds, or a date and time), and optionally
# ``prompt_tokens`` and ``output_tokens``. Published traces of cloud inference call them
# ``TIMESTAMP``, ``ContextTokens`` and ``GeneratedTokens``. The first request arrives at 0.

MAX_ROWS: Final = 1_000_000
MAX_BYTES: Final = 256 << 20
MAX_TOKENS: Final = 65_536
_NAMES: Final = {
    "timestamp": "time_s",
    "contexttokens": "prompt_tokens",
    "generatedtokens": "output_tokens",
}
_LENGTHS: Final = ("prompt", "output")
_Recorded = tuple[float, int | None, int | None]
"""Arrival time in seconds, prompt length and output length; None where the file has no length."""


def read_arrivals(path: Path) -> list[_Recorded]:
    """Read recorded arrivals in order of time, which starts at 0. Raises ``TraceError`` that names
    the file, the line and the fault."""
    found: list[_Recorded] = []
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise TraceError(f"{path}: {size} bytes, but at most {MAX_BYTES} are read")
        with open_to_read(path) as file:
            rows = csv.DictReader(file)
            header = (name.strip().lower() for name in rows.fieldnames or ())
            rows.fieldnames = [_NAMES.get(name, name) for name in header]
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if len(found) == MAX_ROWS:
                    raise TraceError(f"{path}: more than {MAX_ROWS} arrivals, which is the limit")
                at_s = _read_seconds(row.get("time_s"), where)
                prompt, output = (_read_length(row, f"{one}_tokens", where) for one in _LENGTHS)
                found.append((at_s, prompt, output))
                if len(found) > 1 and found[-1][0] < found[-2][0]:
                    raise TraceError(f"{where}: time is earlier than in the row before")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: not readable as text: {error}") from error
    if not found:
        raise TraceError(f"{path}: contains no arrivals")
    return [(at_s - found[0][0], prompt, output) for at_s, prompt, output in found]


def _read_seconds(value: str | None, where: str) -> float:
    try:
        at_s = float(value or "")
    except ValueError:
        try:
            at_s = datetime.fromisoformat((value or "").strip()).timestamp()
        except ValueError:
            raise TraceError(
                f"{where}: time is {value!r}, but must be seconds or a date and time"
            ) from None
    if not math.isfinite(at_s):
        raise TraceError(f"{where}: time is {value!r}, but must be finite")
    return at_s


def _read_length(row: Mapping[str, str | None], name: str, where: str) -> int | None:
    value = row.get(name)
    if not value:
        return None
    if not value.strip().isdecimal() or int(value) < 1:
        raise TraceError(f"{where}: {name} is {value!r}, but must be a whole number of at least 1")
    return min(int(value), MAX_TOKENS)


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
) -> Iterator[_Recorded]:
    if section.kind is ArrivalKind.RECORDED:
        for at_s, prompt, output in read_arrivals(find_file(section.file, folder)):
            if at_s / section.speed > until_s:
                return
            yield at_s / section.speed, prompt, output
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
