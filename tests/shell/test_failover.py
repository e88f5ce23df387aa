"""A text that outlives its verifier. Oracle: the toy's own text, token for token.

Verifiers are real ones over gRPC: in this process behind gates that can be killed in no time, or
processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Sequence

import pytest

from edgespec.core.association import failover_events as ev
from edgespec.core.association.failover import Failover, FailoverPolicy
from edgespec.core.association.policies import Association
from edgespec.core.ports import DeviceStream, LinkError, Transport, VerifierStream
from edgespec.core.protocol.messages import FaultCode, Limits, Opened
from edgespec.core.toy_model import ToyModel
from edgespec.device.agent import Agent, GenerationError
from edgespec.device.verifier_pool import VerifierDirectory, VerifierPool
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.verifier.targets.toy import ToyTarget
from tests.present import present
from tests.shell.failing_verifiers import (
    EXPECTED,
    HASTY,
    PARAMS,
    PROMPT,
    WARY,
    WITHIN_S,
    agent,
    collect,
    gates,
)
from tests.shell.live_verifier import daemon
from tests.shell.loopback import LoopbackTransport
from tests.shell.scripted_verifier import loopback, streaming


@pytest.mark.parametrize(("draft", "most"), [("toy", 21), ("none", 6)])
async def test_killed_at_random_moments_texts_are_whole_and_exact(draft: str, most: int) -> None:
    """Three times in each text, the verifier that serves dies and the other one comes back."""
    dice, kills = random.Random(draft), 0
    async with gates(2) as found, agent(*(gate.address for gate, _ in found), draft=draft) as one:

        def swap() -> None:
            nonlocal kills
            for gate, port in found:
                if gate.address == present(present(one.stats).route).using:
                    gate.kill()
                    kills += 1
                else:
                    gate.port = port

        while kills < most:
            moments = sorted(dice.sample(range(1, len(EXPECTED) - 20), 3))
            assert await collect(one, dict.fromkeys(moments, swap)) == EXPECTED
            assert present(one.stats).failovers >= 1


@pytest.mark.slow
async def test_all_streams_of_a_verifier_that_is_drained_go_on_elsewhere() -> None:
    """Oracle: every text is exact; the drain ends with streams left, or nothing was tested."""
    slow = ("--pass-ms", "100", "--set", "drain_s=0.3")
    begun = 0
    with daemon(*slow) as (address, process):
        async with gates(1) as ((other, _),), contextlib.AsyncExitStack() as stack:
            agents = [
                await stack.enter_async_context(
                    agent(address, other.address, draft="toy" if number % 4 == 0 else "none")
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


def pooled(*links: LoopbackTransport) -> VerifierPool:
    transports: dict[str, Transport] = {f"v{n}:1": link for n, link in enumerate(links)}

    def make(address: str, *, server_name: str = "") -> Transport:
        return transports[address]

    async def nowhere(host: str, port: int) -> Sequence[str]:
        raise OSError

    failover = Failover(FailoverPolicy(), Association.LISTED)
    return VerifierPool(VerifierDirectory(tuple(transports), make, look_up=nowhere), failover)


@pytest.mark.parametrize("event", [ev.Dialed, ev.Tick])
async def test_who_waits_hears_of_a_machine_that_breaks(
    event: type[ev.FailoverEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice of a verifier runs in timers and tasks, which nobody awaits."""
    silent = loopback(streaming([1], (1,)))
    pool = pooled(silent, silent)
    if event is ev.Tick:
        monkeypatch.setattr(silent, "connect", asyncio.Event().wait)
    handle = pool.failover.handle

    def breaks(told: ev.FailoverEvent, now: float) -> Sequence[ev.FailoverAction]:
        if isinstance(told, event):
            raise RuntimeError("the machine was chosen to break")
        return handle(told, now)

    monkeypatch.setattr(pool.failover, "handle", breaks)
    with pytest.raises(LinkError, match="chosen to break"):
        await asyncio.wait_for(pool.stream(ev.Wanted(1, 10)), WITHIN_S)
    await pool.close()


class Reluctant:
    """A stream that takes until ``let_go`` to close, and says so with ``closing``."""

    def __init__(self, inner: DeviceStream, closing: asyncio.Event, let_go: asyncio.Event) -> None:
        self._inner, self._closing, self._let_go = inner, closing, let_go
        self.send, self.receive = inner.send, inner.receive

    async def close(self) -> None:
        self._closing.set()
        await self._let_go.wait()
        await self._inner.close()


async def test_a_text_that_is_cancelled_twice_leaves_no_route_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second time comes while the last messages of the first one leave."""
    greeted, closing, let_go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def silent(stream: VerifierStream) -> None:
        await stream.receive()
        await stream.send(Opened(Limits(), "scripted", 1))
        greeted.set()
        with contextlib.suppress(LinkError):
            while True:
                await stream.receive()

    link = loopback(silent)
    connect, pool = link.connect, pooled(link)

    async def reluctant() -> DeviceStream:
        return Reluctant(await connect(), closing, let_go)

    monkeypatch.setattr(link, "connect", reluctant)
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
    async with gates(2) as ((hole, _), (other, _)):
        if when == 0:
            hole.swallow()
        async with agent(hole.address, other.address, failover=WARY) as one:
            assert await collect(one, {when: hole.swallow}) == EXPECTED
            assert present(one.stats).verifiers[-1] == other.address


def stranger(**changes: object) -> ToyTarget:
    """Another model of the same name and vocabulary, unless told otherwise."""
    settings: dict[str, object] = {
        "name": "toy",
        "vocabulary": f"toy-{TOY_MODEL.vocabulary_size}",
        "fingerprint": "stranger",
    }
    model = ToyModel(TOY_MODEL.vocabulary_size, order=2, seed=9)
    return ToyTarget(model, **{**settings, **changes})  # type: ignore[arg-type]


async def test_a_text_is_not_continued_by_another_model() -> None:
    async with gates(2, [None, stranger()]) as ((gate, _), (other, _)):
        async with agent(gate.address, other.address, reconnect=HASTY) as one:
            with pytest.raises(GenerationError) as caught:
                await collect(one, {30: gate.kill})
            why = str(caught.value)
            assert f"{other.address}: it serves the model 'toy' (stranger)" in why
            assert "but the text was begun by 'toy' (" in why
            assert gate.address in why


async def test_when_all_are_down_each_is_named_and_one_that_returns_is_used() -> None:
    async with gates(3) as found:
        addresses = [gate.address for gate, _ in found]

        def die() -> None:
            for gate, _ in found:
                gate.kill()

        def one_returns() -> None:
            found[2][0].port = found[2][1]

        def all_die() -> None:
            die()
            asyncio.get_running_loop().call_later(0.7, one_returns)

        async with agent(*addresses) as one:
            assert await collect(one, {50: all_die}) == EXPECTED
            assert present(one.stats).verifiers == (addresses[0], addresses[2])
        async with agent(*addresses, reconnect=HASTY) as one:
            die()
            with pytest.raises(GenerationError, match="gave up on the verifier") as caught:
                await collect(one)
            assert caught.value.code is FaultCode.OVERLOADED
            for address in addresses:
                assert address in str(caught.value)


async def test_leaving_a_text_early_leaves_nothing_behind() -> None:
    async with gates(2) as ((gate, _), (other, _)):
        gate.swallow()
        before = asyncio.all_tasks()
        one = agent(gate.address, other.address, failover=WARY)
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
