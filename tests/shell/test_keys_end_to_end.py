"""Keys between a real agent and a real verifier, over sockets of this machine.

Oracle: who is let in gets the toy's text, token for token; who is not hears why, and no key leaves
the device where others could read it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edgespec.cli import doctor as checks
from edgespec.cli.device import greet
from edgespec.config import AgentConfig, ConfigError, PacingSection
from edgespec.config.common import SetupError
from edgespec.core.ports import UntrustedPeerError
from edgespec.core.protocol.messages import FaultCode
from edgespec.core.verifier.engine_events import EngineEvent, StreamOpened
from edgespec.device.agent import GenerationError
from edgespec.device.build import build_agent, connect
from edgespec.verifier.daemon import Verifier
from edgespec.wire.access import ServerAccess, device_access
from tests.present import present
from tests.shell import guarded
from tests.shell.live_verifier import serving
from tests.shell.pki import Pki


def use_key(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_API_KEY", key)


@contextlib.asynccontextmanager
async def keyed(
    path: Path, pass_ms: float = 0.0
) -> AsyncIterator[tuple[str, Verifier, ServerAccess]]:
    config = replace(guarded.verifier_config(keys=path), pacing=PacingSection(pass_ms))
    access = ServerAccess(config)
    async with serving(config=config, access=access) as (address, verifier):
        yield address, verifier, access


async def test_the_right_key_is_let_in_from_the_environment_and_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = guarded.keys_in(tmp_path / "keys.yaml", "one", "two", max_sessions=3)
    async with keyed(tmp_path / "keys.yaml") as (address, verifier, _):
        opened, handle = list[StreamOpened](), verifier._handle

        def watched(event: EngineEvent) -> None:
            if isinstance(event, StreamOpened):
                opened.append(event)
            handle(event)

        monkeypatch.setattr(verifier, "_handle", watched)
        use_key(keys["one"], monkeypatch)
        async with build_agent(guarded.device_config(address)) as agent:
            assert await guarded.collect(agent) == guarded.EXPECTED
        monkeypatch.delenv("EDGESPEC_API_KEY")
        (tmp_path / "key").write_text(keys["two"] + "\n")
        config = replace(guarded.device_config(address), api_key_file=str(tmp_path / "key"))
        assert (await greet(config))[1].name == "toy"
        check = await checks.verifier(address, config)
        assert (check.state, check.finding[:10]) == (checks.State.GOOD, "serves toy")
        async with build_agent(config) as agent:
            assert await guarded.collect(agent) == guarded.EXPECTED
        assert [event.credential.name for event in opened] == ["one", "two"]
        assert {event.credential.max_sessions for event in opened} == {3}


@pytest.mark.parametrize(
    ("key", "why"),
    [("", "this verifier asks for a key"), ("edgespec-wrong", "does not know the key")],
)
async def test_without_the_right_key_nothing_but_health_is_answered(
    key: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded.keys_in(tmp_path / "keys.yaml", "one")
    use_key(key, monkeypatch)
    async with keyed(tmp_path / "keys.yaml") as (address, verifier, _):
        config = guarded.device_config(address)
        async with build_agent(config) as agent:
            with pytest.raises(GenerationError, match=f"{why}.*EDGESPEC_API_KEY") as caught:
                await guarded.collect(agent)
            assert caught.value.code is FaultCode.UNAUTHENTICATED
            assert present(agent.stats).counters.reconnects == 0  # not tried again
        with pytest.raises(SetupError, match=rf"UNAUTHENTICATED: .*{why}.*EDGESPEC_API_KEY"):
            await greet(config)
        check = await checks.verifier(address, config)
        assert check.state is checks.State.BAD
        assert "UNAUTHENTICATED: this verifier" in check.finding
        assert check.advice == ""
        assert not verifier.engine.sessions
        async with grpc.aio.insecure_channel(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_two_keys_in_one_call_are_none(tmp_path: Path) -> None:
    key = guarded.keys_in(tmp_path / "keys.yaml", "one")["one"]
    async with keyed(tmp_path / "keys.yaml") as (address, _, _):
        async with grpc.aio.insecure_channel(address) as channel:
            ask: Any = channel.unary_unary("/edgespec.v1.Verifier/Info", None, None)
            right = ("authorization", f"bearer {key}")
            assert await ask(b"", metadata=(right,))
            for wrong in ((right, right), (("authorization", key),), (("authorization", ""),)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(b"", metadata=wrong)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("address", "sent"),
    [
        ("127.0.0.1:7420", True),
        ("127.8.9.1:7420", True),
        ("[::1]:7420", True),
        ("localhost", True),
        ("unix:edge.sock", True),
        ("10.0.0.7:7420", False),
        ("gpu-box:7420", False),
        ("[2001:db8::1]:7420", False),
        ("localhost.example:7420", False),
    ],
)
def test_a_key_stays_where_nobody_listens(address: str, sent: bool, pki: Pki) -> None:
    config = guarded.device_config(address)
    environment = {"EDGESPEC_API_KEY": "edgespec-secret"}
    access = device_access(config, environment)
    if sent:
        assert access.key_for(address) == "edgespec-secret"
    else:
        with pytest.raises(ConfigError, match="would be sent without TLS") as caught:
            connect(address, access=access)
        assert "edgespec-secret" not in str(caught.value)
    for safe in (replace(config, insecure=True), replace(config, tls=pki.device())):
        assert device_access(safe, environment).key_for(address) == "edgespec-secret"
    assert "edgespec-secret" not in repr(access)


@pytest.mark.parametrize(
    ("content", "why"),
    [("", "holds no key"), ("two words", "one word"), ("schlüssel", "not plain ASCII")],
)
def test_a_file_without_a_key_is_named(content: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(content, encoding="utf-8")
    config = replace(AgentConfig(), api_key_file=str(path))
    with pytest.raises(ConfigError, match=why) as caught:
        device_access(config, {})
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        device_access(replace(config, api_key_file=str(tmp_path / "none")), {})


async def test_the_text_is_the_same_over_mutual_tls(pki: Pki) -> None:
    async with serving(config=guarded.verifier_config(pki.server(mutual=True))) as (address, _):
        async with build_agent(guarded.device_config(address, pki.device(shown=True))) as agent:
            assert await guarded.collect(agent) == guarded.EXPECTED


Sections = Callable[[Pki, Pki], Any]


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Another CA's certificates; the verifier's is for another name."""
    made = Pki(tmp_path_factory.mktemp("strangers"))
    made.renew_server("gpu-box.example")
    return made


@pytest.mark.parametrize(
    ("server", "device", "said"),
    [
        (
            lambda pki, other: pki.server(),
            lambda pki, other: other.device(),
            "its certificate is not trusted.*--ca FILE",
        ),
        (
            lambda pki, other: other.server(),
            lambda pki, other: other.device(),
            "its certificate is for another name; --set tls.server_name",
        ),
        (
            lambda pki, other: pki.server(mutual=True),
            lambda pki, other: pki.device(),
            "it may want tls.client_cert",
        ),
        (
            lambda pki, other: pki.server(mutual=True),
            lambda pki, other: replace(other.device(shown=True), ca=pki.path("ca.pem")),
            "it may not accept tls.client_cert",
        ),
        (
            lambda pki, other: pki.server(),
            lambda pki, other: None,
            "it may want TLS: --ca FILE, or --set tls.enabled=true",
        ),
        (lambda pki, other: None, lambda pki, other: pki.device(), "it does not speak TLS"),
    ],
)
async def test_a_handshake_that_fails_is_explained(
    server: Sections, device: Sections, said: str, pki: Pki, strangers: Pki
) -> None:
    """To ``info``, to a stream, to a command and to a text."""
    shown, known = server(pki, strangers), device(pki, strangers)
    async with serving(config=guarded.verifier_config(shown)) as (address, _):
        config = guarded.device_config(address, known)
        transport = connect(address, access=device_access(config))
        for ask in (transport.info, transport.connect):
            with pytest.raises(UntrustedPeerError, match=said) as caught:
                await ask()
            text = str(caught.value)
            assert f"verifier at {address}: " in text
            assert "failed to connect" not in text
        await transport.close()
        with pytest.raises(SetupError, match=said):
            await greet(config)
        async with build_agent(config) as agent:
            with pytest.raises(GenerationError, match=said):
                await guarded.collect(agent)


async def test_a_certificate_for_another_name_is_taken_under_that_name(strangers: Pki) -> None:
    known = strangers.device(server_name="gpu-box.example")
    async with serving(config=guarded.verifier_config(strangers.server())) as (address, _):
        async with build_agent(guarded.device_config(address, known)) as agent:
            assert await guarded.collect(agent) == guarded.EXPECTED


async def test_a_broken_file_leaves_everything_as_it_was(tmp_path: Path) -> None:
    mine = Pki(tmp_path)
    path = tmp_path / "keys.yaml"
    key = guarded.keys_in(path, "one")["one"]
    access = ServerAccess(guarded.verifier_config(mine.server(), path))
    identity = access._identity
    guarded.keys_in(path, "other")
    (tmp_path / "server.pem").write_text("rubbish")
    with pytest.raises(ConfigError, match=r"server\.pem: holds no PEM certificate"):
        access.reload()
    assert access._identity is identity
    assert access.authenticate(key) is not None
    mine.renew_server()
    path.write_text("keys: 5")
    with pytest.raises(ConfigError, match="keys is 5"):
        access.reload()
    assert access._identity is identity
    assert access.authenticate(key) is not None


def test_without_the_library_it_is_said_what_to_install(
    pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(SetupError, match=r"cryptography .*pip install 'edgespec\[certs\]'"):
        ServerAccess(guarded.verifier_config(pki.server()))
