"""Certificates made by ``edgespec certs``, the key file, the checks of both ends' files, and access
over sockets of this machine.

Oracle: the standard library's own TLS; each mistake is named with its file; printed keys open the
verifier, and no other key does; files that others can write or read are judged by the modes that
PostgreSQL allows for key files, with the group allowed because mounted secrets need it; an admitted
device gets the toy's text, and no key leaves the device where others could read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import ssl
import stat
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import Result

from edgespec.cli import credentials as keys_command
from edgespec.cli import doctor as checks
from edgespec.cli.device import choose_verifier
from edgespec.config import AgentConfig, ConfigError, PacingSection, load_config
from edgespec.config.api_keys import load_api_key
from edgespec.config.common import (
    DeviceTlsSection,
    ServerTlsSection,
    SetupError,
    host_names,
)
from edgespec.config.file_permissions import check_file_permissions
from edgespec.core.ports import UntrustedPeerError
from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.messages import FaultCode
from edgespec.core.verifier.engine_events import EngineEvent, StreamOpened
from edgespec.device.agent import GenerationError
from edgespec.device.build import build_agent, connect
from edgespec.verifier.daemon import Verifier
from edgespec.wire import access, certificates
from edgespec.wire.access import (
    MAX_KEYS,
    KeyChanges,
    KeyFile,
    KeyRing,
    ServerAccess,
    digest,
    load_device_access,
)
from tests.kit import guarded
from tests.kit.guarded import Pki
from tests.kit.live_verifier import own_port, run_command, serve_toy
from tests.present import require


def now() -> datetime:
    """Return the current time. It is no constant, because the whole suite takes longer than a
    certificate's leeway."""
    return datetime.now(UTC)


def certs(*arguments: str | Path) -> Result:
    return run_command("certs", *arguments)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_what_is_made_says_what_it_is_for(pki: Pki) -> None:
    ca, server, device = (certificate(pki.folder / f"{n}.pem") for n in ("ca", "server", "device"))
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    for leaf, purpose in ((server, "serverAuth"), (device, "clientAuth")):
        assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert [one._name for one in usage] == [purpose]
        leaf.verify_directly_issued_by(ca)
        key = leaf.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"
        assert timedelta(396) < leaf.not_valid_after_utc - now() < timedelta(398)
    for name in ("ca", "server", "device"):
        assert stat.S_IMODE((pki.folder / f"{name}.key").stat().st_mode) == 0o600


def test_nothing_is_replaced_unless_asked_for(tmp_path: Path) -> None:
    mine = Pki(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for arguments in (("ca",), ("server", "localhost"), ("device", "device")):
        refused = certs(*arguments, "--dir", tmp_path)
        assert refused.exit_code == 1
        assert "is there already; remove it to make another" in refused.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    mine.renew_server("other.example")
    assert (tmp_path / "server.pem").read_bytes() != before[tmp_path / "server.pem"]
    assert (tmp_path / "ca.pem").read_bytes() == before[tmp_path / "ca.pem"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("server", "no host"), "'no host' is no host name and no address"),
        (
            ("server", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx.example"),
            "is no host name",
        ),
        (("server", "localhost", "--out", "../server"), "cannot be the name of a file"),
        (("server", "localhost", "--out", "ca"), "is the CA's own"),
        (("device", "a/b"), "cannot be the name of a file"),
    ],
)
def test_what_cannot_be_made_is_refused(
    arguments: tuple[str, ...], why: str, pki: Pki, tmp_path: Path
) -> None:
    for name in ("ca.pem", "ca.key"):
        shutil.copy(pki.folder / name, tmp_path)
    refused = certs(*arguments, "--dir", tmp_path)
    assert refused.exit_code == 1
    assert why in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.key", "ca.pem"]


def test_no_certificate_outlives_its_ca(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "LEAF_DAYS", 4000)
    refused = certs("device", "late", "--dir", pki.folder)
    assert refused.exit_code == 1
    assert "for 4000 days, but the CA itself expires on" in refused.stderr


def test_a_certificate_without_a_ca_is_refused(tmp_path: Path) -> None:
    refused = certs("server", "localhost", "--dir", tmp_path)
    assert refused.exit_code == 1
    assert "make a CA first: edgespec certs ca" in refused.stderr


def test_bad_files_are_named_with_the_reason(
    pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, key = pki.folder / "server.pem", pki.folder / "server.key"
    rubbish, empty = tmp_path / "rubbish.pem", tmp_path / "empty.pem"
    rubbish.write_text("-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n")
    empty.write_text("")
    for files, days, why in (
        ((tmp_path / "none", key), 0, "none: No such file"),
        ((rubbish, key), 0, "rubbish.pem: holds no PEM certificate"),
        ((empty, key), 0, "empty.pem: holds no PEM certificate"),
        ((key, key), 0, "server.key: holds no PEM certificate"),
        ((good, good), 0, "server.pem: holds no PEM private key"),
        ((good, pki.folder / "device.key"), 0, "device.key: the key does not belong"),
        ((good, key, rubbish), 0, "rubbish.pem: holds no PEM certificate"),
        ((good, key), 500, "server.pem: the certificate expired on"),
        ((good, key), -1, "server.pem: the certificate is not valid"),
    ):
        clock = Mock(**{"now.return_value": now() + timedelta(days)})
        monkeypatch.setattr(access, "datetime", clock)
        with pytest.raises(ConfigError, match=why):
            access.load_server_identity(ServerTlsSection(*map(str, files)))


def test_a_key_behind_a_password_is_refused_without_asking_for_it(pki: Pki, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form

    plain = form.load_pem_private_key((pki.folder / "server.key").read_bytes(), None)
    path = tmp_path / "locked.key"
    locked = form.BestAvailableEncryption(b"secret")
    path.write_bytes(plain.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, locked))
    with pytest.raises(ConfigError, match=r"locked\.key: a password protects the key"):
        access.load_server_identity(ServerTlsSection(str(pki.folder / "server.pem"), str(path)))
    tls = DeviceTlsSection(client_cert=str(pki.folder / "server.pem"), client_key=str(path))
    with pytest.raises(ConfigError, match=r"locked\.key: no PEM certificate and plain"):
        access.load_tls_access(tls)


def test_a_devices_files_are_checked_too(pki: Pki, tmp_path: Path) -> None:
    ca, mine, key = (str(pki.folder / name) for name in ("ca.pem", "device.pem", "device.key"))
    for right in (DeviceTlsSection(True), DeviceTlsSection(False, ca, mine, key)):
        assert access.load_tls_access(right).credentials is not None
    other, none = str(pki.folder / "server.key"), str(tmp_path / "none")
    for wrong, why in (
        (DeviceTlsSection(ca=key), r"device\.key: holds no PEM certificate"),
        (DeviceTlsSection(False, ca, mine, other), r"server\.key: the key does not belong"),
        (DeviceTlsSection(ca=none), "none: No such file"),
    ):
        with pytest.raises(ConfigError, match=why):
            access.load_tls_access(wrong)


def keys(*arguments: str | Path) -> Result:
    return run_command("keys", *arguments)


def test_a_key_is_printed_once_and_only_its_digest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    given = ("max_sessions=8", "context_length=4096", "tokens_per_s=12.5", "priority=-2")
    limits = [f"--set={one}" for one in (*given, "models=[big, small]")]
    made = keys("add", "workshop", *limits, "--file", path)
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert len(key) > 40
    assert key not in path.read_text()
    assert key not in made.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    credential = Credential("workshop", 8, 4096, 12.5, -2, ("big", "small"))
    assert load_config(KeyFile, path).make_ring().credential(key) == credential
    other = keys("add", "phone.7", "--file", path).stdout.strip()
    ring = load_config(KeyFile, path).make_ring()
    assert ring.credential(other) == Credential("phone.7")
    assert ring.credential(key) == credential
    assert ring.credential(key + "x") is None
    assert ring.credential("") is None
    shown = keys("list", "--file", path).stdout.splitlines()
    assert shown[0] == "phone.7: no limits"
    assert shown[1].startswith("workshop: max_sessions 8, context_length 4096, tokens_per_s 12.5,")
    assert shown[1].endswith("priority -2, models big/small")


def test_a_revoked_key_opens_no_more(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    first = keys("add", "first", "--file", path).stdout.strip()
    second = keys("add", "second", "--file", path).stdout.strip()
    assert keys("revoke", "first", "--file", path).exit_code == 0
    ring = load_config(KeyFile, path).make_ring()
    assert ring.credential(first) is None
    assert ring.credential(second) == Credential("second")
    gone = keys("revoke", "first", "--file", path)
    assert gone.exit_code == 2
    assert "has no key 'first'; known: second" in gone.stderr


def test_a_name_is_not_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    keys("add", "one", "--file", path)
    before = path.read_text()
    wrong = keys("add", "two", "--set", "sesions=3", "--file", path)
    assert (wrong.exit_code, path.read_text()) == (2, before)
    assert "unknown key 'sesions'" in wrong.stderr
    again = keys("add", "one", "--file", path)
    assert (again.exit_code, path.read_text()) == (2, before)
    assert "'one' has a key already" in again.stderr


OWNER, GROUP = 4711, 4712


@pytest.mark.parametrize(
    ("may", "given", "mode"),
    [
        ((True, True), (OWNER, GROUP), 0o640),
        ((False, True), (-1, GROUP), 0o640),
        ((False, False), None, 0o600),  # or a group that could not read it before would be able to
    ],
)
def test_the_file_of_a_service_stays_the_services(
    may: tuple[bool, bool],
    given: tuple[int, int] | None,
    mode: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = (tmp_path / "keys.yaml").resolve()
    assert keys("add", "a", "--file", path).exit_code == 0
    path.chmod(0o640)
    find, owners = os.stat, list[tuple[int, int]]()

    def stat_of(one: Any, *arguments: Any, **more: Any) -> os.stat_result:
        found = find(one, *arguments, **more)
        return os.stat_result((*found[:4], OWNER, GROUP, *found[6:10])) if one == path else found

    def chown(one: object, owner: int, group: int) -> None:
        if not all(allowed or new < 0 for allowed, new in zip(may, (owner, group), strict=True)):
            raise PermissionError(1, "Operation not permitted")
        owners.append((owner, group))

    monkeypatch.setattr(os, "stat", stat_of)
    monkeypatch.setattr(os, "chown", chown)
    assert keys("add", "b", "--file", path).exit_code == 0
    monkeypatch.undo()
    assert owners == ([] if given is None else [given])
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert sorted(load_config(KeyFile, path).keys) == ["a", "b"]


@pytest.mark.parametrize("command", ["add", "revoke"])
def test_no_other_command_changes_the_file_meanwhile(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that was added between reading and writing would be lost."""
    path = tmp_path / "keys.yaml"
    name = "a" if command == "add" else "b"
    assert keys("add", "b", "--file", path).exit_code == 0
    alone: list[bool] = []

    def save(path: Path, known: access.KeyFile) -> None:
        other = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone.append(True)
        finally:
            os.close(other)
        access.save_keys(path, known)

    monkeypatch.setattr(keys_command, "save_keys", save)
    assert keys(command, name, "--file", path).exit_code == 0
    assert alone == [True]


@pytest.mark.parametrize("mode", [0o602, 0o666, 0o777])
@pytest.mark.parametrize(("secret", "advice"), [(True, "600"), (False, "o-w")])
def test_what_others_can_write_is_refused(
    mode: int, secret: bool, advice: str, tmp_path: Path
) -> None:
    path = tmp_path / "a file"
    path.touch()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.; run: chmod {advice} '{path}'"):
        check_file_permissions(path, secret=secret)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o600, 0o640, 0o440, 0o660])
def test_a_secret_that_others_can_read_is_warned_of_once(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link, which has mode 0777, is judged by its file, like a mounted secret."""
    (path := tmp_path / "key").touch()
    path.chmod(mode)
    (link := tmp_path / "link").symlink_to(path)
    for _ in range(2):
        check_file_permissions(link, secret=True)
        check_file_permissions(path, secret=False)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (1 if mode & 0o004 else 0)
    assert all(line.endswith(f"(mode {mode:04o}); run: chmod 600 {link}") for line in said)


def test_all_files_that_say_who_is_who_are_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Pki(tmp_path).device(shown=True)
    (key := tmp_path / "api.key").write_text("edgespec-key\n")
    key.chmod(0o644)
    config = AgentConfig(tls=tls, api_key_file=str(key))
    for path in (*map(Path, (tls.ca, tls.client_cert, tls.client_key)), key):
        before = path.stat().st_mode
        path.chmod(0o666)
        with pytest.raises(ConfigError, match=f"{path.name}: others can write"):
            access.load_device_access(config, {})
        path.chmod(before)
    assert access.load_device_access(config, {}).key == "edgespec-key"
    assert load_api_key(str(key), "EDGESPEC_ENDPOINT_KEY", {}) == "edgespec-key"
    assert [record.getMessage() for record in caplog.records] == [
        f"{key}: others can read this secret (mode 0644); run: chmod 600 {key}"
    ]


def test_a_configuration_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "verifier.yaml").write_text("model: toy\n")
    path.chmod(0o666)
    result = run_command("verifier", "--config", path, "--help-all")
    assert result.exit_code == 2
    assert "others can write this file" in result.output


# --- look-up of API keys --------------------------------------------------------------------------


def make_key_ring(**keys: str) -> KeyRing:
    return KeyRing({name: (digest(key), Credential(name)) for name, key in keys.items()})


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=20), st.text())
def test_a_key_opens_for_its_owner_and_nobody_else(keys: dict[str, str], stranger: str) -> None:
    owners = {key: name for name, key in keys.items()}
    unique = {name: key for key, name in owners.items()}
    found = KeyRing({name: (digest(key), Credential(name)) for name, key in unique.items()})
    for key in (*owners, stranger):
        credential = found.credential(key)
        assert (credential.name if credential else None) == owners.get(key)


def test_changes_tell_added_revoked_and_limits_apart() -> None:
    old = make_key_ring(same="s", gone="g", rotated="before", tighter="t")
    keys = {name: (digest(key), Credential(name)) for name, key in (("same", "s"), ("new", "n"))}
    keys["rotated"] = digest("after"), Credential("rotated")
    keys["tighter"] = digest("t"), replace(Credential("tighter"), max_sessions=1)
    changes = old.changes(KeyRing(keys))
    assert changes == KeyChanges(("new", "rotated"), ("gone", "rotated"), ("tighter",))
    assert str(changes) == "added: new, rotated; revoked: gone, rotated; new limits: tighter"
    assert not old.changes(old)


def test_what_cannot_be_a_ring_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="'a' and 'b' have the same key"):
        make_key_ring(a="k", b="k")
    with pytest.raises(ValueError, match=f"{MAX_KEYS + 1} keys, but at most {MAX_KEYS}"):
        make_key_ring(**{f"n{number}": f"k{number}" for number in range(MAX_KEYS + 1)})


# --- between a real agent and a real verifier -----------------------------------------------------


def use_key(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_API_KEY", key)


@contextlib.asynccontextmanager
async def serve_with_keys(
    path: Path, pass_ms: float = 0.0
) -> AsyncIterator[tuple[str, Verifier, ServerAccess]]:
    config = replace(guarded.verifier_config(keys=path), pacing=PacingSection(pass_ms))
    access = ServerAccess(config)
    async with serve_toy(config=config, access=access) as (address, verifier):
        yield address, verifier, access


async def test_the_right_key_is_let_in_from_the_environment_and_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = guarded.keys_in(tmp_path / "keys.yaml", "one", "two", max_sessions=3)
    async with serve_with_keys(tmp_path / "keys.yaml") as (address, verifier, _):
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
        assert (await choose_verifier(config))[1].name == "toy"
        check = await checks.check_verifier(address, config)
        assert (check.state, check.finding[:10]) == (checks.State.GOOD, "serves toy")
        async with build_agent(config) as agent:
            assert await guarded.collect(agent) == guarded.EXPECTED
        assert [event.credential.name for event in opened] == ["one", "two"]
        assert {event.credential.max_sessions for event in opened} == {3}


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "this verifier requires an API key"),
        ("edgespec-wrong", "unknown to this verifier or was revoked"),
    ],
)
async def test_without_the_right_key_nothing_but_health_is_answered(
    key: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded.keys_in(tmp_path / "keys.yaml", "one")
    use_key(key, monkeypatch)
    async with serve_with_keys(tmp_path / "keys.yaml") as (address, verifier, _):
        config = guarded.device_config(address)
        async with build_agent(config) as agent:
            with pytest.raises(GenerationError, match=f"{why}.*EDGESPEC_API_KEY") as caught:
                await guarded.collect(agent)
            assert caught.value.code is FaultCode.UNAUTHENTICATED
            assert require(agent.stats).counters.reconnects == 0  # not tried again
        with pytest.raises(SetupError, match=rf"UNAUTHENTICATED: .*{why}.*EDGESPEC_API_KEY"):
            await choose_verifier(config)
        check = await checks.check_verifier(address, config)
        assert check.state is checks.State.BAD
        assert "UNAUTHENTICATED: " in check.finding
        assert check.advice == ""
        assert not verifier.engine.sessions
        async with grpc.aio.insecure_channel(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_two_keys_in_one_call_are_none(tmp_path: Path) -> None:
    key = guarded.keys_in(tmp_path / "keys.yaml", "one")["one"]
    async with serve_with_keys(tmp_path / "keys.yaml") as (address, _, _):
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
    access = load_device_access(config, environment)
    if sent:
        assert access.key_for(address) == "edgespec-secret"
    else:
        with pytest.raises(ConfigError, match="would be sent without TLS") as caught:
            connect(address, access=access)
        assert "edgespec-secret" not in str(caught.value)
    for safe in (replace(config, insecure=True), replace(config, tls=pki.device())):
        assert load_device_access(safe, environment).key_for(address) == "edgespec-secret"
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
        load_device_access(config, {})
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        load_device_access(replace(config, api_key_file=str(tmp_path / "none")), {})


async def test_the_text_is_the_same_over_mutual_tls(pki: Pki) -> None:
    async with serve_toy(config=guarded.verifier_config(pki.server(mutual=True))) as (address, _):
        async with build_agent(guarded.device_config(address, pki.device(shown=True))) as agent:
            assert await guarded.collect(agent) == guarded.EXPECTED


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Make certificates of another CA; the verifier's is for another name."""
    made = Pki(tmp_path_factory.mktemp("strangers"))
    made.renew_server("gpu-box.example")
    return made


@pytest.mark.parametrize(
    ("server", "device", "said"),
    [
        ("own", "other", "its certificate is not trusted.*--ca FILE"),
        ("other", "other", "its certificate is for another name; --set tls.server_name"),
        ("mutual", "own", "it may require tls.client_cert"),
        ("mutual", "shown by other", "it may not accept tls.client_cert"),
        ("own", "none", "it may require TLS: --ca FILE, or --set tls.enabled=true"),
        ("none", "own", "it does not use TLS"),
    ],
)
async def test_a_handshake_that_fails_is_explained(
    server: str, device: str, said: str, pki: Pki, strangers: Pki
) -> None:
    """The explanation reaches ``info``, a stream, a command and a generation."""
    own, other = pki.device(), strangers.device(shown=True)
    servers = {"own": pki.server(), "mutual": pki.server(mutual=True), "other": strangers.server()}
    devices = {"own": own, "other": strangers.device(), "shown by other": replace(other, ca=own.ca)}
    shown, known = servers.get(server), devices.get(device)
    async with serve_toy(config=guarded.verifier_config(shown)) as (address, _):
        config = guarded.device_config(address, known)
        transport = connect(address, access=load_device_access(config))
        for ask in (transport.info, transport.connect):
            with pytest.raises(UntrustedPeerError, match=said) as caught:
                await ask()
            text = str(caught.value)
            assert f"verifier at {address}: " in text
            assert "failed to connect" not in text
        await transport.close()
        with pytest.raises(SetupError, match=said):
            await choose_verifier(config)
        async with build_agent(config) as agent:
            with pytest.raises(GenerationError, match=said):
                await guarded.collect(agent)


async def test_a_certificate_for_another_name_is_taken_under_that_name(strangers: Pki) -> None:
    known = strangers.device(server_name="gpu-box.example")
    async with serve_toy(config=guarded.verifier_config(strangers.server())) as (address, _):
        async with build_agent(guarded.device_config(address, known)) as agent:
            assert await guarded.collect(agent) == guarded.EXPECTED


async def test_every_loopback_address_shows_the_newest_certificate(tmp_path: Path) -> None:
    mine = Pki(tmp_path)
    config = replace(guarded.verifier_config(mine.server()), port=own_port())
    access = ServerAccess(config)
    async with serve_toy(config=config, access=access):
        for renewed in (False, True):
            if renewed:
                mine.renew_server()
                assert access.reload().certificate
            expected = ssl.PEM_cert_to_DER_cert((tmp_path / "server.pem").read_text().strip())
            for host in host_names("localhost"):
                shown = await asyncio.to_thread(
                    ssl.get_server_certificate, (host, config.port), timeout=guarded.PATIENCE_S
                )
                assert ssl.PEM_cert_to_DER_cert(shown) == expected, host


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
