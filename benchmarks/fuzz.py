"""Send random and mutated messages to the codec, and to the socket of a real verifier.

    python benchmarks/fuzz.py [--messages 100000] [--streams 5000] [--seed 1] [--model toy]

Messages are random bytes, messages that parse as protobuf but hold invalid numbers, valid messages
with damaged bytes, and valid ones at the wrong time, in equal parts. The verifier is a process of
its own with a small context and short leases; ``--cached-tokens`` makes its KV pool small
(``--model bundled``). Hostile streams come from eight addresses of this machine (127.0.1.1 and on),
an honest device from 127.0.0.1.

Each finding makes the exit status 1: a message that the codec neither decodes to one that survives
a round trip nor refuses by ``ProtocolViolation``; a stream that ends with UNKNOWN, INTERNAL or not
at all; a text of the honest device that differs from its text before; a traceback in the log;
memory that grows; sessions left behind; an exit status other than 0.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import honest_devices
from watched_verifier import Verifier, kill

from edgespec.bench.report import describe_machine, list_versions
from edgespec.config import LimitsSection, VerifierConfig
from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Limits,
    Open,
    Opened,
    Received,
    RunAhead,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.wire.codec import (
    ProtocolViolation,
    WireLimits,
    decode_downlink,
    decode_info,
    decode_uplink,
    encode_downlink,
    encode_info,
    encode_uplink,
)
from edgespec.wire.pb import speculation_pb2 as pb
from tests.kit.gate import Gate

VOCABULARY = 64
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


@dataclass
class Tally:
    """The counts so far."""

    ends: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


# --- messages, functions of dice ------------------------------------------------------------

# Numbers at and around the bounds of fields.
_EDGES = (0, 1, 2, 63, 64, 127, 128, 255, 256, 4095, 4096, 1 << 16, (1 << 31) - 1, (1 << 32) - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-38, 5e-324, 1e308, float("inf"), float("nan"), 100.0, 1e-9)


def number(dice: random.Random) -> int:
    """Return a number below 2^32, often one at a bound."""
    return dice.choice(_EDGES) if dice.random() < 0.6 else dice.randrange(1 << 32)


def tokens(dice: random.Random, most: int = 24) -> tuple[int, ...]:
    """Return token ids of the vocabulary, and now and then one outside it."""
    if dice.random() < 0.1:
        return tuple(number(dice) for _ in range(dice.randrange(1, 4)))
    return tuple(dice.randrange(VOCABULARY) for _ in range(dice.randrange(most)))


def sampling(dice: random.Random) -> SamplingParams:
    """Return any allowed parameters, the costly ones too."""
    return SamplingParams(
        temperature=dice.choice((0.0, 0.7, 1.0, 100.0, 1e-9)),
        top_k=dice.choice((0, 1, 5, 1 << 20)),
        top_p=dice.choice((1.0, 0.9, 1e-6)),
        min_p=dice.choice((0.0, 0.1, 1.0)),
        repetition_penalty=dice.choice((1.0, 1.3, 0.01, 100.0)),
        presence_penalty=dice.choice((0.0, -100.0, 2.0)),
        frequency_penalty=dice.choice((0.0, 0.5, 100.0)),
        logit_bias={dice.randrange(VOCABULARY): dice.uniform(-100.0, 100.0) for _ in range(2)},
        seed=dice.randrange(1 << 64),
        stop_token_ids=(dice.randrange(VOCABULARY),) if dice.random() < 0.2 else (),
        max_tokens=dice.choice((1, 7, 64, 1 << 20)),
        ignore_eos=dice.random() < 0.5,
    )


def valid_open(dice: random.Random, session_id: str = "") -> Open:
    """Return an Open that a verifier with a vocabulary of 64 or more serves."""
    return Open(
        session_id or f"fuzz-{dice.randrange(40)}",
        "",
        "",
        tuple(dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 40))),
        tuple(dice.randrange(VOCABULARY) for _ in range(dice.choice((0, 0, 0, 3)))),
        sampling(dice),
        dice.choice(list(RunAhead)),
        drafting=dice.random() < 0.7,
        session_secret=dice.randbytes(dice.choice((0, 16, 64))),
    )


def valid_uplink(dice: random.Random) -> bytes:
    """Return a well-formed message with any content."""
    kind = dice.randrange(5)
    if kind == 0:
        return encode_uplink(Received(number(dice) % 4096, number(dice)))
    if kind == 1:
        return encode_uplink(Cancel() if dice.random() < 0.3 else Draft(1, (), ()))
    if kind == 2:
        return encode_uplink(valid_open(dice))
    count, first = dice.randrange(1, 40), dice.choice((1, 1, 50, 1 << 20))
    parents = tuple(dice.choice((0, first + i - 1)) for i in range(count))
    ids = tuple(dice.randrange(VOCABULARY) for _ in range(count))
    base = dice.randrange(1, 200) if 0 in parents else 0
    return encode_uplink(Draft(first, parents, ids, base, dice.randrange(1 << 32) if base else 0))


def valid_downlink(dice: random.Random) -> bytes:
    """Return any message of a verifier."""
    kind = dice.randrange(4)
    if kind == 0:
        limits = Limits(number(dice), number(dice), number(dice), number(dice), dice.random() * 99)
        return encode_downlink(Opened(limits, "model", number(dice)))
    if kind == 1:
        return encode_downlink(Fault(dice.choice(list(FaultCode)), "why", dice.random()))
    ids = tuple(dice.randrange(VOCABULARY) for _ in range(dice.randrange(20)))
    finish = dice.choice((None, None, *FinishReason))
    position = dice.randrange(1 << 20)
    return encode_downlink(Commit(position, ids, dice.randrange(len(ids) + 1), finish=finish))


def odd_uplink(dice: random.Random) -> bytes:
    """Return a message that parses, with numbers of any size in any field."""
    kind = dice.randrange(4)
    if kind == 0:
        return pb.DeviceMessage(
            received=pb.Received(position=number(dice), echo=number(dice))
        ).SerializeToString()
    if kind == 1:
        draft = pb.Draft(
            first_node_id=number(dice),
            tokens=tokens(dice, 400),
            parent_deltas=tokens(dice),
            base_position=number(dice),
            base_hash=number(dice),
        )
        return pb.DeviceMessage(draft=draft).SerializeToString()
    odd = pb.Sampling(
        temperature=dice.choice(_FLOATS),
        top_k=number(dice),
        top_p=dice.choice(_FLOATS),
        min_p=dice.choice(_FLOATS),
        repetition_penalty=dice.choice(_FLOATS),
        presence_penalty=dice.choice(_FLOATS),
        logit_bias={number(dice): dice.choice(_FLOATS)},
        stop_token_ids=tokens(dice, 90),
        max_tokens=number(dice),
    )
    request = pb.Open(
        version=dice.choice((1, 1, 1, 0, 2)),
        session_id=dice.choice(("a", "a\nb", "x" * 129, "", "\x1b[31m", "ä" * 9)),
        model=dice.choice(("", "", "other", "m" * 300)),
        prompt=tokens(dice, 90),
        committed=tokens(dice),
        sampling=odd if dice.random() < 0.7 else None,
        run_ahead=dice.choice((0, 1, 2, 3)),  # type: ignore[arg-type] # that is the point
        rule=dice.choice(("", "", "typical")),
        session_secret=dice.randbytes(dice.choice((0, 64, 65))),
    )
    return pb.DeviceMessage(open=request).SerializeToString()


def odd_downlink(dice: random.Random) -> bytes:
    """Return a message of the other direction that parses, with numbers of any size in any
    field."""
    commit = pb.Commit(
        position=number(dice),
        tokens=tokens(dice, 90),
        accepted=number(dice) if dice.random() < 0.3 else 0,
        stale=number(dice),
        echo=number(dice),
        held_us=number(dice),
    )
    limits = pb.Limits(context_length=number(dice), lease_s=dice.choice(_FLOATS))
    fault = pb.Fault(message="x" * dice.choice((0, 1024, 1025)), retry_after_s=dice.choice(_FLOATS))
    message = dice.choice(
        (
            pb.VerifierMessage(commit=commit),
            pb.VerifierMessage(opened=pb.Opened(limits=limits, position=number(dice))),
            pb.VerifierMessage(fault=fault),
        )
    )
    return message.SerializeToString()


def damaged(payload: bytes, dice: random.Random) -> bytes:
    """Return ``payload`` with bytes changed, cut off, repeated or inserted."""
    data = bytearray(payload or b"\x00")
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(data))
        change = dice.randrange(4)
        if change == 0:
            data[at] = dice.randrange(256)
        elif change == 1:
            del data[max(1, at) :]
        elif change == 2:
            data += data[at:][:400]
        else:
            data[at:at] = dice.randbytes(dice.randrange(1, 12))
    return bytes(data)


def hostile_uplink(dice: random.Random) -> bytes:
    """Return an invalid or hostile message of a device."""
    return _hostile(dice, valid_uplink, odd_uplink)


def hostile_downlink(dice: random.Random) -> bytes:
    """Return an invalid or hostile message of a verifier."""
    return _hostile(dice, valid_downlink, odd_downlink)


def _hostile(
    dice: random.Random,
    valid: Callable[[random.Random], bytes],
    odd: Callable[[random.Random], bytes],
) -> bytes:
    kind = dice.randrange(4)
    if kind == 0:
        return dice.randbytes(dice.choice((0, 1, 3, 20, 200, 3000)))
    if kind == 1:
        return odd(dice)
    return damaged(valid(dice), dice) if kind == 2 else valid(dice)


def fuzz_codec(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Decode ``count`` hostile messages; return their outcomes and the findings."""
    dice, limits = random.Random(seed), WireLimits.for_context(256)
    ends: Counter[str] = Counter()
    findings = []
    for index in range(count):
        up = index % 2 == 0
        payload = hostile_uplink(dice) if up else hostile_downlink(dice)
        for decode, encode in (
            (decode_uplink, encode_uplink) if up else (decode_downlink, encode_downlink),
            (decode_info, encode_info),
        ):
            try:
                message = decode(payload, limits)
                ends[f"codec: {type(message).__name__}"] += 1
                if decode(encode(message, limits), limits) != message:  # type: ignore[arg-type]
                    findings.append(f"message {index}: another one after a round trip: {message}")
            except ProtocolViolation as violation:
                ends[f"codec: {type(violation).__name__}"] += 1
            except Exception:
                findings.append(f"message {index}, {payload!r}:\n{traceback.format_exc()}")
    return ends, findings


# --- hostile streams ------------------------------------------------------------------------


def script(dice: random.Random) -> list[bytes]:
    """Return the messages of a hostile stream."""
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
    """Run one stream from its seed: send a script, then read on, half-close, cancel or go
    silent."""
    dice = random.Random(seed)
    call = method()
    try:
        async with asyncio.timeout(PATIENCE_S):
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.BaseError):
                await call.wait_for_connection()
                for payload in script(dice):
                    # ``call.write`` would not do: if the verifier has just ended the stream, it
                    # replaces the verifier's status with INTERNAL (grpc/grpc#36066).
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
    """Run all streams; return the verifier's memory at each fifth of them, in bytes."""
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


# --- beside an honest device ----------------------------------------------------------------


async def fuzz_socket(
    verifier: Verifier, options: argparse.Namespace, tally: Tally, honest: honest_devices.Tally
) -> str:
    """Run all streams; return a line about memory."""
    await verifier.start()
    agent = honest_devices.device_agent(verifier.address, options.model, drafting=True)
    async with agent:
        # The requests have few tokens, because the context is small.
        requests = honest_devices.make_requests(6, options.seed, 60)
        requests = await honest_devices.answers(agent, requests)
        device = honest_devices.Device(agent, random.Random(options.seed), honest)
        living = asyncio.create_task(device.live(requests, 0.0))
        async with AsyncExitStack() as stack:
            ways = [Gate(verifier.port, f"127.0.1.{i + 1}") for i in range(PEERS)]
            addresses = [(await stack.enter_async_context(way)).address for way in ways]
            resident = await hostile_streams(
                addresses, options.streams, options.seed, tally, verifier
            )
            living.cancel()
            with suppress(asyncio.CancelledError):
                await living
        for request in requests:
            await device.generate(request)
    tally.findings += [f"an honest text is lost: {one}" for one in honest.lost]
    tally.findings += [f"an honest text differs: {one}" for one in honest.wrong]
    if left := await sessions_left(verifier):
        tally.findings.append(f"{left} sessions are left {LEASE_S:g} s after the last stream")
    resident.append(verifier.resident_bytes())
    mebibytes = ", ".join(str(size >> 20) for size in resident)
    # The first fifth fills caches and pools.
    if resident[-1] - resident[1] > MAX_GROWTH_BYTES:
        tally.findings.append(f"the verifier's memory grew: {mebibytes} MiB")
    tally.findings += await verifier.stop()
    return f"the verifier's memory at each fifth: {mebibytes} MiB"


async def sessions_left(verifier: Verifier) -> int:
    """Count the sessions that the verifier still holds when all leases have ended."""
    count = 0
    for _ in range(50):
        count = int((await verifier.look())["sessions"])
        if not count:
            break
        await asyncio.sleep(0.3)
    return count


async def fuzz_verifier(
    options: argparse.Namespace, tally: Tally, honest: honest_devices.Tally
) -> str:
    limits = LimitsSection(
        max_sessions=256, max_cached_tokens=options.cached_tokens, lease_s=LEASE_S
    )
    config = VerifierConfig(
        model=options.model, port=0, max_model_len=CONTEXT_LENGTH, limits=limits
    )
    with tempfile.TemporaryDirectory() as folder:
        verifier = Verifier(config, Path(folder))
        try:
            return await fuzz_socket(verifier, options, tally, honest)
        finally:
            await kill(verifier)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000, help="at the codec")
    parser.add_argument("--streams", type=int, default=5_000, help="at the socket")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="toy", choices=("toy", "bundled"))
    parser.add_argument("--cached-tokens", type=int, default=65_536, help="size of the KV pool")
    options = parser.parse_args()
    print(
        f"machine: {describe_machine()}\nversions: {list_versions()}\ncommand: {' '.join(sys.argv)}"
    )
    tally, honest = Tally(*fuzz_codec(options.messages, options.seed)), honest_devices.Tally()
    memory = asyncio.run(fuzz_verifier(options, tally, honest)) if options.streams else ""
    for name, count in sorted(tally.ends.items()):
        print(f"{count:8} {name}")
    print(f"{honest.texts:8} honest texts, {len(honest.lost)} failed")
    print(memory)
    print(f"{len(tally.findings):8} findings")
    for finding in tally.findings[:20]:
        print(f"  {finding}")
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
