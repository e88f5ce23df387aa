"""What a session and pass costs the event loop of a verifier with front processes, in one process.

    python benchmarks/loop_path.py [--sessions 64,128] [--nodes 8] [--together 4] [--pass-ms 25]

The verifier's own code, from the pipe of a front process to the engine and back; this script is the
other end of the pipe and the target. Drafts come ``--together`` at a time. Where
``daemon_load.py`` says what a busy machine makes of it, this says what the code costs: the CPU time
of the quickest passes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from engine_cost import PROMPT, Device
from table_target import TableTarget

from edgespec.benchmark.report import machine, versions
from edgespec.compose import TOY_CONTEXT_LENGTH, TOY_MODEL
from edgespec.core.protocol.messages import Commit, Limits, Open, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.call_budget import INFO_LIMITS
from edgespec.targets.toy import ToyTarget
from edgespec.transport import front_child, front_frames
from edgespec.transport.codec import decode_downlink, encode_uplink
from edgespec.transport.front_orders import Orders
from edgespec.transport.grpc_listener import STREAMED
from edgespec.transport.grpc_options import Keepalive
from edgespec.transport.grpc_server import GrpcServer
from edgespec.verifier.daemon import Verifier

HEADER = struct.Struct("<IBI")
RUN_IN = 5


class Worker:
    """In place of the target's thread: keeps what it is given until the script carries it out."""

    def __init__(self) -> None:
        self.work: list[Any] = []
        self.requests: tuple[Any, ...] = ()
        self.done: asyncio.Future[ee.BatchDone] | None = None

    def queue(self, work: Any) -> None:
        self.work.append(work)

    @property
    def has_queued(self) -> bool:
        return False

    def submit(self, requests: tuple[Any, ...]) -> asyncio.Future[ee.BatchDone]:
        self.requests, self.done = requests, asyncio.get_running_loop().create_future()
        return self.done


class Bench:
    """A verifier with one front process, which is this script."""

    def __init__(self, sessions: int) -> None:
        blocks = (sessions + 8) * TOY_CONTEXT_LENGTH // 16
        toy = ToyTarget(TOY_MODEL, cache=CacheShape(blocks, 16))
        limits = ee.EngineLimits(
            max_sessions=sessions, max_rows_per_pass=16 * (sessions + 8), cache=toy.cache
        )
        self.target, self.worker, self.loop = TableTarget(toy), Worker(), asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.setblocking(False)
        self.devices = {number: Device(number) for number in range(1, sessions + 1)}
        self.unread = b""
        self.loop.run_until_complete(self._begin(toy, limits))
        for number in self.devices:
            sampling = SamplingParams(max_tokens=4000, ignore_eos=True)
            ask = Open(f"s{number}", "", "", PROMPT, sampling=sampling, run_ahead=RunAhead.ALWAYS)
            call = json.dumps([STREAMED, f"ipv4:127.1.0.{number}:1", []]).encode()
            self.say(front_frames.OPEN, number, call)
            self.say(front_frames.MESSAGE, number, encode_uplink(ask))
            self.turns(8)
        while len(self.worker.requests) < sessions:
            self.end_pass()
        gc.collect()
        gc.freeze()  # as ``edgespec verifier`` does
        gc.set_threshold(20_000, 20, 50)

    async def _begin(self, toy: ToyTarget, limits: ee.EngineLimits) -> None:
        self.verifier = Verifier(toy, Limits(), limits)
        self.verifier._worker = self.worker  # type: ignore[assignment]
        process: Any = SimpleNamespace(pid=1, poll=lambda: 0, wait=lambda timeout=None: 0)
        life = os.open(os.devnull, os.O_RDONLY)
        front_child._started = lambda: (self.ours, life, process)
        orders = Orders("127.0.0.1:0", 1 << 20, Keepalive(), INFO_LIMITS, 30, None)
        listener: Any = SimpleNamespace()

        async def start(methods: Any, _line: Any) -> int:
            self.front = front_child.FrontChild(orders, methods)
            await self.front.talk()
            return 0

        listener.start = start
        server = GrpcServer("", self.verifier.serve, lambda: self.verifier.info, listener=listener)
        await server.start()

    def say(self, kind: int, number: int, body: bytes) -> None:
        self.theirs.sendall(HEADER.pack(len(body), kind, number) + body)

    def turns(self, count: int) -> float:
        """Turns of the event loop; their CPU time in seconds."""
        began = time.thread_time()
        for _ in range(count):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        return time.thread_time() - began

    def heard(self) -> Iterator[tuple[int, int, bytes]]:
        """What the verifier has sent."""
        while True:
            try:
                self.unread += self.theirs.recv(1 << 18)
            except BlockingIOError:
                break
        at = 0
        while len(self.unread) - at >= HEADER.size:
            size, kind, number = HEADER.unpack_from(self.unread, at)
            begin, at = at + HEADER.size, at + HEADER.size + size
            yield kind, number, self.unread[begin:at]
        self.unread = self.unread[at:]

    def end_pass(self) -> float:
        """The pass ends and its commits are sent; what the event loop needs for it, in seconds."""
        worker, target = self.worker, self.target
        for item in worker.work:
            match item:
                case ee.OpenSequence(key, length, sampling, text):
                    target.open(key, length, sampling, text)
                case ee.KeepNodes(key, nodes):
                    target.keep(key, nodes)
        worker.work.clear()
        assert worker.done is not None
        worker.done.set_result(ee.BatchDone(tuple(target.forward(worker.requests)), 0.025))
        took_s = self.turns(4)
        wrote = []
        for kind, number, body in self.heard():
            if kind == front_frames.WRITE:
                wrote.append(number)
                message = decode_downlink(body)
                if isinstance(message, Commit):
                    self.devices[number].prefix.extend(message.tokens)
        self.say(front_frames.WROTE, 0, struct.pack(f"<{len(wrote)}I", *wrote))
        return took_s + self.turns(2)

    def take_drafts(self, nodes: int, together: int) -> float:
        """Every device sends its drafts; what the event loop needs for them, in seconds."""
        took_s, frames = 0.0, b""
        for count, (number, device) in enumerate(self.devices.items(), start=1):
            for message in device.messages(nodes, 1):
                body = encode_uplink(message)
                frames += HEADER.pack(len(body), front_frames.MESSAGE, number) + body
            if count % together == 0 or count == len(self.devices):
                self.theirs.sendall(frames)
                took_s, frames = took_s + self.turns(2), b""
        return took_s

    def close(self) -> None:
        async def end() -> None:
            await self.front.close()

        self.loop.run_until_complete(end())
        self.theirs.close()
        self.loop.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", default="64,128")
    parser.add_argument("--nodes", type=int, default=8, help="that a device sends for each pass")
    parser.add_argument("--together", type=int, default=4, help="drafts that come at a time")
    parser.add_argument("--pass-ms", type=float, default=25.0)
    parser.add_argument("--passes", type=int, default=80)
    options = parser.parse_args()
    print(f"machine: {machine()}\nversions: {versions()}\ncommand: {' '.join(sys.argv)}")
    print("sessions  drafts us  pass us  together us  (the quickest quarter of the passes)")
    for sessions in map(int, options.sessions.split(",")):
        bench, took = Bench(sessions), []
        for _ in range(options.passes):
            ends = time.monotonic() + options.pass_ms / 1e3
            drafts_s = bench.take_drafts(options.nodes, options.together)
            time.sleep(max(0.0, ends - time.monotonic()))
            took.append((drafts_s, bench.end_pass()))
        best = max(1, (options.passes - RUN_IN) // 4)
        each = [
            1e6 * sum(sorted(part)[:best]) / best / sessions
            for part in zip(*took[RUN_IN:], strict=True)
        ]
        bench.close()
        print(f"{sessions:8d} {each[0]:10.1f} {each[1]:8.1f} {sum(each):12.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
