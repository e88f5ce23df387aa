"""Access to a verifier: API keys and TLS of both ends, from files to running parts.

The verifier's side can be read again while it runs (``ServerAccess.reload``). All files are read
and checked first, and only if all are valid does anything change. So a typing error in a
file leaves the verifier as it was.

The device sends its API key only where it cannot be intercepted: over TLS, on this machine, or
where the user allows it.

gRPC accepts any certificate file and reports only "failed to bind" or "failed to connect" if it is
of no use. So a verifier's files are checked first (``cryptography``: PEM, dates, whether key and
certificate belong together), and a device's as far as the standard library can. The error of a
failed handshake is explained by ``handshake_failure``. A verifier's certificate can be replaced
while it runs: gRPC requests the current one at every handshake. Existing connections stay.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from edgespec.config import AgentConfig, ConfigError, VerifierConfig
from edgespec.config.api_keys import load_api_key
from edgespec.config.common import (
    DeviceTlsSection,
    ServerTlsSection,
    host_of,
    is_loopback,
    require_library,
)
from edgespec.config.file_permissions import checked_path
from edgespec.config.files import TooLargeError, read_bytes, replace_file
from edgespec.config.loading import dump_config, load_config
from edgespec.core.protocol.checks import check_limits, range_field
from edgespec.core.protocol.credential import Credential

if TYPE_CHECKING:
    import grpc
    from cryptography.x509 import Certificate

_EXPIRES_SOON_DAYS = 14
KEY_HEADER: Final = "authorization"
"""Header (gRPC metadata) in which a device sends its API key, behind ``KEY_SCHEME``."""
KEY_SCHEME: Final = "Bearer"
ALPN: Final = "h2"
"""Name of HTTP/2 in the TLS handshake."""


# --- look-up of API keys --------------------------------------------------------------------------

MAX_KEYS = 1024
DIGEST_BYTES = 32


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """Differences between two key rings, as sorted names of credentials."""

    added: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()
    """Credentials that are gone, or have another digest."""
    changed: tuple[str, ...] = ()
    """Credentials with the same API key but other limits."""

    def __bool__(self) -> bool:
        return bool(self.added or self.revoked or self.changed)

    def __str__(self) -> str:
        words = ("added", self.added), ("revoked", self.revoked), ("new limits", self.changed)
        return "; ".join(f"{word}: {', '.join(names)}" for word, names in words if names)


class KeyRing:
    """The API keys that a verifier accepts: ``keys`` maps the name of each credential to its digest
    and its limits.

    An API key is random text of at least 128 bits, so a fast hash is enough (slow hashes are for
    passwords, which can be guessed). A look-up compares every digest in constant time, which takes
    0.11 ms for ``MAX_KEYS``. A name whose digest changed counts as revoked and added again.

    Raises ``ValueError`` for too many API keys, and for two names with the same API key.
    """

    def __init__(self, keys: Mapping[str, tuple[bytes, Credential]]) -> None:
        if len(keys) > MAX_KEYS:
            raise ValueError(f"{len(keys)} keys, but at most {MAX_KEYS} can be held")
        owners: dict[bytes, str] = {}
        for name, (of_key, credential) in keys.items():
            assert len(of_key) == DIGEST_BYTES
            assert credential.name == name != ""
            if (other := owners.setdefault(of_key, name)) != name:
                raise ValueError(f"{other!r} and {name!r} have the same key")
        self._keys = dict(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def credential(self, key: str) -> Credential | None:
        shown, found = digest(key), None
        for of_key, credential in self._keys.values():
            if hmac.compare_digest(of_key, shown):
                found = credential
        return found

    def changes(self, newer: KeyRing) -> KeyChanges:
        old, new = self._keys, newer._keys
        unchanged = {name for name in old.keys() & new.keys() if old[name][0] == new[name][0]}
        return KeyChanges(
            added=tuple(sorted(new.keys() - unchanged)),
            revoked=tuple(sorted(old.keys() - unchanged)),
            changed=tuple(sorted(name for name in unchanged if old[name] != new[name])),
        )


# --- the file of API keys, with the limits of each key -------------------------------------------
#
#     keys:
#       workshop:
#         sha256: 5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef
#         max_sessions: 8
#
# It holds digests only. A key is shown once, when it is made. The file is replaced as a whole: a
# verifier that reads it meanwhile finds the old one or the new one.

MAX_NAME_LENGTH = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_LENGTH - 1}}}")
_HEX = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_HEAD = (
    "# Keys of an edgespec verifier: digests and limits, 0 for no limit of its own.\n"
    "# `edgespec keys add NAME --file FILE` makes one; SIGHUP makes the verifier read this anew.\n"
)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One API key: its digest, and limits on the common use of its devices. 0 means no own
    limit."""

    sha256: str
    max_sessions: int = range_field(0, 0, 1024)
    context_length: int = range_field(0, 0, 1 << 20)
    """Most tokens of a session, prompt and output together."""
    tokens_per_s: float = range_field(0.0, 0.0, 1e9)
    """Most tokens per second of all sessions together, in the long run."""
    priority: int = range_field(0, -100, 100)
    """Priority of the key's sessions. Those with a higher one get room in a pass first."""
    models: tuple[str, ...] = ()
    """Names of the models that the key may use. Empty means all."""

    def __post_init__(self) -> None:
        if not _HEX.fullmatch(self.sha256):
            raise ValueError(f"sha256 is {self.sha256[:80]!r}, but must be 64 hexadecimal digits")
        check_limits(self)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """All API keys, by name.

    A file without keys has to contain ``keys: {}``. Otherwise a file that an editor or a full disk
    has just truncated would revoke all keys."""

    keys: Mapping[str, KeyEntry]

    def __post_init__(self) -> None:
        for name in self.keys:  # Names appear in logs and metrics as they are.
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"the name {name[:80]!r} must have 1 to {MAX_NAME_LENGTH} letters, digits,"
                    " dots, dashes or underscores, and begin with a letter or digit"
                )
        self.make_ring()

    def make_ring(self) -> KeyRing:
        """Return the keys for lookups. Raises ``ValueError`` for too many keys, or for a key with
        two names."""
        credentials = {}
        for name, entry in self.keys.items():
            limits = {one.name: getattr(entry, one.name) for one in fields(entry)}
            of_key = bytes.fromhex(limits.pop("sha256"))
            credentials[name] = (of_key, Credential(name, **limits))
        return KeyRing(credentials)


def make_key() -> tuple[str, str]:
    """Make an API key of 256 random bits. Return it, and its digest as the file holds it."""
    # The prefix makes a leaked key recognisable, for example in a repository.
    key = "edgespec-" + secrets.token_urlsafe(32)
    return key, digest(key).hex()


def save_keys(path: Path, keys: KeyFile) -> None:
    """Write the key file, readable for its owner only.

    An existing file keeps its owner, because a verifier that runs as another user reads it. Raises
    ``ConfigError``."""
    path = path.resolve()
    try:
        replace_file(path, _HEAD + dump_config(keys), keeps_owner=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class ReloadResult:
    keys: KeyChanges
    certificate: bool
    """Whether another certificate is shown from now on."""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        changes = [f"keys {self.keys}"] if self.keys else []
        changes += ["a new certificate or client CA"] if self.certificate else []
        return "; ".join(changes) or "nothing changed"


class ServerAccess:
    """The API keys and certificates of one verifier.

    Raises ``ConfigError`` if the files cannot be used, and ``SetupError`` if TLS is not
    available."""

    def __init__(self, config: VerifierConfig) -> None:
        self._keys, self._tls = config.keys, config.tls
        self._ring = self._read_ring()
        self._identity = identity = load_server_identity(self._tls)
        self._requires_certificates = identity is not None and identity.client_ca is not None
        self.credentials = None if identity is None else self._port_credentials
        """Makes the credentials of one port of a server. None for plaintext.

        If the first identity has a ``client_ca``, devices need a certificate, and all later
        identities require one too."""

    @property
    def requires_keys(self) -> bool:
        return self._ring is not None

    @property
    def warnings(self) -> tuple[str, ...]:
        texts = []
        if self._ring is not None and not len(self._ring):
            texts.append(f"{self._keys} holds no key: every device is refused")
        if self._identity is not None:
            ends = self._identity.expires
            if (days := (ends - datetime.now(UTC)).days) < _EXPIRES_SOON_DAYS:
                texts.append(f"{self._tls.cert} expires in {days} days, on {ends:%Y-%m-%d}")
        return tuple(texts)

    def authenticate(self, key: str) -> Credential | None:
        """Return the credential of an API key, as of the last reload. Call it only if keys are
        required."""
        assert self._ring is not None
        return self._ring.credential(key)

    def reload(self) -> ReloadResult:
        """Read all files again. Raises ``ConfigError``, in which case nothing has changed."""
        ring, identity = self._read_ring(), load_server_identity(self._tls)
        changes, replaced = KeyChanges(), False
        if ring is not None and self._ring is not None:
            changes, self._ring = self._ring.changes(ring), ring
        if identity is not None:
            replaced, self._identity = identity != self._identity, identity
        return ReloadResult(changes, replaced, self.warnings)

    def _port_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for one port.

        A second port with the same ones would have no certificate: gRPC hands the first
        configuration, and each later one, to one port only."""
        import grpc

        current = self._identity
        assert current is not None

        def fetch_newer() -> Any:
            """Return the new identity for the port, or None if the port shows it already.

            gRPC calls this at every handshake, in its own thread."""
            nonlocal current
            identity = self._identity
            if identity is None or identity is current:
                return None
            current = identity
            return identity.make_configuration()

        return grpc.dynamic_ssl_server_credentials(
            current.make_configuration(),
            fetch_newer,
            require_client_authentication=self._requires_certificates,
        )

    def _read_ring(self) -> KeyRing | None:
        if not self._keys:
            return None
        if not (path := checked_path(self._keys)).exists():
            make = f"`edgespec keys add NAME --file {path}` makes it"
            raise ConfigError(f"keys: {path}: no such file; {make}")
        return load_config(KeyFile, path).make_ring()


_NOT_TRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: ([^:]+))?")


@dataclass(frozen=True, slots=True)
class DeviceAccess:
    """The device's API key and TLS settings for its verifiers."""

    key: str = field(default="", repr=False)
    """The API key to send. Empty if none is sent."""
    insecure: bool = False
    """Whether the key may be sent where others can read it on the way."""
    credentials: grpc.ChannelCredentials | None = None
    """Credentials of the TLS channel. None for plaintext."""
    shows_certificate: bool = False
    server_name: str = ""
    """Name that the verifier's certificate must carry. If empty, it is the host of its address."""
    tls_context: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    """The settings of ``credentials`` for connections that are made without gRPC."""

    def key_for(self, address: str) -> str:
        """Return the API key to send to ``address``. Raises ``ConfigError`` if others could read
        it."""
        private = self.credentials is not None or is_loopback(host_of(address))
        if self.key and not (private or self.insecure):
            raise ConfigError(
                f"the key for {address} would be sent without TLS, so others could read it: give"
                " --ca FILE, or --set insecure=true if the network is yours"
            )
        return self.key

    def handshake_failure(self, details: str) -> str | None:
        """Return an explanation of a failed TLS handshake with a verifier, or None.

        ``details`` are gRPC's own words about a connection that failed. None means that the reason
        was something else."""
        if not details.startswith("failed to connect to all addresses"):
            return None
        if match := _NOT_TRUSTED.search(details):
            why = f": {match[1].strip()}" if match[1] else ""
            return f"its certificate is not trusted{why}; name a CA to trust with --ca FILE"
        if "Hostname Verification Check failed" in details:
            why = "--set tls.server_name=NAME names the one it has"
            return f"its certificate is for another name; {why}"
        if "WRONG_VERSION_NUMBER" in details:
            return "it does not use TLS; leave out --ca and tls if that is intended"
        if "andshake failed" in details:
            return f"the TLS handshake failed: {details.rpartition('SSL routines:')[2][-200:]}"
        if "Socket closed" not in details and "reset by peer" not in details:
            return None
        closes = "it closes the connection"
        if self.credentials is None:
            return f"{closes}; it may require TLS: --ca FILE, or --set tls.enabled=true"
        if self.shows_certificate:
            return f"{closes} in the handshake; it may not accept tls.client_cert"
        return f"{closes} in the handshake; it may require tls.client_cert and .client_key"


def load_device_access(
    config: AgentConfig, environment: Mapping[str, str] = os.environ
) -> DeviceAccess:
    """Return the device's access to its verifiers. Raises ``ConfigError`` for files of no use."""
    key = load_api_key(config.api_key_file, "EDGESPEC_API_KEY", environment)
    return replace(load_tls_access(config.tls), key=key, insecure=config.insecure)


def load_tls_access(tls: DeviceTlsSection) -> DeviceAccess:
    """Return the device's access without an API key. Raises ``ConfigError`` for files of no use."""
    if not tls.used:
        return DeviceAccess()
    import grpc

    context: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols([ALPN])
    roots = certificate_pem = key_pem = None
    if tls.ca:
        roots = _read(ca := checked_path(tls.ca))
        try:
            context.load_verify_locations(cadata=roots.decode("ascii", "replace"))
        except ssl.SSLError as error:
            raise ConfigError(f"{ca}: holds no PEM certificate: {error.reason}") from None
    elif system_roots := ssl.get_default_verify_paths().cafile:
        # OpenSSL would trust these here. Without them, gRPC uses the ones that it brings along.
        roots = _read(Path(system_roots))
    if not tls.ca:
        context.load_default_certs()
    if tls.client_cert:
        certificate_path = checked_path(tls.client_cert)
        key_path = checked_path(tls.client_key, secret=True)
        certificate_pem, key_pem = _read(certificate_path), _read(key_path)
        try:
            context.load_cert_chain(certificate_path, key_path, password="")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                why = f"the key does not belong to the certificate in {certificate_path}"
                raise ConfigError(f"{key_path}: {why}") from None
            why = f"no PEM certificate and plain private key: {error.reason or error}"
            raise ConfigError(f"{certificate_path} and {key_path}: {why}") from None
    credentials = grpc.ssl_channel_credentials(roots, key_pem, certificate_pem)
    return DeviceAccess(
        credentials=credentials,
        shows_certificate=certificate_pem is not None,
        server_name=tls.server_name,
        tls_context=context,
    )


# --- certificates and private keys as gRPC takes them ---------------------------------------------

MAX_PEM_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """The certificate and key of a verifier, and the CA of the device certificates it accepts."""

    certificate: bytes = field(repr=False)
    """Certificates in PEM: the verifier's own first, then those between it and the CA."""
    key: bytes = field(repr=False)
    client_ca: bytes | None = field(repr=False)
    """CA in PEM. None if devices need no certificate."""
    expires: datetime
    """Expiry of the certificate that expires first."""

    def make_configuration(self) -> Any:
        """Return the identity in gRPC's form."""
        import grpc

        pairs = [(self.key, self.certificate)]
        return grpc.ssl_server_certificate_configuration(pairs, self.client_ca)


def load_server_identity(tls: ServerTlsSection) -> ServerIdentity | None:
    """Return a verifier's identity, or None without TLS. Raises ``ConfigError`` and
    ``SetupError``."""
    if not tls.used:
        return None
    certificate_path, key_path = checked_path(tls.cert), checked_path(tls.key, secret=True)
    with require_library("cryptography", "edgespec[certs]"):
        certificate_pem, certificates = read_certificates(certificate_path)
        key_pem, _ = read_key(key_path, certificate_path, certificates[0])
        client_ca = read_certificates(checked_path(tls.client_ca))[0] if tls.client_ca else None
    expires = min(one.not_valid_after_utc for one in certificates)
    return ServerIdentity(certificate_pem, key_pem, client_ca, expires)


def read_certificates(path: Path) -> tuple[bytes, Sequence[Certificate]]:
    """Return a file's content and its certificates, after checking that all of them are valid
    now."""
    from cryptography import x509

    pem, now = _read(path), datetime.now(UTC)
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{path}: holds no PEM certificate that can be read: {error}") from None
    for one in certificates:
        begins, ends = one.not_valid_before_utc, one.not_valid_after_utc
        if now > ends:
            raise ConfigError(f"{path}: the certificate expired on {ends:%Y-%m-%d %H:%M} UTC")
        if now < begins:
            why = f"the certificate is not valid before {begins:%Y-%m-%d %H:%M}"
            raise ConfigError(f"{path}: {why}")
    return pem, certificates


def read_key(path: Path, certificate_path: Path, certificate: Certificate) -> tuple[bytes, Any]:
    """Return a file's content and its private key, which must belong to the certificate in
    ``of``."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    pem = _read(path)
    try:
        key: Any = load_pem_private_key(pem, password=None)
    except TypeError:
        raise ConfigError(f"{path}: a password protects the key; give a plain one") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path}: holds no PEM private key to be read: {error}") from None
    if key.public_key() != certificate.public_key():
        raise ConfigError(
            f"{path}: the key does not belong to the certificate in {certificate_path}"
        )
    return pem, key


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_PEM_BYTES)
    except TooLargeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        why = f"{error.strerror or error}; `edgespec certs` makes certificates and their keys"
        raise ConfigError(f"{path}: {why}") from None
