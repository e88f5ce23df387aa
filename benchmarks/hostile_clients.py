"""Clients that are a burden to a verifier, each kind from an address of its own.

    python benchmarks/hostile_clients.py PORT --kinds stale-drafts,open-cancel [--seconds 5]

It prints "ready", waits for a line on its standard input, plays for the given time and until every
kind has begun, prints a JSON object (for each kind what was sent and what became of it) and then
waits to be killed, with its streams open. Every kind has a fixed number of clients (``KINDS``) and
each sends as fast as it is let. ``only-cpu`` is a control, which no verifier can be to blame for,
and not among "all". The process is niced to 10: what is measured is how the verifier holds out,
not how hungry these clients are. ``--kinds all`` plays all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from hostile_messages import hostile_uplink

from edgespec.core.protocol.messages import Cancel, Commit, Draft, Open, Opened, Received, Uplink
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.wire.codec import WireLimits, decode_downlink, encode_uplink
from edgespec.wire.grpc_calls import KEY_HEADER, KEY_SCHEME
from tests.shell.gate import Gate

SERVICE = "/edgespec.v1.Verifier/"
WIDE = WireLimits.for_context(1 << 20)
PLAIN = SamplingParams(max_tokens=2_000, ignore_eos=True)
COSTLY = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    max_tokens=2_000,
    ignore_eos=True,
)
# How long a client of each kind may take to do its first deed beyond the given time.
BEGUN_WITHIN_S = 60.0
# All that the library raises when a call is over; which one varies with the moment.
OVER = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, RuntimeError, OSError)


class Stream:
    """One stream of raw messages; ``sent`` counts those the library has taken."""

    def __init__(self, call: Any, dice: random.Random, sent: Counter[str]) -> None:
        self._call, self._dice, self._sent = call, dice, sent
        self._turn = asyncio.Lock()  # the library takes one message at a time
        self.prefix = CommittedPrefix((1,))
        self.position = 1
        """Committed so far."""

    async def open(self, length: int, sampling: SamplingParams = PLAIN) -> None:
        """Begin a generation from a prompt of so many random tokens."""
        prompt = tuple(self._dice.randrange(1, 64) for _ in range(length))
        self.prefix, self.position = CommittedPrefix(prompt), length
        name = f"hostile-{self._dice.randbytes(8).hex()}"
        await self.send(Open(name, "", "", prompt, sampling=sampling))

    async def send(self, message: Uplink) -> None:
        await self.send_bytes(encode_uplink(message, WIDE))
        self._sent[type(message).__name__] += 1

    async def send_bytes(self, payload: bytes) -> None:
        await self._call.wait_for_connection()
        # Not ``call.write``: when the verifier has just ended the stream, that replaces the
        # verifier's status with INTERNAL (grpc/grpc#36066).
        async with self._turn:
            await self._call._cython_call.send_serialized_message(payload)

    async def read(self) -> bool:
        """Take one message in; False at the end of the stream."""
        payload = await self._call.read()
        if payload is grpc.aio.EOF:
            return False
        message = decode_downlink(payload, WIDE)
        if isinstance(message, Commit):
            self.prefix.extend(message.tokens[self.prefix.length - message.position :])
            self.position = self.prefix.length
        elif isinstance(message, Opened):
            self._sent["opened"] += 1
        return True

    async def read_on(self, pause_s: float = 0.0) -> None:
        """Read and acknowledge until the stream ends."""
        while await self.read():
            await self.send(Received(self.position, 0))
            await asyncio.sleep(pause_s)

    async def beside_reading(self, flood: Awaitable[None]) -> None:
        """Do something until the stream, read meanwhile, has ended."""
        tasks = [asyncio.ensure_future(self.read_on()), asyncio.ensure_future(flood)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    def leave(self) -> None:
        self._call.cancel()


@dataclass
class Client:
    """What one hostile client has: a way to the verifier, dice, and a tally."""

    relay: Gate
    channel: grpc.aio.Channel
    dice: random.Random
    tally: Counter[str]
    context_length: int
    metadata: tuple[tuple[str, str], ...] = ()
    """Of each call: the key, if there is one."""
    streams: list[Stream] = field(default_factory=list)

    def stream(self) -> Stream:
        method: Any = self.channel.stream_stream(f"{SERVICE}Speculate", None, None)
        stream = Stream(method(metadata=self.metadata), self.dice, self.tally)
        self.streams.append(stream)
        self.tally["streams"] += 1
        return stream


# --- what they do, once over; repeated until the time is over -----------------------------------


async def stale_drafts(client: Client) -> None:
    stream = client.stream()
    await stream.open(20)
    base, base_hash = 20, stream.prefix.hash_at(20)

    async def flood() -> None:
        for number in range(1, 1 << 30):
            # Odd ids of the toy's alphabet, one of which the target may have chosen: still stale.
            await stream.send(Draft(number, (0,), (number % 64,), base, base_hash))

    await stream.beside_reading(flood())


async def _new_roots(client: Client, sampling: SamplingParams, nodes: int) -> None:
    stream = client.stream()
    await stream.open(20, sampling)

    async def flood() -> None:
        first = 1
        while True:
            base = stream.position
            tokens = tuple(client.dice.randrange(1, 64) for _ in range(nodes))
            await stream.send(Draft(first, (0,) * nodes, tokens, base, stream.prefix.hash_at(base)))
            first += nodes
            await asyncio.sleep(0.0)

    await stream.beside_reading(flood())


async def new_roots(client: Client) -> None:
    await _new_roots(client, PLAIN, 1)


async def wide_roots(client: Client) -> None:
    await _new_roots(client, PLAIN, 32)


async def costly_roots(client: Client) -> None:
    await _new_roots(client, COSTLY, 32)


async def received(client: Client) -> None:
    stream = client.stream()
    await stream.open(20)

    async def flood() -> None:
        while True:
            await stream.send(Received(stream.position, client.dice.randrange(1 << 30)))

    await stream.beside_reading(flood())


async def open_cancel(client: Client) -> None:
    stream = client.stream()
    await stream.open(20)
    if await stream.read():
        await stream.send(Cancel())
    while await stream.read():
        pass


async def info(client: Client) -> None:
    ask: Any = client.channel.unary_unary(f"{SERVICE}Info", None, None)
    client.tally["asked"] += 1
    await ask(b"", metadata=client.metadata)
    client.tally["answered"] += 1


async def huge_opens(client: Client) -> None:
    stream = client.stream()
    await stream.open(client.dice.choice((50_000, 262_144)))
    while await stream.read():
        pass


async def long_prompts(client: Client) -> None:
    stream = client.stream()
    await stream.open(client.context_length - 100)
    await stream.read_on()


async def costly_sampling(client: Client) -> None:
    stream = client.stream()
    await stream.open(client.context_length // 2, COSTLY)
    await stream.read_on()


async def no_open(client: Client) -> None:
    stream = client.stream()
    await stream.read()


async def no_reading(client: Client) -> None:
    """Opens, and from then on neither reads nor acknowledges."""
    stream = client.stream()
    await stream.open(20)
    await stream._call.code()


async def black_hole(client: Client) -> None:
    """The network of a device that streams swallows everything from some moment on."""
    async with Gate(client.relay.port, client.relay.source) as way:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(way.address, options=options) as channel:
            mine = replace(client, relay=way, channel=channel, streams=[])
            stream = mine.stream()
            await stream.open(20)
            for _ in range(client.dice.randrange(1, 30)):
                await stream.read()
            way.swallow()
            await asyncio.sleep(5.0)
            stream.leave()


async def slow_reader(client: Client) -> None:
    stream = client.stream()
    await stream.open(20)
    await stream.read_on(0.3)


async def malformed(client: Client) -> None:
    stream = client.stream()
    if client.dice.random() < 0.7:
        await stream.open(20)
    for _ in range(client.dice.randrange(1, 20)):
        await stream.send_bytes(hostile_uplink(client.dice))
        client.tally["malformed"] += 1
    while await stream.read():
        pass


async def killed(client: Client) -> None:
    """A device whose process or link dies in the middle of a text."""
    async with Gate(client.relay.port, client.relay.source) as way:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(way.address, options=options) as channel:
            mine = replace(client, relay=way, channel=channel, streams=[])
            stream = mine.stream()
            await stream.open(20)
            for _ in range(client.dice.randrange(1, 30)):
                await stream.read()
                await stream.send(Received(stream.position, 0))
            way.cut()


async def only_cpu(client: Client) -> None:
    """A control: it sends nothing, but takes a core as a flood's sender does."""
    for _ in range(2_000):
        client.dice.random()
    client.tally["rounds"] += 1


@dataclass(frozen=True, slots=True)
class Kind:
    act: Callable[[Client], Awaitable[None]]
    clients: int


CONTROL = "only-cpu"
KINDS = {
    CONTROL: Kind(only_cpu, 1),
    "stale-drafts": Kind(stale_drafts, 4),
    "new-roots": Kind(new_roots, 4),
    "wide-roots": Kind(wide_roots, 4),
    "costly-roots": Kind(costly_roots, 4),
    "received": Kind(received, 4),
    "open-cancel": Kind(open_cancel, 4),
    "info": Kind(info, 16),
    "huge-opens": Kind(huge_opens, 2),
    "long-prompts": Kind(long_prompts, 16),
    "costly-sampling": Kind(costly_sampling, 8),
    "no-open": Kind(no_open, 128),
    "no-reading": Kind(no_reading, 64),
    "black-hole": Kind(black_hole, 16),
    "slow-reader": Kind(slow_reader, 16),
    "malformed": Kind(malformed, 4),
    "killed": Kind(killed, 8),
}


# --- playing them --------------------------------------------------------------------------------


async def again_and_again(client: Client, act: Callable[[Client], Awaitable[None]]) -> None:
    while True:
        try:
            await act(client)
        except OVER as error:
            code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
            client.tally["refused" if code is None else code.name] += 1
            await asyncio.sleep(0.02)
        for stream in client.streams:
            stream.leave()
        client.streams.clear()
        await asyncio.sleep(0.0)


async def play(options: argparse.Namespace) -> dict[str, dict[str, int]]:
    tallies: dict[str, Counter[str]] = {name: Counter() for name in options.kinds}
    key = options.key_file.read_text().strip() if options.key_file else ""
    metadata = ((KEY_HEADER, f"{KEY_SCHEME} {key}"),) if key else ()
    length = options.context_length
    async with AsyncExitStack() as stack:
        actors = []
        for name in options.kinds:
            place = list(KINDS).index(name)
            source = f"127.0.1.{1 + place % options.addresses}"
            relay = await stack.enter_async_context(Gate(options.port, source))
            channel = grpc.aio.insecure_channel(
                relay.address, options=[("grpc.use_local_subchannel_pool", 1)]
            )
            for number in range(max(1, round(KINDS[name].clients * options.share))):
                dice = random.Random(f"{options.seed} {name} {number}")
                client = Client(relay, channel, dice, tallies[name], length, metadata)
                actors.append((client, KINDS[name].act))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        tasks = [asyncio.create_task(again_and_again(*actor)) for actor in actors]
        await asyncio.sleep(options.seconds)
        for _ in range(round(BEGUN_WITHIN_S / 0.1)):  # on a busy machine some kinds begin late
            if all(tallies.values()):
                break
            await asyncio.sleep(0.1)
        for task in tasks:
            if task.done():
                task.result()  # a mistake of ours
        print(json.dumps({name: dict(tally) for name, tally in tallies.items()}), flush=True)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(600.0)
    return {}


def kinds(text: str) -> list[str]:
    everything = [name for name in KINDS if name != CONTROL]
    names = everything if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"unknown: {unknown[0]}; known: {', '.join(KINDS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--kinds", type=kinds, default=kinds("all"))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--share", type=float, default=1.0, help="of the clients of each kind")
    parser.add_argument("--addresses", type=int, default=16, help="kinds share them in turn")
    parser.add_argument("--key-file", type=Path, help="the key that all of them show")
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.nice(10)
    asyncio.run(play(options))


if __name__ == "__main__":
    main()
