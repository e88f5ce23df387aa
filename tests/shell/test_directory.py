"""What names stand for. Oracle: answers of a made-up resolver, and addresses of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from edgespec.core.ports import DeviceStream, LinkError, Transport
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.wire.directory import (
    KEEP_S,
    MAX_ADDRESSES,
    VerifierDirectory,
    is_name,
    look_up,
)


class Made:
    """A transport that only remembers how it was made."""

    def __init__(self, address: str, server_name: str) -> None:
        self.made_with, self.closed = (address, server_name), False

    async def connect(self) -> DeviceStream:
        raise LinkError("only made")

    async def info(self) -> VerifierInfo:
        raise LinkError("only made")

    async def close(self) -> None:
        self.closed = True


class Resolver:
    def __init__(self, **names: Sequence[str]) -> None:
        self.names, self.asked, self.now = dict(names), 0, 0.0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        if host not in self.names:
            raise OSError(f"no such name: {host}")
        return self.names[host]

    def directory(self, *verifiers: str) -> VerifierDirectory:
        def make(address: str, *, server_name: str = "") -> Transport:
            return Made(address, server_name)

        return VerifierDirectory(verifiers, make, look_up=self, clock=lambda: self.now)


def made(found: object) -> dict[str, tuple[str, str]]:
    assert isinstance(found, dict)
    return {label: one.made_with for label, one in found.items()}


async def test_each_address_of_a_name_is_a_verifier_and_shows_the_names_certificate() -> None:
    resolver = Resolver(pool=["10.0.0.1", "10.0.0.2", "10.0.0.1", "fd00::7"], box=["10.0.0.9"])
    found = await resolver.directory("pool:7420", "10.1.1.1:1", "box:7420").find()
    assert made(found) == {
        "pool:7420 (10.0.0.1)": ("10.0.0.1:7420", "pool"),
        "pool:7420 (10.0.0.2)": ("10.0.0.2:7420", "pool"),
        "pool:7420 ([fd00::7])": ("[fd00::7]:7420", "pool"),
        "10.1.1.1:1": ("10.1.1.1:1", ""),
        "box:7420": ("box:7420", ""),
    }


class Busy(Made):
    """It knows whether it is in use."""

    idle = False


async def test_transports_of_addresses_that_are_gone_are_closed_once_nobody_uses_them() -> None:
    resolver = Resolver(pool=["10.0.0.1", "10.0.0.2"])
    directory = VerifierDirectory(
        ("pool:1",),
        lambda address, *, server_name="": Busy(address, server_name),
        look_up=resolver,
        clock=lambda: resolver.now,
    )

    async def find() -> list[Busy]:
        resolver.now += KEEP_S + 1.0
        found = [one for one in (await directory.find()).values() if isinstance(one, Busy)]
        await asyncio.sleep(0)
        return found

    first, second = await find()
    resolver.names["pool"] = ["10.0.0.2", "10.0.0.3"]
    assert (await find())[0] is second
    assert not first.closed  # a text still comes over it
    first.idle = second.idle = True
    resolver.now -= KEEP_S  # no other addresses are looked for
    _, third = await find()
    assert [one.closed for one in (first, second, third)] == [True, False, False]
    resolver.names["pool"] = ["10.0.0.1", "10.0.0.2"]
    again, _ = await find()
    assert again is not first
    assert not third.closed
    third.idle = again.idle = True
    for _ in range(50):
        resolver.names["pool"] = [f"10.0.1.{resolver.asked}", "10.0.0.2"]
        for one in await find():
            one.idle = True
    assert len(directory._transports) == 2
    await directory.close()
    assert all(one.closed for one in (second, third, again))


async def test_a_name_with_many_addresses_is_cut() -> None:
    resolver = Resolver(pool=[f"10.0.0.{n}" for n in range(100)])
    assert len(await resolver.directory("pool:1").find()) == MAX_ADDRESSES


@pytest.mark.parametrize(
    ("verifier", "asked"),
    [
        ("gpu-box:7420", True),
        ("gpu.example.com:1", True),
        ("127.0.0.1:7420", False),
        ("[::1]:7420", False),
        ("localhost:7420", False),
        ("unix:/run/edgespec.sock", False),
        ("dns:///gpu-box:1", False),
        ("gpu-box", False),
    ],
)
def test_only_names_are_looked_up(verifier: str, asked: bool) -> None:
    assert is_name(verifier) is asked


async def test_the_systems_resolver_is_asked() -> None:
    found = await asyncio.wait_for(look_up("127.0.0.1", 80), 10.0)
    assert list(found) == ["127.0.0.1"]
