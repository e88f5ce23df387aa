"""Measure the capacity of one verifier process: its CPU time per session and pass, and the delay of
its passes.

    python benchmarks/daemon_load.py [--sessions 1,8,32,128,256,512]
        [--seconds 5] [--repeats 3]

This program starts a verifier with an emulated pass of ``--pass-ms`` (the toy target's law, looked
up in a table) and the given number of emulated devices in a process of their own (below). It lets
them run in, and measures for ``--seconds``.

Each point has: the period from the start of a pass to the start of the next, and per token of a
session; the CPU time of the event loop's thread, of the whole process (gRPC's threads and the
target's included) and of the load generator, per session and pass; messages and bytes per session
and pass. ``--nodes 0`` is plain streaming. All kinds of points take turns within a repeat. Every
token is compared with the target's own text: the exit status is 1 if one differs.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import random
import select
import shlex
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from watched_verifier import Verifier, answer, kill, line_of, start, tell

from edgespec.bench.report import describe_machine, list_versions
from edgespec.config import LimitsSection, PacingSection, VerifierConfig
from edgespec.core.device.session import RECEIVED_EVERY
from edgespec.core.protocol.messages import Draft, Open, Received, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.models.toy import TOY_CONTEXT_LENGTH, TOY_MODEL
from edgespec.wire.codec import encode_uplink
from edgespec.wire.pb import speculation_pb2 as pb

EMULATED = "emulated-devices"
"""First argument that makes this process play the devices."""
PROMPT = (5, 11, 7, 3, 29, 2, 17, 13)
RUN_IN_S = 1.5


Point = dict[str, float]
"""One measurement, by the keys of ``COLUMNS``. CPU times are in microseconds; they and messages,
bytes, tokens and nodes are per session and pass."""
COLUMNS = {
    "sessions": "{:.0f}",
    "sends": "{:.0f}",  # nodes that a device sends for each pass
    "period ms": "{:.2f}",
    "p95": "{:.2f}",
    "late": "{:.1%}",  # excess of the median period over the emulated pass
    "ms/token": "{:.1f}",  # a reader's wait: not every session takes part in every pass
    "loop us": "{:.0f}",
    "process us": "{:.0f}",
    "target us": "{:.0f}",
    "devices us": "{:.0f}",
    "up": "{:.2f}",
    "down": "{:.2f}",
    "B up": "{:.0f}",
    "B down": "{:.0f}",
    "tokens": "{:.2f}",
    "nodes": "{:.2f}",
    "ended": "{:.0f}",
}
KIND = ("sessions", "sends")


async def measure(sessions: int, nodes: int, options: argparse.Namespace) -> Point:
    """Run one verifier and its devices from their start to their end; return the measurement."""
    flags = ["--table", *shlex.split(options.verifier_flags)]
    with tempfile.TemporaryDirectory() as name:
        verifier, devices = Verifier(config_of(sessions, options), Path(name), *flags), Devices()
        try:
            await verifier.start()
            load = {"port": verifier.port, "devices": sessions, "nodes": nodes}
            load |= {"rate": options.rate, "pass_ms": options.pass_ms}
            devices.process = await start("daemon_load.py", EMULATED, json.dumps(load))
            await line_of(devices.process)
            await asyncio.sleep(RUN_IN_S)
            before = await counts(verifier, devices)
            await asyncio.sleep(options.seconds)
            after = await counts(verifier, devices)
            await kill(devices)
            await verifier.stop()
        finally:
            await kill(devices)
            await kill(verifier)
    return point((sessions, nodes), before, after, options.pass_ms)


def config_of(sessions: int, options: argparse.Namespace) -> VerifierConfig:
    limits = LimitsSection(
        max_sessions=min(1024, 2 * sessions + 8),
        max_cached_tokens=min(1 << 30, (sessions + 8) * TOY_CONTEXT_LENGTH),
        max_rows_per_pass=16 * (sessions + 8),
        lease_s=1.0,
    )
    return VerifierConfig(
        model="toy",
        port=0,
        pacing=PacingSection(options.pass_ms),
        limits=limits,
        server_drafts=False,  # the measurement is about the nodes that devices send
        drain_s=0.0,
    )


class Devices:
    """The devices' process, seen from outside."""

    process: Any = None


Counts = tuple[dict[str, Any], dict[str, Any]]


async def counts(verifier: Verifier, devices: Devices) -> Counts:
    await tell(devices.process, "count")
    theirs: dict[str, Any] = json.loads(await line_of(devices.process))
    return await verifier.look(), theirs


def point(kind: tuple[int, int], before: Counts, after: Counts, pass_ms: float) -> Point:
    sessions, passes = kind[0], after[0]["passes"] - before[0]["passes"]
    starts = [at for at in after[0]["starts_s"] if at > before[0]["starts_s"][-1]]
    periods = sorted(1e3 * (later - sooner) for sooner, later in pairwise(starts))

    def per_pass(name: str, who: int, scale: float = 1.0) -> float:
        change = after[who].get(name, 0) - before[who].get(name, 0)
        return float(scale * change / (sessions * passes))

    middle = statistics.median(periods)
    found = {
        **dict(zip(KIND, kind, strict=True)),
        "passes": passes,
        "period ms": middle,
        "p95": periods[int(0.95 * (len(periods) - 1))],
        "late": middle / pass_ms - 1.0,
        "loop us": per_pass("loop_cpu_s", 0, 1e6),
        "process us": per_pass("process_cpu_s", 0, 1e6),
        "target us": per_pass("target_cpu_s", 0, 1e6),
        "devices us": per_pass("cpu_s", 1, 1e6),
        "up": sum(per_pass(message, 1) for message in ("Open", "Draft", "Received")),
        "down": per_pass("commit", 1),
        "B up": per_pass("bytes_up", 1),
        "B down": per_pass("bytes_down", 1),
        "tokens": per_pass("tokens", 1),
        "nodes": per_pass("drafted", 0),
        "wrong": after[1].get("wrong", 0),
        "ended": after[1].get("ended", 0),
    }
    return {**found, "ms/token": middle / found["tokens"] if found["tokens"] else float("inf")}


def table(points: list[Point]) -> str:
    """Return a row for each kind of point: the median of its repeats, and the spread of the main
    figures."""
    lines = ["  ".join(f"{title:>10}" for title in COLUMNS)]
    for kind in sorted({tuple(point[name] for name in KIND) for point in points}):
        same = [point for point in points if tuple(point[name] for name in KIND) == kind]
        cells = []
        for name, form in COLUMNS.items():
            values = [found[name] for found in same]
            cell = form.format(statistics.median(values))
            if name in ("ms/token", "loop us") and len(values) > 1:
                cell += f" ±{(max(values) - min(values)) / 2:.2g}"
            cells.append(f"{cell:>10}")
        lines.append("  ".join(cells))
    return "\n".join(lines)


async def run(options: argparse.Namespace) -> list[Point]:
    points: list[Point] = []
    kinds = [*product(numbers(options.sessions), numbers(options.nodes))]
    for repeat in range(options.repeats):
        turn = repeat % len(kinds)
        for kind in kinds[turn:] + kinds[:turn]:
            try:
                points.append(await measure(*kind, options))
            except (TimeoutError, RuntimeError) as error:
                why = f"{type(error).__name__} {error}"
                print(f"{kind[0]} sessions could not be played: {why}", file=sys.stderr)
                continue
            shown = table(points[-1:]).splitlines()
            print("\n".join(shown if len(points) == 1 else shown[1:]), file=sys.stderr, flush=True)
    return points


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


# --- a gRPC stream as cheap bytes: the little of HTTP/2 that a load generator needs ---------------

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ACK = END_STREAM = 1
_END_HEADERS = 4
_WINDOW = (1 << 31) - 1
_FRAME = struct.Struct(">IBI")
"""Frame header: length (24 bits) and kind, flags, stream."""
_READ_BYTES = 1 << 14


class RawCall:
    """One bidirectional call of ``path`` (such as "/package.Service/Method") at ``port`` of this
    machine, over a connection of its own from the address ``source``.

    ``send`` frames a message, ``receive`` returns the received ones. Settings and pings are
    acknowledged, and the window is opened once for good. It has no TLS, no compression, and no flow
    control upwards: it is for small messages to a server that reads them. Raises ``OSError``.
    """

    def __init__(self, port: int, path: str, source: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 30.0, (source, 0))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.over = False
        """Whether the server has ended the call."""
        self._unread = self._partial = b""
        headers = b"".join(
            _header(name, value)
            for name, value in (
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", "load"),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
            )
        )
        self._write(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, _WINDOW))  # initial window size
            + _frame(8, 0, 0, struct.pack(">I", _WINDOW - 65_535))  # window update
            + _frame(_HEADERS, _END_HEADERS, 1, headers)
        )

    def send(self, message: bytes) -> None:
        """Send a message at once: the kernel takes it whole, or it is an error."""
        length = len(message)
        self._write(
            (length + 5).to_bytes(3, "big")
            + b"\0\0\0\0\0\1\0"
            + length.to_bytes(4, "big")
            + message
        )

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived whole; block only if no byte has arrived."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            self.over = True
            return []
        if self._unread:
            data = self._unread + data
        found: list[bytes] = []
        at, end = 0, len(data)
        while end - at >= _FRAME.size:
            word, flags, _ = _FRAME.unpack_from(data, at)
            begin, kind = at + _FRAME.size, word & 0xFF
            stop = begin + (word >> 8)
            if stop > end:
                break
            if kind == _DATA:
                found += self._messages(data[begin:stop])
            elif kind != _HEADERS or flags & END_STREAM:
                self._control(kind, flags, data[begin:stop])
            at = stop
        self._unread = data[at:]
        return found

    def _control(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind in (_HEADERS, _RESET, _GOAWAY):
            self.over = True

    def _messages(self, data: bytes) -> list[bytes]:
        """Return the messages that are whole with these further bytes of the call."""
        if self._partial:
            data = self._partial + data
        found: list[bytes] = []
        at, end = 0, len(data)
        while end - at >= 5:
            begin = at + 5
            stop = begin + int.from_bytes(data[at + 1 : begin], "big")
            if stop > end:
                break
            found.append(data[begin:stop])
            at = stop
        self._partial = data[at:]
        return found

    def _write(self, data: bytes) -> None:
        self.socket.sendall(data)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: str, value: str) -> bytes:
    """Encode a literal that is not indexed (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


# --- the devices ---------------------------------------------------------------------------------
#
# Each generates the text (prompt and the target's own answer) over a connection of its own, again
# and again. For each pass it sends ``--nodes`` nodes in one message: a tree of width two behind
# what it sent before, whose first choices are right with ``--rate``. It acknowledges as
# the agent does. Their process prints "ready" when all streams have their first commit; "count" on
# its input makes it print a JSON object of what went to and fro so far, and the end of the input
# ends it.

PATH = "/edgespec.v1.Verifier/Speculate"
WIDTH = 2
# Nodes sent and not judged yet: two passes' worth, like an agent near its verifier.
PASSES_AHEAD = 2
# Most devices that open their first stream at a time.
OPENING = 64


class Text:
    """A prompt, the target's own tokens after it, and the hash of each of its beginnings."""

    def __init__(self) -> None:
        self.prompt, self.vocabulary_size = PROMPT, TOY_MODEL.vocabulary_size
        said = answer(PROMPT, TOY_CONTEXT_LENGTH - len(PROMPT) - 64)
        self.tokens = (*self.prompt, *said)
        prefix = CommittedPrefix(self.prompt)
        self.hashes = {prefix.length: prefix.hash_at(prefix.length)}
        for token in said:
            prefix.extend((token,))
            self.hashes[prefix.length] = prefix.hash_at(prefix.length)


class Device:
    """A device that costs next to nothing: raw messages, guesses by the dice. ``number`` seeds its
    dice and names its sessions."""

    def __init__(self, number: int, text: Text, options: argparse.Namespace) -> None:
        self._text, self._options, self._number = text, options, number
        self._dice = random.Random(f"device {number}")
        self._texts = 0
        self.counts: Counter[str] = Counter()
        self.call: RawCall
        self.open()

    def open(self) -> None:
        """Begin the text anew, on a new connection."""
        text, self._texts = self._text, self._texts + 1
        # Each device has an address of its own, because a verifier bounds the usage of one address.
        source = f"127.{1 + self._number // 250}.0.{1 + self._number % 250}"
        self.call = RawCall(self._options.port, PATH, source)
        self.call.socket.setblocking(True)
        self.position = self._acknowledged = len(text.prompt)
        self._last_id, self._chain = 0, list[int]()
        """Ids of the first choices from ``position`` on, as long as they are right; the last one
        may be wrong."""
        self._wrong_at: int | None = None
        most = len(text.tokens) - len(text.prompt)
        sampling = SamplingParams(max_tokens=most, ignore_eos=True)
        name = f"load-{self._number}-{self._texts}"
        # Run-ahead is ALWAYS, so that every session takes part in every pass, with a draft or
        # without.
        request = Open(name, "", "", text.prompt, sampling=sampling, run_ahead=RunAhead.ALWAYS)
        self._send(encode_uplink(request), "Open")

    def read(self) -> bool:
        """Process all received messages; return whether a commit was among them."""
        found = False
        try:
            payloads = self.call.receive()
        except OSError:  # the verifier cut the connection: the text is begun anew
            payloads, self.call.over = [], True
        for payload in payloads:
            wire = pb.VerifierMessage.FromString(payload)
            kind = wire.WhichOneof("kind")
            self.counts[kind] += 1
            self.counts["bytes_down"] += len(payload)
            if kind == "commit" and wire.commit.tokens:
                found = True
                self._commit(wire.commit.position, tuple(wire.commit.tokens))
        if self.call.over:
            self.counts["ended"] += 1
            self.call.socket.close()
        return found

    def draft(self) -> None:
        """Send one message with ``--nodes`` more nodes, if the tree has room for them."""
        options, text, dice = self._options, self._text, self._dice
        room = PASSES_AHEAD * options.nodes - WIDTH * len(self._chain)
        steps = min(options.nodes, room) // WIDTH
        at = self.position + len(self._chain)
        steps = min(steps, len(text.tokens) - 2 - at)
        if steps <= 0 or self._wrong_at is not None:
            return
        first = self._last_id + 1
        parents: list[int] = []
        tokens: list[int] = []
        parent = self._chain[-1] if self._chain else 0
        for position in range(at, at + steps):
            right, size = text.tokens[position], text.vocabulary_size
            choices = [right, (right + 1) % size]
            if dice.random() >= options.rate:
                choices.reverse()
            if self._wrong_at is None and choices[0] != right:
                self._wrong_at = position
            tokens += choices
            parents += [parent, parent]
            parent = first + len(tokens) - WIDTH
            self._chain.append(parent)
        self._last_id += len(tokens)
        base = self.position if 0 in parents else 0
        message = Draft(first, tuple(parents), tuple(tokens), base, text.hashes.get(base, 0))
        self.counts["nodes"] += len(tokens)
        self._send(encode_uplink(message), "Draft")

    def _commit(self, position: int, tokens: tuple[int, ...]) -> None:
        right = self._text.tokens[position : position + len(tokens)]
        if tokens != right or position != self.position:
            self.counts["wrong"] += 1
        self.counts["tokens"] += len(tokens)
        self.position += len(tokens)
        missed = self._wrong_at is not None and self._wrong_at < self.position
        if missed or len(tokens) > len(self._chain):
            self._chain, self._wrong_at = [], None
        else:
            del self._chain[: len(tokens)]
        if self.position == len(self._text.tokens):
            self._send(encode_uplink(Received(self.position, 0)), "Received")
        elif self.position - self._acknowledged >= RECEIVED_EVERY:
            self._acknowledged = self.position
            self._send(encode_uplink(Received(self.position, self.position)), "Received")

    def _send(self, payload: bytes, kind: str) -> None:
        self.counts[kind] += 1
        self.counts["bytes_up"] += len(payload)
        try:
            self.call.send(payload)
        except OSError:
            self.call.over = True


def play(options: argparse.Namespace) -> None:
    text, poll, orders = Text(), select.epoll(), sys.stdin.fileno()
    poll.register(orders, select.EPOLLIN)
    devices: list[Device] = []
    device_of: dict[int, Device] = {}
    """Devices by the descriptor of their socket."""
    begun: set[Device] = set()
    # A device drafts this long after a commit.
    draft_s = 0.4 * options.pass_ms / 1e3
    due: list[tuple[float, int, Device]] = []
    while True:
        while len(devices) < options.devices and len(devices) < len(begun) + OPENING:
            devices.append(device := Device(len(devices), text, options))
            watch(device, poll, device_of)
        wait_s = max(0.0, due[0][0] - time.monotonic()) if due else 0.05
        for descriptor, _ in poll.poll(min(wait_s, 0.05)):
            if descriptor == orders:
                if not (word := os.read(orders, 4096)):
                    return
                if b"count" in word:
                    print(json.dumps(sum_counts(devices)), flush=True)
                continue
            device = device_of[descriptor]
            if device.read():
                heapq.heappush(due, (time.monotonic() + draft_s, id(device), device))
                if device not in begun:
                    begun.add(device)
                    if len(begun) == options.devices:
                        print("ready", flush=True)
            if device.call.over:
                del device_of[descriptor]  # the kernel forgets it with its socket
                device.call.socket.close()
                device.open()
                watch(device, poll, device_of)
        now = time.monotonic()
        while due and due[0][0] <= now:
            heapq.heappop(due)[2].draft()


def watch(device: Device, poll: select.epoll, device_of: dict[int, Device]) -> None:
    descriptor = device.call.socket.fileno()
    poll.register(descriptor, select.EPOLLIN)
    device_of[descriptor] = device


def sum_counts(devices: list[Device]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for device in devices:
        counts += device.counts
    return {**counts, "cpu_s": time.process_time()}


# --- the command ---------------------------------------------------------------------------------


def main() -> int:
    if sys.argv[1:2] == [EMULATED]:
        play(argparse.Namespace(**json.loads(sys.argv[2])))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", default="1,8,32,128,256,512")
    parser.add_argument("--nodes", default="8", help="that a device sends for each pass")
    parser.add_argument("--rate", type=float, default=0.8, help="how often a first choice is right")
    parser.add_argument("--pass-ms", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--verifier-flags", default="", help="of `edgespec verifier`")
    parser.add_argument("--json", type=Path, help="where all points go")
    options = parser.parse_args()
    head = {
        "command": shlex.join(sys.argv),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": describe_machine(),
        "versions": list_versions(),
    }
    points = asyncio.run(run(options))
    for name, value in head.items():
        print(f"{name}: {value}")
    print(table(points))
    if options.json is not None:
        options.json.write_text(json.dumps({**head, "points": points}, indent=1))
    wrong = sum(found["wrong"] for found in points)
    if wrong:
        print(f"{wrong:.0f} commits differ from the target's own text")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
