"""Choice of the proxy for an outgoing connection, from the variables of the environment.

gRPC and the Hub's HTTP client read the proxy variables by themselves, and would send even a call to
this machine through the proxy. edgespec connects directly to nearby hosts: this machine, addresses
of private networks, and names without a dot. Hosts in ``no_proxy`` are reached directly as well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

from edgespec.config.common import host_of, is_loopback

GRPC_VARIABLES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that gRPC reads; the first one that is set counts."""
HTTPS_VARIABLES: Final = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
HTTP_VARIABLES: Final = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
NO_PROXY: Final = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
_LOCAL_NAMES: Final = (".localhost", ".local")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that a variable of the environment names."""

    variable: str
    where: str
    """Host and port, without the password that its URL may hold."""

    def explain(self, host: str) -> str:
        """Return a clause for an error: the proxy that was used, and how to avoid it."""
        return (
            f"through the proxy {self.where} that {self.variable} names; to reach {host} without"
            f" it: no_proxy={host}"
        )


def proxy_of(
    host: str,
    variables: Sequence[str] = GRPC_VARIABLES,
    environment: Mapping[str, str] | None = None,
) -> Proxy | None:
    """Return the proxy through which ``host`` is reached, or None for a direct connection.

    ``host``: a name or an address without a port; "" means a unix socket.
    ``variables``: names of variables; the first one that is set names the proxy.
    ``environment``: the variables' values, by default this process's."""
    environment = os.environ if environment is None else environment
    variable = next((one for one in variables if environment.get(one)), None)
    if variable is None or is_near(host):
        return None
    if any(_matches_host(environment.get(one, ""), host) for one in NO_PROXY):
        return None
    given = environment[variable]
    parts = urlsplit(given if "://" in given else f"//{given}")
    return Proxy(variable, parts.netloc.rpartition("@")[2] or "?")


def proxy_of_address(address: str, server_name: str = "") -> Proxy | None:
    """Return the proxy through which a verifier's ``address``, such as "host:port", is reached.

    ``server_name``: the name from which the address was resolved, if there was one. A name that is
    reached directly makes its addresses so."""
    if server_name and proxy_of(server_name) is None:
        return None
    return proxy_of(host_of(address))


def is_near(host: str) -> bool:
    """Return whether ``host`` belongs to this machine or a private network, as far as its name or
    address shows it."""
    if is_loopback(host):
        return True
    if (address := _address_of(host)) is not None:
        return not address.is_global
    name = host.lower().rstrip(".")
    return "." not in name or name.endswith(_LOCAL_NAMES)


def _matches_host(no_proxy: str, host: str) -> bool:
    """Return whether an entry of ``no_proxy`` matches ``host``. An entry is a name, the end of a
    name, an address, a network, or ``*``."""
    name, address = host.lower().rstrip("."), _address_of(host)
    for entry in (one.strip().lower() for one in no_proxy.split(",")):
        if not entry:
            continue
        if entry == "*" or entry == name:
            return True
        if address is None:
            if name.endswith("." + entry.lstrip("*").lstrip(".")):
                return True
            continue
        try:
            if address in ip_network(entry, strict=False):
                return True
        except ValueError:  # a name
            continue
    return False


def _address_of(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        return None


def proxy_of_url(url: str) -> Proxy | None:
    """Return the proxy through which an http or https URL is reached, or None."""
    variables = HTTP_VARIABLES if url.startswith("http:") else HTTPS_VARIABLES
    return proxy_of(urlsplit(url).hostname or "", variables)


def bypass_proxy_if_near(url: str) -> None:
    """Add the host of ``url`` to ``no_proxy`` if it is nearby, for the HTTP clients of this
    process, which would use the proxy even for this machine."""
    host = urlsplit(url).hostname or ""
    if host and is_near(host):
        named = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
        if host not in (one.strip() for one in named.split(",")):
            os.environ["no_proxy"] = f"{named},{host}" if named else host
