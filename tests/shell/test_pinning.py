"""A device that trusts one certificate and no other. Oracles: OpenSSL's fingerprint as hashlib has
it; who is let in gets the toy's text."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import socket
import ssl
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from edgespec.cli.main import app
from edgespec.config import DeviceTlsSection
from edgespec.core.ports import UntrustedPeerError
from edgespec.device.build import build_agent, connect
from edgespec.wire import pinning
from edgespec.wire.access import device_access
from tests.shell.guarded import EXPECTED, collect, device_config, verifier_config
from tests.shell.live_verifier import serving
from tests.shell.pki import Pki


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, pki: Pki) -> list[tuple[str, int]]:
    """Which hosts and ports ``edgespec certs pin`` asks; all show the same certificate."""
    found: list[tuple[str, int]] = []

    def fetch(host: str, port: int) -> pinning.Shown:
        found.append((host, port))
        return pinning.read(Path(pki.path("server.pem")))

    monkeypatch.setattr(pinning, "fetch", fetch)
    return found


async def command(*words: str | Path) -> Result:
    """``edgespec certs`` in a thread of its own, because the verifier is served in this one."""
    said = ["certs", *map(str, words)]
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, said))


async def test_a_pinned_certificate_is_trusted_and_its_successor_is_not(
    pki: Pki, tmp_path: Path
) -> None:
    there = await command("fingerprint", pki.path("server.pem"))
    fingerprint, out = there.output.strip(), tmp_path / "verifier.pem"
    mine = DeviceTlsSection(ca=str(out))
    async with serving(config=verifier_config(pki.server(mutual=True))) as (address, _):
        asked = await command("pin", address)
        assert asked.exit_code == 0
        assert asked.stdout == f"{fingerprint}\n"
        assert not out.exists()
    async with serving(config=verifier_config(pki.server())) as (address, _):
        done = await command("pin", address, "--fingerprint", fingerprint, "--out", out)
        assert done.exit_code == 0, done.output
        async with build_agent(device_config(address, mine)) as agent:
            assert await collect(agent) == EXPECTED
        again = await command("pin", address, "--fingerprint", fingerprint, "--out", out)
        assert again.exit_code == 1
        assert "--force" in again.output
    other = Pki.__new__(Pki)  # the same CA, a new certificate
    other.folder = tmp_path / "pki"
    shutil.copytree(pki.folder, other.folder)
    other.renew_server()
    async with serving(config=verifier_config(other.server())) as (address, _):
        transport = connect(address, access=device_access(device_config(address, mine)))
        with pytest.raises(UntrustedPeerError, match="is not trusted"):
            await transport.info()
        await transport.close()
        forced = ("--out", out, "--force")
        refused = await command("pin", address, "--fingerprint", fingerprint, *forced)
        assert refused.exit_code == 1
        assert fingerprint in refused.output
        assert "was renewed, or somebody stands in between" in refused.output
        assert pinning.read(out).fingerprint == fingerprint  # it stays


def test_fingerprints_are_read_as_people_write_them(pki: Pki) -> None:
    shown = pinning.read(Path(pki.path("server.pem")))
    lines = shown.pem.strip().splitlines()
    assert ssl.PEM_cert_to_DER_cert(shown.pem) == shown.der
    assert lines == Path(pki.path("server.pem")).read_text().strip().splitlines()[: len(lines)]
    digits = hashlib.sha256(shown.der).hexdigest().upper()
    colons = ":".join(digits[at : at + 2] for at in range(0, 64, 2))
    for written in (digits, colons, f"sha256:{digits}", f" SHA256:{colons}\n"):
        pinning.check(shown, written)
    for wrong in ("", "sha256:", digits[:-1], f"sha1:{digits}", "g" * 64):
        with pytest.raises(pinning.PinError, match="64 hexadecimal digits"):
            pinning.check(shown, wrong)


def test_who_shows_no_certificate_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(pinning.PinError, match=rf"127.0.0.1:{port}: no answer within 0.2 s"):
            pinning.fetch("127.0.0.1", port, 0.2)
    with pytest.raises(pinning.PinError, match=rf"cannot reach 127.0.0.1:{port}: .*refused"):
        pinning.fetch("127.0.0.1", port)
    (tmp_path / "none.pem").write_text("nothing")
    with pytest.raises(pinning.PinError, match="holds no certificate"):
        pinning.read(tmp_path / "none.pem")
    with pytest.raises(pinning.PinError, match="No such file"):
        pinning.read(tmp_path / "nowhere.pem")


async def test_a_verifier_in_plaintext_is_named() -> None:
    async with serving() as (address, _):
        refused = await command("pin", address)
    assert refused.exit_code == 1
    assert f"{address} does not speak TLS" in refused.output


@pytest.mark.parametrize("port", ["99999", "0", "abc", "²"])
async def test_a_port_that_cannot_be_is_named(port: str) -> None:
    refused = await command("pin", f"gpu-box:{port}")
    assert refused.exit_code == 2
    said = f"verifier is 'gpu-box:{port}', but its port must be in [1, 65535]"
    assert said in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("::1", "an IPv6 address must be like [::1]:7420"),
        ("2001:db8::7:7420", "an IPv6 address must be like [::1]:7420"),
        ("unix:verifier.sock", "must be host:port"),
        ("https://gpu-box", "must be host:port"),
    ],
)
async def test_what_names_no_host_and_port_is_refused_before_anybody_is_asked(
    asked: list[tuple[str, int]], address: str, said: str
) -> None:
    refused = await command("pin", address)
    assert refused.exit_code == 2
    assert said in " ".join(refused.output.split())
    assert asked == []


async def test_an_ipv6_address_in_brackets_is_asked(asked: list[tuple[str, int]]) -> None:
    for address in ("[::1]", "[::1]:7421"):
        assert (await command("pin", address)).exit_code == 0
    assert asked == [("::1", 7420), ("::1", 7421)]
