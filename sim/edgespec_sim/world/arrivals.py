"""An open loop: when requests come, at which device, how long they are, and where they wait.

Theory of operation. The whole list of arrivals is drawn before the world begins, from dice that
know nothing of the arm: instant, device, lengths, number of the question. A Poisson stream is
drawn gap by gap; one whose rate follows the day by thinning one of the highest rate (Lewis and
Shedler 1979). Arrivals go on while the world drains, so those that count see no emptier verifier
than the others. A ``Reception`` hands each to a device that is free, and keeps the rest in order.

A device serves one request at a time. Where requests wait at their own device, each device is a
queue of its own; where they take a free one, each group of devices has one common queue.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from edgespec_sim.event_queue import EventQueue
from edgespec_sim.scenario.sections import ArrivalKind, ArrivalsSection, AtDevice, Scenario
from edgespec_sim.traces.network_trace import TraceError, file_named
from edgespec_sim.world.conservation import ArrivalWatch

# --- recorded arrivals -------------------------------------------------------------------------
# when requests came, and how long they were where that is known.
# Two forms, told from the first line: CSV with a header, JSONL with an object a line. Columns are
# ``time_s``, or ``timestamp`` (seconds, or a date and time), and as they are known
# ``prompt_tokens`` and ``output_tokens``; ``TIMESTAMP``, ``ContextTokens`` and
# ``GeneratedTokens``, as published traces of cloud inference call them, are the same. The first
# request comes at 0.


MAX_ROWS: Final = 1_000_000
MAX_BYTES: Final = 256 << 20
MAX_TOKENS: Final = 32_000
_NAMES: Final = {
    "time_s": "time_s",
    "timestamp": "time_s",
    "prompt_tokens": "prompt_tokens",
    "contexttokens": "prompt_tokens",
    "output_tokens": "output_tokens",
    "generatedtokens": "output_tokens",
}


@dataclass(frozen=True, slots=True)
class RecordedArrival:
    time_s: float
    """From the first one's."""
    prompt_tokens: int | None
    output_tokens: int | None


def read_arrivals(path: Path) -> tuple[RecordedArrival, ...]:
    """In order of time. Raises ``TraceError`` that names file, line and what is wrong."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise TraceError(f"{path}: {size} bytes, but at most {MAX_BYTES} are read")
        with path.open(encoding="utf-8", newline="") as file:
            found = [_arrival(row, f"{path}:{line}") for line, row in _rows(file, path)]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: not readable as text: {error}") from error
    if not found:
        raise TraceError(f"{path}: no arrivals in it")
    for index, (before, after) in enumerate(itertools.pairwise(found)):
        if after.time_s < before.time_s:
            raise TraceError(f"{path}: arrival {index + 2} is earlier than the one before it")
    first_s = found[0].time_s
    return tuple(
        RecordedArrival(one.time_s - first_s, one.prompt_tokens, one.output_tokens) for one in found
    )


def _rows(file: Iterable[str], path: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    for count, (number, row) in enumerate(
        _objects(itertools.chain([first], lines), path)
        if first[1].lstrip().startswith("{")
        else _columns(first[1], lines, path)
    ):
        if count == MAX_ROWS:
            raise TraceError(f"{path}: more than {MAX_ROWS} arrivals, the limit")
        yield number, row


def _objects(
    lines: Iterable[tuple[int, str]], path: Path
) -> Iterable[tuple[int, Mapping[str, Any]]]:
    for number, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{number}: holds a {type(row).__name__}, not an object")
        yield number, _known(row)


def _columns(
    header: str, lines: Iterable[tuple[int, str]], path: Path
) -> Iterable[tuple[int, Mapping[str, Any]]]:
    names = next(csv.reader([header]))
    for number, line in lines:
        values = next(csv.reader([line]))
        if len(values) != len(names):
            raise TraceError(
                f"{path}:{number}: {len(values)} columns, but the header has {len(names)}"
            )
        yield number, _known(dict(zip(names, values, strict=True)))


def _known(row: Mapping[str, Any]) -> Mapping[str, Any]:
    named = {_NAMES.get(str(name).strip().lower()): value for name, value in row.items()}
    return {name: value for name, value in named.items() if name is not None}


def _arrival(row: Mapping[str, Any], where: str) -> RecordedArrival:
    if "time_s" not in row:
        raise TraceError(f"{where}: no time_s or timestamp")
    return RecordedArrival(
        _seconds(row["time_s"], where),
        _length(row, "prompt_tokens", where),
        _length(row, "output_tokens", where),
    )


def _seconds(value: Any, where: str) -> float:
    try:
        at_s = float(value)
    except (TypeError, ValueError):
        try:
            at_s = datetime.fromisoformat(str(value).strip()).timestamp()
        except ValueError:
            raise TraceError(
                f"{where}: time is {value!r}, but must be seconds or a date and time"
            ) from None
    if not math.isfinite(at_s):
        raise TraceError(f"{where}: time is {value!r}, but must be finite")
    return at_s


def _length(row: Mapping[str, Any], name: str, where: str) -> int | None:
    value = row.get(name)
    if value is None or value == "":
        return None
    try:
        length = int(value)
    except (TypeError, ValueError, OverflowError):
        length = 0
    if length < 1:
        raise TraceError(f"{where}: {name} is {value!r}, but must be a whole number of at least 1")
    return min(length, MAX_TOKENS)


# --- how long a prompt or an answer is ---------------------------------------------------------


def drawn_length(typical: int, spread: float, dice: random.Random) -> int:
    """Log-normal around ``typical`` with this relative standard deviation; nothing is drawn where
    all are alike."""
    if spread == 0.0 or typical == 0:
        return typical
    sigma = math.sqrt(math.log1p(spread * spread))
    return max(1, min(round(typical * dice.lognormvariate(0.0, sigma)), MAX_TOKENS))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, as it is for every arm."""

    number: int
    """Of its question."""
    at_s: float
    device: int
    prompt_tokens: int
    output_tokens: int


def draw_arrivals(scenario: Scenario, seed: str, folder: Path) -> tuple[Arrival, ...]:
    """All that come up to the end of the longest drain. Raises ``TraceError``."""
    section = scenario.arrivals
    assert section is not None
    until_s = scenario.duration_s + scenario.longest_drain_s
    groups = [group for group, devices in scenario.devices.items() for _ in range(devices.count)]
    dice = random.Random(f"{seed}/arrivals")
    arrivals = []
    for number, (at_s, prompt, output) in enumerate(_times(section, until_s, dice, folder)):
        device = dice.randrange(len(groups))
        load = scenario.devices[groups[device]].workload
        # Drawn in any case: a file with some lengths leaves the other requests as they are.
        drawn = [
            drawn_length(typical, load.length_spread, dice)
            for typical in (load.prompt_tokens, load.output_tokens)
        ]
        arrivals.append(Arrival(number, at_s, device, prompt or drawn[0], output or drawn[1]))
    return tuple(arrivals)


def _times(
    section: ArrivalsSection, until_s: float, dice: random.Random, folder: Path
) -> Iterator[tuple[float, int | None, int | None]]:
    if section.kind is ArrivalKind.RECORDED:
        for one in read_arrivals(file_named(section.file, folder)):
            at_s = one.time_s / section.speed
            if at_s > until_s:
                return
            yield at_s, one.prompt_tokens, one.output_tokens
        return
    at_s = 0.0
    while True:
        at_s += dice.expovariate(section.most)
        if at_s > until_s:
            return
        if section.rate_at(at_s) >= dice.random() * section.most:
            yield at_s, None, None


class Server:
    """What a ``Reception`` needs of a device: ``busy``, and ``serve`` while it is not."""

    def __init__(self, serve: Callable[[Arrival], None], group: str) -> None:
        self.serve, self.group, self.busy = serve, group, False


class Reception:
    """Hands arrivals to devices; ``free`` has to hear of each that has ended."""

    def __init__(
        self,
        queue: EventQueue,
        arrivals: Sequence[Arrival],
        at: AtDevice,
        servers: Sequence[Server],
        watch: ArrivalWatch | None = None,
    ) -> None:
        self.arrived, self.watch = 0, watch
        self.arrivals = arrivals
        self._queue, self._at, self._servers = queue, at, servers
        self._waiting: dict[int | str, deque[Arrival]] = {}
        self._groups: Mapping[str, list[int]] = _by_group(servers)
        self._place = {
            device: place
            for devices in self._groups.values()
            for place, device in enumerate(devices)
        }
        if watch is not None:
            for device, server in enumerate(servers):
                watch.device(device, server.group)

    def start(self) -> None:
        for arrival in self.arrivals:
            self._queue.at(arrival.at_s, partial(self._arrive, arrival))

    @property
    def waiting(self) -> list[Arrival]:
        """Requests that no device has begun, in order of arrival."""
        found = [arrival for line in self._waiting.values() for arrival in line]
        return sorted(found, key=lambda arrival: arrival.number)

    def free(self, device: int) -> None:
        """That device has ended its request: it begins the next one that waits for it."""
        self._servers[device].busy = False
        if self.watch is not None:
            self.watch.ended(device, self._queue.now)
        line = self._waiting.get(self._line(device))
        if line:
            self._begin(device, line.popleft())
        if self.watch is not None:
            self.watch.settled(self._queue.now)

    def _line(self, device: int) -> int | str:
        return device if self._at is AtDevice.OWN else self._servers[device].group

    def _arrive(self, arrival: Arrival) -> None:
        self.arrived += 1
        if self.watch is not None:
            now_s = self._queue.now
            self.watch.came(arrival.number, arrival.device, arrival.at_s, now_s)
        device = self._free_device(arrival.device)
        if device is None:
            self._waiting.setdefault(self._line(arrival.device), deque()).append(arrival)
        else:
            self._begin(device, arrival)
        if self.watch is not None:
            self.watch.settled(self._queue.now)

    def _free_device(self, drawn: int) -> int | None:
        if not self._servers[drawn].busy:
            return drawn
        if self._at is AtDevice.OWN:
            return None
        alike = self._groups[self._servers[drawn].group]
        place = self._place[drawn]
        for device in (*alike[place + 1 :], *alike[:place]):
            if not self._servers[device].busy:
                return device
        return None

    def _begin(self, device: int, arrival: Arrival) -> None:
        if self.watch is not None:
            self.watch.begun(arrival.number, device, self._queue.now)
        self._servers[device].busy = True
        self._servers[device].serve(arrival)


def _by_group(servers: Sequence[Server]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for device, server in enumerate(servers):
        found.setdefault(server.group, []).append(device)
    return found
