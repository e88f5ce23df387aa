"""Exceptions wherever the device awaits or acts. Oracle: the generation ends all the same, with the
whole text or with a ``GenerationError``, and leaves no task behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from edgespec.bench.measurement import measure
from edgespec.cli.device import Progress, summary
from edgespec.core.device import events as ev
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import (
    Cancelled,
    Candidate,
    DeviceStream,
    Drafter,
    LinkError,
    ModelInfo,
    Transport,
    never_cancelled,
)
from edgespec.core.protocol.messages import (
    Commit,
    Downlink,
    Opened,
    Uplink,
    VerifierInfo,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.agent import Agent, GenerationError
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.device.session_driver import Link
from edgespec.models.toy import TOY_ALPHABET
from tests.shell.scripted_verifier import (
    PROMPT,
    agent,
    generate,
    loopback,
    streaming,
    undrafted,
)

TOKENS = [5, 9, 3, 7, 1, 2, 8, 4, 6, 5, 3, 1]
WITHIN_S = 30.0
ERRORS: tuple[Exception, ...] = (
    LinkError("the link broke"),
    LinkError("refused for good", retryable=False),
    OSError("out of files"),
    ValueError("a message that does not fit"),
    RuntimeError("a bug"),
    AssertionError(),
    EOFError("at the end"),
)


class Fault:
    """Raises ``error`` at the ``at``-th passing of the place named."""

    def __init__(self, place: str, at: int, error: Exception) -> None:
        self.place, self.struck = place, False
        self._left, self._error = at, error

    def pass_by(self, place: str) -> None:
        if place == self.place:
            self._left -= 1
            if self._left == 0:
                self.struck = True
                raise self._error


class FaultyStream:
    def __init__(self, inner: DeviceStream, fault: Fault) -> None:
        self._inner, self._fault = inner, fault

    async def send(self, message: Uplink) -> None:
        self._fault.pass_by("send")
        await self._inner.send(message)

    async def receive(self) -> Downlink:
        message = await self._inner.receive()
        self._fault.pass_by("receive")
        return message

    async def close(self) -> None:
        await self._inner.close()
        self._fault.pass_by("close")


class FaultyTransport:
    def __init__(self, inner: Transport, fault: Fault) -> None:
        self._inner, self._fault = inner, fault

    async def connect(self) -> DeviceStream:
        self._fault.pass_by("connect")
        return FaultyStream(await self._inner.connect(), self._fault)

    async def info(self) -> VerifierInfo:
        return await self._inner.info()

    async def close(self) -> None:
        await self._inner.close()


class FaultyDrafter:
    def __init__(self, inner: Drafter, fault: Fault) -> None:
        self._inner, self._fault = inner, fault

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._fault.pass_by("begin")
        self._inner.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        self._fault.pass_by("step")
        return self._inner.step(keep_length, feed, width, cancelled)

    def close(self) -> None:
        self._inner.close()


class FaultyTracer:
    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        self._fault.pass_by("trace")


def toy_drafter() -> Drafter:
    return ToyDrafter(ToyModel(len(TOY_ALPHABET), order=2))


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """No task outlives the block."""
    before = asyncio.all_tasks()
    async with asyncio.timeout(WITHIN_S):
        yield
        while left := asyncio.all_tasks() - before:
            await asyncio.wait(left)


async def told(one: Agent) -> list[int] | str:
    """The whole text, or why there is none."""
    tokens: list[int] = []
    try:
        async for chunk in generate(one, len(TOKENS)):
            tokens += chunk.tokens
    except GenerationError as error:
        assert tokens == TOKENS[: len(tokens)]
        return str(error)
    return tokens


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize(
    ("place", "at"),
    [
        ("connect", 1),
        ("send", 1),
        ("send", 2),
        ("receive", 1),
        ("receive", 2),
        ("receive", 9),
        ("receive", 14),
        ("close", 1),
        ("begin", 1),
        ("step", 1),
        ("step", 2),
        ("trace", 1),
        ("trace", 12),
    ],
)
async def test_an_exception_ends_the_generation_or_does_no_harm(
    place: str, at: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault(place, at, error)
    in_thread = place in ("begin", "step")  # which may begin late: the text waits for it
    async with nothing_left():
        serve = streaming(TOKENS, once=lambda: fault.struck or not in_thread)
        transport = FaultyTransport(loopback(serve), fault)
        drafter = FaultyDrafter(toy_drafter(), fault)
        async with agent(transport, drafter, tracer=FaultyTracer(fault)) as one:
            result = await told(one)
            again = await told(one)
    assert fault.struck
    harmless = (
        in_thread
        or place == "close"
        or (
            place in ("connect", "send", "receive")
            and isinstance(error, OSError)
            and getattr(error, "retryable", True)
        )
    )
    if harmless or (isinstance(result, list) and place == "send" and at > 1):
        assert result == TOKENS  # the whole text may be there before a late message breaks the link
    else:
        assert isinstance(result, str)
        assert str(error) in result
    assert again == TOKENS  # the fault was one generation's


EVENTS = (ev.Start, ev.Connected, ev.StepDone, Opened, Commit, ev.LinkDown, ev.Tick)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
async def test_a_bug_in_the_session_is_heard_of(
    event: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = DraftSession.handle

    def buggy(session: DraftSession, happened: ev.DraftEvent, now: float) -> Any:
        if isinstance(happened, event):
            raise ZeroDivisionError("a bug")
        return handle(session, happened, now)

    monkeypatch.setattr(DraftSession, "handle", buggy)
    cuts = Fault("receive", 4, LinkError("cut"))
    async with nothing_left():
        # A step ends in its own time, perhaps after a text that does not wait for it.
        serve = streaming(TOKENS, once=lambda: event is not ev.StepDone)
        transport = FaultyTransport(loopback(serve), cuts)
        async with agent(transport, toy_drafter()) as one:
            assert await told(one) == "the device failed: ZeroDivisionError: a bug"
    driver = [r.levelno for r in caplog.records if r.name == "edgespec.device.session_driver"]
    assert driver == [logging.ERROR]


@pytest.mark.parametrize("method", ["_run", "_connect", "_use", "_read"])
async def test_a_bug_in_the_link_is_heard_of(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def buggy(link: Link, *stream: DeviceStream) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Link, method, buggy)
    async with nothing_left(), agent(loopback(streaming(TOKENS))) as one:
        assert "ZeroDivisionError: a bug" in str(await told(one))


@pytest.mark.parametrize(
    "guesses",
    [
        None,
        [Candidate(1, 0.0)],
        (7,),
        (Candidate(-1, 0.0),),
        (Candidate(1.5, 0.0),),  # type: ignore[arg-type] # what is to be refused
    ],
)
async def test_rubbish_from_a_drafter_ends_the_drafting_alone(
    guesses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = toy_drafter()
    monkeypatch.setattr(drafter, "step", lambda *arguments: guesses, raising=True)
    async with nothing_left(), agent(loopback(streaming(TOKENS)), drafter) as one:
        assert await told(one) == TOKENS
        assert one.stats is not None
        assert one.stats.counters.steps == 0


async def test_a_failed_draft_is_told_once_in_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("head_size shall be a multiple of 16")

    drafter = toy_drafter()
    monkeypatch.setattr(drafter, "step", fail, raising=True)

    one = undrafted(TOKENS, drafter)
    async with nothing_left(), one:
        for _ in range(2):
            assert await told(one) == TOKENS
            assert one.stats is not None
            assert "head_size" in one.stats.counters.draft_failure
            assert "drafting stopped: RuntimeError: head_size" in summary(Progress(), one.stats)
        with pytest.raises(GenerationError, match="draft model failed: RuntimeError: head_size"):
            await measure(one, PROMPT, SamplingParams(max_tokens=len(TOKENS)), ())
    assert caplog.text.count("the text went on without drafts") == 1
