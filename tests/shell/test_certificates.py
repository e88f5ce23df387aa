"""Certificates made by ``edgespec certs`` and the checks of a verifier's and a device's files.

Oracle: the standard library's own TLS, beside the end-to-end tests; each mistake is named with its
file.
"""

from __future__ import annotations

import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import Result

from edgespec.config import ConfigError
from edgespec.wire import certificates
from edgespec.wire.access import channel_credentials, load_server_identity
from tests.shell.live_verifier import call
from tests.shell.pki import Pki


def now() -> datetime:
    """Not a constant of the module: the whole suite takes longer than a certificate's leeway."""
    return datetime.now(UTC)


def certs(*arguments: str | Path) -> Result:
    return call("certs", *arguments)


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
        (("server", "x" * 64 + ".example"), "is no host name"),
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


# --- the files of a verifier -------------------------------------------------------------------


def test_bad_files_are_named_with_the_reason(pki: Pki, tmp_path: Path) -> None:
    good, key = pki.folder / "server.pem", pki.folder / "server.key"
    rubbish, empty = tmp_path / "rubbish.pem", tmp_path / "empty.pem"
    rubbish.write_text("-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n")
    empty.write_text("")
    later = now() + timedelta(days=500)
    cases = [
        ((tmp_path / "none", key, None, now()), "none: No such file"),
        ((rubbish, key, None, now()), "rubbish.pem: holds no PEM certificate"),
        ((empty, key, None, now()), "empty.pem: holds no PEM certificate"),
        ((key, key, None, now()), "server.key: holds no PEM certificate"),
        ((good, good, None, now()), "server.pem: holds no PEM private key"),
        ((good, pki.folder / "device.key", None, now()), "device.key: the key does not belong"),
        ((good, key, rubbish, now()), "rubbish.pem: holds no PEM certificate"),
        ((good, key, None, later), "server.pem: the certificate expired on"),
        ((good, key, None, now() - timedelta(days=1)), "server.pem: the certificate is not valid"),
    ]
    for (certificate_path, key_path, client_ca, at), why in cases:
        with pytest.raises(ConfigError) as caught:
            load_server_identity(certificate_path, key_path, client_ca, at)
        assert why in str(caught.value)


def test_a_key_behind_a_password_is_refused_without_asking_for_it(pki: Pki, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form

    plain = form.load_pem_private_key((pki.folder / "server.key").read_bytes(), None)
    path = tmp_path / "locked.key"
    locked = form.BestAvailableEncryption(b"secret")
    path.write_bytes(plain.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, locked))
    with pytest.raises(ConfigError, match=r"locked\.key: a password protects the key"):
        load_server_identity(pki.folder / "server.pem", path, None, now())
    with pytest.raises(ConfigError, match=r"locked\.key: no PEM certificate and plain"):
        channel_credentials(None, pki.folder / "server.pem", path)


def test_a_devices_files_are_checked_too(pki: Pki, tmp_path: Path) -> None:
    ca, mine, key = (pki.folder / name for name in ("ca.pem", "device.pem", "device.key"))
    assert channel_credentials(ca, mine, key) is not None
    assert channel_credentials(None, None, None) is not None
    with pytest.raises(ConfigError, match=r"device\.key: holds no PEM certificate"):
        channel_credentials(key, None, None)
    with pytest.raises(ConfigError, match=r"server\.key: the key does not belong"):
        channel_credentials(ca, mine, pki.folder / "server.key")
    with pytest.raises(ConfigError, match="none: No such file"):
        channel_credentials(tmp_path / "none", None, None)
