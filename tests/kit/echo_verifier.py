"""A verifier on localhost for transport tests, which echoes over gRPC.

`Open` is answered with `Opened`, a `Draft` is committed unchanged, `Received` is an error of the
test, and `Cancel` ends the generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from edgespec.core.ports import DeviceStream, ModelInfo, ServeStream, VerifierStream
from edgespec.core.protocol import messages as m
from edgespec.wire.grpc_client import GrpcTransport
from edgespec.wire.grpc_server import GrpcServer

INFO = m.VerifierInfo(ModelInfo("toy", "v1", 32000, 4096, (2,)), m.Limits(lease_s=7.5), 3, 8)
STOPPING = m.Fault(
    m.FaultCode.SHUTTING_DOWN, "the verifier is shutting down; resume elsewhere", retry_after_s=1.0
)
OPEN = m.Open("session", "", "", (1, 2, 3))
PATIENCE_S = 60.0
"""Seconds that a test waits for an expected event. Keepalive notices a dead peer within 4 s, or
later on a busy machine. TCP alone takes a quarter of an hour, and never notices a silent peer."""


async def echo(stream: VerifierStream) -> None:
    position = 0
    while True:
        match await stream.receive():
            case m.Open(prompt=prompt):
                position = len(prompt)
                await stream.send(m.Opened(m.Limits(), "toy", position))
            case m.Draft(tokens=tokens):
                await stream.send(m.Commit(position, tokens, len(tokens)))
                position += len(tokens)
            case m.Received():
                raise ZeroDivisionError("a bug in the verifier")
            case m.Cancel():
                await stream.send(m.Commit(position, (), finish=m.FinishReason.CANCELLED))
                return


@asynccontextmanager
async def serve_streams(
    serve: ServeStream = echo, **options: Any
) -> AsyncIterator[tuple[GrpcServer, GrpcTransport]]:
    server = GrpcServer("127.0.0.1:0", serve, lambda: INFO, **options)
    await server.start()
    transport = GrpcTransport(f"127.0.0.1:{server.port}", limits=options.get("limits"))
    try:
        yield server, transport
    finally:
        await transport.close()
        await server.stop()


@asynccontextmanager
async def raw_call(transport: GrpcTransport) -> AsyncIterator[Any]:
    """Open a stream of raw bytes on a connection of its own."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.aio.insecure_channel(transport.address, options=own)
    method: Any = channel.stream_stream("/edgespec.v1.Verifier/Speculate", None, None)
    try:
        yield method()
    finally:
        await channel.close(None)


async def open_stream(transport: GrpcTransport) -> DeviceStream:
    stream = await transport.connect()
    await stream.send(OPEN)
    assert await stream.receive() == m.Opened(m.Limits(), "toy", 3)
    return stream


async def held_up(sending: asyncio.Future[None], transport: GrpcTransport) -> bool:
    """Return whether sending is blocked while the verifier still serves other streams.

    It is blocked once the flow-control window of its device is full. Ten round trips are longer
    than a message takes to leave, however slow the machine is.
    """
    await asyncio.wait((sending,), timeout=0.2)
    for _ in range(0 if sending.done() else 10):
        await transport.info()
    return not sending.done()


async def is_alive(stream: DeviceStream) -> bool:
    await stream.send(m.Draft(1, (0,), (7,), 3, 9))
    return isinstance(await stream.receive(), m.Commit)
