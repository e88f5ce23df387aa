"""Tests of a generation that outlives its verifier, and of replicas behind one name, chosen by the
conversation.

Oracle: the toy's own tokens; the order that the hash gives; the prefix hits that a verifier counts.
The verifiers are real ones over gRPC, either in this process behind gates that can be cut at once,
or in separate processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from edgespec.config import VerifierConfig
from edgespec.core.association import failover_events as ev
from edgespec.core.association.failover import Failover, FailoverPolicy
from edgespec.core.association.policies import (
    Association,
    hash_conversation_name,
    hash_prompt_beginning,
    rendezvous_weight,
)
from edgespec.core.ports import DeviceStream, LinkError, TargetModel, Transport, VerifierStream
from edgespec.core.protocol.errors import ConnectError
from edgespec.core.protocol.messages import Limits, Opened, VerifierInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.agent import Agent, GenerationError, GenerationStats
from edgespec.device.build import connect
from edgespec.device.verifier_pool import (
    LOOKUP_LIFETIME_S,
    RETRY_LOOKUP_S,
    VerifierDirectory,
    VerifierPool,
    is_name,
    look_up,
)
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.testing import LoopbackTransport
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.toy import ToyTarget
from edgespec.wire.grpc_client import CONVERSATION_HEADER
from tests.kit.gate import Gate
from tests.kit.live_verifier import serve_toy, start_daemon, toy_text
from tests.kit.scripted_verifier import connect_loopback, stream_output
from tests.present import require
from tests.verifier.failing_verifiers import (
    EXPECTED,
    HASTY,
    PACED,
    PARAMS,
    PROMPT,
    WARY,
    WITHIN_S,
    collect,
    make_agent,
    run_behind_gates,
)


@pytest.mark.parametrize(("draft", "most"), [("toy", 21), ("none", 6)])
async def test_killed_at_random_moments_texts_are_whole_and_exact(draft: str, most: int) -> None:
    """Three times in each generation the current verifier dies and the other one comes back."""
    dice, kills = random.Random(draft), 0
    async with (
        run_behind_gates(2) as found,
        make_agent(*(gate.address for gate, _ in found), draft=draft) as one,
    ):

        def swap() -> None:
            nonlocal kills
            for gate, port in found:
                if gate.address == require(require(one.stats).route).current.address_in_use:
                    gate.kill()
                    kills += 1
                else:
                    gate.port = port

        while kills < most:
            moments = sorted(dice.sample(range(1, len(EXPECTED) - 20), 3))
            assert await collect(one, dict.fromkeys(moments, swap)) == EXPECTED
            assert require(one.stats).failovers >= 1


@pytest.mark.slow
async def test_all_streams_of_a_verifier_that_is_drained_go_on_elsewhere() -> None:
    """Oracle: every text is exact. The drain must end with streams left over, or nothing was
    tested."""
    slow = ("--pass-ms", "100", "--set", "drain_s=0.3")
    begun = 0
    with start_daemon(*slow) as (address, process):
        async with run_behind_gates(1) as ((other, _),), contextlib.AsyncExitStack() as stack:
            agents = [
                await stack.enter_async_context(
                    make_agent(address, other.address, draft="toy" if number % 4 == 0 else "none")
                )
                for number in range(8)
            ]

            def begins() -> None:
                nonlocal begun
                begun += 1
                if begun == len(agents):
                    process.send_signal(signal.SIGTERM)

            texts = [collect(one, {1: begins}) for one in agents]
            assert await asyncio.gather(*texts) == [EXPECTED] * 8
            served = [one.stats.verifiers for one in agents if one.stats is not None]
        assert served.count((address, other.address)) >= 4
        assert await asyncio.to_thread(process.wait) == 0


def make_pool(*links: LoopbackTransport) -> VerifierPool:
    transports: dict[str, Transport] = {f"v{n}:1": link for n, link in enumerate(links)}

    def make(address: str, *, server_name: str = "") -> Transport:
        return transports[address]

    async def find_no_address(host: str, port: int) -> Sequence[str]:
        raise OSError

    failover = Failover(FailoverPolicy(), Association.LISTED)
    return VerifierPool(
        VerifierDirectory(tuple(transports), make, look_up=find_no_address), failover
    )


@pytest.mark.parametrize("event", [ev.Dialed, ev.Tick])
async def test_who_waits_hears_of_a_machine_that_breaks(
    event: type[ev.FailoverEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice of a verifier runs in timers and tasks that no caller awaits, so an error there
    must reach the waiting caller."""
    silent = connect_loopback(stream_output([1], (1,)))
    pool = make_pool(silent, silent)
    if event is ev.Tick:
        monkeypatch.setattr(silent, "connect", asyncio.Event().wait)
    handle = pool.failover.handle

    def break_session(happened: ev.FailoverEvent, now: float) -> Sequence[ev.FailoverAction]:
        if isinstance(happened, event):
            raise RuntimeError("the machine was chosen to break")
        return handle(happened, now)

    monkeypatch.setattr(pool.failover, "handle", break_session)
    with pytest.raises(LinkError, match="chosen to break"):
        await asyncio.wait_for(pool.open_stream(ev.Wanted(1, 10)), WITHIN_S)
    await pool.close()


class Reluctant:
    """A stream whose ``close`` sets ``closing`` and then waits for ``let_go``."""

    def __init__(self, inner: DeviceStream, closing: asyncio.Event, let_go: asyncio.Event) -> None:
        self._inner, self._closing, self._let_go = inner, closing, let_go
        self.send, self.receive, self.verifier = inner.send, inner.receive, inner.verifier

    async def close(self) -> None:
        self._closing.set()
        await self._let_go.wait()
        await self._inner.close()


async def test_a_text_that_is_cancelled_twice_leaves_no_route_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second cancellation comes while the last messages of the first one are being sent."""
    greeted, closing, let_go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def stay_silent(stream: VerifierStream) -> None:
        await stream.receive()
        await stream.send(Opened(Limits(), "scripted", 1))
        greeted.set()
        with contextlib.suppress(LinkError):
            while True:
                await stream.receive()

    link = connect_loopback(stay_silent)
    connect, pool = link.connect, make_pool(link)

    async def open_reluctantly() -> DeviceStream:
        return Reluctant(await connect(), closing, let_go)

    monkeypatch.setattr(link, "connect", open_reluctantly)
    async with asyncio.timeout(WITHIN_S):
        one = Agent(pool, None, lambda text: [1], ToyTokenizer().stream)
        reading = asyncio.create_task(anext(one.generate("x")))
        for moment in (greeted, closing):
            await moment.wait()
            reading.cancel()
        await asyncio.wait([reading])
        assert pool.failover.routes == {}
        let_go.set()
        await one.close()


@pytest.mark.parametrize("when", [0, 40], ids=["from the beginning", "in mid-text"])
async def test_one_that_says_nothing_any_more_is_left(when: int) -> None:
    async with run_behind_gates(2) as ((hole, _), (other, _)):
        if when == 0:
            hole.swallow()
        async with make_agent(hole.address, other.address, failover=WARY) as one:
            assert await collect(one, {when: hole.swallow}) == EXPECTED
            assert require(one.stats).verifiers[-1] == other.address


def make_stranger(**changes: object) -> ToyTarget:
    """Make another model with the same name and vocabulary, unless ``changes`` say otherwise."""
    settings: dict[str, object] = {
        "name": "toy",
        "vocabulary": f"toy-{TOY_MODEL.vocabulary_size}",
        "fingerprint": "stranger",
    }
    model = ToyModel(TOY_MODEL.vocabulary_size, order=2, seed=9)
    return ToyTarget(model, **{**settings, **changes})  # type: ignore[arg-type]


async def test_a_text_is_not_continued_by_another_model() -> None:
    async with run_behind_gates(2, [None, make_stranger()]) as ((gate, _), (other, _)):
        async with make_agent(gate.address, other.address, reconnect=HASTY) as one:
            with pytest.raises(GenerationError) as caught:
                await collect(one, {30: gate.kill})
            why = str(caught.value)
            assert f"{other.address}: it serves the model 'toy' (stranger)" in why
            assert "but the generation began on 'toy' (" in why
            assert gate.address in why


async def test_when_all_are_down_each_is_named_and_one_that_returns_is_used() -> None:
    async with run_behind_gates(3) as found:
        addresses = [gate.address for gate, _ in found]

        def die() -> None:
            for gate, _ in found:
                gate.kill()

        def one_returns() -> None:
            found[2][0].port = found[2][1]

        def all_die() -> None:
            die()
            asyncio.get_running_loop().call_later(0.7, one_returns)

        async with make_agent(*addresses) as one:
            assert await collect(one, {50: all_die}) == EXPECTED
            assert require(one.stats).verifiers == (addresses[0], addresses[2])
        async with make_agent(*addresses, reconnect=HASTY) as one:
            die()
            with pytest.raises(GenerationError, match="gave up on the verifier") as caught:
                await collect(one)
            assert isinstance(caught.value, ConnectError)
            for address in addresses:
                assert address in str(caught.value)


async def test_leaving_a_text_early_leaves_nothing_behind() -> None:
    async with run_behind_gates(2) as ((gate, _), (other, _)):
        gate.swallow()
        before = asyncio.all_tasks()
        one = make_agent(gate.address, other.address, failover=WARY)
        chunks = one.generate(PROMPT, PARAMS)
        await anext(chunks)
        await chunks.aclose()
        other.swallow()
        waiting = asyncio.ensure_future(anext(one.generate(PROMPT, PARAMS)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await one.close()
        left = [repr(task.get_coro()) for task in asyncio.all_tasks() - before]
        ours = ("VerifierPool", "PooledStream", "Link.", "SessionDriver")
        assert not [one for one in left if any(name in one for name in ours)]


# --- replicas behind one name, chosen by the conversation -----------------------------------------


SOON_S = 200.0  # enough on a busy machine too

BRIEF = SamplingParams(max_tokens=40, ignore_eos=True)

CHATS = [f"chat {number}" for number in range(9)]

# With these times no verifier is left for being slow, so a stream moves only for the test's reason.
CALM = FailoverPolicy(hedge_s=SOON_S, quiet_s=SOON_S, probe_s=SOON_S)

ONE_A_PASS = replace(PACED, server_drafts=False)


@contextlib.asynccontextmanager
async def start_replicas(
    config: VerifierConfig = PACED, targets: Sequence[TargetModel | None] = (None,) * 3
) -> AsyncIterator[dict[str, tuple[Gate, Verifier]]]:
    """Start a verifier for each target, each behind a gate, and yield both by the gate's
    address."""
    async with contextlib.AsyncExitStack() as stack:
        found = {}
        for target in targets:
            address, verifier = await stack.enter_async_context(serve_toy(target, config=config))
            gate = await stack.enter_async_context(Gate(int(address.rpartition(":")[2])))
            found[gate.address] = gate, verifier
        yield found


def device(addresses: Sequence[str]) -> Agent:
    return make_agent(*addresses, draft="none", association=Association.RENDEZVOUS, failover=CALM)


def order_by_chat(chat: str, names: Sequence[str]) -> list[str]:
    return order_by_hash(hash_conversation_name(chat), names)


def order_by_hash(conversation: str, names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: rendezvous_weight(conversation, name), reverse=True)


async def generate_and_list_verifiers(
    one: Agent,
    prompt: Sequence[int],
    conversation: str = "",
    at: int = 0,
    do: Callable[[], object] = lambda: None,
) -> tuple[str, ...]:
    """Generate, require the exact output, and return the addresses of the verifiers that served it.
    ``do`` is called once ``at`` tokens have come."""
    tokens, begun = list[int](), list[GenerationStats]()
    texts = one.generate(prompt, BRIEF, conversation=conversation, started=begun.append)
    done = False
    async with asyncio.timeout(SOON_S):
        async for chunk in texts:
            tokens += chunk.tokens
            if at and not done and len(tokens) >= at:
                done = True
                do()
    assert tokens == toy_text(prompt, BRIEF)
    return begun[0].verifiers


async def test_the_next_turns_of_a_chat_meet_the_same_replica_and_its_cache() -> None:
    async with start_replicas() as found, device(tuple(found)) as one:
        for number, chat in enumerate(CHATS[:4]):
            prompt = [1 + number, *range(1, 60)]
            for _ in range(3):
                assert await generate_and_list_verifiers(one, prompt, chat) == (
                    order_by_chat(chat, tuple(found))[0],
                )
                prompt += [*toy_text(prompt, BRIEF), 7, 8, 9]
        hits = sum(
            verifier.engine.cache_scheduler.prefix_hit_tokens for _, verifier in found.values()
        )
        asked = sum(
            verifier.engine.cache_scheduler.prefix_query_tokens for _, verifier in found.values()
        )
        # A second turn shares 60 of 103 tokens with the first, a third 103 of 146, each less one
        # block.
        assert hits > asked / 3


async def test_a_proxy_is_told_the_conversation_and_nothing_else() -> None:
    """With one address the stream's headers must hold sixteen digits, the same in each turn."""
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
                        await generate_and_list_verifiers(one, [1, 2, 3], chat)
            named = hash_conversation_name("any name: ü\n")
            conversations = {found[CONVERSATION_HEADER] for found in seen}
            assert conversations == {hash_prompt_beginning([1, 2, 3]), named}
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
    """A transport that records the arguments it was made with, and whether it is in use."""

    is_idle = False

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


def arguments_of(found: object) -> dict[str, tuple[str, str]]:
    assert isinstance(found, dict)
    return {label: one.made_with for label, one in found.items()}


async def test_each_address_of_a_name_is_a_verifier_and_shows_the_names_certificate() -> None:
    resolver = Resolver(pool=["10.0.0.1", "10.0.0.2", "10.0.0.1", "fd00::7"], box=["10.0.0.9"])
    found = await resolver.directory("pool:7420", "10.1.1.1:1", "box:7420").find()
    assert arguments_of(found) == {
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
    resolver.names["pool"], resolver.now = ["10.0.0.2", "10.0.0.3"], RETRY_LOOKUP_S + 0.1
    assert arguments_of(await directory.find()) == arguments_of(first)
    found = await directory.find(fresh=True)
    assert list(found) == ["pool:1 (10.0.0.2)", "pool:1 (10.0.0.3)"]
    assert found["pool:1 (10.0.0.2)"] is first["pool:1 (10.0.0.2)"]
    resolver.now += LOOKUP_LIFETIME_S + 1.0
    del resolver.names["pool"]  # the resolver fails, so the earlier addresses stay
    assert list(await directory.find()) == list(found)
    await settle_lookup(directory)
    assert list(await directory.find()) == list(found)
    assert resolver.asked == 3
    await directory.close()
    assert all(one.closed for one in {**first, **found}.values() if isinstance(one, Made))


async def settle_lookup(directory: VerifierDirectory) -> None:
    """Wait for a lookup that nothing else waits for."""
    if directory._looking_up is not None:
        await directory._looking_up


async def test_a_resolver_that_does_not_answer_holds_up_no_generation() -> None:
    resolver = Resolver(pool=["10.0.0.1", "10.0.0.2"])
    directory = resolver.directory("pool:1")
    first = await directory.find()

    async def look_up_for_ever(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        raise AssertionError("never set")

    directory._look_up = look_up_for_ever
    resolver.now += LOOKUP_LIFETIME_S + 1.0
    assert arguments_of(await directory.find()) == arguments_of(first)
    await directory.close()


async def test_transports_of_addresses_that_are_gone_are_closed_once_nobody_uses_them() -> None:
    resolver = Resolver(pool=["10.0.0.1", "10.0.0.2"])
    directory = VerifierDirectory(
        ("pool:1",),
        lambda address, *, server_name="": Made(address, server_name),
        look_up=resolver,
        clock=lambda: resolver.now,
    )

    async def find() -> list[Made]:
        resolver.now += LOOKUP_LIFETIME_S + 1.0
        await directory.find()  # this begins a lookup, whose result is used from then on
        await settle_lookup(directory)
        found = [one for one in (await directory.find()).values() if isinstance(one, Made)]
        await asyncio.sleep(0)
        return found

    first, second = await find()
    resolver.names["pool"] = ["10.0.0.2", "10.0.0.3"]
    assert (await find())[0] is second
    assert not first.closed  # a generation still uses its transport
    first.is_idle = second.is_idle = True
    resolver.now -= LOOKUP_LIFETIME_S  # so that no new lookup is due
    _, third = await find()
    assert [one.closed for one in (first, second, third)] == [True, False, False]
    resolver.names["pool"] = ["10.0.0.1", "10.0.0.2"]
    again, _ = await find()
    assert again is not first
    assert not third.closed
    third.is_idle = again.is_idle = True
    for _ in range(50):
        resolver.names["pool"] = [f"10.0.1.{resolver.asked}", "10.0.0.2"]
        for one in await find():
            one.is_idle = True
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
