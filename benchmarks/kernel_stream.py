"""Small messages one way over plain TCP: their delay in a real kernel and in the simulator."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from namespaces import VERIFIER_ADDRESS, linked_namespaces
from packet_relay import LineSettings, be_prompt

from edgespec.core.network.link_model import LinkModel, LinkSettings
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.tcp_connection import TcpConnection

MESSAGE_BYTES = 60
_GIVE_UP_S = 30.0
_LENGTHENED = 10
"""The simulator plays so many times as many messages: it is there to be exact."""


@dataclass(frozen=True, slots=True)
class StreamCell:
    rtt_ms: float
    loss: float
    gap_ms: float
    count: int
    seed: int = 1

    @property
    def name(self) -> str:
        return f"RTT {self.rtt_ms:g} ms, loss {100 * self.loss:g} %, every {self.gap_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Added:
    """To the one-way delay, in ms."""

    mean: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, delays_s: Sequence[float], one_way_s: float) -> Added:
        added = sorted(1e3 * (delay_s - one_way_s) for delay_s in delays_s)
        count = len(added)
        return cls(fmean(added), added[count * 95 // 100], added[count * 99 // 100], added[-1])

    def __str__(self) -> str:
        return f"{self.mean:.2f} (p95 {self.p95:.1f}, p99 {self.p99:.1f}, most {self.most:.0f})"


def real_stream(cell: StreamCell) -> Added:
    """Raises ``NoNamespaces``, and ``RuntimeError`` when not all came."""
    one_way_s = cell.rtt_ms / 2e3
    lines = [LineSettings(one_way_s, cell.loss, seed=2 * cell.seed + way) for way in (0, 1)]
    with linked_namespaces(*lines) as (device, verifier, _), contextlib.ExitStack() as opened:
        door = opened.enter_context(verifier.run(socket.socket))
        door.bind((VERIFIER_ADDRESS, 0))
        door.listen()
        there = door.getsockname()
        sender = opened.enter_context(device.run(partial(socket.create_connection, there, 10.0)))
        receiver = opened.enter_context(door.accept()[0])
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        receiver.settimeout(_GIVE_UP_S)
        delays_s: list[float] = []
        reader = threading.Thread(target=_read, args=(receiver, cell.count, delays_s))
        reader.start()
        next_s = time.monotonic()
        for _ in range(cell.count):
            time.sleep(max(0.0, next_s - time.monotonic()))
            sender.sendall(struct.pack(f"d{MESSAGE_BYTES - 8}x", time.monotonic()))
            next_s += cell.gap_ms / 1e3
        reader.join()
    if len(delays_s) < cell.count:
        raise RuntimeError(f"{len(delays_s)} of {cell.count} messages came within {_GIVE_UP_S} s")
    return Added.of(delays_s, one_way_s)


def _read(receiver: socket.socket, count: int, delays_s: list[float]) -> None:
    held = b""
    be_prompt()
    with contextlib.suppress(TimeoutError):
        while len(delays_s) < count and (read := receiver.recv(1 << 16)):
            now_s, held = time.monotonic(), held + read
            while len(held) >= MESSAGE_BYTES:
                delays_s.append(now_s - struct.unpack("d", held[:8])[0])
                held = held[MESSAGE_BYTES:]


def played_stream(cell: StreamCell) -> Added:
    queue, one_way_s = EventQueue(), cell.rtt_ms / 2e3
    up, down = (
        LinkModel(LinkSettings(one_way_s=one_way_s, loss=cell.loss, seed=2 * cell.seed + way))
        for way in (0, 1)
    )
    connection = TcpConnection(queue, [up], [down])
    delays_s: list[float] = []

    def send() -> None:
        sent_s = queue.now
        connection.up.send(MESSAGE_BYTES - 14, lambda: delays_s.append(queue.now - sent_s))

    for number in range(cell.count * _LENGTHENED):
        queue.at(number * cell.gap_ms / 1e3, send)
    queue.run(cell.count * _LENGTHENED * cell.gap_ms / 1e3 + 1e4)
    return Added.of(delays_s, one_way_s)
