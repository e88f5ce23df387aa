"""What the configurations of both roles share: defaults, and checks that name the field.

Every section checks itself: ``ValueError`` names the field, the value and the range.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 7420
DEFAULT_ADDRESS = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
HASHED, PLAIN = "hashed", "plain"
TRACE_TOKENS = (HASHED, PLAIN)
MINUTE_MS = 60_000.0


def not_empty(name: str, value: str) -> None:
    if not value.strip():
        raise ValueError(f"{name} is empty")


def both_or_neither(advice: str = "", **files: str) -> None:
    """Raises ``ValueError``, with ``advice``, where one of two files is given without the other."""
    given = [name for name, file in files.items() if file]
    if len(given) == 1:
        (missing,) = files.keys() - given
        raise ValueError(f"{given[0]} is given without {missing}{advice}")


# --- what secures the way between a device and a verifier ---------------------------------------
# Loopback needs nothing. Anything else needs TLS, or the word ``insecure``: then what passes can be
# read and changed on its way, and nothing but the operator's network says who is who.


@dataclass(frozen=True, slots=True)
class ServerTlsSection:
    """PEM files of a verifier. They are read again at SIGHUP."""

    cert: str = ""
    """Encrypt with this certificate (``edgespec certs``). Certificates between it and the CA may
    stand behind it; empty is no TLS."""
    key: str = ""
    """The certificate's private key."""
    client_ca: str = ""
    """Let in only devices with a certificate of this CA. Empty lets in devices without one."""

    def __post_init__(self) -> None:
        both_or_neither(": give both, --tls-cert and --tls-key", cert=self.cert, key=self.key)
        if self.client_ca and not self.cert:
            raise ValueError(
                "client_ca is given without cert and key: give --tls-cert and --tls-key"
            )

    @property
    def used(self) -> bool:
        return bool(self.cert)


@dataclass(frozen=True, slots=True)
class DeviceTlsSection:
    """How a device makes sure of its verifier. Any setting here turns TLS on."""

    enabled: bool = False
    """Encrypt, and trust the CAs that the system trusts."""
    ca: str = ""
    """Encrypt, and trust the CA in this file."""
    client_cert: str = ""
    """The device's own certificate, for a verifier that asks for one."""
    client_key: str = ""
    """The private key of the device's certificate."""
    server_name: str = ""
    """The name that the verifier's certificate must have. Empty is the host of its address."""

    def __post_init__(self) -> None:
        both_or_neither(client_cert=self.client_cert, client_key=self.client_key)

    @property
    def used(self) -> bool:
        return self.enabled or any((self.ca, self.client_cert, self.server_name))


def host_of(address: str) -> str:
    """The host of "host:port", "[ipv6]:port" or "host"; empty for a unix socket."""
    if address.startswith("unix:") or "/" in address:
        return ""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0]


def joined(host: str, port: int) -> str:
    """``host_of`` the other way round."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_names(host: str) -> tuple[str, ...]:
    """Return the addresses at which a server for ``host`` listens: of 127.0.0.1 and localhost both
    loopback addresses, where there is IPv6, for clients take ``localhost`` for either."""
    if host.lower() not in (DEFAULT_HOST, "localhost"):
        return (host,)
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return (DEFAULT_HOST,)
    return (DEFAULT_HOST, "::1")


def own_name(host: str) -> str:
    """By which this machine reaches what listens at ``host``."""
    return {"0.0.0.0": DEFAULT_HOST, "::": "::1"}.get(host, host)


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can listen in. An empty host is that of a unix socket."""
    if host.lower() in ("", "localhost"):
        return True
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a name: what it stands for is for others to say
        return False


def installed_version(name: str) -> str | None:
    """Of a distribution; None: it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # takes its time

    try:
        return version(name)
    except PackageNotFoundError:
        return None


class SetupError(RuntimeError):
    """A part cannot be built; the message says what is wrong and, if known, what to run."""


@contextmanager
def needs(library: str, install: str) -> Iterator[None]:
    """Turns a missing library into the line that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("edgespec"):
            raise
        raise SetupError(
            f"this needs {library} ({error.name} is not installed): pip install '{install}'"
        ) from error
