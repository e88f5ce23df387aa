"""Keys at the transport's door: who is turned away takes nothing from those who are let in.

Oracle: a dictionary of keys that the test changes while streams are under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio

from edgespec.core.ports import VerifierStream
from edgespec.core.protocol import messages as m
from edgespec.core.verifier.credential import Credential
from edgespec.core.verifier.traffic_budget import CallLimits, ShareLimits, UplinkLimits, Wait
from edgespec.wire.callers import WRONG_KEY
from edgespec.wire.grpc_client import GrpcTransport
from edgespec.wire.grpc_server import GrpcServer
from tests.shell.echo_verifier import OPEN, PATIENCE_S, echo, opened, served, works

ONE_A_SECOND = CallLimits(
    peer_rate=1.0, peer_burst=1.0, total_rate=100.0, total_burst=100.0, max_wait_s=30.0
)
# In these tests' time only the first call of a peer gets out of the line.
ONE_FOR_GOOD = replace(ONE_A_SECOND, peer_rate=1e-4, max_wait_s=1e6)


@dataclass
class Keys:
    """What ``authenticate`` knows, and who was served."""

    known: dict[str, Credential] = field(
        default_factory=lambda: {name: Credential(name) for name in ("one", "two")}
    )
    served: list[str] = field(default_factory=list)

    async def serve(self, stream: VerifierStream) -> None:
        self.served.append(stream.credential.name)
        await echo(stream)


@asynccontextmanager
async def guarded(keys: Keys, **options: Any) -> AsyncIterator[tuple[GrpcServer, str]]:
    async with served(keys.serve, authenticate=keys.known.get, **options) as (server, transport):
        yield server, transport.address


@asynccontextmanager
async def device(address: str, key: str) -> AsyncIterator[GrpcTransport]:
    transport = GrpcTransport(address, api_key=key)
    try:
        yield transport
    finally:
        await transport.close()


async def test_many_wrong_keys_are_refused_and_right_ones_come_through() -> None:
    keys = Keys()
    async with guarded(keys, max_streams=2) as (_, address), device(address, "one") as known:
        async with grpc.aio.insecure_channel(address) as channel:
            ask: Any = channel.unary_unary("/edgespec.v1.Verifier/Info", None, None)
            wrong = (("authorization", "Bearer three"),)
            calls = [ask(b"", metadata=wrong) for _ in range(40)]
            assert await works(await opened(known))  # it took no slot and no turn of theirs
            codes = [await call.code() for call in calls]
        assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
    assert keys.served == ["one"]


async def test_a_key_is_read_at_its_share_over_all_its_streams_and_another_is_not_held() -> None:
    """Its share is 8 messages, quiet streams have 8 more as their grace, and no more come in this
    test's time; each stream may be the one that gets the key into debt."""
    shares = ShareLimits(1e-3, 1e-3, 8.0, 8.0, max_wait_s=3600.0, idle_s=3600.0)
    uplink = UplinkLimits(shares=shares, messages_per_open=1e-3, bytes_per_message=1e9)
    read, heard, keys = list[str](), list[Wait](), Keys()

    async def listen(stream: VerifierStream) -> None:
        while True:
            message = await stream.receive()
            read.append(stream.credential.name)
            if isinstance(message, m.Open):
                await stream.send(m.Opened(m.Limits(), "toy", 3))
            elif isinstance(message, m.Draft):
                await stream.send(m.Commit(3, ()))

    keys.serve = listen  # type: ignore[method-assign]
    async with guarded(keys, uplink=uplink, waits=lambda why, _: heard.append(why)) as (_, address):
        async with device(address, "one") as greedy, device(address, "two") as modest:
            mine = await opened(modest)
            flood = [await opened(greedy) for _ in range(3)]
            for position in range(50):
                for stream in flood:
                    await stream.send(m.Received(position, 0))
            async with asyncio.timeout(PATIENCE_S):
                while Wait.CREDENTIAL not in heard:
                    await modest.info()
            assert all([await works(mine) for _ in range(5)])
            late = await greedy.connect()  # a new stream finds no way around the debt
            await late.send(OPEN)
            fault = await asyncio.wait_for(late.receive(), PATIENCE_S)
            assert isinstance(fault, m.Fault)
            assert fault.code is m.FaultCode.OVERLOADED
            assert "key 'one'" in fault.message
    assert 8 + 8 <= read.count("one") <= 8 + 8 + 3
    assert set(heard) == {Wait.CREDENTIAL}


async def test_one_keys_line_is_not_anothers() -> None:
    keys = Keys()
    async with guarded(keys, opens=ONE_FOR_GOOD) as (server, address):
        async with device(address, "one") as greedy, device(address, "two") as modest:
            assert await works(await opened(greedy))
            waiting = [await greedy.connect() for _ in range(5)]
            assert await works(await opened(modest))  # though it calls from the same address
            assert server.stream_count == 2
            for stream in waiting:
                await stream.close()


async def test_a_key_that_is_revoked_in_the_line_is_not_served() -> None:
    """The first stream's key is looked at when it comes and when it is served; the second's when it
    has come to the line, and then it is revoked."""
    keys, asked = Keys(), 0

    def known(key: str) -> Credential | None:
        nonlocal asked
        asked += 1
        return keys.known.pop(key) if asked == 3 else keys.known.get(key)

    async with served(keys.serve, authenticate=known, opens=ONE_A_SECOND) as (_, transport):
        async with device(transport.address, "one") as mine:
            await opened(mine)
            waiting = await mine.connect()
            await waiting.send(OPEN)
            assert await asyncio.wait_for(waiting.receive(), PATIENCE_S) == WRONG_KEY
    assert (keys.served, asked) == (["one"], 4)
