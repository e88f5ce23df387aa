"""Proxies of the environment.

Oracle: a proxy that counts its clients, and addresses whose kind is known from the RFCs (1918,
4193, 6598).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from edgespec.config.proxies import (
    HTTPS_VARIABLES,
    bypass_proxy_if_near,
    proxy_of,
    proxy_of_address,
    proxy_of_url,
)
from edgespec.core.ports import LinkError
from edgespec.device.build import connect
from edgespec.wire.access import DeviceAccess
from edgespec.wire.grpc_client import SERVING, GrpcTransport, check_health
from tests.kit import echo_verifier
from tests.kit.live_verifier import serve_toy

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")


@asynccontextmanager
async def a_proxy() -> AsyncIterator[tuple[str, list[bytes]]]:
    """Run a proxy that refuses all clients and keeps the first line of each."""
    asked: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        yield f"http://user:secret@127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


@pytest.mark.parametrize("variable", VARIABLES)
async def test_a_verifier_on_this_machine_is_reached_without_a_proxy(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_proxy() as (url, asked), serve_toy() as (address, _):
        monkeypatch.setenv(variable, url)
        transport = connect(address)
        try:
            assert (await transport.info()).model.name == "toy"
        finally:
            await transport.close()
        assert not asked
    async with echo_verifier.serve_streams() as (server, _):
        where = f"127.0.0.1:{server.port}"
        assert await check_health(where, DeviceAccess(), echo_verifier.PATIENCE_S) == SERVING


@pytest.mark.parametrize("variable", VARIABLES)
async def test_a_proxy_that_fails_is_named_without_its_password(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_proxy() as (url, asked):
        monkeypatch.setenv(variable, url)
        transport = GrpcTransport("verifier.example:7420")
        try:
            for ask in (transport.info, transport.connect):
                with pytest.raises(LinkError) as caught:
                    await ask()
                why = str(caught.value)
                assert f"through the proxy {url.rpartition('@')[2]} that {variable} names" in why
                assert "no_proxy=verifier.example" in why
                assert "secret" not in why
        finally:
            await transport.close()
        assert b"CONNECT verifier.example:7420 HTTP/1.1\r\n" in asked


NEAR = (
    *("", "localhost", "gpu-box", "gpu-box.local", "127.0.0.1", "127.8.9.1", "::1", "10.1.2.3"),
    *("172.16.0.9", "192.168.7.7", "169.254.1.1", "fd00::7", "fe80::1%eth0", "100.64.0.1"),
)
FAR = ("verifier.example", "8.8.8.8", "172.32.0.1", "2606:4700::1111", "local.example")
SET = {"http_proxy": "http://proxy.example:3128"}


@pytest.mark.parametrize("host", NEAR)
def test_who_is_near_is_reached_directly(host: str) -> None:
    assert proxy_of(host, environment=SET) is None


@pytest.mark.parametrize("host", FAR)
@pytest.mark.parametrize(
    ("no_proxy", "spared"),
    [
        ("", ()),
        ("*", FAR),
        ("example", ("verifier.example", "local.example")),
        (".example, 8.8.8.8", ("verifier.example", "local.example", "8.8.8.8")),
        ("verifier.example", ("verifier.example",)),
        ("xample", ()),
        ("8.0.0.0/8,2606:4700::/32", ("8.8.8.8", "2606:4700::1111")),
    ],
)
@pytest.mark.parametrize("variable", ["no_proxy", "no_grpc_proxy", "NO_PROXY"])
def test_who_is_named_is_reached_directly(
    variable: str, no_proxy: str, spared: tuple[str, ...], host: str
) -> None:
    found = proxy_of(host, environment={**SET, variable: no_proxy})
    assert (found is None) is (host in spared)
    if found is not None:
        assert (found.variable, found.where) == ("http_proxy", "proxy.example:3128")


def test_the_first_variable_that_is_set_counts() -> None:
    both = {"https_proxy": "first:1", "http_proxy": "second:2"}
    found = proxy_of("a.example", environment=both)
    assert found is not None
    assert (found.variable, found.where) == ("https_proxy", "first:1")
    assert proxy_of("a.example", environment={"HTTP_PROXY": "not for gRPC"}) is None
    upper = proxy_of("a.example", HTTPS_VARIABLES, {"HTTPS_PROXY": "http://u:p@third:3"})
    assert upper is not None
    assert upper.where == "third:3"


def test_a_name_behind_an_address_may_be_the_one_that_is_spared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "proxy:1")
    assert proxy_of_address("8.8.8.8:7420") is not None
    assert proxy_of_address("[2606:4700::1]:7420") is not None
    monkeypatch.setenv("no_proxy", "gpu.example")
    assert proxy_of_address("8.8.8.8:7420", "gpu.example") is None
    assert proxy_of_address("8.8.8.8:7420", "other.example") is not None


def test_a_hub_nearby_is_spared_and_another_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "proxy:1")
    monkeypatch.setenv("http_proxy", "proxy:1")
    monkeypatch.setenv("no_proxy", "a.example")
    for url in ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "https://hub.example"):
        bypass_proxy_if_near(url)
    import os

    assert os.environ["no_proxy"] == "a.example,127.0.0.1"
    assert proxy_of_url("http://127.0.0.1:8000") is None
    assert proxy_of_url("https://hub.example") is not None
