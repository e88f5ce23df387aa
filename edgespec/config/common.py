"""Defaults, sections and checks that the configurations of both roles share.

Every section checks itself when it is made: ``ValueError`` names the field, the value and the
range.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address

from edgespec.core.protocol.errors import SetupError as SetupError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 7420
DEFAULT_ADDRESS = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
HASHED, PLAIN = "hashed", "plain"
TRACE_TOKENS = (HASHED, PLAIN)
MINUTE_MS = 60_000.0


def check_not_empty(name: str, value: str) -> None:
    """Raise ``ValueError`` if the text ``value`` of the field ``name`` is empty or blank."""
    if not value.strip():
        raise ValueError(f"{name} is empty; give a value, or leave the key out")


def check_both_or_neither(advice: str = "", **files: str) -> None:
    """Raise ``ValueError``, with ``advice``, if one of two files is given without the other."""
    given = [name for name, file in files.items() if file]
    if len(given) == 1:
        (missing,) = files.keys() - given
        raise ValueError(f"{given[0]} is given without {missing}{advice}")


# --- security of the link between a device and a verifier ---------------------------------------
# Loopback needs no TLS. Every other link needs TLS or the setting ``insecure``. An insecure link
# can be read and changed on its way, and only the operator's network keeps strangers out.


@dataclass(frozen=True, slots=True)
class ServerTlsSection:
    """PEM files of a verifier. SIGHUP makes a running verifier read them again."""

    cert: str = ""
    """PEM file with the certificate to encrypt with, as ``edgespec certs`` makes it. Intermediate
    certificates may follow it in the same file. Empty turns TLS off."""
    key: str = ""
    """PEM file with the certificate's private key."""
    client_ca: str = ""
    """PEM file of a CA: only devices with a certificate of this CA are admitted. Empty admits
    devices without a certificate."""

    def __post_init__(self) -> None:
        check_both_or_neither(": give both, --tls-cert and --tls-key", cert=self.cert, key=self.key)
        if self.client_ca and not self.cert:
            raise ValueError(
                "client_ca is given without cert and key: give --tls-cert and --tls-key"
            )

    @property
    def used(self) -> bool:
        return bool(self.cert)


@dataclass(frozen=True, slots=True)
class DeviceTlsSection:
    """TLS of a device. Any of these settings turns TLS on."""

    enabled: bool = False
    """Encrypt, and trust the CAs that this system trusts. Use it if a public CA signed the
    verifier's certificate."""
    ca: str = ""
    """Encrypt, and trust the CA in this PEM file (ca.pem of `edgespec certs`)."""
    client_cert: str = ""
    """PEM file with the device's own certificate. A verifier with ``tls.client_ca`` requires
    one."""
    client_key: str = ""
    """PEM file with the private key of the device's certificate."""
    server_name: str = ""
    """Name that the verifier's certificate must carry. Empty takes the host of its address."""

    def __post_init__(self) -> None:
        check_both_or_neither(client_cert=self.client_cert, client_key=self.client_key)

    @property
    def used(self) -> bool:
        return self.enabled or any((self.ca, self.client_cert, self.server_name))


def host_of(address: str) -> str:
    """Return the host of "host:port", "[ipv6]:port" or "host", or "" for a unix socket."""
    if address.startswith("unix:") or "/" in address:
        return ""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0]


def join_host_port(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_names(host: str) -> tuple[str, ...]:
    """Return the addresses at which a server for ``host`` listens.

    A server for 127.0.0.1 or localhost listens at both loopback addresses where there is IPv6,
    because clients resolve ``localhost`` to either."""
    if host.lower() not in (DEFAULT_HOST, "localhost"):
        return (host,)
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return (DEFAULT_HOST,)
    return (DEFAULT_HOST, "::1")


def local_host_of(host: str) -> str:
    """Return the host by which this machine reaches a server that listens at ``host``."""
    return {"0.0.0.0": DEFAULT_HOST, "::": "::1"}.get(host, host)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``. An empty host means a unix socket."""
    if host.lower() in ("", "localhost"):
        return True
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a name, which may resolve to any address
        return False


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # a slow import

    try:
        return version(name)
    except PackageNotFoundError:
        return None


@contextmanager
def require_library(library: str, install: str) -> Iterator[None]:
    """Turn a missing module in this block into ``SetupError`` with the line that installs it.

    ``library`` is what the message calls it, ``install`` the argument of ``pip install``."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("edgespec"):
            raise
        raise SetupError(
            f"this needs {library} ({error.name} is not installed): pip install '{install}'"
        ) from error
