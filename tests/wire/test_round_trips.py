"""Tests that count the round trips until the first token, without a clock.

Oracle: a link that holds one direction (``held_link.py``). What arrives while the way down is held
needed no answer from there.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from edgespec.config import VerifierConfig
from edgespec.core.ports import DeviceStream, LinkError, UntrustedPeerError, VerifierStream
from edgespec.core.protocol import messages as m
from edgespec.testing import play_output
from edgespec.wire import early_connection
from edgespec.wire.access import DeviceAccess, ServerAccess, load_tls_access
from edgespec.wire.channel_options import Options
from edgespec.wire.early_connection import SettingsAckFilter
from edgespec.wire.grpc_client import GrpcTransport
from edgespec.wire.shaped import PLAIN_TRIPS, TLS_TRIPS
from tests.kit.echo_verifier import OPEN, PATIENCE_S, serve_streams
from tests.kit.guarded import Pki
from tests.kit.held_link import HeldLink
from tests.kit.live_verifier import wait_until

OUTPUT = [7, 8, 9]
TCP_TRIPS = 1
"""The handshake of TCP, which a link on this machine cannot hold: the system answers it."""


class Verifier:
    """A verifier that notes each Open, and answers it."""

    def __init__(self) -> None:
        self.opened: asyncio.Queue[m.Open] = asyncio.Queue()
        self.answered = asyncio.Event()

    async def serve(self, stream: VerifierStream) -> None:
        opening = await stream.receive()
        assert isinstance(opening, m.Open)
        self.opened.put_nowait(opening)
        self.answered.set()
        await play_output(stream, opening, OUTPUT)


@asynccontextmanager
async def link_to(
    verifier: Verifier, access: DeviceAccess | None = None, server: ServerAccess | None = None
) -> AsyncIterator[tuple[HeldLink, GrpcTransport]]:
    """Serve ``verifier`` behind a link, and yield the link and a transport over it."""
    credentials = None if server is None else server.credentials
    async with serve_streams(verifier.serve, credentials=credentials) as (daemon, _):
        async with HeldLink(daemon.port) as link:
            transport = GrpcTransport(link.address, access, early=True)
            try:
                yield link, transport
            finally:
                for upwards in (True, False):
                    link.release(upwards=upwards)
                await transport.close()


async def first_tokens(transport: GrpcTransport) -> list[int]:
    """Open a generation, and return the tokens of its first commit."""
    stream = await transport.connect()
    await stream.send(OPEN)
    while True:
        message = await stream.receive()
        if isinstance(message, m.Commit):
            await stream.close()
            return list(message.tokens)


async def read_to_the_end(stream: DeviceStream) -> None:
    while True:
        await stream.receive()


async def finish_in_one_trip(
    verifier: Verifier, link: HeldLink, tokens: asyncio.Task[list[int]]
) -> None:
    """Assert that the request arrives while the way down is held, and that the first token arrives
    while the way up is held."""
    async with asyncio.timeout(PATIENCE_S):
        await verifier.opened.get()
        assert not tokens.done()
        link.hold(upwards=True)
        link.release(upwards=False)
        assert await tokens == OUTPUT[:1]


async def test_a_warm_connection_needs_one_round_trip() -> None:
    verifier = Verifier()
    async with link_to(verifier) as (link, transport):
        for _ in range(3):
            await transport.info()
            link.hold(upwards=False)
            tokens = asyncio.create_task(first_tokens(transport))
            await finish_in_one_trip(verifier, link, tokens)
            link.release(upwards=True)


async def test_a_new_connection_needs_no_settings_before_the_request() -> None:
    """So without TLS the handshake of TCP is all that comes before the request."""
    verifier = Verifier()
    async with link_to(verifier) as (link, transport):
        link.hold(upwards=False)
        tokens = asyncio.create_task(first_tokens(transport))
        await finish_in_one_trip(verifier, link, tokens)
    assert PLAIN_TRIPS == TCP_TRIPS


async def test_with_tls_the_request_leaves_with_the_end_of_its_handshake(pki: Pki) -> None:
    server = ServerAccess(VerifierConfig(tls=pki.server()))
    access = load_tls_access(pki.device())
    verifier = Verifier()
    async with link_to(verifier, access, server) as (link, transport):
        link.hold_at_flight = 2
        tokens = asyncio.create_task(first_tokens(transport))
        await finish_in_one_trip(verifier, link, tokens)
    handshake_trips = TCP_TRIPS + 1  # the first flight of TLS and its answer
    assert TLS_TRIPS == handshake_trips


def frame(kind: int, flags: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags, 0, 0, 0, 0]) + payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, ACK = frame(4, 0, bytes(12)), frame(4, 1)
HEADERS, DATA = frame(1, 4, b"x" * 300), frame(0, 0, ACK * 3)  # bytes that look like a frame
CASES = {
    "at once": ([PREFACE, SETTINGS, ACK, HEADERS, DATA], 2),
    "behind requests": ([PREFACE, SETTINGS, HEADERS, DATA, ACK, DATA], 4),
    "the first of two": ([PREFACE, SETTINGS, ACK, HEADERS, ACK], 2),
}


@pytest.mark.parametrize("step", [1, 2, 8, 9, 10, 33, 4096])
@pytest.mark.parametrize(("sent", "removed"), CASES.values(), ids=CASES)
def test_only_the_first_acknowledgement_is_removed_however_bytes_are_cut(
    sent: list[bytes], removed: int, step: int
) -> None:
    ack_filter, data = SettingsAckFilter(), b"".join(sent)
    passed = [ack_filter.remove(data[at : at + step]) for at in range(0, len(data), step)]
    assert b"".join(passed) == b"".join(sent[:removed] + sent[removed + 1 :])


async def test_a_verifier_that_is_away_is_named_as_without_an_early_connection(dead: str) -> None:
    said = []
    for early in (True, False):
        transport = GrpcTransport(dead, early=early)
        with pytest.raises(LinkError, match="UNAVAILABLE") as refused:
            await transport.connect()
        said.append(str(refused.value))
        await transport.close()
    assert said[0] == said[1]


async def test_a_missing_client_certificate_is_named_as_without_an_early_connection(
    pki: Pki,
) -> None:
    """The verifier refuses the device after the handshake that the device sees as complete."""
    server = ServerAccess(VerifierConfig(tls=pki.server(mutual=True)))
    access = load_tls_access(pki.device())
    async with serve_streams(Verifier().serve, credentials=server.credentials) as (daemon, _):
        transport = GrpcTransport(f"127.0.0.1:{daemon.port}", access, early=True)
        for ask in (transport.info, transport.connect):
            with pytest.raises(UntrustedPeerError, match=r"may require tls\.client_cert"):
                await ask()
        await transport.close()


async def test_generations_go_on_over_the_usual_connection_and_the_early_one_is_closed() -> None:
    verifier = Verifier()
    async with link_to(verifier) as (link, transport):
        assert await first_tokens(transport) == OUTPUT[:1]
        while transport._early is not None:  # until a call ends after the usual one is ready
            assert await first_tokens(transport) == OUTPUT[:1]
        await wait_until(lambda: link.connection_count == 1)
        assert await first_tokens(transport) == OUTPUT[:1]


class SilentChannel:
    """A channel of the library that connects and never sends anything, which was seen."""

    def __init__(self, target: str, options: object) -> None:
        self._path = target.removeprefix("unix:")
        self._socket = socket.socket(socket.AF_UNIX)

    def get_state(self, try_to_connect: bool) -> None:
        self._socket.setblocking(False)
        self._socket.connect(self._path)

    async def close(self, grace: None) -> None:
        self._socket.close()


@pytest.fixture
def _silent_library(monkeypatch: pytest.MonkeyPatch) -> None:
    make_channel = grpc.aio.insecure_channel

    def connect(target: str, options: Options) -> object:
        kind = SilentChannel if target.startswith("unix:") else make_channel
        return kind(target, options)

    monkeypatch.setattr(grpc.aio, "insecure_channel", connect)


@pytest.mark.usefixtures("_silent_library")
async def test_a_library_that_sends_nothing_costs_a_trip_and_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the first tokens come over the usual connection, while the early one waits."""
    monkeypatch.setattr(early_connection, "_FIRST_BYTES_TIMEOUT_S", 600.0)
    async with link_to(Verifier()) as (link, transport):
        for upwards in (True, False):
            link.release(upwards=upwards)
        async with asyncio.timeout(PATIENCE_S):
            assert await first_tokens(transport) == OUTPUT[:1]
        assert transport._early is None or not transport._early.is_usable


@pytest.mark.usefixtures("_silent_library")
async def test_a_silent_library_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_connection, "_FIRST_BYTES_TIMEOUT_S", 0.0)
    async with serve_streams(Verifier().serve) as (daemon, _):
        address = f"127.0.0.1:{daemon.port}"
        early = early_connection.EarlyConnection(address, DeviceAccess(), [], PATIENCE_S)
        with pytest.raises(OSError, match="the library does not use its connection"):
            await early.opened
        assert not early.is_usable
        await early.close()


async def test_a_connection_that_breaks_breaks_its_streams_and_the_next_one_works() -> None:
    verifier = Verifier()
    async with link_to(verifier) as (link, transport):
        stream = await transport.connect()
        await stream.send(OPEN)
        await verifier.opened.get()
        link.cut()
        with pytest.raises(LinkError) as broken:
            await read_to_the_end(stream)
        assert broken.value.retryable
        await stream.close()
        assert await first_tokens(transport) == OUTPUT[:1]
