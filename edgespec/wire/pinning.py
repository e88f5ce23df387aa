"""One certificate is trusted and no other: pinned by its SHA-256 fingerprint.

gRPC takes a verifier's own certificate in the place of a CA's, so a pin is a file: the certificate
as it was shown once and compared with its fingerprint. No CA can then vouch for another.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgespec.config.bounded_file import read_bytes

MAX_PEM_BYTES: Final = 1 << 20
ALGORITHM: Final = "sha256"
FETCH_S: Final = 10.0


class PinError(ValueError):
    """A certificate cannot be read, or is not the one; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A certificate in DER."""

    der: bytes

    @property
    def fingerprint(self) -> str:
        """ "sha256:" and 64 hexadecimal digits, as ``openssl x509 -fingerprint -sha256`` has
        them but for its colons."""
        return f"{ALGORITHM}:{hashlib.sha256(self.der).hexdigest()}"

    @property
    def pem(self) -> str:
        return ssl.DER_cert_to_PEM_cert(self.der)


def fetch(host: str, port: int, timeout_s: float = FETCH_S) -> Shown:
    """The certificate that is shown there, believed by nobody yet. Raises ``PinError``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        with (
            socket.create_connection((host, port), timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            der = secured.getpeercert(binary_form=True)
    except ssl.SSLError as error:
        raise PinError(f"{where} does not speak TLS: {error.reason or error}") from error
    except (OSError, UnicodeError) as error:
        why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else error
        raise PinError(f"cannot reach {where}: {why}") from error
    if der is None:
        raise PinError(f"{where} shows no certificate")
    return Shown(der)


def read(path: Path) -> Shown:
    """The first certificate of a PEM file, which is a verifier's own. Raises ``PinError``."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        text = read_bytes(path, MAX_PEM_BYTES).decode("ascii")
        return Shown(ssl.PEM_cert_to_DER_cert(text[text.index(begin) : text.index(end)] + end))
    except OSError as error:
        raise PinError(f"{path}: {error.strerror or error}") from error
    except ValueError:
        raise PinError(f"{path}: holds no certificate in PEM") from None


def check(shown: Shown, fingerprint: str) -> None:
    """Raises ``PinError`` unless ``fingerprint``, with or without "sha256:" and colons, is that of
    the certificate."""
    wanted = fingerprint.strip().lower().removeprefix(f"{ALGORITHM}:").replace(":", "")
    if not re.fullmatch("[0-9a-f]{64}", wanted):
        raise PinError(
            f"fingerprint {fingerprint!r} must be {ALGORITHM}: and 64 hexadecimal digits"
        )
    if not hmac.compare_digest(f"{ALGORITHM}:{wanted}", shown.fingerprint):
        raise PinError(
            f"the certificate has the fingerprint {shown.fingerprint}, not {ALGORITHM}:{wanted}:"
            " either it was renewed, or somebody stands in between"
        )
