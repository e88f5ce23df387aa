"""gRPC on localhost.

The protocol passes, a failing stream affects no other, and dead peers are noticed: a silent
verifier by a device, whose error names it, and a silent device by a verifier. If the verifier needs
a process of its own, that process runs this file as a script. Further tests cover the daemon's life
(ports, refusals with reasons, health, reflection, stopping) and shaped links.
"""

from __future__ import annotations

import asyncio
import heapq
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typer.testing import Result

from edgespec.config import DeviceTlsSection
from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec.core.ports import DeviceStream, LinkError, ModelInfo, VerifierStream
from edgespec.core.protocol import messages as m
from edgespec.testing import LoopbackTransport
from edgespec.wire import channel_options
from edgespec.wire.access import DeviceAccess, load_tls_access
from edgespec.wire.codec import WireLimits, payload_bytes
from edgespec.wire.grpc_client import SERVING, GrpcTransport, check_health
from edgespec.wire.pb import speculation_pb2 as pb
from edgespec.wire.shaped import PLAIN_TRIPS, TLS_TRIPS, ShapedTransport, ThreadPacer, TrafficMeter
from tests.kit import echo_verifier
from tests.kit.gate import Gate
from tests.kit.guarded import run_certs
from tests.kit.live_verifier import child_environment, start_daemon
from tests.kit.live_verifier import run_command as run


async def test_a_cancelled_receive_loses_nothing() -> None:
    async with echo_verifier.serve_streams() as (_, transport):
        stream = await echo_verifier.open_stream(transport)
        for _ in range(3):
            waiting = asyncio.ensure_future(stream.receive())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait((waiting,))
            assert waiting.cancelled()
        for token in range(20):
            await stream.send(m.Draft(1 + token, (0,), (token,), 3, 9))
        received = [await stream.receive() for _ in range(20)]
        assert received == [m.Commit(3 + n, (n,), 1) for n in range(20)]


async def test_a_verifier_whose_send_is_cancelled_sends_on_in_order() -> None:
    """Its device does not read meanwhile, so further messages wait until the write under way has
    ended."""
    given: list[int] = []
    read_now = asyncio.Event()

    async def leave_early(stream: VerifierStream) -> None:
        await stream.receive()
        number = 0
        while True:
            sending = asyncio.ensure_future(stream.send(m.Commit(number, (1,) * 4000)))
            if await echo_verifier.held_up(sending, transport):
                break
            given.append(number)
            number += 1
        sending.cancel()
        await asyncio.wait((sending,))
        assert sending.cancelled()
        read_now.set()
        await stream.send(m.Commit(number + 1, (2,)))
        given.append(number + 1)
        await stream.receive()

    async with echo_verifier.serve_streams(leave_early) as (_, transport):
        stream = await transport.connect()
        await stream.send(echo_verifier.OPEN)
        await asyncio.wait_for(read_now.wait(), echo_verifier.PATIENCE_S)
        heard: list[int] = []
        while not heard or heard[-1] != given[-1] or len(heard) < len(given):
            message = await asyncio.wait_for(stream.receive(), echo_verifier.PATIENCE_S)
            assert isinstance(message, m.Commit)
            heard.append(message.position)
        assert heard == given
        await stream.close()


@pytest.mark.parametrize(
    ("payload", "details"),
    [
        (b"\xff\xff\xff", "3 bytes are not a DeviceMessage"),
        (b"", "no kind known here"),
        (b"x" * 10_000, "4096"),
        (pb.DeviceMessage(draft=pb.Draft(tokens=[1])).SerializeToString(), "first_node_id is 0"),
    ],
)
async def test_a_malformed_message_ends_its_own_stream_only(payload: bytes, details: str) -> None:
    limits = WireLimits(max_message_bytes=4096)
    too_large = len(payload) > 4096
    async with echo_verifier.serve_streams(limits=limits) as (_, transport):
        good = await echo_verifier.open_stream(transport)
        async with echo_verifier.raw_call(transport) as call:
            await call.write(payload)
            if not too_large:
                assert details.encode() in await call.read()  # the Fault
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        code = grpc.StatusCode.RESOURCE_EXHAUSTED if too_large else grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.code() is code
        assert details in str(caught.value.details())
        assert await echo_verifier.is_alive(good)


async def test_a_verifier_over_a_bound_is_refused_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    long = pb.VerifierMessage(commit=pb.Commit(tokens=[7] * 4097)).SerializeToString()
    async with echo_verifier.serve_streams() as (_, transport):
        stream = await echo_verifier.open_stream(transport)
        monkeypatch.setattr("edgespec.wire.codec.encode_downlink", lambda *_: long)
        await stream.send(m.Draft(1, (0, 1), (7, 8), 3, 9))
        with pytest.raises(LinkError, match=r"Commit.tokens has 4097 entries") as caught:
            await stream.receive()
        assert not caught.value.retryable


async def test_a_bug_in_the_verifier_ends_its_own_stream_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with echo_verifier.serve_streams() as (_, transport):
        good, bad = (
            await echo_verifier.open_stream(transport),
            await echo_verifier.open_stream(transport),
        )
        await bad.send(m.Received(1, 1))
        fault = await bad.receive()
        assert fault == m.Fault(m.FaultCode.INTERNAL, "the verifier failed: ZeroDivisionError")
        with pytest.raises(LinkError, match="INTERNAL: the verifier failed"):
            await bad.receive()
        assert await echo_verifier.is_alive(good)
    (failed,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "ZeroDivisionError" in getattr(failed, "failure", "")
    assert "ZeroDivisionError: a bug" not in getattr(failed, "failure", "") + caplog.text


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("RESYNC", "ABORTED"),
        ("UNKNOWN_MODEL", "NOT_FOUND"),
        ("OVERLOADED", "RESOURCE_EXHAUSTED"),
    ],
)
async def test_a_fault_arrives_before_the_status_that_matches_it(name: str, status: str) -> None:
    code = m.FaultCode[name]
    fault = m.Fault(code, "because", 1.5)

    async def refuse(stream: VerifierStream) -> None:
        await stream.receive()
        await stream.send(m.Commit(3, (1,)))
        await stream.send(fault)

    async with echo_verifier.serve_streams(refuse) as (_, transport):
        stream = await transport.connect()
        await stream.send(echo_verifier.OPEN)
        assert await stream.receive() == m.Commit(3, (1,))
        assert await stream.receive() == fault
        with pytest.raises(LinkError, match=f"{status}: because") as caught:
            await stream.receive()
        assert caught.value.retryable is code.retryable


async def test_a_fault_reaches_a_device_that_is_sending() -> None:
    """The library's own write replaces the fault by INTERNAL when it fails (grpc/grpc#36066)."""
    fault = m.Fault(m.FaultCode.VOCABULARY_MISMATCH, "because")

    async def refuse(stream: VerifierStream) -> None:
        await stream.receive()
        for position in range(20):
            await stream.send(m.Commit(position, (1,)))
        await stream.send(fault)

    async with echo_verifier.serve_streams(refuse) as (_, transport):
        for _ in range(20):
            stream = await transport.connect()
            for node_id in range(1, 200):
                await stream.send(m.Draft(node_id, (0,), (7,), 3, 9))
            received = [await stream.receive() for _ in range(21)]
            assert received[-1] == fault
            with pytest.raises(LinkError, match="FAILED_PRECONDITION: because") as caught:
                await stream.receive()
            assert not caught.value.retryable
            await stream.close()


async def test_what_was_sent_before_closing_arrives_and_the_closing_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edgespec.wire.grpc_client._LINGER_TIMEOUT_S", echo_verifier.PATIENCE_S)
    heard: asyncio.Queue[object] = asyncio.Queue()

    async def listen(stream: VerifierStream) -> None:
        while True:
            heard.put_nowait(await stream.receive())

    async with echo_verifier.serve_streams(listen) as (_, transport):
        stream = await transport.connect()
        receiving = asyncio.ensure_future(stream.receive())
        for position in range(50):
            await stream.send(m.Received(position, 0))
        await stream.send(m.Cancel())
        await stream.close()
        with pytest.raises(LinkError, match="was closed here"):
            await receiving
        with pytest.raises(LinkError, match="was closed here"):
            await stream.send(m.Cancel())
        await transport.close()
        assert [heard.get_nowait() for _ in range(51)][-1] == m.Cancel()


async def test_who_is_cancelled_as_the_connection_stands_has_no_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the call is cancelled, and so is the caller."""
    asked, connected = asyncio.Event(), asyncio.get_running_loop().create_future()
    cancelled: list[bool] = []

    class Connecting:
        async def wait_for_connection(self) -> None:
            asked.set()
            await connected

        def cancel(self) -> None:
            cancelled.append(True)

    class Channel:
        def stream_stream(self, *_: object) -> Any:
            return lambda metadata: Connecting()

    transport = GrpcTransport("127.0.0.1:1")
    monkeypatch.setattr(transport, "_get_channel", Channel)
    connecting = asyncio.create_task(transport.connect())
    await asked.wait()
    connected.set_result(None)  # connected, but no waiter has run since
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    assert connecting.cancelled()
    assert cancelled == [True]


@contextmanager
def verifier_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    quiet = child_environment() | {"GRPC_VERBOSITY": "NONE"}
    process = subprocess.Popen(
        [sys.executable, __file__], stdout=subprocess.PIPE, text=True, env=quiet
    )
    assert process.stdout is not None
    try:
        yield process, f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
async def test_a_verifier_behind_a_black_hole_is_noticed_in_time() -> None:
    """Both processes live and the connection stands, but nothing passes any more."""
    with verifier_process() as (_, address):
        async with Gate(int(address.rpartition(":")[2])) as gate:
            transport = GrpcTransport(gate.address)
            stream = await echo_verifier.open_stream(transport)
            gate.swallow()
            with pytest.raises(LinkError, match="UNAVAILABLE") as caught:
                await asyncio.wait_for(stream.receive(), echo_verifier.PATIENCE_S)
            assert caught.value.retryable
            await transport.close()


@pytest.mark.slow
async def test_an_idle_stream_outlives_many_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with gRPC's default ping policy ends it with "too many pings"."""
    monkeypatch.setattr(channel_options, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(channel_options, "PING_TIMEOUT_S", echo_verifier.PATIENCE_S)
    with verifier_process() as (_, address):
        transport = GrpcTransport(address)
        stream = await echo_verifier.open_stream(transport)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.receive(), 2.5)
        await stream.send(m.Received(1, 1))
        await transport.close()


@pytest.mark.slow
async def test_a_peer_that_never_answers_is_noticed_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer accepts the connection and sends nothing, not even HTTP/2 settings."""
    monkeypatch.setattr("edgespec.wire.grpc_client.CALL_TIMEOUT_S", 0.5)
    # the kernel connects, no process reads
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        transport = GrpcTransport(f"127.0.0.1:{port}")
        with pytest.raises(LinkError, match=r"no answer to connect within 0.5 s"):
            await transport.connect()
        with pytest.raises(LinkError, match=r"no answer to info within 0.5 s"):
            await transport.info()
        await transport.close()


@pytest.mark.slow
async def test_a_stopped_device_is_noticed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier notices it, so that the session's lease begins to run."""
    gone: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()

    async def watch(stream: VerifierStream) -> None:
        await stream.receive()
        gate.swallow()
        try:
            await stream.receive()
        except LinkError as error:
            gone.set_result(error)

    async with echo_verifier.serve_streams(watch) as (server, _), Gate(server.port) as gate:
        # The device itself sends no pings.
        monkeypatch.setattr(channel_options, "PING_INTERVAL_S", 3600.0)
        transport = GrpcTransport(gate.address)
        stream = await transport.connect()
        await stream.send(echo_verifier.OPEN)
        error = await asyncio.wait_for(gone, echo_verifier.PATIENCE_S)
        assert "device at ipv4:127.0.0.1" in str(error)
        await transport.close()


async def _serve_until_killed() -> None:
    async with echo_verifier.serve_streams() as (server, _):
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


async def test_a_verifier_that_is_not_there_is_an_error_that_names_it() -> None:
    async with echo_verifier.serve_streams() as (server, _):
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
    async with echo_verifier.serve_streams() as (server, transport):
        channel = grpc.aio.insecure_channel(transport.address)
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "edgespec.v1.Verifier"):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        running = await echo_verifier.open_stream(transport)
        stopping = asyncio.ensure_future(server.stop(grace_s=30))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await echo_verifier.is_alive(running)
        late = await transport.connect()
        fault = await late.receive()
        assert fault == echo_verifier.STOPPING
        await running.send(m.Cancel())
        assert isinstance(await running.receive(), m.Commit)
        watch.cancel()
        await channel.close(None)
        await asyncio.wait_for(stopping, echo_verifier.PATIENCE_S)


async def test_reflection_lists_the_service() -> None:
    async with echo_verifier.serve_streams() as (_, transport):
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
    return run("doctor", "--probe", seconds, "--verifier", address, *arguments)


def test_a_verifier_that_serves_is_exit_code_0() -> None:
    with start_daemon() as (address, _):
        result = call(address)
    assert (result.exit_code, result.stdout) == (0, f"{SERVING}\n")


def test_nobody_there_is_exit_code_1_and_one_line() -> None:
    result = call("127.0.0.1:1", seconds="1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: no health from 127.0.0.1:1: " in result.stderr
    assert result.stderr.count("\n") == 1


def test_not_serving_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    async def not_serving(address: str, *_: object) -> str:
        return "NOT_SERVING"

    monkeypatch.setattr("edgespec.wire.grpc_client.check_health", not_serving)
    result = call("gpu-box")
    assert (result.exit_code, result.stdout) == (1, "NOT_SERVING\n")
    assert result.stderr == "error: the verifier at gpu-box:7420 is not serving: NOT_SERVING\n"


async def test_a_proxy_of_the_environment_is_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with echo_verifier.serve_streams() as (server, _):
        where = f"127.0.0.1:{server.port}"
        assert await check_health(where, DeviceAccess(), echo_verifier.PATIENCE_S) == SERVING


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a CA and a certificate for ``NAME``."""
    folder = tmp_path_factory.mktemp("tls")
    run_certs("ca", "--dir", folder)
    run_certs("server", NAME, "--dir", folder)
    return folder


async def test_tls_by_the_name_in_the_certificate(identity: Path) -> None:
    ours = load_tls_access(DeviceTlsSection(ca=str(identity / "ca.pem"))).credentials
    systems = load_tls_access(DeviceTlsSection(enabled=True)).credentials
    pair = ((identity / "server.key").read_bytes(), (identity / "server.pem").read_bytes())
    async with echo_verifier.serve_streams(
        echo_verifier.echo, credentials=lambda: grpc.ssl_server_credentials([pair])
    ) as (server, _):
        address = f"127.0.0.1:{server.port}"
        access = DeviceAccess(credentials=ours, server_name=NAME)
        assert await check_health(address, access, echo_verifier.PATIENCE_S) == SERVING
        for wrong, name in ((ours, ""), (systems, NAME), (None, "")):
            access = DeviceAccess(credentials=wrong, server_name=name)
            with pytest.raises(LinkError, match="no health from"):
                await check_health(address, access, 20.0)


if __name__ == "__main__":
    asyncio.run(_serve_until_killed())


# --- the shaped link: delays by a clock of the test's own, order, ends and cancellation -----------


INFO = m.VerifierInfo(ModelInfo("toy", "v1", 32000, 4096), m.Limits(), 3, 8)

UP_S, DOWN_S = 0.030, 0.070


class HandPacer(ThreadPacer):
    """A pacer whose time moves only when the test moves it, from one waiter to the next."""

    time_s = 100.0

    def now(self) -> float:
        return self.time_s

    async def wait_until(self, when_s: float) -> None:
        if when_s > self.time_s:
            future = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiters, (when_s, next(self._numbers), future))
            await future

    async def run_until(self, end_s: float) -> None:
        await settle()
        while self._waiters and self._waiters[0][0] <= end_s:
            when_s, _, future = heapq.heappop(self._waiters)
            self.time_s = max(self.time_s, when_s)
            if not future.done():
                future.set_result(None)
            await settle()
        self.time_s = end_s


async def settle() -> None:
    """Let everything run that can run without a change of time."""
    for _ in range(30):
        await asyncio.sleep(0)


class World:
    """A verifier that notes the arrival of each message, and commits the tokens of each draft."""

    def __init__(
        self,
        up: LinkModel | None = None,
        down: LinkModel | None = None,
        handshake_trips: int = 1,
    ) -> None:
        self.pacer = HandPacer()
        self.arrived: list[tuple[float, m.Uplink]] = []
        self.left_s: list[float] = []
        self.meter = TrafficMeter()
        self.inner = LoopbackTransport(self._serve, lambda: INFO)
        self.transport = ShapedTransport(
            self.inner,
            up or LinkModel(LinkSettings(one_way_s=UP_S)),
            down or LinkModel(LinkSettings(one_way_s=DOWN_S)),
            pacer=self.pacer,
            meter=self.meter,
            handshake_trips=handshake_trips,
        )

    async def _serve(self, stream: VerifierStream) -> None:
        try:
            while True:
                message = await stream.receive()
                self.arrived.append((self.now_s(), message))
                if isinstance(message, m.Draft):
                    await stream.send(m.Commit(3, message.tokens, len(message.tokens)))
                elif isinstance(message, m.Received):
                    return
        finally:
            self.left_s.append(self.now_s())

    def now_s(self) -> float:
        return round(self.pacer.now() - 100.0, 9)

    async def run_until(self, end_s: float) -> None:
        await self.pacer.run_until(100.0 + end_s)

    async def connected(self, by_s: float) -> DeviceStream:
        connecting = asyncio.ensure_future(self.transport.connect())
        await self.run_until(by_s)
        assert connecting.done()
        return await connecting


def draft(node_id: int) -> m.Draft:
    return m.Draft(node_id, (0,), (node_id,), 3, 9)


@pytest.mark.parametrize("trips", [PLAIN_TRIPS, TLS_TRIPS])
async def test_a_new_connection_costs_its_round_trips_and_each_message_its_way(trips: int) -> None:
    world = World(handshake_trips=trips)
    rtt_s = UP_S + DOWN_S
    connecting = asyncio.ensure_future(world.transport.connect())
    await world.run_until(trips * rtt_s - 0.001)
    assert not connecting.done()
    await world.run_until(trips * rtt_s)
    stream = await connecting
    await stream.send(draft(1))
    receiving = asyncio.ensure_future(stream.receive())
    await world.run_until((trips + 1) * rtt_s - 0.001)
    assert world.arrived == [(round(trips * rtt_s + UP_S, 9), draft(1))]
    assert not receiving.done()
    await world.run_until((trips + 1) * rtt_s)
    assert await receiving == m.Commit(3, (1,), 1)
    await world.transport.close()


async def test_a_second_stream_of_a_connection_costs_nothing() -> None:
    world = World()
    await world.connected(0.1)
    second = await world.connected(0.1)
    await second.send(draft(1))
    await world.run_until(0.2)
    assert world.arrived == [(0.13, draft(1))]
    assert await second.receive() == m.Commit(3, (1,), 1)
    await world.transport.close()


async def test_the_description_costs_a_round_trip_and_opens_the_connection() -> None:
    world = World()
    asking = asyncio.ensure_future(world.transport.info())
    opening = asyncio.ensure_future(world.transport.connect())
    await world.run_until(0.1)
    assert opening.done()
    assert not asking.done()
    await world.run_until(0.2)
    assert await asking == INFO
    await world.transport.close()


async def test_a_broken_connection_is_paid_for_again() -> None:
    world = World()
    stream = await world.connected(0.1)
    await stream.send(m.Received(1, 1))  # the verifier ends the stream when it receives this
    await world.run_until(0.2)
    with pytest.raises(LinkError):
        await stream.receive()
    connecting = asyncio.ensure_future(world.transport.connect())
    await world.run_until(0.299)
    assert not connecting.done()
    await world.run_until(0.3)
    await connecting
    await world.transport.close()


async def test_messages_queue_for_the_bandwidth_and_keep_their_order() -> None:
    size_bytes = payload_bytes(draft(1))
    queue = SharedQueue(size_bytes * 8 / 0.010)  # one draft takes 10 ms
    settings = LinkSettings(one_way_s=UP_S, jitter_s=0.020, seed=4)
    expected = LinkModel(settings, SharedQueue(size_bytes * 8 / 0.010))
    world = World(up=LinkModel(settings, queue), down=LinkModel())
    stream = await world.connected(2.0)
    expected.arrival(0.0, 64)
    model_s = [round(expected.arrival(2.0, size_bytes), 9) for _ in range(20)]
    for node_id in range(1, 21):
        await stream.send(draft(node_id))
    await world.run_until(4.0)
    assert world.arrived == [(model_s[n], draft(n + 1)) for n in range(20)]
    await world.transport.close()


async def test_a_cancelled_receive_of_a_shaped_link_loses_nothing() -> None:
    world = World()
    stream = await world.connected(0.1)
    await stream.send(draft(1))
    await stream.send(draft(2))
    for end_s in (0.15, 0.199):
        waiting = asyncio.ensure_future(stream.receive())
        await world.run_until(end_s)
        waiting.cancel()
        await settle()
    await world.run_until(0.3)
    assert [await stream.receive(), await stream.receive()] == [
        m.Commit(3, (1,), 1),
        m.Commit(3, (2,), 1),
    ]
    await world.transport.close()


async def test_the_end_of_the_stream_comes_after_the_data_before_it() -> None:
    world = World()
    stream = await world.connected(0.1)
    await stream.send(draft(1))
    await stream.send(m.Received(1, 1))  # the verifier ends the stream when it receives this
    await world.run_until(0.15)
    assert world.left_s == [0.13]
    await stream.send(draft(2))  # the device does not have this end yet
    await world.run_until(0.3)
    assert await stream.receive() == m.Commit(3, (1,), 1)
    with pytest.raises(LinkError, match="the verifier ended the stream"):
        await stream.receive()
    with pytest.raises(LinkError, match="the verifier ended the stream"):
        await stream.send(draft(3))
    await world.transport.close()


async def test_closing_returns_at_once_and_what_was_sent_still_arrives() -> None:
    world = World()
    stream = await world.connected(0.1)
    await stream.send(m.Cancel())
    await stream.close()
    for attempt in (stream.send(draft(1)), stream.receive()):
        with pytest.raises(LinkError, match="was closed here"):
            await attempt
    await settle()
    assert not world.left_s
    await world.run_until(0.2)
    assert world.arrived == [(0.13, m.Cancel())]
    assert world.left_s == [0.13]
    await world.transport.close()


class HeldClock:
    """The real clock, except that it stands still until ``release``, however long that takes."""

    def __init__(self) -> None:
        self._held_s: float | None = time.monotonic()

    def release(self) -> None:
        self._held_s = None

    def monotonic(self) -> float:
        return time.monotonic() if self._held_s is None else self._held_s


async def test_the_pacer_wakes_in_the_order_of_the_moments_and_never_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = HeldClock()
    monkeypatch.setattr("edgespec.wire.shaped.time", clock)
    others = set(threading.enumerate())
    pacer = ThreadPacer()
    start_s = pacer.now()
    woken: list[int] = []

    async def wait(milliseconds: int) -> None:
        await pacer.wait_until(start_s + milliseconds / 1000)
        assert pacer.now() >= start_s + milliseconds / 1000
        woken.append(milliseconds)

    waiting = asyncio.gather(*(wait(ms) for ms in (30, 10, 20, -5, 0)))
    await settle()  # a busy machine may take longer than 10 ms until all five wait
    assert woken == [-5, 0]
    clock.release()
    await waiting
    assert woken == [-5, 0, 10, 20, 30]
    pacer.close()
    left = set(threading.enumerate()) - others
    assert not any(thread.name == "pacer" for thread in left)
    with pytest.raises(RuntimeError, match="the pacer is closed"):
        await pacer.wait_until(pacer.now() + 1.0)
