"""A text that outlives its verifier. Oracle: the toy's own text, token for token.

Verifiers are real ones over gRPC: in this process behind gates that can be killed in no time, or
processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.access import ServerAccess
from edgespec.agent.agent import Agent, AgentOptions, GenerationError
from edgespec.agent.verifier_pool import VerifierPool
from edgespec.compose import TOY_MODEL, build_agent
from edgespec.config import AgentConfig, DraftSection, PacingSection, VerifierConfig
from edgespec.core.association.circuit_breaker import BreakerPolicy
from edgespec.core.association.failover import Failover
from edgespec.core.association.policies import DeviceView, ListedOrder
from edgespec.core.association.route import FailoverPolicy
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.protocol.messages import Commit, FaultCode, Limits, Open, Opened
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.models.toy_tokenizer import ToyTokenizer
from edgespec.ports import LinkError, ServeStream, TargetModel, Transport, VerifierStream
from edgespec.targets.toy import ToyTarget
from edgespec.transport.directory import VerifierDirectory
from edgespec.transport.loopback import LoopbackTransport
from tests.shell.gate import Gate
from tests.shell.guarded import keys_in
from tests.shell.live_verifier import daemon, serving, toy_text
from tests.shell.scripted_verifier import loopback, streaming

TEXT = ToyTokenizer()
PROMPT = "once upon a time"
PARAMS = SamplingParams(max_tokens=120, ignore_eos=True, temperature=0.8, seed=3)
EXPECTED = toy_text(TEXT.encode(PROMPT), PARAMS)
PATIENT = ReconnectPolicy(first_s=0.02, longest_s=0.1, give_up_first_s=60.0, give_up_s=60.0)
HASTY = replace(PATIENT, give_up_first_s=1.0, give_up_s=1.0)
WITHIN_S = 60.0
PACED = VerifierConfig(model="toy", port=0, pacing=PacingSection(2.0))
# Quick to suspect, for tests of those who say nothing.
WARY = FailoverPolicy(hedge_s=0.05, quiet_s=0.2, probe_s=0.3)


@contextlib.asynccontextmanager
async def gates(
    count: int, targets: Sequence[TargetModel | None] = (), access: ServerAccess | None = None
) -> AsyncIterator[list[tuple[Gate, int]]]:
    """Verifiers in this process, each behind a gate; with the port of each."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for number in range(count):
            target = targets[number] if number < len(targets) else None
            last = access if number == count - 1 else None
            serve = serving(target, config=PACED, access=last)
            address, _ = await stack.enter_async_context(serve)
            port = int(address.rpartition(":")[2])
            found.append((await stack.enter_async_context(Gate(port)), port))
        yield found


def agent(
    *addresses: str,
    draft: str = "toy",
    reconnect: ReconnectPolicy = PATIENT,
    failover: FailoverPolicy | None = None,
    association: str = "listed",
) -> Agent:
    return build_agent(
        AgentConfig(
            verifier=addresses,
            tokenizer="toy",
            draft=DraftSection(model=draft),
            reconnect=reconnect,
            failover=failover or FailoverPolicy(),
            association=association,
        )
    )


async def collect(one: Agent, at: Mapping[int, Callable[[], object]] | None = None) -> list[int]:
    """The tokens of one text; what stands in ``at`` is called when so many have come."""
    tokens: list[int] = []
    todo = dict(at or {})
    async with asyncio.timeout(WITHIN_S):
        async for chunk in one.generate(PROMPT, PARAMS):
            tokens += chunk.tokens
            for count in [count for count in todo if count <= len(tokens)]:
                todo.pop(count)()
    return tokens


# --- kills ------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["toy", "none"])
async def test_killed_at_random_moments_texts_are_whole_and_exact(draft: str) -> None:
    """Now this verifier is killed and now that one, for a moment each."""
    dice, kills, failovers = random.Random(draft), 0, 0
    async with gates(2) as (first, second), agent(first[0].address, second[0].address) as one:
        streaming_ends = asyncio.Event()

        async def killer() -> None:
            nonlocal kills
            while not streaming_ends.is_set() or kills < 20:
                await asyncio.sleep(dice.uniform(0.01, 0.08))
                gate, port = (first, second)[kills % 2]
                gate.kill()
                kills += 1
                await asyncio.sleep(dice.uniform(0.02, 0.1))
                gate.port = port

        killing = asyncio.create_task(killer())
        while kills < 20:
            assert await collect(one) == EXPECTED
            assert one.stats is not None
            failovers += one.stats.failovers
        streaming_ends.set()
        await killing
    assert failovers >= 1


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
    with daemon("--pass-ms", "10") as (a, one_process), daemon("--pass-ms", "10") as (b, _):
        async with agent(a, b) as one:
            assert await collect(one, {40: one_process.kill}) == EXPECTED
            assert one.stats is not None
            assert one.stats.verifiers == (a, b)
        one_process.wait()
        port = a.rpartition(":")[2]
        with daemon("--pass-ms", "10", "--port", port) as (again, _):
            assert again == a
            async with agent(a, b) as one:
                assert await collect(one) == EXPECTED
                assert one.stats is not None
                assert one.stats.verifiers == (a,)


# --- drains -----------------------------------------------------------------------------------


async def test_what_is_told_to_resume_elsewhere_does() -> None:
    async with gates(1) as ((other, _),), contextlib.AsyncExitStack() as drained:
        address, verifier = await drained.enter_async_context(serving(config=PACED))
        stopping: list[asyncio.Task[None]] = []

        def stop() -> None:
            stopping.append(asyncio.create_task(verifier.stop()))

        async with agent(address, other.address) as one, agent(address, other.address) as two:
            texts = await asyncio.gather(collect(one, {30: stop}), collect(two))
            assert list(texts) == [EXPECTED, EXPECTED]
            for each in (one, two):
                assert each.stats is not None
                assert each.stats.verifiers == (address, other.address)
        await stopping[0]


@pytest.mark.slow
async def test_all_streams_of_a_verifier_that_is_drained_go_on_elsewhere() -> None:
    """Oracle: every text is exact; the drain ends with streams left, or nothing was tested."""
    slow = ("--pass-ms", "20", "--drain-s", "0.3")
    with daemon(*slow) as (address, process):
        async with gates(1) as ((other, _),), contextlib.AsyncExitStack() as stack:
            agents = [
                await stack.enter_async_context(
                    agent(address, other.address, draft="toy" if number % 4 == 0 else "none")
                )
                for number in range(8)
            ]
            stop = {25: lambda: process.send_signal(signal.SIGTERM)}
            texts = [collect(one, stop if one is agents[0] else None) for one in agents]
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

    failover = Failover(FailoverPolicy(), ListedOrder(), DeviceView("d", 0.01), ask_first=False)
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


# --- those who are of no use ------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 40], ids=["from the beginning", "in mid-text"])
async def test_one_that_says_nothing_any_more_is_left(when: int) -> None:
    async with gates(2) as ((hole, _), (other, _)):
        if when == 0:
            hole.swallow()
        async with agent(hole.address, other.address, failover=WARY) as one:
            assert await collect(one, {when: hole.swallow}) == EXPECTED
            assert one.stats is not None
            assert one.stats.verifiers[-1] == other.address


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


async def test_it_waits_for_the_one_that_began_rather_than_take_another_model() -> None:
    async with gates(2, [None, stranger()]) as ((gate, port), (other, _)):

        def die() -> None:
            gate.kill()
            loop = asyncio.get_running_loop()
            loop.call_later(0.5, lambda: setattr(gate, "port", port))

        async with agent(gate.address, other.address) as one:
            assert await collect(one, {30: die}) == EXPECTED
            assert one.stats is not None
            assert one.stats.verifiers == (gate.address,)


async def test_one_of_another_vocabulary_is_passed_over_and_named() -> None:
    async with gates(2, [stranger(vocabulary="other-words")]) as ((wrong, _), (gate, _)):
        async with agent(wrong.address, gate.address, reconnect=HASTY) as one:
            assert await collect(one) == EXPECTED
            gate.kill()
            with pytest.raises(GenerationError) as caught:
                await collect(one)
            assert f"{wrong.address}: the draft's vocabulary" in str(caught.value)
            assert "other-words" in str(caught.value)


async def test_one_that_refuses_the_key_is_passed_over_and_named(tmp_path: Path) -> None:
    keys_in(tmp_path / "keys.yaml", "somebody")
    guarded = ServerAccess(replace(PACED, keys=str(tmp_path / "keys.yaml")))
    async with gates(2, access=guarded) as ((gate, port), (refuses, _)):
        async with agent(refuses.address, gate.address, reconnect=HASTY) as one:
            assert await collect(one) == EXPECTED
            gate.kill()
            with pytest.raises(GenerationError, match="this verifier asks for a key") as caught:
                await collect(one)
            assert refuses.address in str(caught.value)
            assert gate.address in str(caught.value)
            gate.port = port
            assert await collect(one) == EXPECTED
        async with agent(refuses.address, refuses.address.replace("127.0.0.1", "localhost")) as one:
            with pytest.raises(GenerationError, match="asks for a key") as caught:
                await collect(one)
            assert caught.value.code is FaultCode.UNAUTHENTICATED


# --- all of them ------------------------------------------------------------------------------


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
            assert one.stats is not None
            assert one.stats.verifiers == (addresses[0], addresses[2])
        async with agent(*addresses, reconnect=HASTY) as one:
            die()
            with pytest.raises(GenerationError, match="gave up on the verifier") as caught:
                await collect(one)
            assert caught.value.code is FaultCode.OVERLOADED
            for address in addresses:
                assert address in str(caught.value)


async def test_generations_beside_each_other_all_move() -> None:
    async with gates(2) as ((gate, _), (other, _)):
        async with agent(gate.address, other.address) as one:
            texts = [collect(one, {30: gate.kill}), *(collect(one) for _ in range(5))]
            assert await asyncio.gather(*texts) == [EXPECTED] * 6


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
