"""No failure of a verifier's parts is silent, and none reaches further than it must.

Oracle: a part is made to raise at one place. Then either everybody else's text is the target's own
and the one session concerned hears a retryable fault, or the verifier says that it is broken and
every stream hears a retryable fault. Nobody waits for ever: each test ends by itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from edgespec.cli.verifier import ready_line
from edgespec.config import VerifierConfig
from edgespec.config.verifier import LimitsSection
from edgespec.core.ports import DeviceStream, LinkError, TargetLostError, VerifierStream
from edgespec.core.protocol.constraint import Constraint, ConstraintError, ConstraintKind
from edgespec.core.protocol.messages import (
    Commit,
    Downlink,
    Fault,
    FaultCode,
    Limits,
    Open,
    Opened,
    Received,
    RunAhead,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape, PassRequest, PassResult
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.credential import ANYBODY
from edgespec.device.build import build_agent
from edgespec.telemetry.verifier_counts import StreamMeter, StreamRecord
from edgespec.verifier.build import build_verifier, load_target
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.toy import ToyTarget
from tests.core.token_grammars import Automaton, AutomatonMatcher
from tests.shell.live_verifier import ready, serving, start, toy_text
from tests.shell.loopback import LoopbackTransport
from tests.shell.test_end_to_end import GREEDY, IDS, collect, config, tokens

MODEL = ToyModel(vocabulary_size=16, order=2)

PROMPT = (1, 2, 3)

SAMPLING = SamplingParams(max_tokens=12)

TEXT = toy_text(PROMPT, SAMPLING, MODEL)

CACHE = CacheShape(64, 4)


class Fragile(ToyTarget):
    """``fails(operation, keys)`` says whether an operation raises."""

    def __init__(self, fails: Callable[[str, tuple[str, ...]], bool]) -> None:
        super().__init__(MODEL, cache=CACHE)
        self._fails = fails

    def _maybe(self, operation: str, *keys: str) -> None:
        if self._fails(operation, keys):
            raise RuntimeError(f"{operation} was chosen to fail")

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._maybe("open", key)
        super().open(key, prompt_length, sampling, text)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        self._maybe("forward", *(request.key for request in batch))
        return super().forward(batch)

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self._maybe("keep", key)
        super().keep(key, nodes)

    def close(self, key: str) -> None:
        super().close(key)
        self._maybe("close", key)


def _verifier(target: ToyTarget) -> tuple[Verifier, LoopbackTransport]:
    verifier = Verifier(target, Limits(context_length=256), ee.EngineLimits(cache=CACHE))
    return verifier, LoopbackTransport(verifier.serve, lambda: verifier.info)


async def _open(transport: LoopbackTransport, key: str) -> DeviceStream:
    stream = await transport.connect()
    await stream.send(
        Open(key, "", "", PROMPT, sampling=SAMPLING, run_ahead=RunAhead.ALWAYS, drafting=False)
    )
    return stream


async def _read(stream: DeviceStream) -> tuple[list[int], Fault | None]:
    """What a stream says until its text or itself ends."""
    tokens: list[int] = []
    while True:
        message: Downlink = await stream.receive()
        match message:
            case Opened():
                pass
            case Commit(_, committed, finish=finish):
                tokens += committed
                if finish is not None:
                    await stream.send(Received(len(PROMPT) + len(tokens), 0))
                    return tokens, None
            case Fault():
                return tokens, message


@pytest.mark.parametrize("operation", ["open", "forward", "keep"])
async def test_who_makes_the_target_raise_is_alone_with_it(operation: str) -> None:
    verifier, transport = _verifier(Fragile(lambda what, keys: what == operation and "bad" in keys))
    streams = [await _open(transport, key) for key in ("a", "bad", "c")]
    (first, bad, last) = await asyncio.gather(*(_read(stream) for stream in streams))
    assert (first, last) == ((TEXT, None), (TEXT, None))
    tokens, fault = bad
    assert fault is not None
    assert fault.code is FaultCode.INTERNAL
    assert fault.code.retryable
    assert tokens == TEXT[: len(tokens)]
    assert not verifier.broken.is_set()
    await transport.close()
    await verifier.stop()


class Outgrown(AutomatonMatcher):
    """A grammar whose work is over its bounds behind the fourth token of a text."""

    def consume(self, tokens: Sequence[int]) -> int:
        if len(self._states) + len(tokens) > 4:  # the state before the text is one of them
            raise ConstraintError("the regex cannot be used: it asks for too much work")
        return super().consume(tokens)


async def test_a_constraint_that_outgrows_its_bounds_in_mid_text_is_invalid_and_alone() -> None:
    loop = Automaton(({7: 0},), frozenset())
    constraint = Constraint(ConstraintKind.REGEX, "7*")
    verifier = Verifier(
        ToyTarget(replace(MODEL, eos_token=0), cache=CACHE),
        Limits(context_length=256),
        ee.EngineLimits(cache=CACHE),
        read_constraint=lambda asked: replace(asked, matcher=lambda: Outgrown(loop)),
    )
    transport = LoopbackTransport(verifier.serve, lambda: verifier.info)
    bad = await transport.connect()
    sampling = replace(SAMPLING, constraint=constraint)
    await bad.send(Open("bad", "", "", PROMPT, sampling=sampling, run_ahead=RunAhead.ALWAYS))
    (text, _), (tokens, fault) = await asyncio.gather(
        _read(await _open(transport, "a")), _read(bad)
    )
    assert (text[:3], tokens) == (TEXT[:3], [7] * 4)
    assert fault is not None
    assert fault.code is FaultCode.INVALID
    assert "asks for too much work" in fault.message
    await transport.close()
    await verifier.stop()


async def test_a_target_that_always_raises_breaks_the_verifier_and_everybody_hears_it() -> None:
    passes = 0

    def after_three(what: str, keys: tuple[str, ...]) -> bool:
        nonlocal passes
        passes += what == "forward"
        return what == "forward" and passes > 3

    verifier, transport = _verifier(Fragile(after_three))
    streams = [await _open(transport, key) for key in ("a", "b")]
    for said, fault in await asyncio.gather(*(_read(stream) for stream in streams)):
        assert fault is not None
        assert fault.code is FaultCode.SHUTTING_DOWN
        assert fault.retry_after_s > 0
        assert said == TEXT[: len(said)]
    await verifier.broken.wait()
    assert verifier.why_broken is not None
    assert "forward was chosen to fail" in verifier.why_broken
    late = await _read(await _open(transport, "late"))
    assert late[1] is not None
    assert late[1].code is FaultCode.SHUTTING_DOWN
    await transport.close()
    await verifier.stop()


@pytest.mark.parametrize("operation", ["open", "forward", "keep", "close"])
async def test_a_target_that_is_lost_ends_the_verifier_at_once_and_blames_nobody(
    operation: str,
) -> None:
    class Losing(Fragile):
        def _maybe(self, operation: str, *keys: str) -> None:
            if self._fails(operation, keys):
                raise TargetLostError("rank 1 is no more")

    verifier, transport = _verifier(Losing(lambda what, keys: what == operation))
    stream = await _open(transport, "a")
    tokens, fault = await _read(stream)
    assert tokens == TEXT[: len(tokens)]
    if operation != "close":
        assert fault is not None
        assert fault.code is FaultCode.SHUTTING_DOWN
    await verifier.broken.wait()
    assert verifier.why_broken == "rank 1 is no more"
    await transport.close()
    await verifier.stop()


@pytest.mark.parametrize(
    "event", [ee.StreamOpened, ee.StreamMessage, ee.BatchDone, ee.StreamLost, ee.Poll]
)
async def test_an_engine_that_raises_breaks_the_verifier(
    event: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, transport = _verifier(ToyTarget(MODEL, cache=CACHE))
    handle = verifier.engine.handle
    seen: list[object] = []

    def broken(stimulus: ee.EngineEvent, now: float) -> tuple[ee.EngineAction, ...]:
        seen.append(stimulus)
        if isinstance(stimulus, event):
            raise ZeroDivisionError("a bug of the engine")
        return handle(stimulus, now)

    monkeypatch.setattr(verifier.engine, "handle", broken)
    watching = asyncio.create_task(_read(await _open(transport, "watching")))
    if event is ee.StreamMessage:
        await (other := await _open(transport, "other")).send(Received(3, 0))
        await _read(other)
    elif event is ee.StreamLost:
        await (await _open(transport, "leaving")).close()
    elif event is ee.Poll:
        verifier._handle(ee.Poll())
    await verifier.broken.wait()
    assert verifier.why_broken == "ZeroDivisionError: a bug of the engine"
    tokens, fault = await watching
    if tokens != TEXT:
        assert fault is not None
        assert fault.code is FaultCode.SHUTTING_DOWN
    await transport.close()
    await verifier.stop()


@pytest.mark.parametrize("place", ["receive", "send"])
async def test_a_stream_that_raises_ends_alone(place: str) -> None:
    verifier, transport = _verifier(ToyTarget(MODEL, cache=CACHE))
    serve = verifier.serve
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    async def serve_one_broken(stream: Any) -> None:
        if ended.done() or verifier.engine.sessions:
            await serve(stream)
            return
        original = getattr(stream, place)
        calls = 0

        async def raising(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ZeroDivisionError("a bug of the transport")
            return await original(*arguments)

        monkey = pytest.MonkeyPatch()
        monkey.setattr(stream, place, raising)
        try:
            await serve(stream)
        except ZeroDivisionError as error:
            ended.set_result(error)
        else:
            ended.set_result(None)
        finally:
            monkey.undo()

    transport = LoopbackTransport(serve_one_broken, lambda: verifier.info)
    await _open(transport, "broken")
    await ended
    assert await _read(await _open(transport, "fine")) == (TEXT, None)
    assert not verifier.broken.is_set()
    await transport.close()
    await verifier.stop()


async def test_a_context_that_the_cache_makes_shorter_is_announced_as_it_is_served() -> None:
    settings = VerifierConfig(model="toy", port=0, limits=LimitsSection(max_cached_tokens=256))
    verifier, _ = build_verifier(settings)
    info, target = verifier.info, load_target(settings)
    assert (info.model.context_length, info.limits.context_length) == (256, 256)
    line, most = ready_line(settings, 7420, target, info), target.info.context_length
    assert line.endswith(f"context 256 of {most}: the cache holds no more (limits)")
    await verifier.stop()


async def test_a_sticky_error_ends_the_process_and_a_device_finishes_with_the_next_one(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace.jsonl"
    params = replace(GREEDY, max_tokens=60, ignore_eos=True)
    breaking = start("0", "5", str(trace), module="tests.shell.breaking_verifier")
    with ready(breaking) as (address, process):
        async with build_agent(config(address)) as agent:
            text = asyncio.create_task(collect(agent, params))
            assert await asyncio.to_thread(process.wait) == 1
            assert process.stderr is not None
            assert "error: the verifier failed: RuntimeError: CUDA error" in process.stderr.read()
            last = trace.read_text(encoding="utf-8").splitlines()[-1]
            assert '"name":"GiveUp"' in last  # the trace is written out to its end
            assert not text.done()
            async with serving(port=int(address.rpartition(":")[2])):
                assert tokens(await text) == toy_text(IDS, params)


class Hasty:
    """A stream on which messages can be sent at once, which raises from the third on."""

    def __init__(self, inner: VerifierStream) -> None:
        self._inner, self._sent = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send_now(self, message: Downlink) -> bool:
        self._sent += 1
        if self._sent > 2:
            raise RuntimeError("sending at once was chosen to fail")
        return False


async def test_a_stream_that_fails_to_send_at_once_ends_alone() -> None:
    verifier, _ = _verifier(ToyTarget(MODEL, cache=CACHE))
    streams = 0

    async def serve(stream: VerifierStream) -> None:
        nonlocal streams
        streams += 1
        await verifier.serve(cast(VerifierStream, Hasty(stream)) if streams == 2 else stream)

    transport = LoopbackTransport(serve, lambda: verifier.info)
    others = [
        await _open(transport, "a"),
        await _open(transport, "bad"),
        await _open(transport, "c"),
    ]
    first, bad, last = await asyncio.gather(
        *(_read(stream) for stream in others), return_exceptions=True
    )
    assert (first, last) == ((TEXT, None), (TEXT, None))
    assert isinstance(bad, LinkError)
    assert bad.retryable
    await transport.close()
    await verifier.stop()


async def opened(transport: LoopbackTransport, key: str, tokens: int) -> DeviceStream:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    stream = await transport.connect()
    await stream.send(
        Open(key, "", "", PROMPT, sampling=sampling, run_ahead=RunAhead.ALWAYS, drafting=False)
    )
    return stream


async def until_fault_or_end(stream: DeviceStream) -> Fault | None:
    while True:
        message: Downlink = await stream.receive()
        if isinstance(message, Fault):
            return message
        if isinstance(message, Commit) and message.finish is not None:
            return None


class Stuck(ToyTarget):
    """Once it is told, it does not come back from the end of a sequence before it may."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def close(self, key: str) -> None:
        super().close(key)
        self.reached.set()
        assert self.go_on.wait(60.0)


async def test_a_target_that_is_stuck_between_passes_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edgespec.verifier.daemon._LAST_PASS_S", 0.05)
    target = Stuck()
    verifier = Verifier(target, Limits(context_length=256))
    transport = LoopbackTransport(verifier.serve, lambda: verifier.info)
    assert await until_fault_or_end(await opened(transport, "a", 3)) is None
    await asyncio.to_thread(target.reached.wait)
    stopping = asyncio.create_task(verifier.stop())
    try:
        await asyncio.wait_for(asyncio.shield(stopping), 30.0)
    finally:
        target.go_on.set()
        await stopping
    # So the process does not wait for that thread at its end, either (``cli/verifier._leave``).
    assert verifier.why_broken == "the target is still at work after 0.05 s"
    await transport.close()


async def test_a_stream_whose_key_was_revoked_is_not_counted_as_cancelled() -> None:
    records: list[StreamRecord] = []
    meter = StreamMeter(records.append)
    verifier = Verifier(ToyTarget(MODEL), Limits(context_length=256), telemetry=meter)
    transport = LoopbackTransport(verifier.serve, lambda: verifier.info)
    stream = await opened(transport, "a", 200)
    await stream.receive()
    nobody = ""  # the name of who showed no key
    assert verifier.revoke([nobody]) == 1
    assert not verifier.engine.sessions
    fault = await until_fault_or_end(stream)
    assert fault is not None
    assert fault.code is FaultCode.UNAUTHENTICATED
    await transport.close()
    await verifier.stop()
    assert [record.reason for record in records] == ["unauthenticated"]
    assert {reason: n for reason, n in meter.finished.items() if n} == {"unauthenticated": 1}


class Held:
    """A stream whose one message comes when the test says."""

    peer, credential = "peer", ANYBODY

    def __init__(self, first: asyncio.Future[Open]) -> None:
        never: asyncio.Future[Open] = asyncio.get_running_loop().create_future()
        self._coming = [first, never]
        self.asked = asyncio.Event()

    async def receive(self) -> Open:
        self.asked.set()
        return await self._coming.pop(0)

    async def send(self, message: Downlink) -> None:
        """It is lost."""

    async def close(self) -> None:
        """It holds nothing."""


async def test_an_open_that_comes_as_its_stream_ends_leaves_no_session_attached() -> None:
    verifier = Verifier(ToyTarget(MODEL), Limits(context_length=256))
    first: asyncio.Future[Open] = asyncio.get_running_loop().create_future()
    stream = Held(first)
    serving = asyncio.create_task(verifier.serve(stream))
    await stream.asked.wait()
    first.set_result(Open("s", "", "", PROMPT, sampling=SamplingParams(max_tokens=4)))
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(session.attached for session in verifier.engine.sessions.values())
    await verifier.stop()
