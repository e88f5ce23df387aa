"""Run clients that burden a verifier, each kind from an address of its own.

    python benchmarks/hostile_clients.py PORT --kinds stale-drafts,open-cancel [--seconds 5]

It prints "ready", waits for a line on its standard input, plays for the given time and until every
kind has begun, prints a JSON object (for each kind the counts of its messages and their outcomes),
and then waits to be killed, with its streams open. Every kind has a fixed number of clients
(``KINDS``), and each sends as fast as it can. ``--kinds all`` plays all at once, except
``wrong-keys``, which needs a verifier with keys, and ``only-cpu``, a control that is no verifier's
fault. The process is niced to 10, because the measurement is about the verifier, not about the CPU
share of these clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from asyncio.subprocess import DEVNULL
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from fuzz import hostile_uplink
from watched_verifier import START_WITHIN_S, Verifier, line_of, start, tell

from edgespec.core.protocol.messages import Cancel, Commit, Draft, Open, Opened, Received, Uplink
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.wire.access import KEY_HEADER, KEY_SCHEME
from edgespec.wire.codec import WireLimits, decode_downlink, encode_uplink
from tests.kit.gate import Gate

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
# Kinds share the addresses in turn.
ADDRESSES = 16
# Most seconds beyond the given time that a client of each kind may take to begin.
BEGUN_WITHIN_S = 60.0
# All exceptions that the library raises after the end of a call; which one varies with the moment.
OVER = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, RuntimeError, OSError)


class Stream:
    """One stream of raw messages; ``sent`` counts the messages that the library has taken."""

    def __init__(self, call: Any, dice: random.Random, sent: Counter[str]) -> None:
        self._call, self._dice, self._sent = call, dice, sent
        self._turn = asyncio.Lock()  # the library takes one message at a time
        self.prefix = CommittedPrefix((1,))
        self.position = 1
        """The committed length."""

    async def open(self, length: int, sampling: SamplingParams = PLAIN) -> None:
        """Begin a generation from a prompt of ``length`` random tokens."""
        prompt = tuple(self._dice.randrange(1, 64) for _ in range(length))
        self.prefix, self.position = CommittedPrefix(prompt), length
        name = f"hostile-{self._dice.randbytes(8).hex()}"
        await self.send(Open(name, "", "", prompt, sampling=sampling))

    async def send(self, message: Uplink) -> None:
        await self.send_bytes(encode_uplink(message, WIDE))
        self._sent[type(message).__name__] += 1

    async def send_bytes(self, payload: bytes) -> None:
        await self._call.wait_for_connection()
        # ``call.write`` would not do: if the verifier has just ended the stream, it replaces the
        # verifier's status with INTERNAL (grpc/grpc#36066).
        async with self._turn:
            await self._call._cython_call.send_serialized_message(payload)

    async def read(self) -> bool:
        """Read one message; return False at the end of the stream."""
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
        """Run ``flood`` until the stream, which is read meanwhile, has ended."""
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
    """The tools of one hostile client: a way to the verifier, dice, and a tally."""

    relay: Gate
    channel: grpc.aio.Channel
    dice: random.Random
    tally: Counter[str]
    context_length: int
    roots: bytes | None = None
    """Certificates of the verifier's CA; None: no TLS."""
    metadata: tuple[tuple[str, str], ...] = ()
    """Metadata of each call: the key, if there is one."""
    streams: list[Stream] = field(default_factory=list)

    def stream(self) -> Stream:
        method: Any = self.channel.stream_stream(f"{SERVICE}Speculate", None, None)
        stream = Stream(method(metadata=self.metadata), self.dice, self.tally)
        self.streams.append(stream)
        self.tally["streams"] += 1
        return stream

    @asynccontextmanager
    async def way_of_its_own(self) -> AsyncIterator[tuple[Gate, Stream]]:
        """Open a stream over a link of its own."""
        async with (
            Gate(self.relay.port, self.relay.source) as way,
            channel_to(way.address, self.roots) as channel,
        ):
            stream = replace(self, channel=channel, streams=[]).stream()
            await stream.open(20)
            yield way, stream


def channel_to(address: str, roots: bytes | None) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1)]
    if roots is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots), options)


def key_metadata(key: str) -> tuple[tuple[str, str], ...]:
    """Return metadata that shows a key."""
    return ((KEY_HEADER, f"{KEY_SCHEME} {key}"),)


# --- one deed of each kind; repeated until the time is over ---------------------------------------


async def stale_drafts(client: Client) -> None:
    stream = client.stream()
    await stream.open(20)
    base, base_hash = 20, stream.prefix.hash_at(20)

    async def flood() -> None:
        for number in range(1, 1 << 30):
            # The ids are odd in the toy's alphabet. The target may have chosen one: the draft is
            # still stale.
            await stream.send(Draft(number, (0,), (number % 64,), base, base_hash))

    await stream.beside_reading(flood())


async def new_roots(client: Client, sampling: SamplingParams = PLAIN, nodes: int = 32) -> None:
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


async def long_prompts(
    client: Client, share: float = 0.97, sampling: SamplingParams = PLAIN
) -> None:
    """Send prompts that fill ``share`` of the context."""
    stream = client.stream()
    await stream.open(int(share * client.context_length), sampling)
    await stream.read_on()


async def no_open(client: Client) -> None:
    stream = client.stream()
    await stream.read()


async def no_reading(client: Client) -> None:
    """Open a stream, and from then on neither read nor acknowledge."""
    stream = client.stream()
    await stream.open(20)
    await stream._call.code()


async def black_hole(client: Client) -> None:
    """Stream until the device's network swallows everything from some moment on."""
    async with client.way_of_its_own() as (way, stream):
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
    """Let the process or the link of a device die in the middle of a text."""
    async with client.way_of_its_own() as (way, stream):
        for _ in range(client.dice.randrange(1, 30)):
            await stream.read()
            await stream.send(Received(stream.position, 0))
        way.cut()


async def wrong_keys(client: Client) -> None:
    """Show another key each time, at both calls."""
    mine = replace(client, metadata=key_metadata(f"edgespec-{client.dice.randbytes(32).hex()}"))
    if client.dice.random() < 0.5:
        await info(mine)
    else:
        stream = mine.stream()
        while await stream.read():
            pass
    client.tally["let in"] += 1


async def only_cpu(client: Client) -> None:
    """Use a core like a flood's sender, but send nothing: a control."""
    for _ in range(2_000):
        client.dice.random()
    client.tally["rounds"] += 1


@dataclass(frozen=True, slots=True)
class Kind:
    act: Callable[[Client], Awaitable[None]]
    clients: int


CONTROL, WRONG_KEYS = "only-cpu", "wrong-keys"
KINDS = {
    CONTROL: Kind(only_cpu, 1),
    WRONG_KEYS: Kind(wrong_keys, 40),
    "stale-drafts": Kind(stale_drafts, 4),
    "new-roots": Kind(partial(new_roots, nodes=1), 4),
    "wide-roots": Kind(new_roots, 4),
    "costly-roots": Kind(partial(new_roots, sampling=COSTLY), 4),
    "received": Kind(received, 4),
    "open-cancel": Kind(open_cancel, 4),
    "info": Kind(info, 16),
    "huge-opens": Kind(huge_opens, 2),
    "long-prompts": Kind(long_prompts, 16),
    "costly-sampling": Kind(partial(long_prompts, share=0.5, sampling=COSTLY), 8),
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


async def play(options: argparse.Namespace) -> None:
    tallies: dict[str, Counter[str]] = {name: Counter() for name in options.kinds}
    metadata = key_metadata(options.key_file.read_text()) if options.key_file else ()
    roots = options.ca.read_bytes() if options.ca else None
    async with AsyncExitStack() as stack:
        actors = []
        for name in options.kinds:
            place = list(KINDS).index(name)
            source = f"127.0.1.{1 + place % ADDRESSES}"
            relay = await stack.enter_async_context(Gate(options.port, source))
            channel = channel_to(relay.address, roots)
            for number in range(KINDS[name].clients):
                dice = random.Random(f"{options.seed} {name} {number}")
                most = options.context_length
                client = Client(relay, channel, dice, tallies[name], most, roots, metadata)
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
                task.result()  # raises a mistake of this file
        print(json.dumps({name: dict(tally) for name, tally in tallies.items()}), flush=True)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(600.0)


class Hostile:
    """The process of this file, from outside; its clients stand ready until ``play``."""

    async def start(
        self,
        verifier: Verifier,
        kinds: Sequence[str],
        seconds: float,
        seed: int = 1,
        key: Path | None = None,
        ca: Path | None = None,
    ) -> None:
        self._within_s = START_WITHIN_S + seconds
        options = ["--kinds", ",".join(kinds), "--seconds", str(seconds), "--seed", str(seed)]
        options += ["--context-length", str(verifier.context_length)]
        options += [] if key is None else ["--key-file", str(key)]
        options += [] if ca is None else ["--ca", str(ca)]
        self.process = await start(
            "hostile_clients.py", str(verifier.port), *options, stderr=DEVNULL
        )
        await line_of(self.process)

    async def play(self) -> dict[str, dict[str, int]]:
        """Let the clients play and return their counts by kind; then kill them, with all streams
        open."""
        await tell(self.process, "go")
        found: dict[str, dict[str, int]] = json.loads(await line_of(self.process, self._within_s))
        self.process.kill()
        await self.process.wait()
        return found


def kinds(text: str) -> list[str]:
    everything = [name for name in KINDS if name not in (CONTROL, WRONG_KEYS)]
    names = everything if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"unknown: {unknown[0]}; known: {', '.join(KINDS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--kinds", type=kinds, default=kinds("all"))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--key-file", type=Path, help="the key that all of them show")
    parser.add_argument("--ca", type=Path, help="of the verifier's certificate")
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.nice(10)
    asyncio.run(play(options))


if __name__ == "__main__":
    main()
