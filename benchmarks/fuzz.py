"""Random and mutated messages: at the codec, and at the socket of a real verifier.

    python benchmarks/fuzz.py [--messages 100000] [--streams 5000] [--seed 1] [--model toy]

The verifier is a process of its own with a small context and short leases; ``--cached-tokens``
makes its KV pool small (``--model bundled``). Hostile streams come from eight addresses of this
machine (127.0.1.1 and on), an honest device from 127.0.0.1. Findings, each of which makes the exit
status 1: an exception of the codec other than ``ProtocolViolation``, a stream that ends with
UNKNOWN, INTERNAL or not at all, a text of the honest device that differs from its text before, a
traceback in the log, memory that grows, sessions left behind, an exit status other than 0.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
from hostile_messages import VOCABULARY, fuzz_codec, hostile_uplink, valid_open

from edgespec.bench.report import machine, versions
from edgespec.config import AgentConfig, DraftSection, LimitsSection, VerifierConfig, dump_config
from edgespec.core.protocol.messages import Cancel, Draft, Received
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent
from edgespec.wire.codec import WireLimits, encode_uplink
from edgespec.wire.grpc_client import GrpcTransport
from tests.shell.gate import Gate

CONTEXT_LENGTH, LEASE_S = 256, 1.0
PEERS, STREAMS_AT_ONCE = 8, 32
# A stream that half-closes ends as soon as it has had its turn.
PATIENCE_S = 45.0
WIDE = WireLimits.for_context(1 << 20)
MAX_GROWTH_BYTES = 64 << 20
CLEAN = frozenset(
    "OK CANCELLED ABORTED INVALID_ARGUMENT NOT_FOUND FAILED_PRECONDITION OUT_OF_RANGE "
    "RESOURCE_EXHAUSTED".split()
)
HONEST = (
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=40, ignore_eos=True),
)


@dataclass
class Tally:
    """What was seen so far."""

    ends: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    honest_texts: int = 0
    honest_faults: int = 0


# --- the verifier and the way to it ---------------------------------------------------------


class Verifier:
    """The daemon in a process of its own, its log in a file."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        limits = LimitsSection(
            max_sessions=256, max_cached_tokens=options.cached_tokens, lease_s=LEASE_S
        )
        config = VerifierConfig(
            model=options.model, port=0, max_model_len=CONTEXT_LENGTH, limits=limits
        )
        path = folder / "verifier.yaml"
        path.write_text(dump_config(config))
        self.log = folder / "verifier.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "edgespec", "verifier", "--config", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "ready on" not in line:
            raise RuntimeError(f"the verifier did not start: {line}{self.log.read_text()}")
        self.port = int(line.split(": ")[0].rpartition(":")[2])
        self.memory = psutil.Process(self.process.pid)

    def resident_bytes(self) -> int:
        """Memory of the process; 0 when it has died."""
        try:
            return int(self.memory.memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def stop(self) -> int:
        """End it as a supervisor does; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


# --- hostile streams ------------------------------------------------------------------------


def script(dice: random.Random) -> list[bytes]:
    """What a hostile stream sends."""
    opening = encode_uplink(valid_open(dice))
    kind = dice.randrange(7)
    if kind == 0:
        return [hostile_uplink(dice)]
    if kind == 1:  # a second Open, or the wrong message first
        return [opening, opening] if dice.random() < 0.5 else [encode_uplink(Cancel())]
    if kind == 2:  # more tokens than the context has
        prompt = (dice.randrange(VOCABULARY),) * dice.choice((256, 257, 50_000, 400_000))
        return [encode_uplink(replace(valid_open(dice), prompt=prompt), WIDE)]
    if kind == 3:  # a flood
        message = dice.choice((Received(3, 1), Draft(1, (0,), (1,), 1, 5), Draft(1, (), ())))
        return [opening] + [encode_uplink(message)] * dice.choice((50, 500))
    if kind == 4:
        return [opening]
    return [opening] + [hostile_uplink(dice) for _ in range(dice.randrange(1, 12))]


async def hostile_stream(method: Any, seed: int, tally: Tally) -> None:
    """One stream, from its seed: send a script, then read on, half-close, cancel or go silent."""
    dice = random.Random(seed)
    call = method()
    try:
        async with asyncio.timeout(PATIENCE_S):
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.BaseError):
                await call.wait_for_connection()
                for payload in script(dice):
                    # Not ``call.write``: when the verifier has just ended the stream, that replaces
                    # the verifier's status with INTERNAL (grpc/grpc#36066).
                    await call._cython_call.send_serialized_message(payload)
                ending = dice.randrange(4)
                if ending == 0:
                    await asyncio.sleep(dice.random() * 0.3)  # reads nothing
                    call.cancel()
                elif ending == 1:
                    for _ in range(dice.randrange(20)):
                        if await asyncio.wait_for(call.read(), 0.2) is grpc.aio.EOF:
                            break
                    call.cancel()
                else:
                    await call.done_writing()
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            code, details = await call.code(), await call.details()
    except (TimeoutError, asyncio.CancelledError) as error:
        call.cancel()
        if isinstance(error, TimeoutError) and not call.done():
            tally.findings.append(f"stream {seed}: not over within {PATIENCE_S:g} s")
        elif isinstance(error, TimeoutError):
            tally.ends["stream: cancelled here"] += 1
        elif call.cancelled():
            tally.ends["stream: cancelled here"] += 1
        else:
            raise
        return
    tally.ends[f"stream: {code.name}"] += 1
    if code.name not in CLEAN:
        tally.findings.append(f"stream {seed}: {code.name}: {details}")


async def hostile_streams(
    addresses: list[str], count: int, seed: int, tally: Tally, verifier: Verifier
) -> list[int]:
    """Run all streams; the verifier's memory at each fifth of them, in bytes."""
    channels = [grpc.aio.insecure_channel(address) for address in addresses]
    methods: list[Any] = [
        channel.stream_stream("/edgespec.v1.Verifier/Speculate", None, None) for channel in channels
    ]
    numbers = iter(range(count))
    resident: list[int] = []

    async def one_after_the_other(method: Any) -> None:
        for index in numbers:
            await hostile_stream(method, seed * 1_000_003 + index, tally)
            if index % max(1, count // 5) == 0:
                resident.append(verifier.resident_bytes())

    loops = [one_after_the_other(methods[i % len(methods)]) for i in range(STREAMS_AT_ONCE)]
    await asyncio.gather(*loops)
    for channel in channels:
        await channel.close(None)
    return resident


# --- the honest device ----------------------------------------------------------------------


async def text_of(agent: Agent, params: SamplingParams) -> list[int]:
    found: list[int] = []
    async for chunk in agent.generate("the honest one asks", params):
        found += chunk.tokens
    return found


async def honest_device(agent: Agent, expected: list[list[int]], tally: Tally) -> None:
    """Generate on and on; every text must be that of the quiet verifier."""
    while True:
        for params, text in zip(HONEST, expected, strict=True):
            try:
                found = await text_of(agent, params)
            except Exception as error:
                tally.honest_faults += 1
                tally.findings.append(f"the honest device failed: {error}")
                continue
            tally.honest_texts += 1
            if found != text:
                tally.findings.append(f"the honest text differs: {found} is not {text}")


async def fuzz_socket(verifier: Verifier, options: argparse.Namespace, tally: Tally) -> str:
    """Run all streams beside the honest device; a line about memory."""
    model = "toy" if options.model == "toy" else "bundled"
    config = AgentConfig(
        verifier=f"127.0.0.1:{verifier.port}", draft=DraftSection(model), tokenizer=model
    )
    async with build_agent(config) as agent:
        expected = [await text_of(agent, params) for params in HONEST]
        honest = asyncio.create_task(honest_device(agent, expected, tally))
        async with AsyncExitStack() as stack:
            ways = [Gate(verifier.port, f"127.0.1.{i + 1}") for i in range(PEERS)]
            addresses = [(await stack.enter_async_context(way)).address for way in ways]
            resident = await hostile_streams(
                addresses, options.streams, options.seed, tally, verifier
            )
            honest.cancel()
            with suppress(asyncio.CancelledError):
                await honest
        for params, text in zip(HONEST, expected, strict=True):
            if await text_of(agent, params) != text:
                tally.findings.append("the honest text after the streams differs")
    left = await sessions_left(verifier.port)
    resident.append(verifier.resident_bytes())
    if left:
        tally.findings.append(f"{left} sessions are left {LEASE_S:g} s after the last stream")
    mebibytes = ", ".join(str(size >> 20) for size in resident)
    # The first fifth fills caches and pools.
    if resident[-1] - resident[1] > MAX_GROWTH_BYTES:
        tally.findings.append(f"the verifier's memory grew: {mebibytes} MiB")
    return f"the verifier's memory at each fifth: {mebibytes} MiB"


async def sessions_left(port: int) -> int:
    """Sessions that the verifier still holds when all leases are over."""
    transport = GrpcTransport(f"127.0.0.1:{port}")
    try:
        for _ in range(50):
            if (count := (await transport.info()).sessions) == 0:
                return 0
            await asyncio.sleep(0.3)
        return count
    finally:
        await transport.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000, help="at the codec")
    parser.add_argument("--streams", type=int, default=5_000, help="at the socket")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="toy", choices=("toy", "bundled"))
    parser.add_argument("--cached-tokens", type=int, default=65_536, help="size of the KV pool")
    options = parser.parse_args()
    print(f"machine: {machine()}\nversions: {versions()}\ncommand: {' '.join(sys.argv)}")
    tally = Tally()
    tally.ends, tally.findings = fuzz_codec(options.messages, options.seed)
    memory = ""
    if options.streams:
        with tempfile.TemporaryDirectory() as folder:
            verifier = Verifier(options, Path(folder))
            try:
                memory = asyncio.run(fuzz_socket(verifier, options, tally))
            finally:
                status = verifier.stop()
            if status:
                tally.findings.append(f"the verifier's exit status is {status}")
            log = verifier.log.read_text()
            if "Traceback" in log:
                first = log[log.index("Traceback") :][:4_000]
                tally.findings.append(f"{log.count('Traceback')} tracebacks; the first:\n{first}")
    for name, count in sorted(tally.ends.items()):
        print(f"{count:8} {name}")
    print(f"{tally.honest_texts:8} honest texts, {tally.honest_faults} failed")
    print(memory)
    print(f"{len(tally.findings):8} findings")
    for finding in tally.findings[:20]:
        print(f"  {finding}")
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
