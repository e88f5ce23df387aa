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
from edgespec.core.association.candidates import BreakerPolicy
from edgespec.core.association.failover import Failover, FailoverPolicy
from edgespec.core.association.policies import Association
from edgespec.core.ports import DeviceStream, LinkError, ServeStream, Transport, VerifierStream
from edgespec.core.protocol.messages import Commit, Limits, Open, Opened
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.verifier_pool import VerifierPool
from edgespec.verifier.build import load_target
from edgespec.wire.directory import VerifierDirectory
from tests.shell.failing_verifiers import EXPECTED, PACED, PATIENT, WITHIN_S, agent, collect, gates
from tests.shell.live_verifier import GatedTarget, daemon, own_port, serving
from tests.shell.loopback import LoopbackTransport
from tests.shell.scripted_verifier import loopback, streaming

# --- kills ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "most"), [("toy", 21), ("none", 6)])
async def test_killed_at_random_moments_texts_are_whole_and_exact(draft: str, most: int) -> None:
    """Three times in each text, the verifier that serves dies and the other one comes back."""
    dice, kills = random.Random(draft), 0
    async with gates(2) as found, agent(*(gate.address for gate, _ in found), draft=draft) as one:

        def swap() -> None:
            nonlocal kills
            assert one.stats is not None
            assert one.stats.route is not None
            for gate, port in found:
                if gate.address == one.stats.route.last:
                    gate.kill()
                    kills += 1
                else:
                    gate.port = port

        while kills < most:
            moments = sorted(dice.sample(range(1, len(EXPECTED) - 20), 3))
            assert await collect(one, dict.fromkeys(moments, swap)) == EXPECTED
            assert one.stats is not None
            assert one.stats.failovers >= 1


async def test_a_text_goes_on_at_the_other_one_and_says_so() -> None:
    async with gates(2) as ((gate, _), (other, _)):
        async with agent(gate.address, other.address) as one:
            assert await collect(one, {30: gate.kill}) == EXPECTED
            assert one.stats is not None
            assert one.stats.verifiers == (gate.address, other.address)
            assert one.stats.failovers == 1


async def test_it_comes_back_to_the_first_with_the_next_text() -> None:
    async with gates(2) as ((gate, port), (other, _)):
        soon = FailoverPolicy(breaker=BreakerPolicy(open_s=0.05, longest_open_s=0.05))
        async with agent(gate.address, other.address, failover=soon) as one:
            assert await collect(one, {30: gate.kill}) == EXPECTED
            gate.port = port
            served: tuple[str, ...] = ()
            async with asyncio.timeout(WITHIN_S):
                while gate.address not in served:
                    assert await collect(one) == EXPECTED
                    assert one.stats is not None
                    served = one.stats.verifiers


async def test_a_session_that_was_left_behind_is_taken_up_again() -> None:
    """The first verifier still holds the beginning when the text comes back from the second."""
    async with gates(2) as ((first, port), (second, _)):

        def back() -> None:
            first.port = port
            second.kill()

        async with agent(first.address, second.address) as one:
            assert await collect(one, {20: first.kill, 60: back}) == EXPECTED
            assert one.stats is not None
            assert one.stats.failovers == 2


@pytest.mark.slow
async def test_verifier_processes_are_killed_and_started_again() -> None:
    paced, port = ("--pass-ms", "10"), str(own_port())
    with daemon(*paced, "--port", port) as (a, one_process), daemon(*paced) as (b, _):
        async with agent(a, b) as one:
            assert await collect(one, {40: one_process.kill}) == EXPECTED
            assert one.stats is not None
            assert one.stats.verifiers == (a, b)
        one_process.wait()
        with daemon(*paced, "--port", port) as (again, _):
            assert again == a
            async with agent(a, b) as one:
                assert await collect(one) == EXPECTED
                assert one.stats is not None
                assert one.stats.verifiers == (a,)


# --- drains -----------------------------------------------------------------------------------


async def test_what_is_told_to_resume_elsewhere_does() -> None:
    async with gates(1) as ((other, _),), contextlib.AsyncExitStack() as drained:
        gated = GatedTarget(load_target(PACED), free_passes=0)
        address, verifier = await drained.enter_async_context(serving(gated, config=PACED))
        stopping: list[asyncio.Task[None]] = []

        def stop() -> None:
            stopping.append(asyncio.create_task(verifier.stop()))

        both = (address, other.address)
        async with agent(*both, draft="none") as one, agent(*both, draft="none") as two:
            texts = asyncio.gather(collect(one, {30: stop}), collect(two))
            async with asyncio.timeout(WITHIN_S):
                while len(verifier.engine.sessions) < 2:  # noqa: ASYNC110 # no event
                    await asyncio.sleep(0)
            gated.gate.set()  # now that both are there, both have as many tokens at any time
            assert list(await texts) == [EXPECTED, EXPECTED]
            for each in (one, two):
                assert each.stats is not None
                assert each.stats.verifiers == (address, other.address)
        await stopping[0]


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


# --- text -------------------------------------------------------------------------------------


def pooled(*links: LoopbackTransport) -> VerifierPool:
    transports: dict[str, Transport] = {f"v{n}:1": link for n, link in enumerate(links)}

    def make(address: str, *, server_name: str = "") -> Transport:
        return transports[address]

    async def nowhere(host: str, port: int) -> Sequence[str]:
        raise OSError

    failover = Failover(FailoverPolicy(), Association.LISTED)
    return VerifierPool(VerifierDirectory(tuple(transports), make, look_up=nowhere), failover)


class Bytes:
    """One token a byte of UTF-8: most characters here take several."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, tokens: Sequence[int]) -> str:
        self._held += bytes(tokens)
        for cut in range(len(self._held), -1, -1):
            with contextlib.suppress(UnicodeDecodeError):
                text, self._held = self._held[:cut].decode(), self._held[cut:]
                return text
        return ""

    def flush(self) -> str:
        return self._held.decode(errors="replace")


@pytest.mark.parametrize(("stop", "ends"), [((), None), (("🙂 b",), "🙂 b"), (("zz",), None)])
async def test_characters_and_stop_strings_that_straddle_the_move(
    stop: tuple[str, ...], ends: str | None
) -> None:
    """Wherever the first verifier dies, also within a character or a stop string."""
    whole = "naïve 🙂 bär — ça va"
    tokens = list(whole.encode())
    wanted = whole if ends is None else whole.partition(ends)[0]
    for cut in range(1, len(tokens)):
        first, second = loopback(_dies_after(tokens, cut)), loopback(streaming(tokens, (3, 1)))
        options = AgentOptions(reconnect=PATIENT)
        encode = lambda text: list(text.encode())  # noqa: E731
        one = Agent(pooled(first, second), None, encode, lambda ids: Bytes(), options)
        params = SamplingParams(max_tokens=len(tokens), stop=stop)
        async with asyncio.timeout(WITHIN_S), one:
            chunks = [chunk async for chunk in one.generate("x", params)]
        assert "".join(chunk.text for chunk in chunks) == wanted, cut


def _dies_after(tokens: list[int], cut: int) -> ServeStream:
    """Greets, commits the first ``cut`` tokens one by one, and is dead from then on."""
    died = False

    async def serve(stream: VerifierStream) -> None:
        nonlocal died
        opening = await stream.receive()
        if died or not isinstance(opening, Open):
            raise LinkError("killed")
        died, position = True, len(opening.prompt)
        await stream.send(Opened(Limits(), "scripted", position))
        for index in range(cut):
            await stream.send(Commit(position + index, (tokens[index],)))
        raise LinkError("killed")

    return serve


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
        one = Agent(pool, None, lambda text: [1], lambda ids: Bytes())
        reading = asyncio.create_task(anext(one.generate("x")))
        for moment in (greeted, closing):
            await moment.wait()
            reading.cancel()
        await asyncio.wait([reading])
        assert pool.failover.routes == {}
        let_go.set()
        await one.close()
