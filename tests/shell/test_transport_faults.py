"""Peers that die: a device notices a killed, a stopped and a silent verifier, and says which one.

The verifier is a process of its own (this file run as a script). A stopped process is the hard
case: its kernel still acknowledges what nobody reads.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgespec.core.ports import DeviceStream, LinkError, VerifierStream
from edgespec.core.protocol.messages import Limits, Open, Opened, Received
from edgespec.wire.grpc_calls import Keepalive
from edgespec.wire.grpc_client import GrpcTransport
from edgespec.wire.grpc_server import GrpcServer
from tests.shell.echo_verifier import INFO, PATIENCE_S
from tests.shell.gate import Gate

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def verifier_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"}
    process = subprocess.Popen(
        [sys.executable, __file__], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        yield process, f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def opened(transport: GrpcTransport) -> DeviceStream:
    stream = await transport.connect()
    await stream.send(Open("session", "", "", (1,)))
    assert isinstance(await stream.receive(), Opened)
    return stream


@pytest.mark.slow
async def test_a_verifier_behind_a_black_hole_is_noticed_in_time() -> None:
    """Both processes live and the connection stands, but nothing passes any more."""
    with verifier_process() as (_, address):
        async with Gate(int(address.rpartition(":")[2])) as gate:
            transport = GrpcTransport(gate.address)
            stream = await opened(transport)
            gate.swallow()
            with pytest.raises(LinkError, match="UNAVAILABLE") as caught:
                await asyncio.wait_for(stream.receive(), PATIENCE_S)
            assert caught.value.retryable
            await transport.close()


@pytest.mark.slow
async def test_an_idle_stream_outlives_many_pings() -> None:
    """A server with gRPC's default ping policy ends it with "too many pings"."""
    with verifier_process() as (_, address):
        transport = GrpcTransport(address, keepalive=Keepalive(0.1, PATIENCE_S))
        stream = await opened(transport)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.receive(), 2.5)
        await stream.send(Received(1, 1))
        await transport.close()


@pytest.mark.slow
async def test_a_peer_that_never_answers_is_noticed_in_time() -> None:
    """It takes the connection and says nothing, not even HTTP/2."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel connects, nobody reads
        port = listener.getsockname()[1]
        transport = GrpcTransport(f"127.0.0.1:{port}", connect_timeout_s=0.5)
        with pytest.raises(LinkError, match=r"no answer to connect within 0.5 s"):
            await transport.connect()
        with pytest.raises(LinkError, match=r"no answer to info within 0.5 s"):
            await transport.info()
        await transport.close()


@pytest.mark.slow
async def test_a_stopped_device_is_noticed_in_time() -> None:
    """By the verifier, so that the session's lease begins to run."""
    gone: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()

    async def watch(stream: VerifierStream) -> None:
        await stream.receive()
        gate.swallow()
        try:
            await stream.receive()
        except LinkError as error:
            gone.set_result(error)

    server = GrpcServer("127.0.0.1:0", watch, lambda: INFO)
    await server.start()
    async with Gate(server.port) as gate:
        transport = GrpcTransport(gate.address, keepalive=Keepalive(3600.0, 3600.0))
        stream = await transport.connect()
        await stream.send(Open("session", "", "", (1,)))
        error = await asyncio.wait_for(gone, PATIENCE_S)
        assert "device at ipv4:127.0.0.1" in str(error)
        await transport.close()
        await server.stop()


async def _serve_until_killed() -> None:
    async def open_and_listen(stream: VerifierStream) -> None:
        await stream.receive()
        await stream.send(Opened(Limits(), "toy", 1))
        while True:
            await stream.receive()

    server = GrpcServer("127.0.0.1:0", open_and_listen, lambda: INFO)
    await server.start()
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve_until_killed())
