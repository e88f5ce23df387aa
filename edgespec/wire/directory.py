"""Where verifiers are: a name may stand for several addresses, and for other ones tomorrow.

Each address of a name is a verifier of its own, so that a device can leave the one that is gone for
the one that is not; gRPC by itself would keep to the connection it has. Certificates are still
checked against the name. Numbers, sockets and names of this machine are taken as they are.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from ipaddress import ip_address
from typing import Final, Protocol

from edgespec.core.ports import Transport, is_idle

LOOK_UP_S: Final = 2.0
KEEP_S: Final = 30.0
"""What a name stands for is looked up again after so long, or before if nobody answered."""
FRESH_S: Final = 1.0
MAX_ADDRESSES: Final = 16
"""Of one name."""


class MakeTransport(Protocol):
    """To this address, where the certificate has to bear ``server_name``; empty: the address."""

    def __call__(self, address: str, *, server_name: str = "") -> Transport: ...


LookUp = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host; raises ``OSError``."""


async def look_up(host: str, port: int) -> Sequence[str]:
    """By the system's resolver, in the order that it prefers."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class VerifierDirectory:
    """Transports for the addresses of ``verifiers`` ("host:port", "unix:path"), in their order."""

    def __init__(
        self,
        verifiers: Sequence[str],
        make: MakeTransport,
        *,
        look_up: LookUp = look_up,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verifiers, self._make = tuple(verifiers), make
        self._look_up, self._clock = look_up, clock
        self._transports: dict[str, Transport] = {}
        """Of the addresses found last, and of those before that are still in use."""
        self._closing: set[asyncio.Task[None]] = set()
        self._found: dict[str, tuple[str, ...]] = {}
        """The addresses of each name when it was last looked up."""
        self._found_at: float | None = None

    async def find(self, *, fresh: bool = False) -> Mapping[str, Transport]:
        """A transport for each address. A name that cannot be looked up stands for what it stood
        for before, or for itself: then gRPC says what is wrong with it. The transports of addresses
        that are gone are closed once they are idle."""
        now, names = self._clock(), [one for one in self._verifiers if is_name(one)]
        age_s = None if self._found_at is None else now - self._found_at
        if names and (age_s is None or age_s > (FRESH_S if fresh else KEEP_S)):
            self._found_at = now
            await asyncio.gather(*(self._find_name(name) for name in names))
        found: dict[str, Transport] = {}
        for verifier in self._verifiers:
            addresses = self._found.get(verifier, ())
            if len(addresses) < 2:
                found[verifier] = self._transport(verifier, verifier, "")
            else:
                host = verifier.rpartition(":")[0]
                for address in addresses:
                    label = f"{verifier} ({address.rpartition(':')[0]})"
                    found[label] = self._transport(label, address, host)
        self._close_gone(found)
        return found

    async def close(self) -> None:
        transports, self._transports = self._transports, {}
        await asyncio.gather(*(one.close() for one in transports.values()), *self._closing)

    def _close_gone(self, found: Collection[str]) -> None:
        gone = [name for name in self._transports if name not in found]
        for name in gone:
            if is_idle(self._transports[name]):
                task = asyncio.create_task(self._transports.pop(name).close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def _transport(self, label: str, address: str, name: str) -> Transport:
        if label not in self._transports:
            self._transports[label] = self._make(address, server_name=name)
        return self._transports[label]

    async def _find_name(self, verifier: str) -> None:
        host, _, port = verifier.rpartition(":")
        try:
            async with asyncio.timeout(LOOK_UP_S):
                addresses = await self._look_up(host, int(port))
        except (OSError, TimeoutError, ValueError):
            return
        unique = list(dict.fromkeys(addresses))[:MAX_ADDRESSES]
        self._found[verifier] = tuple(
            f"[{a}]:{port}" if ":" in a else f"{a}:{port}" for a in unique
        )


def is_name(verifier: str) -> bool:
    """Whether somebody has to be asked what it stands for."""
    host, _, port = verifier.rpartition(":")
    if "/" in verifier or verifier.startswith("unix:") or not port.isdigit():
        return False
    bare = host.strip("[]")
    if not bare or bare == "localhost" or bare.endswith(".localhost"):
        return False
    try:
        ip_address(bare.partition("%")[0])
    except ValueError:
        return True
    return False
