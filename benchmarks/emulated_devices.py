"""Devices that cost a load generator next to nothing: raw messages, guesses by the dice.

    python benchmarks/emulated_devices.py PORT TEXT --devices 128 [--nodes 8] [--messages 1]

Each device generates the text of TEXT (prompt and the target's own answer, as JSON) over a
connection of its own, again and again. For each pass it sends ``--nodes`` nodes in ``--messages``
messages: a tree of width two behind what it sent before, whose first choices are right with
``--rate``. It acknowledges as the agent does. Prints "ready" when all streams have their first
commit; "count" on standard input makes it print a JSON object of what went to and fro so far, and
the end of the input ends it. Every token that comes is compared with TEXT.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import select
import sys
import time
from collections import Counter
from pathlib import Path

from raw_http2 import RawCall

from edgespec.core.device.commit_reader import RECEIVED_EVERY
from edgespec.core.protocol.messages import Draft, Open, Received, RunAhead
from edgespec.core.protocol.prefix import CommittedPrefix
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.transport.codec import encode_uplink
from edgespec.transport.pb import speculation_pb2 as pb

PATH = "/edgespec.v1.Verifier/Speculate"
WIDTH = 2
# Nodes sent and not decided on yet: two passes' worth, as an agent near its verifier holds them.
PASSES_AHEAD = 2
# How many open their first stream at a time.
OPENING = 64


class Text:
    """A prompt, the target's own tokens behind it, and the hash of each of its beginnings."""

    def __init__(self, path: Path) -> None:
        found = json.loads(path.read_text())
        self.prompt = tuple(found["prompt"])
        self.vocabulary_size: int = found["vocabulary_size"]
        self.tokens = (*self.prompt, *found["answer"])
        prefix = CommittedPrefix(self.prompt)
        self.hashes = {prefix.length: prefix.hash_at(prefix.length)}
        for token in found["answer"]:
            prefix.extend((token,))
            self.hashes[prefix.length] = prefix.hash_at(prefix.length)


class Device:
    """One device; ``number`` seeds its dice and names its sessions."""

    def __init__(self, number: int, text: Text, options: argparse.Namespace) -> None:
        self._text, self._options, self._number = text, options, number
        self._dice = random.Random(f"{options.seed} device {number}")
        self._texts = 0
        self.counts: Counter[str] = Counter()
        self.call: RawCall
        self.open()

    def open(self) -> None:
        """Begin the text anew, on a new connection."""
        text, self._texts = self._text, self._texts + 1
        # Each from an address of its own: a verifier bounds what one address may hold.
        source = f"127.{1 + self._number // 250}.0.{1 + self._number % 250}"
        self.call = RawCall(self._options.port, PATH, source)
        self.call.socket.setblocking(True)
        self.position = self._acknowledged = len(text.prompt)
        self._last_id, self._chain = 0, []
        """Ids of the first choices at ``position`` and on, as long as they are right; the last may
        be a wrong one."""
        self._wrong_at: int | None = None
        most = len(text.tokens) - len(text.prompt)
        sampling = SamplingParams(max_tokens=most, ignore_eos=True)
        name = f"load-{self._options.seed}-{self._number}-{self._texts}"
        # Always: so that every session takes part in every pass, with a draft or without.
        request = Open(name, "", "", text.prompt, sampling=sampling, run_ahead=RunAhead.ALWAYS)
        self._send(encode_uplink(request), "Open")

    def read(self) -> bool:
        """Take in what has come; whether a commit was among it."""
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
            self.call.close()
        return found

    def draft(self, count: int) -> None:
        """Send one message with so many more nodes, if the tree has room for them."""
        options, text, dice = self._options, self._text, self._dice
        room = PASSES_AHEAD * options.nodes - WIDTH * len(self._chain)
        steps = min(count, room) // WIDTH
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
    text, poll, orders = Text(options.text), select.epoll(), sys.stdin.fileno()
    poll.register(orders, select.EPOLLIN)
    devices: list[Device] = []
    device_of: dict[int, Device] = {}
    """By the descriptor of its socket."""
    begun: set[Device] = set()
    # When a device sends which message of a pass: spread over the pass behind its commit.
    spread_s = options.pass_ms / 1e3 / options.messages
    offsets = [(number + 0.4) * spread_s for number in range(options.messages)]
    share = options.nodes // options.messages
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
                    print(json.dumps(total(devices)), flush=True)
                continue
            device = device_of[descriptor]
            if device.read():
                now = time.monotonic()
                for offset_s in offsets:
                    heapq.heappush(due, (now + offset_s, id(device), device))
                if device not in begun:
                    begun.add(device)
                    if len(begun) == options.devices:
                        print("ready", flush=True)
            if device.call.over:
                del device_of[descriptor]  # the kernel forgets it with its socket
                device.call.close()
                device.open()
                watch(device, poll, device_of)
        now = time.monotonic()
        while due and due[0][0] <= now:
            heapq.heappop(due)[2].draft(share)


def watch(device: Device, poll: select.epoll, device_of: dict[int, Device]) -> None:
    descriptor = device.call.socket.fileno()
    poll.register(descriptor, select.EPOLLIN)
    device_of[descriptor] = device


def total(devices: list[Device]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for device in devices:
        counts += device.counts
    return {**counts, "cpu_s": time.process_time()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("text", type=Path)
    parser.add_argument("--devices", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=8, help="sent for each pass")
    parser.add_argument("--messages", type=int, default=1, help="in which they are sent")
    parser.add_argument("--rate", type=float, default=0.8, help="how often a first choice is right")
    parser.add_argument("--pass-ms", type=float, default=25.0)
    parser.add_argument("--seed", type=int, default=1)
    play(parser.parse_args())


if __name__ == "__main__":
    main()
