"""What fairness counts by: the address a peer calls from, without its port."""

from __future__ import annotations

from ipaddress import IPv6Address, IPv6Network
from urllib.parse import unquote

_NETWORK_BITS = 64
"""An IPv6 host has a whole network of this size to itself and can call from any address in it."""


def peer_address(uri: str) -> str:
    """The peer named by ``uri`` as gRPC spells it, in a form that all its connections share.

    ``ipv4:10.0.0.7:5123`` becomes ``ipv4:10.0.0.7``, ``ipv6:%5B2001:db8::7%5D:5123`` becomes
    ``ipv6:2001:db8::/64``, and any unix socket becomes ``unix``.
    """
    kind, _, rest = uri.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    host = unquote(rest).rpartition(":")[0].strip("[]")
    if kind == "ipv4":
        return f"ipv4:{host}"
    try:
        address = IPv6Address(host.partition("%")[0])
    except ValueError:
        return f"ipv6:{host}"
    if address.ipv4_mapped is not None:
        return f"ipv4:{address.ipv4_mapped}"
    return f"ipv6:{IPv6Network((int(address), _NETWORK_BITS), strict=False)}"
