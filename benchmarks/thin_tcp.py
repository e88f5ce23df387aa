"""What a lost packet costs a thin stream: a real kernel's TCP beside the simulator's.

    python benchmarks/thin_tcp.py [--rtt-ms 50] [--gap-ms 25] [--seconds 200] [--streams 3]

As root on Linux. Two TUN devices, each in a network namespace of its own, and between them this
program as the link: it holds packets back for half a round trip and drops 1 % of those with data. A
stream is a message of 46 bytes every gap. Shown is by how much all messages together come later,
per packet lost, with the 95 % interval over losses: the kernel's with each congestion control, and
the simulator's, which is CUBIC's. A loss near which this program was not on time itself is left
out, so that a busy machine costs losses and not accuracy.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from edgespec.core.link_model import LinkModel, LinkSettings
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.tcp import MESSAGE_BYTES, TcpConnection

SIZE, LOSS = 46, 0.01
SETTLED_S = 1.0
"""From the start: nothing is lost and nothing counts before."""
ON_TIME_S, NEAR_S = 0.003, 0.8
CLONE_NEWNET, TUNSETIFF, TUN_PLAIN = 0x40000000, 0x400454CA, 0x1001
Late = list[tuple[float, float]]
"""When a message was due and how late it came."""


def cost_s(lost_s: Sequence[float], late: Late, stalls_s: Sequence[float] = ()) -> list[float]:
    """Lateness by loss, each message's that of the last packet lost before it was due or after."""
    costs = {
        at_s: 0.0
        for at_s in lost_s
        if not any(abs(at_s - stall_s) < NEAR_S for stall_s in stalls_s)
    }
    usual_s = statistics.median(late_s for _, late_s in late)
    for due_s, late_s in late:
        behind = [at_s for at_s in lost_s if -NEAR_S < at_s - due_s < late_s]
        if late_s > usual_s + ON_TIME_S and behind and behind[-1] in costs:
            costs[behind[-1]] += late_s - usual_s
    return list(costs.values())


def simulated(rtt_s: float, gap_s: float, count: int, seed: int) -> list[float]:
    queue, late, lost_s = EventQueue(), Late(), list[float]()
    link = LinkModel(LinkSettings(one_way_s=rtt_s / 2, loss=LOSS, seed=seed))
    back = LinkModel(LinkSettings(one_way_s=rtt_s / 2))

    class Up:
        def packet(self, now_s: float, size_bytes: int) -> float | None:
            arrival_s = link.packet(now_s, size_bytes)
            if arrival_s is None:
                lost_s.append(now_s)
            return arrival_s

    connection = TcpConnection(queue, [Up()], [back])

    def send() -> None:
        due_s = queue.now
        connection.up.send(SIZE, lambda: late.append((due_s, queue.now - due_s - rtt_s / 2)))

    for number in range(count):
        queue.at(number * gap_s, send)
    queue.run(1e9)
    return cost_s(lost_s, late)


class Kernel:
    """One stream; ``run`` plays it and returns what its losses cost."""

    def __init__(self, rtt_s: float, gap_s: float, count: int, control: str, seed: int) -> None:
        self._one_way_s, self._gap_s, self._count = rtt_s / 2, gap_s, count
        self._control, self._dice = control, random.Random(seed)
        self._tun: dict[int, int] = {}
        self._late = Late()
        self._ready, self._done = threading.Barrier(3), threading.Event()

    def _host(self, number: int, work: Callable[[socket.socket], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "a network namespace: run as root")
        self._tun[number] = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self._tun[number], TUNSETIFF, struct.pack("16sH", b"thin", TUN_PLAIN))
        address = f"ip addr add 10.9.0.{number}/24 dev thin && ip link set thin up"
        subprocess.run(address, shell=True, check=True)
        with socket.socket() as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if number == 2:
                end.bind(("10.9.0.2", 7000))
                end.listen()
            self._ready.wait()
            work(end)
            self._done.wait()

    def _receive(self, end: socket.socket) -> None:
        connection, _ = end.accept()
        with connection.makefile("rb") as stream:
            while len(self._late) < self._count:
                due_s = struct.unpack("d", stream.read(SIZE + MESSAGE_BYTES)[:8])[0]
                self._late.append((due_s, time.monotonic() - due_s - self._one_way_s))
        self._done.set()

    def _send(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._control.encode())
        end.connect(("10.9.0.2", 7000))
        due_s = time.monotonic()
        for _ in range(self._count):
            due_s += self._gap_s
            while (wait_s := due_s - time.monotonic()) > 0:
                time.sleep(wait_s)
            end.send(struct.pack("d", due_s).ljust(SIZE + MESSAGE_BYTES))

    def run(self) -> list[float]:
        for number, work in ((1, self._send), (2, self._receive)):
            threading.Thread(target=self._host, args=(number, work), daemon=True).start()
        self._ready.wait()
        under_way: list[tuple[float, int, bytes]] = []
        lost_s, stalls_s, began_s = [], [], time.monotonic()
        while not self._done.is_set():
            wait_s = under_way[0][0] - time.monotonic() if under_way else 0.05
            readable, _, _ = select.select(self._tun.values(), (), (), max(0.0, min(wait_s, 0.05)))
            now_s = time.monotonic()
            for source in readable:
                packet = os.read(source, 2048)
                if packet[0] >> 4 != 4:
                    continue  # IPv6 looks for neighbours
                up = source == self._tun[1]
                data = up and len(packet) > SIZE + MESSAGE_BYTES
                if data and now_s > began_s + SETTLED_S and self._dice.random() < LOSS:
                    lost_s.append(now_s)
                else:
                    entry = (now_s + self._one_way_s, self._tun[2 if up else 1], packet)
                    heapq.heappush(under_way, entry)
            while under_way and under_way[0][0] <= (now_s := time.monotonic()):
                due_s, target, packet = heapq.heappop(under_way)
                os.write(target, packet)
                if now_s - due_s > ON_TIME_S:
                    stalls_s.append(now_s)
        return cost_s(lost_s, self._late, stalls_s)


def shown(name: str, costs_s: Sequence[float]) -> str:
    mean, spread = statistics.fmean(costs_s), statistics.stdev(costs_s)
    return f"{name:10} {1e3 * mean:5.0f} ± {1960 * spread / len(costs_s) ** 0.5:.0f} ms" + (
        f" a lost packet ({len(costs_s)} of them)"
    )


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--gap-ms", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--streams", type=int, default=3, help="of each congestion control")
    options = parser.parse_args()
    rtt_s, gap_s = options.rtt_ms / 1e3, options.gap_ms / 1e3
    count = int(options.seconds / gap_s)
    seeds = range(options.streams)
    simulation = [cost for seed in range(20) for cost in simulated(rtt_s, gap_s, count, seed)]
    print(shown("simulator", simulation), flush=True)
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))  # threads are as their maker
    for control in ("cubic", "bbr"):
        with ThreadPoolExecutor() as pool:
            runs = [pool.submit(Kernel(rtt_s, gap_s, count, control, seed).run) for seed in seeds]
            print(shown(f"{control}", [cost for run in runs for cost in run.result()]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
