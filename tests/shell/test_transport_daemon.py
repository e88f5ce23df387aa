"""The daemon's life over gRPC: ports, refusals with reasons, health, reflection, stopping."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from edgespec.core.ports import LinkError
from edgespec.core.protocol.messages import Cancel, Commit
from edgespec.wire.grpc_client import GrpcTransport
from edgespec.wire.grpc_server import GrpcServer
from tests.shell.echo_verifier import (
    INFO,
    PATIENCE_S,
    STOPPING,
    echo,
    opened,
    served,
    works,
)


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    async with served() as (server, _):
        address = f"127.0.0.1:{server.port}"
        second = GrpcServer(address, echo, lambda: INFO)
        with pytest.raises(OSError, match=f"cannot listen on {address} .is it in use"):
            await second.start()


async def test_a_verifier_that_is_not_there_is_an_error_that_names_it() -> None:
    async with served() as (server, _):
        gone = f"127.0.0.1:{server.port}"
    transport = GrpcTransport(gone)
    attempts: list[Callable[[], Awaitable[object]]] = [transport.connect, transport.info]
    for attempt in attempts:
        with pytest.raises(LinkError, match=f"verifier at {gone}: UNAVAILABLE") as caught:
            await attempt()
        assert caught.value.retryable
    await transport.close()
    with pytest.raises(LinkError, match="was closed here"):
        await transport.connect()


async def test_health_is_reported_and_ends_before_the_service() -> None:
    async with served() as (server, transport):
        channel = grpc.aio.insecure_channel(transport.address)
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "edgespec.v1.Verifier"):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        running = await opened(transport)
        stopping = asyncio.ensure_future(server.stop(grace_s=30))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await works(running)
        late = await transport.connect()
        fault = await late.receive()
        assert fault == STOPPING
        await running.send(Cancel())
        assert isinstance(await running.receive(), Commit)
        watch.cancel()
        await channel.close(None)
        await asyncio.wait_for(stopping, PATIENCE_S)


async def test_reflection_lists_the_service() -> None:
    async with served() as (_, transport):
        channel = grpc.aio.insecure_channel(transport.address)
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast(Any, channel))
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {"edgespec.v1.Verifier", "grpc.health.v1.Health"} <= names
        await call.write(
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="edgespec.v1.Verifier")
        )
        assert (await call.read()).HasField("file_descriptor_response")
        await channel.close(None)
