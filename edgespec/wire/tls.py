"""Certificates and private keys as gRPC takes them, checked before they are used.

gRPC takes whatever it is given and says no more than "failed to bind" or "failed to connect" when
that is of no use. So a verifier's files are looked at first (``cryptography``; PEM, dates, whether
key and certificate belong together), a device's too as far as the standard library can, and what
the library says of a handshake that failed is put into words (``handshake_failure``).

A verifier's certificate can be replaced while it runs: gRPC asks for the current one at every
handshake. Connections that stand are not touched.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from edgespec.config.files import TooLargeError, read_bytes
from edgespec.config.loading import ConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

MAX_PEM_BYTES: Final = 1 << 20


# --- the verifier's --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What a verifier shows in a handshake, and whose certificates it takes."""

    certificate: bytes
    """PEM: its own first, then those between it and the CA."""
    key: bytes
    client_ca: bytes | None
    """PEM; None: devices need no certificate."""
    expires: datetime
    """When the first of the certificates shown does."""

    def __repr__(self) -> str:
        return f"ServerIdentity(expires={self.expires:%Y-%m-%d})"


def load_server_identity(
    certificate: Path, key: Path, client_ca: Path | None, now: datetime
) -> ServerIdentity:
    shown = _read(certificate)
    certificates = _certificates(certificate, shown)
    for one in certificates:
        _check_dates(certificate, one, now)
    secret = _read(key)
    _check_key(key, secret, certificate, certificates[0])
    trusted = None
    if client_ca is not None:
        trusted = _read(client_ca)
        for one in _certificates(client_ca, trusted):
            _check_dates(client_ca, one, now)
    expires = min(one.not_valid_after_utc for one in certificates)
    return ServerIdentity(shown, secret, trusted, expires)


class ServerTls:
    """A server's credentials, whose identity can be replaced while it listens. Devices need a
    certificate when the first identity has a ``client_ca``, and so do they for all later ones."""

    def __init__(self, identity: ServerIdentity) -> None:
        self._identity = identity
        self._told: ServerIdentity | None = None
        self.credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            _configuration(identity),
            self._newest,
            require_client_authentication=identity.client_ca is not None,
        )

    @property
    def identity(self) -> ServerIdentity:
        return self._identity

    def replace(self, identity: ServerIdentity) -> None:
        self._identity = identity

    def _newest(self) -> Any:
        """What gRPC asks at every handshake, in a thread of its own; None: as before."""
        identity = self._identity
        if identity is self._told:
            return None
        self._told = identity
        return _configuration(identity)


def _configuration(identity: ServerIdentity) -> Any:
    pairs = [(identity.key, identity.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, identity.client_ca)


def _certificates(path: Path, pem: bytes) -> Sequence[Certificate]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{path}: holds no PEM certificate that can be read: {error}") from None


def _check_dates(path: Path, certificate: Certificate, now: datetime) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > ends:
        raise ConfigError(f"{path}: the certificate expired on {ends:%Y-%m-%d %H:%M} UTC")
    if now < begins:
        raise ConfigError(f"{path}: the certificate is not valid before {begins:%Y-%m-%d %H:%M}")


def _check_key(path: Path, pem: bytes, of: Path, certificate: Certificate) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key: Any = load_pem_private_key(pem, password=None)
    except TypeError:
        raise ConfigError(f"{path}: a password protects the key; give a plain one") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path}: holds no PEM private key to be read: {error}") from None
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"{path}: the key does not belong to the certificate in {of}")


# --- the device's ----------------------------------------------------------------------------


def channel_credentials(
    ca: Path | None, client_certificate: Path | None, client_key: Path | None
) -> grpc.ChannelCredentials:
    """What a device connects with; ``ca`` None trusts the CAs of the system. Raises
    ``ConfigError``."""
    check: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is None:
        roots = _system_roots()
    else:
        roots = _read(ca)
        try:
            check.load_verify_locations(cadata=roots.decode("ascii", "replace"))
        except ssl.SSLError as error:
            raise ConfigError(f"{ca}: holds no PEM certificate: {error.reason}") from None
    shown = secret = None
    if client_certificate is not None and client_key is not None:
        shown, secret = _read(client_certificate), _read(client_key)
        try:
            check.load_cert_chain(client_certificate, client_key, password="")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                why = f"the key does not belong to the certificate in {client_certificate}"
                raise ConfigError(f"{client_key}: {why}") from None
            why = f"no PEM certificate and plain private key: {error.reason or error}"
            raise ConfigError(f"{client_certificate} and {client_key}: {why}") from None
    return grpc.ssl_channel_credentials(roots, secret, shown)


def _system_roots() -> bytes | None:
    """The CAs that OpenSSL would trust here; None: those that come with gRPC."""
    found: Any = ssl.get_default_verify_paths().cafile  # the stub leaves None out
    return None if found is None else _read(Path(found))


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_PEM_BYTES)
    except TooLargeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


# --- a handshake that failed -----------------------------------------------------------------

_NOT_TRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: ([^:]+))?")
_NEVER_CONNECTED = "failed to connect to all addresses"


def handshake_failure(details: str, *, tls: bool, certificate_shown: bool) -> str | None:
    """What is wrong between this device and a verifier that is there, in words, from what gRPC says
    of a connection that did not come about; None: something else."""
    if not details.startswith(_NEVER_CONNECTED):
        return None
    if found := _NOT_TRUSTED.search(details):
        why = f": {found[1].strip()}" if found[1] else ""
        return f"its certificate is not trusted{why}; --ca FILE says which CA to trust"
    if "Hostname Verification Check failed" in details:
        return "its certificate is for another name; --set tls.server_name says which one it has"
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not speak TLS; leave --ca and tls out if that is meant so"
    if "andshake failed" in details:
        return f"the TLS handshake failed: {details.rpartition('SSL routines:')[2][-200:]}"
    if "Socket closed" not in details and "reset by peer" not in details:
        return None
    if not tls:
        return "it closes the connection; it may want TLS: --ca FILE, or --set tls.enabled=true"
    if certificate_shown:
        return "it closes the connection in the handshake; it may not accept tls.client_cert"
    return "it closes the connection in the handshake; it may want tls.client_cert and .client_key"
