"""The daemon's life over gRPC: ports, refusals with reasons, health, reflection, stopping."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typer.testing import CliRunner, Result

from edgespec.cli.main import app
from edgespec.core.ports import LinkError
from edgespec.core.protocol.messages import Cancel, Commit
from edgespec.wire.access import channel_credentials
from edgespec.wire.grpc_client import SERVING, GrpcTransport, ask_health
from tests.shell.echo_verifier import PATIENCE_S, STOPPING, echo, opened, served, works
from tests.shell.live_verifier import daemon
from tests.shell.pki import certs


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


NAME = "gpu-box"


def call(address: str, *arguments: str, seconds: str = "60") -> Result:
    words = ("doctor", "--probe", seconds, "--verifier", address, *arguments)
    return CliRunner().invoke(app, words)


def test_a_verifier_that_serves_is_exit_code_0() -> None:
    with daemon() as (address, _):
        result = call(address)
    assert (result.exit_code, result.stdout) == (0, f"{SERVING}\n")


def test_nobody_there_is_exit_code_1_and_one_line() -> None:
    result = call("127.0.0.1:1", seconds="1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: no health from 127.0.0.1:1: " in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((NAME, "--probe", "0"), "--probe is 0, but must be in (0, 600]"),
        ((NAME, "--probe", "nan"), "--probe is nan"),
        ((NAME, "--set", "tls.client_cert=c.pem"), "client_cert is given without client_key"),
        (("::1",), "an IPv6 address must be like [::1]:7420"),
        (("gpu-box:99999",), "its port must be in [1, 65535]"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_not_serving_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    async def not_serving(address: str, **_: object) -> str:
        return "NOT_SERVING"

    monkeypatch.setattr("edgespec.wire.grpc_client.ask_health", not_serving)
    result = call("gpu-box")
    assert (result.exit_code, result.stdout) == (1, "NOT_SERVING\n")
    assert result.stderr == "error: the verifier at gpu-box:7420 says NOT_SERVING\n"


async def test_a_proxy_of_the_environment_is_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with served() as (server, _):
        where = f"127.0.0.1:{server.port}"
        assert await ask_health(where, timeout_s=PATIENCE_S) == SERVING


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA and a certificate for ``NAME``."""
    folder = tmp_path_factory.mktemp("tls")
    certs("ca", "--dir", folder)
    certs("server", NAME, "--dir", folder)
    return folder


async def test_tls_by_the_name_in_the_certificate(identity: Path) -> None:
    ours = channel_credentials(identity / "ca.pem", None, None)
    systems = channel_credentials(None, None, None)
    pair = ((identity / "server.key").read_bytes(), (identity / "server.pem").read_bytes())
    async with served(echo, credentials=grpc.ssl_server_credentials([pair])) as (server, _):
        address = f"127.0.0.1:{server.port}"
        found = await ask_health(address, credentials=ours, server_name=NAME, timeout_s=PATIENCE_S)
        assert found == SERVING
        for wrong, name in ((ours, ""), (systems, NAME), (None, "")):
            with pytest.raises(LinkError, match="no health from"):
                await ask_health(address, credentials=wrong, server_name=name, timeout_s=20.0)
