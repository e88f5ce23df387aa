"""A device that sleeps, is stopped, or loses its connection without a sign.

Oracle: the toy's own tokens, and clocks that the test sets. Where a connection carries nothing any
more, the library's own pings are turned off, so that only the watch can find it out.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence

import pytest

from edgespec.config import LimitsSection, PacingSection, VerifierConfig
from edgespec.core.device import events as ev
from edgespec.core.device.goodput_policy import make_policy
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import LinkError, VerifierStream
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.errors import ConnectError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import connect
from edgespec.device.session_driver import SessionDriver
from edgespec.device.sleeping import LOOK_EVERY_S, SLEPT_S, AwakeClock, Clocks, SleepDetector
from edgespec.models.toy import ToyTokenizer, toy_info
from edgespec.testing import TOKENIZER, LoopbackTransport, ScriptedVerifier
from edgespec.wire import channel_options
from tests.kit.gate import Gate
from tests.kit.live_verifier import serve_toy, start, toy_text, wait_until
from tests.present import require
from tests.verifier.failing_verifiers import EXPECTED, PACED, collect, make_agent

# --- clocks ---------------------------------------------------------------------------------------


class SetTime:
    """A clock that a test sets. ``reads`` counts its readings."""

    def __init__(self) -> None:
        self.now, self.reads = 100.0, 0

    def read(self) -> float:
        self.reads += 1
        return self.now

    async def wait_read(self) -> None:
        """Wait until the clock is read once more."""
        before = self.reads
        await wait_until(lambda: self.reads > before)


def test_an_awake_clock_stands_still_while_nothing_reads_it() -> None:
    time = SetTime()
    clock = AwakeClock(time.read)
    seen = [clock.now()]
    for step_s in (0.5, LOOK_EVERY_S, 2.5, 8 * 3600.0, 0.5, 0.0, 3.0, 1.0):
        time.now += step_s
        seen.append(clock.now())
    assert [one - 100.0 for one in seen] == [0.0, 0.5, 1.5, 4.0, 4.0, 4.5, 4.5, 4.5, 5.5]


@pytest.mark.parametrize(
    ("slept_s", "found_s"), [(0.0, 0.0), (SLEPT_S - 1, 0.0), (3600.0, 3600.0), (-3600.0, 0.0)]
)
def test_a_sleep_is_found_once(slept_s: float, found_s: float) -> None:
    """The wall clock goes on while a machine sleeps, the monotonic one does not."""
    time, wall = SetTime(), SetTime()
    detector = SleepDetector(Clocks(time.read, wall.read))
    time.now, wall.now = time.now + 5.0, wall.now + 5.0 + slept_s
    assert [detector.look(), detector.look()] == [pytest.approx(found_s), 0.0]


# --- a generation whose process stood still -------------------------------------------------------


class NoTrace:
    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None: ...


class Gated(ScriptedVerifier):
    """A verifier whose second token waits for ``gate``."""

    def __init__(self, output: Sequence[int]) -> None:
        super().__init__([output])
        self.gate = asyncio.Event()

    async def serve(self, stream: VerifierStream) -> None:
        opening = await stream.receive()
        assert isinstance(opening, m.Open)
        self.opened.append(opening)
        length, (output,) = len(opening.prompt), self.outputs
        assert not isinstance(output, m.Fault)
        await stream.send(m.Opened(m.Limits(), "gated", length))
        await stream.send(m.Commit(length, tuple(output[:1])))
        await self.gate.wait()
        await stream.send(m.Commit(length + 1, tuple(output[1:]), finish=m.FinishReason.STOP))


async def test_a_night_in_which_a_process_does_not_run_ends_no_generation() -> None:
    """Without the awake clock every deadline would have passed in the morning: that for a message,
    that for progress, and that for a new stream. The driver has to read the clock often enough,
    also while nothing happens."""
    time, verifier = SetTime(), Gated((5, 6, 7))
    info = m.VerifierInfo(model=toy_info(), limits=m.Limits(), sessions=0, max_sessions=1)
    transport = LoopbackTransport(verifier.serve, lambda: info)
    request = m.Open("s", "", "", (1, 2), sampling=SamplingParams(max_tokens=8), drafting=False)
    session = DraftSession(request, make_policy(), ReconnectPolicy(), draft_context_length=0)
    clock = AwakeClock(time.read)
    driver = SessionDriver(session, transport.connect, None, NoTrace(), clock)
    tokens = list[int]()
    async with asyncio.timeout(60.0):
        async for outcome in driver.outcomes():
            if not isinstance(outcome, ev.Deliver):
                assert outcome == ev.Finish(m.FinishReason.STOP)
                break
            tokens += outcome.tokens
            if len(tokens) == 1:
                time.now += 8 * 3600.0
                await time.wait_read()
                verifier.gate.set()
    assert (tokens, len(verifier.opened)) == ([5, 6, 7], 1)
    await transport.close()


async def test_a_stopped_device_goes_on_where_it_was() -> None:
    """A device process is stopped in the middle of a text until its verifier has given it up and
    forgotten the session, and then goes on."""
    limits = LimitsSection(lease_s=0.0, max_unreceived=32)
    config = VerifierConfig(model="toy", port=0, limits=limits, pacing=PacingSection(pass_ms=2))
    count, text = 300, "once upon a time"
    expected = toy_text(
        ToyTokenizer().encode(text), SamplingParams(max_tokens=count, ignore_eos=True)
    )
    async with serve_toy(config=config) as (address, verifier):
        options = ("--verifier", address, "--draft", "toy", "--json", "-n", str(count))
        process = start("generate", text, *options, "--set", "sampling.ignore_eos=true")
        try:
            output = require(process.stdout)
            lines = [await asyncio.to_thread(output.readline)]
            assert verifier.engine.sessions
            process.send_signal(signal.SIGSTOP)
            await wait_until(lambda: not verifier.engine.sessions)
            process.send_signal(signal.SIGCONT)
            lines += (await asyncio.to_thread(output.read)).splitlines()
            assert await asyncio.to_thread(process.wait) == 0
        finally:
            process.kill()
            process.communicate()
    assert [token for line in lines for token in json.loads(line)["tokens"]] == expected


# --- a connection that carries nothing any more ---------------------------------------------------


@pytest.fixture
def _no_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the pings of the library at both ends."""
    monkeypatch.setattr(channel_options, "PING_INTERVAL_S", 3600.0)
    monkeypatch.setattr(channel_options, "PING_TIMEOUT_S", 3600.0)


@pytest.mark.usefixtures("_no_pings")
async def test_a_generation_moves_from_a_dead_connection_to_a_new_one() -> None:
    """The device changes its network: between two generations, in one before its first token, and
    in the middle of it."""
    async with serve_toy(config=PACED) as (address, _):
        async with (
            Gate(int(address.rpartition(":")[2])) as gate,
            make_agent(gate.address, draft="toy") as one,
        ):
            assert await collect(one) == EXPECTED
            gate.swallow_open()
            assert await collect(one) == EXPECTED
            assert gate.accepted == 2
            assert await collect(one, {3: gate.swallow_open}) == EXPECTED
            assert gate.accepted == 3
            assert require(one.stats).counters.reconnects == 1


@pytest.mark.usefixtures("_no_pings")
async def test_a_call_is_repeated_on_a_new_connection() -> None:
    async with serve_toy() as (address, _), Gate(int(address.rpartition(":")[2])) as gate:
        transport = connect(gate.address)
        before = await transport.info()
        gate.swallow_open()
        assert (await transport.info()).models == before.models
        assert gate.accepted == 2
        await transport.close()


@pytest.mark.usefixtures("_no_pings")
async def test_a_network_that_comes_back_is_used_at_once() -> None:
    """Connections that were begun while it was away stay dead, since a translator never saw their
    beginning. The generation waits for such a one."""
    async with serve_toy() as (address, _), Gate(int(address.rpartition(":")[2])) as gate:
        policy = ReconnectPolicy(give_up_first_s=60.0)
        async with make_agent(gate.address, draft="none", reconnect=policy) as one:
            assert await collect(one) == EXPECTED
            gate.swallow()
            generating = asyncio.create_task(collect(one))
            await wait_until(lambda: gate.accepted == 3)
            gate.swallow_open()
            assert await generating == EXPECTED


# --- the first request after a sleep --------------------------------------------------------------


class Away(LoopbackTransport):
    """A transport whose first ``failures`` attempts fail."""

    failures = 0

    async def connect(self):  # type: ignore[no-untyped-def]
        if self.failures:
            self.failures -= 1
            raise LinkError("the network is down")
        return await super().connect()


@pytest.mark.parametrize(
    ("slept_s", "after_s", "is_answered"),
    [(0.0, 1.0, False), (3600.0, 1.0, True), (3600.0, 20.0, True), (3600.0, 40.0, False)],
    ids=["awake", "woken", "woken a moment ago", "woken long ago"],
)
async def test_the_network_of_a_woken_device_gets_time(
    slept_s: float, after_s: float, is_answered: bool
) -> None:
    time, wall = SetTime(), SetTime()
    verifier = ScriptedVerifier([TOKENIZER.encode("abc")])
    info = m.VerifierInfo(model=toy_info(), limits=m.Limits(), sessions=0, max_sessions=64)
    transport = Away(verifier.serve, lambda: info)
    policy = ReconnectPolicy(first_s=0.01, longest_s=0.02, give_up_first_s=0.02)
    async with Agent(
        transport,
        None,
        TOKENIZER.encode,
        TOKENIZER.stream,
        AgentOptions(reconnect=policy),
        clocks=Clocks(time.read, wall.read),
    ) as one:
        texts = ["".join([chunk.text async for chunk in one.generate("x")])]
        wall.now += slept_s
        texts += ["".join([chunk.text async for chunk in one.generate("x")])]
        time.now, wall.now = time.now + after_s, wall.now + after_s
        transport.failures = 6
        try:
            texts += ["".join([chunk.text async for chunk in one.generate("x")])]
        except ConnectError:
            assert not is_answered
        else:
            assert is_answered
    assert set(texts) == {"abc"}
