"""TLS between a real agent and a real verifier, over sockets of this machine.

Oracle: who is let in gets the toy's text, token for token; who is not hears why.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.cli.device import greet
from edgespec.config import (
    ConfigError,
    DeviceTlsSection,
)
from edgespec.config.common import SetupError
from edgespec.core.ports import UntrustedPeerError
from edgespec.device.agent import GenerationError
from edgespec.device.build import build_agent, connect
from edgespec.wire.access import ServerAccess, device_access
from tests.shell.guarded import (
    EXPECTED,
    LONG,
    PROMPT,
    collect,
    device_config,
    keys_in,
    verifier_config,
)
from tests.shell.live_verifier import serving
from tests.shell.pki import Pki


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


async def test_the_text_is_the_same_over_mutual_tls(pki: Pki) -> None:
    async with serving(config=verifier_config(pki.server(mutual=True))) as (address, _):
        async with build_agent(device_config(address, pki.device(shown=True))) as agent:
            assert await collect(agent) == EXPECTED


async def refusal(address: str, tls: DeviceTlsSection | None) -> str:
    """What the device says, of ``info``, of a stream, and of a command."""
    config = device_config(address, tls)
    transport = connect(address, access=device_access(config))
    with pytest.raises(UntrustedPeerError) as caught:
        await transport.info()
    with pytest.raises(UntrustedPeerError) as of_stream:
        await transport.connect()
    await transport.close()
    text = str(caught.value)
    assert str(of_stream.value) == text
    with pytest.raises(SetupError) as of_command:
        await greet(config)
    assert str(of_command.value) == text
    assert "failed to connect" not in text
    return text


async def test_a_certificate_of_another_ca_is_not_trusted(pki: Pki, tmp_path: Path) -> None:
    stranger = Pki(tmp_path)
    async with serving(config=verifier_config(pki.server())) as (address, _):
        text = await refusal(address, stranger.device())
        assert f"verifier at {address}: its certificate is not trusted" in text
        assert "--ca FILE" in text
        async with build_agent(device_config(address, stranger.device())) as agent:
            with pytest.raises(GenerationError, match="its certificate is not trusted"):
                await collect(agent)


async def test_a_certificate_for_another_name_is_named(pki: Pki, tmp_path: Path) -> None:
    mine = Pki(tmp_path)
    mine.renew_server("gpu-box.example")
    async with serving(config=verifier_config(mine.server())) as (address, _):
        text = await refusal(address, mine.device())
        assert "its certificate is for another name; --set tls.server_name" in text
        known = mine.device(server_name="gpu-box.example")
        async with build_agent(device_config(address, known)) as agent:
            assert await collect(agent) == EXPECTED


async def test_a_device_without_a_certificate_is_told_what_may_be_missing(
    pki: Pki, tmp_path: Path
) -> None:
    stranger = Pki(tmp_path)
    async with serving(config=verifier_config(pki.server(mutual=True))) as (address, _):
        assert "it may want tls.client_cert" in await refusal(address, pki.device())
        foreign = replace(
            pki.device(),
            client_cert=stranger.path("device.pem"),
            client_key=stranger.path("device.key"),
        )
        assert "it may not accept tls.client_cert" in await refusal(address, foreign)


async def test_one_side_without_tls_is_told_so(pki: Pki) -> None:
    async with serving(config=verifier_config(pki.server())) as (address, _):
        assert "it may want TLS: --ca FILE, or --set tls.enabled=true" in await refusal(
            address, None
        )
    async with serving() as (address, _):
        assert "it does not speak TLS" in await refusal(address, pki.device())


async def test_a_new_certificate_is_shown_after_a_reload_and_streams_go_on(
    tmp_path: Path,
) -> None:
    mine, newer = Pki(tmp_path / "old"), Pki(tmp_path / "new")
    access = ServerAccess(config := verifier_config(mine.server()))
    async with serving(config=config, access=access) as (address, _):
        async with build_agent(device_config(address, mine.device())) as before:
            running = before.generate(PROMPT, LONG)
            first = await anext(running)
            assert str(access.reload()) == "nothing changed"
            for name in ("server.pem", "server.key"):
                (tmp_path / "old" / name).write_bytes((tmp_path / "new" / name).read_bytes())
            assert str(access.reload()) == "a new certificate or client CA"
            async with build_agent(device_config(address, newer.device())) as after:
                assert await collect(after) == EXPECTED
            late = connect(address, access=device_access(device_config(address, mine.device())))
            with pytest.raises(UntrustedPeerError, match="not trusted"):
                await late.info()
            await late.close()
            second = await anext(running)
            assert second.position == first.position + len(first.tokens)
            await running.aclose()
            assert before.stats is not None
            assert before.stats.counters.reconnects == 0


async def test_a_broken_file_leaves_everything_as_it_was(tmp_path: Path) -> None:
    mine = Pki(tmp_path)
    path = tmp_path / "keys.yaml"
    key = keys_in(path, "one")["one"]
    access = ServerAccess(verifier_config(mine.server(), path))
    identity = access._server_tls.identity  # type: ignore[union-attr]
    keys_in(path, "other")
    (tmp_path / "server.pem").write_text("rubbish")
    with pytest.raises(ConfigError, match=r"server\.pem: holds no PEM certificate"):
        access.reload()
    assert access._server_tls.identity is identity  # type: ignore[union-attr]
    assert access.authenticate(key) is not None
    mine.renew_server()
    path.write_text("keys: 5")
    with pytest.raises(ConfigError, match="keys is 5"):
        access.reload()
    assert access._server_tls.identity is identity  # type: ignore[union-attr]
    assert access.authenticate(key) is not None


def test_without_the_library_it_is_said_what_to_install(
    pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(SetupError, match=r"cryptography .*pip install 'edgespec\[certs\]'"):
        ServerAccess(verifier_config(pki.server()))
