"""gRPC in processes of its own before the verifier: the service is the same, whatever ends.

Oracle: texts are the toy's, token for token, though front processes are killed under them; what a
process was is looked up in the system's table of processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edgespec.access import ServerAccess, device_access
from edgespec.agent.agent import Chunk, GenerationError
from edgespec.compose import build_agent, build_verifier, connect
from edgespec.config import VerifierConfig
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.protocol.messages import Cancel, Draft
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.toy_tokenizer import ToyTokenizer
from edgespec.ports import DeviceStream, LinkError, UntrustedPeerError
from edgespec.transport import front_frames
from edgespec.transport.front_group import FrontProcesses
from edgespec.transport.grpc_client import GrpcTransport
from edgespec.transport.grpc_server import GrpcServer
from tests.shell.echo_verifier import INFO, PATIENCE_S, echo, opened, works
from tests.shell.guarded import PROMPT, collect, device_config, keys_in, verifier_config
from tests.shell.live_verifier import daemon, toy_text
from tests.shell.pki import Pki

PATIENT = ReconnectPolicy(
    first_s=0.01, longest_s=0.2, give_up_first_s=PATIENCE_S, give_up_s=PATIENCE_S
)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
EXPECTED = toy_text(ToyTokenizer().encode(PROMPT), LONG)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0)


def alive(process: int) -> bool:
    """Whether it is there, and more than a name in the table."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def echoing(
    ping_every_s: float = 2.0,
) -> AsyncIterator[tuple[GrpcServer, FrontProcesses, GrpcTransport]]:
    fronts = FrontProcesses(1, "127.0.0.1", 0, ping_every_s=ping_every_s)
    server = GrpcServer("", echo, lambda: INFO, listener=fronts)
    await server.start()
    transport = GrpcTransport(f"127.0.0.1:{server.port}")
    try:
        yield server, fronts, transport
    finally:
        await transport.close()
        await server.stop()


async def test_streams_and_info_pass_and_a_port_has_one_verifier() -> None:
    async with echoing() as (server, fronts, transport):
        assert await transport.info() == INFO
        stream = await opened(transport)
        for number in range(1, 40):  # more than may be unread
            await stream.send(Draft(number, (0,), (7,), 2 + number, 9))
        for _ in range(39):
            await stream.receive()
        address = f"127.0.0.1:{server.port}"
        others = FrontProcesses(1, "127.0.0.1", server.port)
        for second in (
            GrpcServer(address, echo, lambda: INFO),
            GrpcServer("", echo, lambda: INFO, listener=others),
        ):
            with pytest.raises(OSError, match=f"cannot listen on {address} .is it in use"):
                await second.start()
        assert await works(stream)
        (process,) = fronts.processes
        await stream.send(Cancel())
        await stream.receive()
    assert not alive(process)


async def test_who_is_killed_or_hangs_breaks_its_streams_and_is_replaced() -> None:
    async with echoing(ping_every_s=0.5) as (server, fronts, transport):
        for number in (signal.SIGKILL, signal.SIGSTOP):
            await until(lambda: bool(fronts.processes))
            (process,) = fronts.processes
            stream = await _opened_in_the_end(transport)
            with suppress(ProcessLookupError):  # taken for one that hangs, on a busy machine
                os.kill(process, number)
            with pytest.raises(LinkError) as caught:
                await asyncio.wait_for(stream.receive(), PATIENCE_S)
            assert caught.value.retryable
            await until(partial(_is_gone, process, fronts))
            await stream.close()
        await until(lambda: server.stream_count == 0)


def _is_gone(process: int, fronts: FrontProcesses) -> bool:
    return process not in fronts.processes and not alive(process)


async def _opened_in_the_end(transport: GrpcTransport) -> DeviceStream:
    """A stream, by whichever attempt: a process may end before it has one."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await opened(transport)
            except LinkError:
                await asyncio.sleep(0)


async def test_health_tells_of_a_verifier_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Here alone: the verifier is patient, so that only the front process judges.
    monkeypatch.setattr(front_frames, "MOST_PINGS", 1_000_000)
    async with echoing(ping_every_s=0.3) as (_, fronts, transport):
        channel = grpc.aio.insecure_channel(transport.address)
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        statuses = health_pb2.HealthCheckResponse
        assert (await watch.read()).status == statuses.SERVING
        (front,) = fronts._fronts
        answered, front._tick = front._tick, lambda: None  # type: ignore[method-assign]
        assert (await watch.read()).status == statuses.NOT_SERVING
        answered()
        assert (await watch.read()).status == statuses.SERVING
        watch.cancel()
        await channel.close(None)


@pytest.mark.slow
async def test_no_device_loses_its_text_with_a_front_process() -> None:
    config = VerifierConfig(model="toy", port=0, front_processes=2)
    verifier, server = build_verifier(config)
    await server.start()
    fronts = server.listener
    assert isinstance(fronts, FrontProcesses)
    address = f"127.0.0.1:{server.port}"
    agents = [build_agent(replace(device_config(address), reconnect=PATIENT)) for _ in range(4)]
    try:
        texts = [agent.generate(PROMPT, LONG) for agent in agents]
        begun = [(await anext(text)).tokens for text in texts]
        first = fronts.processes
        for process in first:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        rest = await asyncio.gather(*(_tokens_of(text) for text in texts))
        assert [[*one, *other] for one, other in zip(begun, rest, strict=True)] == 4 * [EXPECTED]
        await until(lambda: len(set(fronts.processes) - set(first)) == 2)
    finally:
        for agent in agents:
            await agent.close()
        await verifier.stop()
        await server.stop(0.0)


async def _tokens_of(chunks: AsyncIterator[Chunk]) -> list[int]:
    return [token async for chunk in chunks for token in chunk.tokens]


async def test_keys_and_a_new_certificate_hold_in_front_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, newer, path = Pki(tmp_path / "old"), Pki(tmp_path / "new"), tmp_path / "keys.yaml"
    monkeypatch.setenv("EDGESPEC_API_KEY", keys_in(path, "one")["one"])
    config = replace(verifier_config(mine.server(), path), front_processes=1)
    access = ServerAccess(config)
    verifier, server = build_verifier(config, access=access)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    try:
        async with build_agent(device_config(address, mine.device())) as before:
            running = before.generate(PROMPT, LONG)
            tokens = [*(await anext(running)).tokens]
            for name in ("server.pem", "server.key"):
                (tmp_path / "old" / name).write_bytes((tmp_path / "new" / name).read_bytes())
            assert str(await asyncio.to_thread(access.reload)) == "a new certificate or client CA"
            await _trusted_in_the_end(address, newer)
            assert [*tokens, *await _tokens_of(running)] == EXPECTED
            assert before.stats is not None
            assert before.stats.counters.reconnects == 0
        monkeypatch.setenv("EDGESPEC_API_KEY", "edgespec-wrong")
        with pytest.raises(LinkError, match="UNAUTHENTICATED"):
            await _info(address, newer)
        monkeypatch.delenv("EDGESPEC_API_KEY")
        with pytest.raises(GenerationError, match="asks for a key"):
            async with build_agent(device_config(address, newer.device())) as late:
                await collect(late)
    finally:
        await verifier.stop()
        await server.stop(0.0)


async def _info(address: str, pki: Pki) -> None:
    transport = connect(address, access=device_access(device_config(address, pki.device())))
    try:
        await transport.info()
    finally:
        await transport.close()


async def _trusted_in_the_end(address: str, pki: Pki) -> None:
    """A front process hears of its certificate a moment after the reload."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await _info(address, pki)
            except UntrustedPeerError:
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
async def test_no_process_outlives_the_verifier(number: signal.Signals) -> None:
    with daemon("--front-processes", "2", "--drain-s", "0") as (address, process):
        transport = GrpcTransport(address)
        assert (await transport.info()).model.name == "toy"
        fronts = [child.pid for child in psutil.Process(process.pid).children()]
        assert len(fronts) == 2
        os.kill(fronts[0], signal.SIGTERM)  # as a service manager does to all of a service
        assert (await transport.info()).model.name == "toy"
        await transport.close()
        process.send_signal(number)
        assert await asyncio.to_thread(_ended, process) == (0 if number is signal.SIGTERM else -9)
        await until(lambda: not any(map(alive, fronts)))


def _ended(process: subprocess.Popen[str]) -> int:
    return process.wait(PATIENCE_S)
