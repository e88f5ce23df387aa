"""Peers that take more than their share: each waits or loses its place, and other peers are served.

Oracle of stream slots, and of the addresses by which they are counted: a table kept by hand. Oracle
of keys: a dictionary that the test changes; refused peers take nothing from admitted ones.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from edgespec.core.ports import DeviceStream, LinkError, VerifierStream
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.messages import Cancel, Commit, Fault, FaultCode, Open, Opened
from edgespec.core.verifier.traffic_budget import CallLimits, ShareLimits, UplinkLimits, WaitReason
from edgespec.telemetry.verifier_counts import VerifierTelemetry
from edgespec.wire import callers
from edgespec.wire.access import DeviceAccess
from edgespec.wire.callers import WRONG_KEY, peer_address
from edgespec.wire.codec import WireLimits, encode_uplink
from edgespec.wire.grpc_client import GrpcTransport
from edgespec.wire.grpc_server import GrpcServer
from tests.kit.echo_verifier import (
    INFO,
    OPEN,
    PATIENCE_S,
    echo,
    held_up,
    is_alive,
    open_stream,
    raw_call,
    serve_streams,
)

CALLS = CallLimits(
    peer_rate=50.0, peer_burst=1.0, total_rate=100.0, total_burst=50.0, max_wait_s=5.0
)


async def _read_to_end(stream: DeviceStream) -> LinkError:
    """Read a stream to its end; return its error."""
    try:
        while True:
            await stream.receive()
    except LinkError as error:
        return error


async def test_a_stream_without_an_open_gives_way_to_a_new_one() -> None:
    async with serve_streams(max_streams=2, peer_share=1.0) as (_, transport):
        first = await open_stream(transport)
        idle = await transport.connect()
        second = await open_stream(transport)
        fault = await asyncio.wait_for(idle.receive(), PATIENCE_S)
        assert isinstance(fault, Fault)
        assert fault.code is FaultCode.OVERLOADED
        assert "no Open has arrived" in fault.message
        third = await transport.connect()
        refusal = await third.receive()
        assert refusal == Fault(FaultCode.OVERLOADED, "2 streams are open, the limit is 2", 1.0)
        assert await is_alive(first)
        assert await is_alive(second)


async def test_a_peer_cannot_take_all_slots() -> None:
    async with serve_streams(max_streams=4, peer_share=0.5) as (_, transport):
        held = [await open_stream(transport) for _ in range(2)]
        third = await transport.connect()
        refusal = await third.receive()
        text = "2 streams of ipv4:127.0.0.1 are open, the limit is 2"
        assert refusal == Fault(FaultCode.OVERLOADED, text, 1.0)
        await held[0].close()
        assert await is_alive(held[1])


async def test_a_refused_stream_gives_its_slot_back_though_nobody_reads() -> None:
    """The peer fills its flow-control window, sends on and reads nothing, not even the fault."""
    refused = asyncio.Event()

    async def refuse(stream: VerifierStream) -> None:
        if await stream.receive() != Cancel():
            return await stream.send(Opened(INFO.limits, "toy", 3))
        while True:  # until others are served while this one is blocked: its window is full
            sending = asyncio.ensure_future(stream.send(Commit(0, (1,) * 4000)))
            if await held_up(sending, transport):
                break
            sending.result()
        sending.cancel()
        await asyncio.wait((sending,))
        await stream.send(Fault(FaultCode.OVERLOADED, "no room"))
        refused.set()
        await asyncio.Event().wait()  # a driver that never ends

    async with serve_streams(refuse, max_streams=1) as (_, transport), raw_call(transport) as call:
        await call.write(encode_uplink(Cancel()))
        await asyncio.wait_for(refused.wait(), PATIENCE_S)
        again = await transport.connect()
        await again.send(OPEN)
        assert isinstance(await asyncio.wait_for(again.receive(), PATIENCE_S), Opened)


async def test_a_device_that_never_reads_is_let_go() -> None:
    ended: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()

    async def flood(stream: VerifierStream) -> None:
        await stream.receive()
        try:
            while True:
                await stream.send(Commit(0, (1,) * 4000))
        except LinkError as error:
            ended.set_result(error)

    async with serve_streams(flood, stalled_s=0.3) as (_, transport), raw_call(transport) as call:
        await call.write(encode_uplink(OPEN))
        error = await asyncio.wait_for(ended, PATIENCE_S)
        assert "did not read for 0.3 s" in str(error)
        assert error.retryable


async def test_the_calls_of_a_peer_are_bounded_though_each_waits_for_its_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call has the slot, 64 more wait for their refusal, and the others receive a status."""
    for name in ("MIN_DELAY_S", "MAX_DELAY_S"):
        monkeypatch.setattr(f"edgespec.wire.callers.{name}", 3600.0)
    calls = replace(CALLS, peer_rate=1e-3, max_wait_s=1e-3)
    async with serve_streams(max_streams=1, opens=calls) as (_, transport):
        first = await open_stream(transport)
        waiting = [await transport.connect() for _ in range(64)]
        await transport.info()  # answered after the 64 calls wait
        monkeypatch.setattr("edgespec.wire.callers.MAX_DELAY_S", 0.0)
        for _ in range(5):
            error: Exception | None = None
            try:  # its status may come before or after the stream is established
                error = await asyncio.wait_for(_read_to_end(await transport.connect()), PATIENCE_S)
            except LinkError as refused:
                error = refused
            assert "65 calls of ipv4:127.0.0.1 are under way, the limit is 65" in str(error)
        assert await is_alive(first)
        await waiting[0].close()


async def test_a_stream_without_a_place_in_the_line_is_told_when_to_come_back() -> None:
    rate = 1e-3
    calls = replace(CALLS, peer_rate=rate)
    async with serve_streams(opens=calls) as (_, transport):
        first = await open_stream(transport)
        second = await transport.connect()
        fault = await second.receive()
        assert isinstance(fault, Fault)
        assert (fault.code, fault.retry_after_s) == (FaultCode.OVERLOADED, 10.0)
        told = re.fullmatch(
            r"ipv4:127\.0\.0\.1 opens streams too often: the wait would be (\d+\.\d) s, "
            "the limit is 5 s",
            fault.message,
        )
        assert told is not None, fault.message
        # A turn takes 1000 s, less the time since the first one.
        assert 1 / rate - PATIENCE_S < float(told[1]) <= 1 / rate
        assert await is_alive(first)


async def test_health_and_reflection_are_asked_in_the_same_line() -> None:
    calls = replace(CALLS, peer_rate=1e-3, peer_burst=2.0)
    async with serve_streams(infos=calls) as (_, transport):
        stream = await open_stream(transport)
        channel = grpc.aio.insecure_channel(transport.address)
        health: Any = health_pb2_grpc.HealthStub(channel)
        question = health_pb2.HealthCheckRequest()
        for _ in range(2):
            reply = await health.Check(question)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(cast(Any, channel))
        services = reflection_pb2.ServerReflectionRequest(list_services="")
        asks: tuple[Callable[[], Any], ...] = (
            lambda: health.Check(question),
            lambda: health.Watch(question).read(),
            lambda: reflection.ServerReflectionInfo(iter([services])).read(),
        )
        for ask in asks:
            with pytest.raises(grpc.aio.AioRpcError, match="calls too often") as caught:
                await ask()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await channel.close(None)
        assert await is_alive(stream)


async def test_an_open_beyond_the_context_is_refused_in_words_about_tokens() -> None:
    async with serve_streams(limits=WireLimits.for_context(1024)) as (server, _):
        wide = GrpcTransport(f"127.0.0.1:{server.port}", limits=WireLimits.for_context(1 << 20))
        stream = await wide.connect()
        await stream.send(Open("session", "", "", (7,) * 2000))
        text = "Open has 2000 tokens (prompt and committed), but the context is 1024"
        assert await stream.receive() == Fault(FaultCode.CONTEXT_TOO_LONG, text)
        with pytest.raises(LinkError, match="OUT_OF_RANGE") as caught:
            await stream.receive()
        assert not caught.value.retryable
        stream = await wide.connect()
        await stream.send(Open("session", "", "", (7,) * 500_000))
        with pytest.raises(LinkError, match=r"larger than max \(\d+ vs. 262144\)") as caught:
            await stream.receive()
        assert not caught.value.retryable
        await wide.close()


@pytest.mark.parametrize(
    ("uri", "peer"),
    [
        ("ipv4:127.0.0.1:51234", "ipv4:127.0.0.1"),
        ("ipv6:%5B2001:db8:1:2:3::4%5D:51234", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2:ffff::9]:1", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:51234", "ipv4:10.0.0.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:51234", "ipv6:fe80::/64"),
        ("ipv6:nonsense:1", "ipv6:nonsense"),
        ("unix:", "unix"),
        ("unix:edge/verifier.sock", "unix"),
        ("unknown", "unknown"),
    ],
)
def test_all_connections_of_a_peer_share_an_address(uri: str, peer: str) -> None:
    assert peer_address(uri) == peer


def test_the_peer_with_most_idle_streams_gives_way() -> None:
    slots: callers.StreamSlots[int] = callers.StreamSlots(4, 1.0)
    slots.acquire(1, "honest, in the middle of its round trip")
    for stream in (2, 3, 4):
        slots.acquire(stream, "hostile")
    assert slots.acquire(5, "another") == callers.SlotGrant(evicted=2)


@pytest.mark.parametrize("seed", range(20))
def test_random_comings_and_goings_keep_the_bounds(seed: int) -> None:
    dice = random.Random(seed)
    slots: callers.StreamSlots[int] = callers.StreamSlots(
        dice.randrange(1, 9), dice.choice((0.3, 0.75, 1.0))
    )
    held: dict[int, str] = {}
    opened: set[int] = set()
    for stream in range(400):
        peer = dice.choice("aaab")
        entry = slots.acquire(stream, peer)
        if entry.evicted is not None:
            assert entry.refusal is None
            assert entry.evicted not in opened
            del held[entry.evicted]
        if entry.refusal is None:
            held[stream] = peer
        if dice.random() < 0.6:
            slots.mark_opened(stream)
            opened |= {stream} & held.keys()
        if held and dice.random() < 0.4:
            left = dice.choice(list(held))
            slots.release(left)
            slots.release(left)
            del held[left]
        assert len(slots) == len(held) <= slots.max_streams
        assert sum(p == "a" for p in held.values()) <= slots.peer_streams
    for stream in list(held):
        slots.release(stream)
    assert len(slots) == 0
    assert slots.acquire(1000, "a") == callers.SlotGrant()


def test_a_key_with_few_sessions_has_few_streams_and_loses_its_own_idle_ones_first() -> None:
    slots: callers.StreamSlots[int] = callers.StreamSlots(100, 1.0)
    key = Credential("k", max_sessions=1)
    slots.acquire(99, "peer", Credential("other"))
    for stream in range(10):
        assert slots.acquire(stream, "peer", key) == callers.SlotGrant()
    assert slots.acquire(10, "peer", key) == callers.SlotGrant(evicted=0)
    for stream in range(1, 11):
        slots.mark_opened(stream)
    text = "10 streams of key 'k' are open, the limit is 10"
    assert slots.acquire(11, "peer", key) == callers.SlotGrant(refusal=text)


def test_where_address_and_key_are_full_an_idle_stream_of_both_leaves() -> None:
    slots: callers.StreamSlots[int] = callers.StreamSlots(4, 0.5)
    mine, other = Credential("mine"), Credential("other")
    slots.acquire(1, "here", other)
    slots.acquire(2, "there", mine)
    slots.acquire(3, "here", mine)
    assert slots.acquire(4, "here", mine) == callers.SlotGrant(evicted=3)
    assert len(slots) == 3


class Calls:
    """Refused calls that are held until ``release``."""

    def __init__(self) -> None:
        self.refusals = callers.RefusalDelay()
        self.waits: list[float] = []
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def _wait(self, wait_s: float) -> None:
        self.waits.append(wait_s)
        await self._over.wait()

    async def add_calls(self, payer: str, count: int) -> None:
        for _ in range(count):
            self._tasks.append(asyncio.create_task(self.refusals.delay(payer, self._wait)))
        await asyncio.sleep(0)

    async def release(self) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)


async def test_the_more_are_held_the_longer_they_are() -> None:
    calls = Calls()
    await calls.add_calls("a", 150)
    await calls.add_calls("b", 1)
    assert calls.waits[:10] == [0.5] * 10
    assert calls.waits[19] == pytest.approx(1.0)
    assert calls.waits[149] == pytest.approx(150 / callers.REFUSALS_PER_S)
    assert calls.waits[150] == 0.5  # the interval of another peer
    assert calls.refusals.delayed == 151
    await calls.release()
    assert calls.refusals.delayed == 0


async def test_what_is_held_is_bounded_by_payer_and_in_all() -> None:
    calls = Calls()
    await calls.add_calls("a", 2 * callers.MAX_DELAYED_CALLS_PER_PAYER)
    assert calls.refusals.delayed == len(calls.waits) == callers.MAX_DELAYED_CALLS_PER_PAYER
    assert max(calls.waits) == callers.MAX_DELAY_S
    for number in range(20):
        await calls.add_calls(f"other {number}", callers.MAX_DELAYED_CALLS_PER_PAYER)
    assert calls.refusals.delayed == len(calls.waits) == callers.MAX_DELAYED_CALLS
    await calls.release()
    assert calls.refusals.delayed == 0


ONE_A_SECOND = CallLimits(
    peer_rate=1.0, peer_burst=1.0, total_rate=100.0, total_burst=100.0, max_wait_s=30.0
)
# Within these tests' time only the first call of a peer leaves the queue.
ONE_FOR_GOOD = replace(ONE_A_SECOND, peer_rate=1e-4, max_wait_s=1e6)


@dataclass
class Keys:
    """The keys that ``authenticate`` accepts, and the served peers."""

    known: dict[str, Credential] = field(
        default_factory=lambda: {name: Credential(name) for name in ("one", "two")}
    )
    served: list[str] = field(default_factory=list)

    async def serve(self, stream: VerifierStream) -> None:
        self.served.append(stream.credential.name)
        await echo(stream)


@asynccontextmanager
async def start_guarded(keys: Keys, **options: Any) -> AsyncIterator[tuple[GrpcServer, str]]:
    async with serve_streams(keys.serve, authenticate=keys.known.get, **options) as (
        server,
        transport,
    ):
        yield server, transport.address


@asynccontextmanager
async def device(address: str, key: str) -> AsyncIterator[GrpcTransport]:
    transport = GrpcTransport(address, DeviceAccess(key))
    try:
        yield transport
    finally:
        await transport.close()


async def test_many_wrong_keys_are_refused_and_right_ones_come_through() -> None:
    keys = Keys()
    async with start_guarded(keys, max_streams=2) as (_, address), device(address, "one") as known:
        async with grpc.aio.insecure_channel(address) as channel:
            ask: Any = channel.unary_unary("/edgespec.v1.Verifier/Info", None, None)
            wrong = (("authorization", "Bearer three"),)
            calls = [ask(b"", metadata=wrong) for _ in range(40)]
            # it uses no slot and no turn of the unknown peers
            assert await is_alive(await open_stream(known))
            codes = [await call.code() for call in calls]
        assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
    assert keys.served == ["one"]


async def test_a_key_is_read_at_its_share_over_all_its_streams_and_another_is_not_held() -> None:
    """Its share is 8 messages, quiet streams have 8 more as their grace, and no more are earned in
    this test's time. Each stream may be the one that puts the key into debt."""
    shares = ShareLimits(1e-3, 1e-3, 8.0, 8.0, max_wait_s=3600.0, idle_s=3600.0)
    uplink = UplinkLimits(shares=shares, messages_per_open=1e-3, bytes_per_message=1e9)
    read, watch, keys = list[str](), VerifierTelemetry(), Keys()

    async def listen(stream: VerifierStream) -> None:
        while True:
            message = await stream.receive()
            read.append(stream.credential.name)
            if isinstance(message, m.Open):
                await stream.send(m.Opened(m.Limits(), "toy", 3))
            elif isinstance(message, m.Draft):
                await stream.send(m.Commit(3, ()))

    keys.serve = listen  # type: ignore[method-assign]
    async with start_guarded(keys, uplink=uplink, watch=watch) as (_, address):
        async with device(address, "one") as greedy, device(address, "two") as modest:
            mine = await open_stream(modest)
            flood = [await open_stream(greedy) for _ in range(3)]
            for position in range(50):
                for stream in flood:
                    await stream.send(m.Received(position, 0))
            async with asyncio.timeout(PATIENCE_S):
                while not watch.waits[WaitReason.CREDENTIAL.value]:
                    await modest.info()
            assert all([await is_alive(mine) for _ in range(5)])
            late = await greedy.connect()  # a new stream does not avoid the debt
            await late.send(OPEN)
            fault = await asyncio.wait_for(late.receive(), PATIENCE_S)
            assert isinstance(fault, m.Fault)
            assert fault.code is m.FaultCode.OVERLOADED
            assert "key 'one'" in fault.message
    assert 8 + 8 <= read.count("one") <= 8 + 8 + 3
    assert {why for why, wait_s in watch.waits.items() if wait_s} == {WaitReason.CREDENTIAL.value}


async def test_one_keys_line_is_not_anothers() -> None:
    keys = Keys()
    async with start_guarded(keys, opens=ONE_FOR_GOOD) as (server, address):
        async with device(address, "one") as greedy, device(address, "two") as modest:
            assert await is_alive(await open_stream(greedy))
            waiting = [await greedy.connect() for _ in range(5)]
            assert await is_alive(
                await open_stream(modest)
            )  # although it calls from the same address
            assert server.stream_count == 2
            for stream in waiting:
                await stream.close()


async def test_a_key_that_is_revoked_in_the_line_is_not_served() -> None:
    """The first stream's key is checked when it arrives and when it is served. The second one's is
    checked when it has joined the queue, and then it is revoked."""
    keys, asked = Keys(), 0

    def known(key: str) -> Credential | None:
        nonlocal asked
        asked += 1
        return keys.known.pop(key) if asked == 3 else keys.known.get(key)

    async with serve_streams(keys.serve, authenticate=known, opens=ONE_A_SECOND) as (_, transport):
        async with device(transport.address, "one") as mine:
            await open_stream(mine)
            waiting = await mine.connect()
            await waiting.send(OPEN)
            assert await asyncio.wait_for(waiting.receive(), PATIENCE_S) == WRONG_KEY
    # A probe of the connection, which was quiet for a second, asks once more.
    assert keys.served == ["one"]
    assert asked in (4, 5)
