"""Replicas behind one name, chosen by the conversation. Oracles: the order that the hash gives, the
toy's own text, and the prefix hits that a verifier counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from edgespec.config import VerifierConfig
from edgespec.core.association.failover import FailoverPolicy
from edgespec.core.association.policies import (
    Association,
    conversation_named,
    conversation_of,
    weight,
)
from edgespec.core.ports import DeviceStream, LinkError, TargetModel, Transport
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, GenerationError, GenerationStats
from edgespec.device.build import connect
from edgespec.device.verifier_pool import FRESH_S, KEEP_S, VerifierDirectory, is_name, look_up
from edgespec.verifier.daemon import Verifier
from edgespec.wire.grpc_calls import CONVERSATION_HEADER
from tests.shell.failing_verifiers import PACED, agent
from tests.shell.gate import Gate
from tests.shell.live_verifier import serving, toy_text

WITHIN_S = 200.0  # also on a machine that does much else

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)

CHATS = [f"chat {number}" for number in range(9)]

# Nobody is left for being slow: what moves here moves for the reason that the test gives.
CALM = FailoverPolicy(hedge_s=WITHIN_S, quiet_s=WITHIN_S, probe_s=WITHIN_S)

ONE_A_PASS = replace(PACED, server_drafts=False)


@contextlib.asynccontextmanager
async def replicas(
    config: VerifierConfig = PACED, targets: Sequence[TargetModel | None] = (None,) * 3
) -> AsyncIterator[dict[str, tuple[Gate, Verifier]]]:
    """A verifier of each target, each behind a gate, by the address of that."""
    async with contextlib.AsyncExitStack() as stack:
        found = {}
        for target in targets:
            address, verifier = await stack.enter_async_context(serving(target, config=config))
            gate = await stack.enter_async_context(Gate(int(address.rpartition(":")[2])))
            found[gate.address] = gate, verifier
        yield found


def device(addresses: Sequence[str]) -> Agent:
    return agent(*addresses, draft="none", association=Association.RENDEZVOUS, failover=CALM)


def order(chat: str, names: Sequence[str]) -> list[str]:
    return by_hash(conversation_named(chat), names)


def by_hash(conversation: str, names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: weight(conversation, name), reverse=True)


async def served(
    one: Agent,
    prompt: Sequence[int],
    conversation: str = "",
    at: int = 0,
    do: Callable[[], object] = lambda: None,
) -> tuple[str, ...]:
    """Who served the text, which is exact; ``do`` is called once ``at`` tokens have come."""
    tokens, begun = list[int](), list[GenerationStats]()
    texts = one.generate(prompt, PARAMS, conversation=conversation, started=begun.append)
    done = False
    async with asyncio.timeout(WITHIN_S):
        async for chunk in texts:
            tokens += chunk.tokens
            if at and not done and len(tokens) >= at:
                done = True
                do()
    assert tokens == toy_text(prompt, PARAMS)
    return begun[0].verifiers


async def test_the_next_turns_of_a_chat_meet_the_same_replica_and_its_cache() -> None:
    async with replicas() as found, device(tuple(found)) as one:
        for number, chat in enumerate(CHATS[:4]):
            prompt = [1 + number, *range(1, 60)]
            for _ in range(3):
                assert await served(one, prompt, chat) == (order(chat, tuple(found))[0],)
                prompt += [*toy_text(prompt, PARAMS), 7, 8, 9]
        hits = sum(verifier.engine.keeper.prefix_hit_tokens for _, verifier in found.values())
        asked = sum(verifier.engine.keeper.prefix_query_tokens for _, verifier in found.values())
        # A second turn has 60 tokens of 103 from the first, a third 103 of 146, less a block each.
        assert hits > asked / 3


async def test_a_proxy_is_told_the_conversation_and_nothing_else() -> None:
    """A stream's headers, where there is one address: sixteen digits, the same in each turn."""
    seen: list[dict[str, str | bytes]] = []

    async def refuse(requests: Any, context: Any) -> None:
        seen.append(dict(context.invocation_metadata()))
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "only looked at")

    handler: Any = grpc.stream_stream_rpc_method_handler(refuse)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("edgespec.v1.Verifier", {"Speculate": handler}),)
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        for addresses in ((address,), (address, address.replace("127.0.0.1", "localhost"))):
            async with device(addresses) as one:
                for chat in ("", "", "any name: ü\n", "any name: ü\n"):
                    with contextlib.suppress(GenerationError):
                        await served(one, [1, 2, 3], chat)
            named = conversation_named("any name: ü\n")
            told = {found[CONVERSATION_HEADER] for found in seen}
            assert told == {conversation_of([1, 2, 3]), named}
            assert len(seen) >= 4
            seen.clear()
        transport = connect(address)
        with contextlib.suppress(LinkError):
            await (await transport.connect()).receive()
        await transport.close()
        assert CONVERSATION_HEADER not in seen[0]
    finally:
        await server.stop(None)


class Made:
    """A transport that only remembers how it was made, and whether it is in use."""

    idle = False

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


async def test_names_are_looked_up_again_after_a_while_or_when_nobody_answers() -> None:
    resolver = Resolver(pool=["10.0.0.1", "10.0.0.2"])
    directory = resolver.directory("pool:1")
    first = await directory.find()
    await directory.find()
    assert resolver.asked == 1
    resolver.names["pool"], resolver.now = ["10.0.0.2", "10.0.0.3"], FRESH_S + 0.1
    assert made(await directory.find()) == made(first)
    found = await directory.find(fresh=True)
    assert list(found) == ["pool:1 (10.0.0.2)", "pool:1 (10.0.0.3)"]
    assert found["pool:1 (10.0.0.2)"] is first["pool:1 (10.0.0.2)"]
    resolver.now += KEEP_S + 1.0
    del resolver.names["pool"]  # the resolver fails: what was found before stands
    assert list(await directory.find()) == list(found)
    assert resolver.asked == 3
    await directory.close()
    assert all(one.closed for one in {**first, **found}.values() if isinstance(one, Made))


async def test_transports_of_addresses_that_are_gone_are_closed_once_nobody_uses_them() -> None:
    resolver = Resolver(pool=["10.0.0.1", "10.0.0.2"])
    directory = VerifierDirectory(
        ("pool:1",),
        lambda address, *, server_name="": Made(address, server_name),
        look_up=resolver,
        clock=lambda: resolver.now,
    )

    async def find() -> list[Made]:
        resolver.now += KEEP_S + 1.0
        found = [one for one in (await directory.find()).values() if isinstance(one, Made)]
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


@pytest.mark.parametrize(
    ("verifier", "asked"),
    [
        ("gpu-box:7420", True),
        ("127.0.0.1:7420", False),
        ("[::1]:7420", False),
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
