"""Making certificates: a CA, and the certificates that it signs for verifiers and devices.

Keys are of the curve P-256, which every TLS library supports and which costs a handshake the least.
Private keys are readable for their owner only (mode 0600). A certificate states its purpose: a CA
only signs, a device cannot show a verifier's certificate, and a verifier cannot show a device's.

An existing file is never replaced. A certificate and its key are made and checked before either is
written, and each is written as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgespec.config import ConfigError
from edgespec.config.common import SetupError
from edgespec.config.files import replace_file
from edgespec.wire.access import read_certificates, read_key

CA_NAME: Final = "ca"
CA_DAYS: Final = 3650
LEAF_DAYS: Final = 397
_MAX_NAME_CHARS: Final = 64  # This is the limit of a common name by X.520.
_MAX_NAMES: Final = 100
# Clocks differ, so a certificate is valid from a little before it was made.
_BACKDATED: Final = timedelta(minutes=5)
_LABEL: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_FILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_UNUSED: Final = (
    *("content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "encipher_only", "decipher_only"),
)
Files = tuple[Path, Path]
"""Paths of a certificate and its private key."""


def make_ca(folder: Path) -> Files:
    """Make ``ca.pem`` and ``ca.key``. Raises ``SetupError`` and ``OSError``."""
    files, key = _new_paths(folder, CA_NAME), ec.generate_private_key(ec.SECP256R1())
    subject = _common_name("edgespec CA")
    builder = _make_builder(subject, subject, key.public_key(), CA_DAYS, ca=True)
    _write(files, builder.sign(key, hashes.SHA256()), key)
    return files


def make_server(folder: Path, names: Sequence[str], *, out: str = "server") -> Files:
    """Make a verifier's certificate for host names and addresses, signed by the folder's CA.

    Raises ``SetupError`` and ``OSError``."""
    if not 1 <= len(names) <= _MAX_NAMES:
        raise SetupError(f"{len(names)} names, but a certificate takes 1 to {_MAX_NAMES}")
    alternatives = x509.SubjectAlternativeName([_parse_alternative(name) for name in names])
    common_name = names[0][:_MAX_NAME_CHARS]  # The name is for people; TLS checks the alternatives.
    return _sign(folder, out, common_name, ExtendedKeyUsageOID.SERVER_AUTH, alternatives)


def make_device(folder: Path, name: str) -> Files:
    """Make a device's certificate, signed by the folder's CA. The files are named after the device.

    Raises ``SetupError`` and ``OSError``."""
    return _sign(folder, name, name, ExtendedKeyUsageOID.CLIENT_AUTH)


def _sign(
    folder: Path,
    stem: str,
    name: str,
    purpose: x509.ObjectIdentifier,
    *alternatives: x509.SubjectAlternativeName,
) -> Files:
    if stem == CA_NAME:
        raise SetupError(f"the name {stem!r} is the CA's own")
    files = _new_paths(folder, stem)
    ca, ca_key = _load_ca(folder)
    ends = datetime.now(UTC) + timedelta(days=LEAF_DAYS)
    if ends > ca.not_valid_after_utc:
        raise SetupError(
            f"a certificate is for {LEAF_DAYS} days, but the CA itself expires on"
            f" {ca.not_valid_after_utc:%Y-%m-%d}: make a new one in another folder"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _make_builder(_common_name(name), ca.subject, key.public_key(), LEAF_DAYS, ca=False)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    for one in (x509.ExtendedKeyUsage([purpose]), signer, *alternatives):
        builder = builder.add_extension(one, critical=False)
    _write(files, builder.sign(ca_key, hashes.SHA256()), key)
    return files


def _make_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int, *, ca: bool
) -> x509.CertificateBuilder:
    """Return a builder for a certificate. With ``ca`` it signs certificates, and nothing else."""
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - _BACKDATED)
    builder = builder.not_valid_after(now + timedelta(days=days))
    builder = builder.add_extension(
        x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True
    )
    unused = dict.fromkeys(_UNUSED, False)
    usage = x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **unused)
    builder = builder.add_extension(usage, critical=True)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _common_name(text: str) -> x509.Name:
    if not 1 <= len(text) <= _MAX_NAME_CHARS or not text.isprintable():
        raise SetupError(
            f"the name {text[:80]!r} must have 1 to {_MAX_NAME_CHARS} printable characters"
        )
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _parse_alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        labels = name.removeprefix("*.").split(".")
        if len(name) > 253 or not all(map(_LABEL.fullmatch, labels)):
            raise SetupError(f"{name[:80]!r} is no host name and no address") from None
        return x509.DNSName(name)


def _load_ca(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate_path, key_path = folder / f"{CA_NAME}.pem", folder / f"{CA_NAME}.key"
    for path in (certificate_path, key_path):
        if not path.is_file():
            raise SetupError(f"{path} is not there; make a CA first: edgespec certs ca")
    try:
        certificate = read_certificates(certificate_path)[1][0]
        return certificate, read_key(key_path, certificate_path, certificate)[1]
    except ConfigError as error:
        raise SetupError(str(error)) from None


def _new_paths(folder: Path, stem: str) -> Files:
    if not _FILE.fullmatch(stem):
        raise SetupError(f"{stem[:80]!r} cannot be the name of a file here: letters, digits, ._-")
    files = folder / f"{stem}.pem", folder / f"{stem}.key"
    for path in files:
        if path.exists():
            raise SetupError(f"{path} is there already; remove it to make another")
    return files


def _write(files: Files, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    files[0].parent.mkdir(parents=True, exist_ok=True)
    replace_file(files[1], secret)
    replace_file(files[0], certificate.public_bytes(Encoding.PEM), 0o644)
