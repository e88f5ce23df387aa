"""Replicas behind one name, chosen by the conversation. Oracles: the order that the hash gives, the
toy's own text, and the prefix hits that a verifier counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio

from edgespec.config import LimitsSection, VerifierConfig
from edgespec.core.association.failover import Failover, FailoverPolicy
from edgespec.core.association.policies import (
    Association,
    conversation_named,
    conversation_of,
    weight,
)
from edgespec.core.ports import LinkError, TargetModel
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, GenerationError, GenerationStats
from edgespec.device.build import connect
from edgespec.device.verifier_pool import VerifierPool
from edgespec.verifier.build import load_target
from edgespec.verifier.daemon import Verifier
from edgespec.wire.directory import VerifierDirectory
from edgespec.wire.grpc_calls import CONVERSATION_HEADER
from tests.shell.failing_verifiers import PACED, TEXT, agent
from tests.shell.gate import Gate
from tests.shell.live_verifier import GatedTarget, serving, toy_text

WITHIN_S = 200.0  # also on a machine that does much else
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
CHATS = [f"chat {number}" for number in range(9)]
# Nobody is left for being slow: what moves here moves for the reason that the test gives.
CALM = FailoverPolicy(hedge_s=WITHIN_S, quiet_s=WITHIN_S, probe_s=WITHIN_S)
ONE_SESSION = replace(PACED, limits=LimitsSection(max_sessions=1, peer_share=1.0))
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


async def test_of_a_bare_prompt_the_beginning_counts() -> None:
    prompt = list(range(1, 60))
    async with replicas() as found, device(tuple(found)) as one:
        home = by_hash(conversation_of(prompt), tuple(found))[0]
        assert await served(one, prompt) == (home,)


@contextlib.asynccontextmanager
async def halting(chat: str) -> AsyncIterator[tuple[dict[str, tuple[Gate, Verifier]], GatedTarget]]:
    """Replicas of which the first of ``chat`` has ten passes of a token each, and waits then for
    the gate of its target, which is told too."""
    targets = [GatedTarget(load_target(ONE_A_PASS), free_passes=10) for _ in range(3)]
    async with replicas(ONE_A_PASS, targets) as found:
        by_address = dict(zip(found, targets, strict=True))
        halts, *others = (by_address[name] for name in order(chat, tuple(found)))
        for target in others:
            target.gate.set()
        try:
            yield found, halts
        finally:
            halts.gate.set()


async def test_a_replica_that_dies_in_mid_answer_is_followed_by_the_next_in_order() -> None:
    async with halting(CHATS[0]) as (found, halts), device(tuple(found)) as one:
        first, second, _ = order(CHATS[0], tuple(found))
        gate, _ = found[first]
        port = gate.port
        assert await served(one, [1, 2, 3], CHATS[0], 10, gate.kill) == (first, second)
        halts.gate.set()
        others = [chat for chat in CHATS if order(chat, tuple(found))[0] != first]
        for chat in others[:3]:  # they notice nothing
            assert await served(one, [4, 5], chat) == (order(chat, tuple(found))[0],)
        gate.port = port
        async with asyncio.timeout(WITHIN_S):  # and when it is back, so are its conversations
            while await served(one, [1, 2, 3], CHATS[0]) != (first,):
                pass


async def test_a_drained_replica_hands_its_conversations_on() -> None:
    async with halting(CHATS[1]) as (found, halts), device(tuple(found)) as one:
        first, second, _ = order(CHATS[1], tuple(found))
        stopping: list[asyncio.Task[None]] = []

        def drain() -> None:
            stopping.append(asyncio.create_task(found[first][1].stop()))
            halts.gate.set()

        assert await served(one, [1, 2, 3], CHATS[1], 10, drain) == (first, second)
        await stopping[0]
        assert await served(one, [1, 2, 3], CHATS[1]) == (second,)


async def test_a_full_replica_is_passed_over() -> None:
    """Each holds one session; those of the first two wait in their second pass."""
    targets = [GatedTarget(load_target(ONE_SESSION), free_passes=1) for _ in range(3)]
    async with replicas(ONE_SESSION, targets) as found, contextlib.AsyncExitStack() as stack:
        for target in targets:
            stack.callback(target.gate.set)
        by_address = dict(zip(found, targets, strict=True))
        first, second, third = order(CHATS[2], tuple(found))
        by_address[third].gate.set()
        devices = [await stack.enter_async_context(device(tuple(found))) for _ in range(3)]
        began = list[GenerationStats]()
        async with asyncio.timeout(WITHIN_S):
            for one in devices[:2]:
                texts = one.generate([1, 2], PARAMS, conversation=CHATS[2], started=began.append)
                await stack.enter_async_context(contextlib.aclosing(texts))
                await anext(texts)
        assert [stats.verifiers for stats in began] == [(first,), (second,)]
        assert await served(devices[2], [1, 2], CHATS[2]) == (third,)
        for target in targets:
            target.gate.set()


async def test_addresses_of_one_name_are_replicas() -> None:
    """What a headless service is to a device: a name that stands for all of them."""
    async with replicas() as found, contextlib.AsyncExitStack() as stack:
        ports = {f"10.0.0.{n}:7420": address for n, address in enumerate(found)}
        addresses = [host.rpartition(":")[0] for host in ports]

        async def look_up(host: str, port: int) -> Sequence[str]:
            return addresses

        directory = VerifierDirectory(
            ["pool:7420"],
            lambda address, *, server_name="": connect(ports[address]),
            look_up=look_up,
        )
        failover = Failover(CALM, Association.RENDEZVOUS)
        one = Agent(VerifierPool(directory, failover), None, TEXT.encode, TEXT.stream)
        await stack.enter_async_context(one)
        labels = [f"pool:7420 ({address})" for address in addresses]
        homes = {chat: order(chat, labels)[0] for chat in CHATS}
        firsts = {home: chat for chat, home in homes.items()}  # one conversation of each replica
        assert set(firsts) == set(labels)
        for home, chat in firsts.items():
            assert await served(one, [1, 2], chat) == (home,)


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
