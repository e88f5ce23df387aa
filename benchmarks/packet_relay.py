"""A lossy link below TCP: IP packets of two TUN devices, carried over late, one by one, or not.

Theory of operation. Each direction is a ``Direction``: a queue of bounded length before a line of a
given rate, then propagation, then the dice that drop. It is arithmetic on given times, so a test
can play it without a kernel. ``PacketRelay`` runs two of them in a thread between two file
descriptors. What it delivers late because the machine was busy is recorded (``late_s``), so a
measurement can say how far to trust it. Packets of a direction never overtake one another.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import random
import select
import threading
import time
from collections import deque
from dataclasses import dataclass, field

_MAX_PACKET_BYTES = 65_535
_IPV4, _TCP = 4, 6
_MOST_AT_ONCE = 64
_KEPT_LATENESSES = 100_000
_PRIORITY = 10


@dataclass(frozen=True, slots=True)
class LineSettings:
    """One direction. ``queue_packets`` bounds what waits for the line."""

    one_way_s: float = 0.0
    loss: float = 0.0
    bits_per_s: float = math.inf
    queue_packets: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.one_way_s < math.inf:
            raise ValueError(f"one_way_s is {self.one_way_s}, but must be finite and at least 0")
        if not 0.0 <= self.loss < 1.0:
            raise ValueError(f"loss is {self.loss}, but must be in [0, 1)")
        if not self.bits_per_s > 0.0:
            raise ValueError(f"bits_per_s is {self.bits_per_s}, but must be above 0")
        if self.queue_packets < 1:
            raise ValueError(f"queue_packets is {self.queue_packets}, but must be at least 1")


@dataclass(slots=True)
class LineCounts:
    """Packets of one direction; ``data`` are those with a TCP payload."""

    packets: int = 0
    bytes: int = 0
    data: int = 0
    dropped: int = 0
    dropped_data: int = 0
    overflowed: int = 0
    late_s: list[float] = field(default_factory=list)
    """How much later than due packets were delivered."""


class Direction:
    """When does a packet arrive, if at all? Times must not decrease from call to call."""

    def __init__(self, settings: LineSettings) -> None:
        self.counts = LineCounts()
        self.settings = settings
        self._dice = random.Random(settings.seed)
        self._free_s = -math.inf
        self._leaving: deque[float] = deque()

    def arrival(self, now_s: float, packet: bytes) -> float | None:
        """None: it is dropped. A packet without payload is dropped as any other is."""
        settings, counts = self.settings, self.counts
        size_bytes, data = len(packet), payload_bytes(packet) > 0
        counts.packets += 1
        counts.bytes += size_bytes
        counts.data += data
        while self._leaving and self._leaving[0] <= now_s:
            self._leaving.popleft()
        if len(self._leaving) >= settings.queue_packets:
            counts.overflowed += 1
            return None
        self._free_s = max(self._free_s, now_s) + 8 * size_bytes / settings.bits_per_s
        if settings.bits_per_s < math.inf:
            self._leaving.append(self._free_s)
        if self._dice.random() < settings.loss:
            counts.dropped += 1
            counts.dropped_data += data
            return None
        return self._free_s + settings.one_way_s


def payload_bytes(packet: bytes) -> int:
    """Of TCP over IPv4 (RFC 791, 9293); 0 for any other packet."""
    if len(packet) < 20 or packet[0] >> 4 != _IPV4 or packet[9] != _TCP:
        return 0
    header_bytes = 4 * (packet[0] & 15)
    if len(packet) < header_bytes + 20:
        return 0
    total_bytes = int.from_bytes(packet[2:4], "big")
    return max(0, total_bytes - header_bytes - 4 * (packet[header_bytes + 12] >> 4))


def be_prompt(task: int = 0) -> None:
    """Run before everything ordinary (the calling thread, or that task): for light work whose
    lateness would be measured. Without the right to, nothing changes."""
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.sched_setscheduler(task, os.SCHED_RR, os.sched_param(_PRIORITY))


class PacketRelay:
    """Carries packets between two TUN descriptors; use as a context manager.

    The descriptors stay the caller's. Raises on leaving what ended its thread early.
    """

    def __init__(self, one: int, other: int, there: LineSettings, back: LineSettings) -> None:
        self._ends = {one: (other, Direction(there)), other: (one, Direction(back))}
        self.there, self.back = self._ends[one][1], self._ends[other][1]
        self._wake_read, self._wake_write = os.pipe()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="packet relay", daemon=True)

    def become(self, there: LineSettings, back: LineSettings) -> None:
        """Another link from the next packet on, with counts of its own."""
        one, other = self._ends
        self.there, self.back = Direction(there), Direction(back)
        self._ends = {one: (other, self.there), other: (one, self.back)}

    def __enter__(self) -> PacketRelay:
        for descriptor in self._ends:
            os.set_blocking(descriptor, False)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)
        if self._failure is not None and error[0] is None:
            raise RuntimeError("the packet relay failed") from self._failure

    def _run(self) -> None:
        be_prompt()
        try:
            self._carry()
        except BaseException as error:  # told to whoever leaves the block
            self._failure = error

    def _carry(self) -> None:
        due: list[tuple[float, int, int, bytes]] = []
        order = 0
        ends = tuple(self._ends)
        watched = [*ends, self._wake_read]
        while True:
            wait_s = None if not due else max(0.0, due[0][0] - time.monotonic())
            ready, _, _ = select.select(watched, [], [], wait_s)
            if self._wake_read in ready:
                return
            for end in ready:
                other, direction = self._ends[end]
                for packet in _packets(end):
                    now_s = time.monotonic()
                    arrival_s = direction.arrival(now_s, packet)
                    if arrival_s is not None:
                        order += 1
                        heapq.heappush(due, (arrival_s, order, other, packet))
            while due and due[0][0] <= time.monotonic():
                at_s, _, other, packet = heapq.heappop(due)
                self._deliver(at_s, other, packet)

    def _deliver(self, at_s: float, end: int, packet: bytes) -> None:
        try:
            os.write(end, packet)
        except BlockingIOError:  # the device's own queue is full: that packet is lost as well
            self._ends[self._ends[end][0]][1].counts.overflowed += 1
            return
        late_s = self._ends[self._ends[end][0]][1].counts.late_s
        if len(late_s) < _KEPT_LATENESSES:
            late_s.append(time.monotonic() - at_s)


def _packets(end: int) -> list[bytes]:
    found = []
    for _ in range(_MOST_AT_ONCE):
        try:
            found.append(os.read(end, _MAX_PACKET_BYTES))
        except BlockingIOError:
            break
    return found
