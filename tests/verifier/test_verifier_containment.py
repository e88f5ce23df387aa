"""Containment: no failure of a verifier's parts is silent, and none affects more than it must.

Oracle: a part is made to raise, to wait or to loop at one place. Then either every other session's
generation is the target's own and the one concerned receives a fault, or the verifier reports
itself as broken and every stream receives a retryable fault. No test waits for ever: each ends by
itself.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from edgespec.cli import verifier as serving_command
from edgespec.cli.main import app
from edgespec.cli.verifier import ready_line
from edgespec.config import VerifierConfig
from edgespec.config.verifier import LimitsSection
from edgespec.core.ports import DeviceStream, LinkError, TargetLostError, VerifierStream
from edgespec.core.protocol import messages as m
from edgespec.core.protocol import work
from edgespec.core.protocol.constraint import Constraint, ConstraintError, ConstraintKind
from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.server_model import PROBE_EVERY
from edgespec.device.build import build_agent
from edgespec.telemetry.verifier_counts import StreamMeter, StreamRecord
from edgespec.testing import LoopbackTransport
from edgespec.verifier.build import build_verifier, load_target
from edgespec.verifier.constraint_reader import ConstraintReader
from edgespec.verifier.daemon import SendQueue, Verifier
from edgespec.verifier.targets.paced import PacedTarget
from edgespec.verifier.targets.toy import ToyServerDrafter, ToyTarget
from tests.api.test_end_to_end import GREEDY, IDS, collect, make_config, tokens_of
from tests.core.test_constraints import Automaton, AutomatonMatcher
from tests.kit.live_verifier import serve_toy, start, toy_text, wait_until_ready
from tests.present import require

MODEL = ToyModel(vocabulary_size=16, order=2)
PROMPT = (1, 2, 3)
SAMPLING = SamplingParams(max_tokens=12)
TEXT = toy_text(PROMPT, SAMPLING, MODEL)
CACHE = work.CacheShape(64, 4)


class Fragile(ToyTarget):
    """A toy target that calls ``fails(operation, keys)``, which raises if an operation is to
    fail."""

    def __init__(self, fails: Callable[[str, tuple[str, ...]], None]) -> None:
        super().__init__(MODEL, cache=CACHE)
        self._fails = fails

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._fails("open", (key,))
        super().open(key, prompt_length, sampling, text)

    def forward(self, batch: Sequence[work.PassRequest]) -> list[work.PassResult]:
        self._fails("forward", tuple(request.key for request in batch))
        return super().forward(batch)

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self._fails("keep", (key,))
        super().keep(key, nodes)

    def close(self, key: str) -> None:
        super().close(key)
        self._fails("close", (key,))


@asynccontextmanager
async def run_verifier(
    target: ToyTarget | None = None,
    wrap: Callable[[int, VerifierStream], Any] = lambda number, stream: stream,
    **options: Any,
) -> AsyncIterator[tuple[Verifier, LoopbackTransport]]:
    """Run a verifier; ``wrap`` may replace the stream of each number."""
    target = target or ToyTarget(MODEL, cache=CACHE)
    limits = ee.EngineLimits(cache=target.cache, drafter="drafter" in options)
    verifier = Verifier(target, m.Limits(context_length=256), limits, **options)
    streams = 0

    async def serve(stream: VerifierStream) -> None:
        nonlocal streams
        streams += 1
        await verifier.serve(cast(VerifierStream, wrap(streams, stream)))

    transport = LoopbackTransport(serve, lambda: verifier.info)
    yield verifier, transport
    await transport.close()
    await verifier.stop()


async def _open(
    transport: LoopbackTransport, key: str, sampling: SamplingParams = SAMPLING
) -> DeviceStream:
    stream = await transport.connect()
    await stream.send(
        m.Open(key, "", "", PROMPT, sampling=sampling, run_ahead=m.RunAhead.ALWAYS, drafting=False)
    )
    return stream


async def _read(stream: DeviceStream) -> tuple[list[int], m.Fault | None]:
    """Return the tokens and the fault that a stream receives until it or its generation ends."""
    tokens: list[int] = []
    while True:
        message: m.Downlink = await stream.receive()
        match message:
            case m.Opened():
                pass
            case m.Commit(_, committed, finish=finish):
                tokens += committed
                if finish is not None:
                    await stream.send(m.Received(len(PROMPT) + len(tokens), 0))
                    return tokens, None
            case m.Fault():
                return tokens, message


# --- the target -----------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["open", "forward", "keep"])
async def test_who_makes_the_target_raise_is_alone_with_it(operation: str) -> None:
    def fails(what: str, keys: tuple[str, ...]) -> None:
        if what == operation and "bad" in keys:
            raise RuntimeError("chosen to fail")

    async with run_verifier(Fragile(fails)) as (verifier, transport):
        streams = [await _open(transport, key) for key in ("a", "bad", "c")]
        (first, bad, last) = await asyncio.gather(*(_read(stream) for stream in streams))
        assert (first, last) == ((TEXT, None), (TEXT, None))
        tokens, fault = bad[0], require(bad[1])
        assert fault.code is m.FaultCode.INTERNAL
        assert fault.code.retryable
        assert tokens == TEXT[: len(tokens)]
        assert not verifier.broken.is_set()


class FragileDraft(ToyServerDrafter):
    """A toy draft model that calls ``fails(operation, key)``, which raises or waits if an operation
    is to."""

    def __init__(self, fails: Callable[[str, str], None]) -> None:
        super().__init__(MODEL, ToyTarget(MODEL).info)
        self._fails = fails

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._fails("open", key)
        super().open(key, prompt_length, sampling, text)

    def step(self, batch: Sequence[work.DraftStep]) -> list[tuple[work.Candidate, ...]]:
        for step in batch:
            self._fails("step", step.key)
        return super().step(batch)

    def close(self, key: str) -> None:
        self._fails("close", key)
        super().close(key)


@pytest.mark.parametrize("operation", ["open", "step", "close"])
async def test_a_draft_model_that_raises_ends_drafts_and_no_text(operation: str) -> None:
    """The next round reports the failure; a round runs within some ``PROBE_EVERY`` passes."""
    failed: list[str] = []

    def fails(what: str, key: str) -> None:
        if what == operation:
            failed.append(key)
            raise RuntimeError("chosen to fail")

    async with run_verifier(drafter=FragileDraft(fails)) as (verifier, transport):
        for number in range(4 * PROBE_EVERY):
            streams = [await _open(transport, f"{key}{number}") for key in "abc"]
            said = await asyncio.gather(*(_read(stream) for stream in streams))
            assert said == [(TEXT, None)] * 3
            if verifier.engine.draft_counts.failures:
                break
        assert len(failed) == 1
        assert verifier.engine.draft_counts.failures == 1
        assert not verifier.broken.is_set()


class HeldStep:
    """A draft model whose first step waits until ``go_on``."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, what: str, key: str) -> None:
        if what == "step" and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(60.0)


@pytest.mark.parametrize("ending", ["stop", "revoke"])
async def test_who_ends_during_a_round_hears_why_and_the_round_hurts_nobody(ending: str) -> None:
    held = HeldStep()

    async with run_verifier(drafter=FragileDraft(held)) as (verifier, transport):
        stream = await _open(transport, "a")
        await asyncio.to_thread(held.reached.wait, 60.0)
        if ending == "revoke":
            assert verifier.revoke([""]) == 1
            stopping = None
        else:
            stopping = asyncio.create_task(verifier.stop())
        said, fault = await _read(stream)
        assert said == TEXT[: len(said)]
        assert (
            require(fault).code
            is {"stop": m.FaultCode.SHUTTING_DOWN, "revoke": m.FaultCode.UNAUTHENTICATED}[ending]
        )
        held.go_on.set()
        if stopping is not None:
            await stopping
        else:
            assert await _read(await _open(transport, "b")) == (TEXT, None)
        assert verifier.why_broken is None
        assert verifier.engine.draft_counts.failures == 0


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("forward", RuntimeError("chosen to fail")),
        *((each, TargetLostError("rank 1 is no more")) for each in ("open", "keep", "close")),
        ("forward", TargetLostError("rank 1 is no more")),
    ],
)
async def test_a_target_that_always_raises_or_is_lost_breaks_the_verifier_and_blames_nobody(
    operation: str, error: Exception
) -> None:
    calls = 0

    def fails(what: str, keys: tuple[str, ...]) -> None:
        nonlocal calls
        calls += what == operation
        if what == operation and (calls > 3 or isinstance(error, TargetLostError)):
            raise error

    async with run_verifier(Fragile(fails)) as (verifier, transport):
        streams = [await _open(transport, key) for key in ("a", "b")]
        for said, fault in await asyncio.gather(*(_read(stream) for stream in streams)):
            assert said == TEXT[: len(said)]
            if operation != "close" or said != TEXT:
                assert require(fault).code is m.FaultCode.SHUTTING_DOWN
                assert require(fault).retry_after_s > 0
        await verifier.broken.wait()
        assert str(error) in require(verifier.why_broken)
        _, late = await _read(await _open(transport, "late"))
        assert require(late).code is m.FaultCode.SHUTTING_DOWN


async def test_a_target_that_is_stuck_between_passes_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edgespec.verifier.daemon._LAST_PASS_S", 0.05)
    reached, go_on = threading.Event(), threading.Event()

    def sticks(what: str, keys: tuple[str, ...]) -> None:
        if what == "close":
            reached.set()
            assert go_on.wait(60.0)

    async with run_verifier(Fragile(sticks)) as (verifier, transport):
        assert await _read(await _open(transport, "a")) == (TEXT, None)
        await asyncio.to_thread(reached.wait)
        stopping = asyncio.create_task(verifier.stop())
        try:
            await asyncio.wait_for(asyncio.shield(stopping), 30.0)
        finally:
            go_on.set()
            await stopping
        # The process does not wait for that thread at its end either (``cli/verifier._leave``).
        assert verifier.why_broken == "the target is still at work after 0.05 s"


class StickyError(PacedTarget):
    """A target with a sticky error, as on a GPU: passes succeed five times and never again."""

    passes = 5

    def forward(self, batch: Sequence[work.PassRequest]) -> list[work.PassResult]:
        self.passes -= 1
        if self.passes < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().forward(batch)


async def test_a_sticky_error_ends_the_process_and_a_device_finishes_with_the_next_one(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace.jsonl"
    params = replace(GREEDY, max_tokens=60, ignore_eos=True)
    breaking = start(f"--set=trace={trace}", module="tests.verifier.test_verifier_containment")
    with wait_until_ready(breaking) as (address, process):
        async with build_agent(make_config(address)) as agent:
            text = asyncio.create_task(collect(agent, params))
            assert await asyncio.to_thread(process.wait) == 1
            assert process.stderr is not None
            assert "error: the verifier failed: RuntimeError: CUDA error" in process.stderr.read()
            last = trace.read_text(encoding="utf-8").splitlines()[-1]
            assert '"name":"GiveUp"' in last  # the trace is written to its end
            assert not text.done()
            async with serve_toy(port=int(address.rpartition(":")[2])):
                assert tokens_of(await text) == toy_text(IDS, params)


async def test_a_context_that_the_cache_makes_shorter_is_announced_as_it_is_served() -> None:
    settings = VerifierConfig(model="toy", port=0, limits=LimitsSection(max_cached_tokens=256))
    verifier, _ = build_verifier(settings)
    info, target = verifier.info, load_target(settings)
    assert (info.model.context_length, info.limits.context_length) == (256, 256)
    line, most = ready_line(settings, 7420, target, info), target.info.context_length
    assert line.endswith(f"context 256 of {most} (limited by the KV cache)")
    await verifier.stop()


# --- the engine -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event", [ee.StreamOpened, ee.StreamMessage, ee.BatchDone, ee.StreamLost, ee.Poll]
)
async def test_an_engine_that_raises_breaks_the_verifier(
    event: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_verifier() as (verifier, transport):
        handle = verifier.engine.handle

        def broken(stimulus: ee.EngineEvent, now: float) -> tuple[ee.EngineAction, ...]:
            if isinstance(stimulus, event):
                raise ZeroDivisionError("a bug of the engine")
            return handle(stimulus, now)

        monkeypatch.setattr(verifier.engine, "handle", broken)
        watching = asyncio.create_task(_read(await _open(transport, "watching")))
        if event is ee.StreamMessage:
            await (other := await _open(transport, "other")).send(m.Received(3, 0))
            await _read(other)
        elif event is ee.StreamLost:
            await (await _open(transport, "leaving")).close()
        elif event is ee.Poll:
            verifier._handle(ee.Poll())
        await verifier.broken.wait()
        what = f"the engine failed at {event.__name__}: ZeroDivisionError"
        assert verifier.why_broken == what
        tokens, fault = await watching
        if tokens != TEXT:
            assert require(fault).code is m.FaultCode.SHUTTING_DOWN


# --- streams --------------------------------------------------------------------------------


class Changed:
    """A stream with some of its methods replaced by ``methods``."""

    def __init__(self, inner: VerifierStream, **methods: Any) -> None:
        self._inner, self._methods = inner, methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._inner, name)

    async def feed(self, take: Any) -> None:
        while True:
            take(await self.receive())


@pytest.mark.parametrize("place", ["receive", "send", "send_now"])
async def test_a_stream_that_raises_ends_alone(place: str) -> None:
    """The failure starts with the second call; ``send_now`` did not send before."""

    def wrap(number: int, stream: VerifierStream) -> Any:
        calls = 0

        def raising(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ZeroDivisionError("a bug of the transport")
            return place != "send_now" and getattr(stream, place)(*arguments)

        return Changed(stream, **{place: raising}) if number == 2 else stream

    async with run_verifier(wrap=wrap) as (verifier, transport):
        streams = [await _open(transport, key) for key in ("a", "bad", "c")]
        reading = (_read(stream) for stream in streams)
        first, bad, last = await asyncio.gather(*reading, return_exceptions=True)
        assert (first, last) == ((TEXT, None), (TEXT, None))
        if isinstance(bad, BaseException):
            assert isinstance(bad, LinkError)
            assert bad.retryable
        else:
            assert bad[0] == TEXT[: len(bad[0])]
            assert bad[1] is not None
        assert not verifier.broken.is_set()


async def test_a_text_waits_for_what_cannot_leave_and_no_other_text_does() -> None:
    gate = asyncio.Event()

    def wrap(number: int, stream: VerifierStream) -> Any:
        async def send(message: m.Downlink) -> None:
            await gate.wait()
            await stream.send(message)

        return Changed(stream, send=send, send_now=lambda message: False) if number == 1 else stream

    async with run_verifier(wrap=wrap) as (verifier, transport):
        reading = asyncio.ensure_future(_read(await _open(transport, "held")))
        assert await _read(await _open(transport, "free")) == (TEXT, None)
        # Its greeting was not sent, so the end of its first pass found it behind.
        assert verifier.engine.sessions["held"].prefix.length == len(PROMPT) + 1
        gate.set()
        assert await reading == (TEXT, None)


async def test_a_backlog_takes_no_more_than_its_limit_and_nothing_after_its_end() -> None:
    commits = [m.Commit(number, (1,)) for number in range(5)]
    send_queue = SendQueue(2)
    assert [send_queue.put(one) for one in commits[:3]] == [True, True, False]
    assert await send_queue.get() == commits[0]
    assert send_queue.put(commits[3])
    send_queue.end()
    assert not send_queue.put(commits[4])
    assert [await send_queue.get() for _ in range(3)] == [commits[1], commits[3], None]


async def test_a_cancelled_reader_of_a_backlog_loses_nothing() -> None:
    send_queue, commit = SendQueue(2), m.Commit(1, (1,))
    reading = asyncio.ensure_future(send_queue.get())
    await asyncio.sleep(0)
    send_queue.put(commit)
    reading.cancel()
    await asyncio.wait((reading,))
    assert reading.cancelled()
    assert await send_queue.get() == commit


async def test_a_stream_whose_key_was_revoked_is_not_counted_as_cancelled() -> None:
    records: list[StreamRecord] = []
    meter = StreamMeter(records.append)
    async with run_verifier(telemetry=meter) as (verifier, transport):
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        stream = await _open(transport, "a", long)
        await stream.receive()
        nobody = ""  # the name of a peer without a key
        assert verifier.revoke([nobody]) == 1
        assert not verifier.engine.sessions
        _, fault = await _read(stream)
        assert require(fault).code is m.FaultCode.UNAUTHENTICATED
    assert [record.reason for record in records] == ["unauthenticated"]
    assert {reason: n for reason, n in meter.finished.items() if n} == {"unauthenticated": 1}


class Held:
    """A stream whose one message arrives when the test releases it."""

    peer, credential = "peer", ANYBODY

    def __init__(self, first: asyncio.Future[m.Open]) -> None:
        never: asyncio.Future[m.Open] = asyncio.get_running_loop().create_future()
        self._coming = [first, never]
        self.asked = asyncio.Event()

    async def receive(self) -> m.Open:
        self.asked.set()
        return await self._coming.pop(0)

    async def feed(self, take: Callable[[m.Uplink], None]) -> NoReturn:
        while True:
            take(await self.receive())

    def send_now(self, message: m.Downlink) -> bool:
        return False

    async def send(self, message: m.Downlink) -> None:
        """Lose the message."""

    async def close(self) -> None:
        """Do nothing, since there is nothing to close."""


async def test_an_open_that_comes_as_its_stream_ends_leaves_no_session_attached() -> None:
    async with run_verifier() as (verifier, _):
        first: asyncio.Future[m.Open] = asyncio.get_running_loop().create_future()
        stream = Held(first)
        serving = asyncio.create_task(verifier.serve(stream))
        await stream.asked.wait()
        first.set_result(m.Open("s", "", "", PROMPT, sampling=SamplingParams(max_tokens=4)))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(session.attached for session in verifier.engine.sessions.values())


# --- grammars -------------------------------------------------------------------------------


class Outgrown(AutomatonMatcher):
    """A grammar whose work exceeds its bounds after the fourth token of a text."""

    def consume(self, tokens: Sequence[int]) -> int:
        if len(self._states) + len(tokens) > 4:  # the state before the text is one of the states
            raise ConstraintError("the regex cannot be used: it asks for too much work")
        return super().consume(tokens)


async def test_a_constraint_that_outgrows_its_bounds_in_mid_text_is_invalid_and_alone() -> None:
    loop = Automaton(({7: 0},), frozenset())
    target = ToyTarget(replace(MODEL, eos_token=0), cache=CACHE)
    read = lambda asked: replace(asked, matcher=lambda: Outgrown(loop))  # noqa: E731
    async with run_verifier(target, read_constraint=read) as (_, transport):
        held = replace(SAMPLING, constraint=Constraint(ConstraintKind.REGEX, "7*"))
        streams = [await _open(transport, "a"), await _open(transport, "bad", held)]
        (text, _), (tokens, fault) = await asyncio.gather(*map(_read, streams))
        assert (text[:3], tokens) == (TEXT[:3], [7] * 4)
        assert fault is not None
        assert fault.code is m.FaultCode.INVALID
        assert "asks for too much work" in fault.message


HARD, EASY = (Constraint(ConstraintKind.REGEX, name) for name in ("hard", "easy"))


class Reader:
    """A grammar reader that reads ``HARD`` when it may go on; ``begun`` counts its calls,
    ``at_once`` is the most at one time."""

    def __init__(self) -> None:
        self.started, self.go_on = threading.Event(), threading.Event()
        self.begun = self.reading = self.at_once = 0
        self._lock = threading.Lock()

    def __call__(self, constraint: Constraint) -> Constraint:
        if constraint == HARD:
            with self._lock:
                self.begun, self.reading = self.begun + 1, self.reading + 1
                self.at_once = max(self.at_once, self.reading)
            self.started.set()
            assert self.go_on.wait(60.0)
            with self._lock:
                self.reading -= 1
        return constraint


def open_with_constraint(constraint: Constraint) -> m.Open:
    return m.Open("s", "", "", (1,), sampling=SamplingParams(constraint=constraint))


@pytest.fixture
def reader() -> Iterator[Reader]:
    found = Reader()
    yield found
    found.go_on.set()


async def test_who_does_not_wait_any_more_still_has_its_thread(reader: Reader) -> None:
    """Oracle: the reader never runs in two threads for one peer, however often the peer gives
    up."""
    constraints = ConstraintReader(reader, (0,))
    for _ in range(3):
        given_up = asyncio.create_task(
            constraints.read_constraint(open_with_constraint(HARD), "one")
        )
        await asyncio.to_thread(reader.started.wait)
        assert isinstance(
            await constraints.read_constraint(open_with_constraint(EASY), "two"), m.Open
        )  # the threads had their turn
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
    last = asyncio.create_task(constraints.read_constraint(open_with_constraint(HARD), "one"))
    await asyncio.sleep(0)
    reader.go_on.set()
    assert isinstance(await last, m.Open)
    assert (reader.begun, reader.at_once) == (2, 1)
    assert not constraints._queues
    constraints.close()


async def test_a_key_that_loops_from_two_addresses_holds_up_no_other_key(reader: Reader) -> None:
    """The other key comes from the same addresses, after the first key and after five more such
    keys."""
    constraints = ConstraintReader(reader, (0,))
    keys = [Credential(name) for name in ("loop", "b", "c", "d", "e", "f")]
    many = [
        asyncio.create_task(constraints.read_constraint(open_with_constraint(HARD), peer, key))
        for key in keys
        for peer in ("one", "two")
        for _ in range(20)
    ]
    await asyncio.sleep(0)  # each waits in its queue
    for peer in ("one", "two", "three"):
        for _ in range(4):
            assert isinstance(
                await constraints.read_constraint(
                    open_with_constraint(EASY), peer, Credential("other")
                ),
                m.Open,
            )
    assert 1 <= reader.at_once <= len(keys)
    reader.go_on.set()
    refused = [one for one in await asyncio.gather(*many) if isinstance(one, m.Fault)]
    assert {(one.code, one.message) for one in refused} == {
        (m.FaultCode.OVERLOADED, f"16 grammars of {peer} wait to be read, limit 16")
        for peer in ("one", "two")
    }
    assert not constraints._queues
    constraints.close()


async def test_the_addresses_of_one_key_are_served_in_turn() -> None:
    read, go_on = list[str](), threading.Event()

    def reader(constraint: Constraint) -> Constraint:
        read.append(constraint.text)
        assert go_on.wait(60.0)
        return constraint

    constraints, key = ConstraintReader(reader, (0,)), Credential("fleet")
    many = []
    for peer in (*["one"] * 8, "two"):
        opening = open_with_constraint(Constraint(ConstraintKind.REGEX, peer))
        many.append(asyncio.create_task(constraints.read_constraint(opening, peer, key)))
        await asyncio.sleep(0)  # it waits in its queue
    go_on.set()
    assert all(isinstance(one, m.Open) for one in await asyncio.gather(*many))
    assert read == ["one", "two", *["one"] * 7]
    constraints.close()


if __name__ == "__main__":
    serving_command.load_target = lambda config: StickyError(  # type: ignore[attr-defined]
        load_target(config), 0.0, 0.0, time.sleep, time.monotonic
    )
    app(["verifier", "--model", "toy", "--port", "0", *sys.argv[1:]])
