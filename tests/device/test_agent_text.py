"""Tests of the output that a user gets from one stream of tokens. Oracle: the same output, built
one token at a time by hand.

Ids, pieces, text, usage and finish reason must not depend on how commits cut up the stream, which
is all that drafts decide. If an exception is raised wherever the device awaits or acts, the
generation must still end, with the whole text or with a ``GenerationError``, and leave no task
behind.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.bench.measurement import measure
from edgespec.cli.device import ReceivedTokens, describe_generation
from edgespec.core import ports
from edgespec.core.device import events as ev
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.agent import Agent, GenerationError
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.device.session_driver import Link
from edgespec.device.status import StatusSource
from edgespec.models.toy import TOY_ALPHABET, ToyTokenizer
from edgespec.testing import LoopbackTransport, play_output
from tests.kit.scripted_verifier import (
    PROMPT,
    connect_loopback,
    generate,
    make_agent,
    make_undrafted_agent,
    stream_output,
)
from tests.present import require

LETTERS = ToyModel(len(TOY_ALPHABET), order=2)
TOKENS = [5, 9, 3, 7, 1, 2, 8, 4, 6, 5, 3, 1]
WITHIN_S = 30.0
ERRORS: tuple[Exception, ...] = (
    ports.LinkError("the link broke"),
    ports.LinkError("refused for good", retryable=False),
    OSError("out of files"),
    ValueError("a message that does not fit"),
    RuntimeError("a bug"),
    AssertionError(),
    EOFError("at the end"),
)


class Fault:
    """A fault that raises ``error`` at the ``at``-th passing of the named place."""

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
    def __init__(self, inner: ports.DeviceStream, fault: Fault) -> None:
        self._inner, self._fault = inner, fault
        self.verifier = inner.verifier

    async def send(self, message: m.Uplink) -> None:
        self._fault.pass_by("send")
        await self._inner.send(message)

    async def receive(self) -> m.Downlink:
        message = await self._inner.receive()
        self._fault.pass_by("receive")
        return message

    async def close(self) -> None:
        await self._inner.close()
        self._fault.pass_by("close")


class FaultyTransport:
    is_idle = False

    def __init__(self, inner: ports.Transport, fault: Fault) -> None:
        self._inner, self._fault = inner, fault

    async def connect(self) -> ports.DeviceStream:
        self._fault.pass_by("connect")
        return FaultyStream(await self._inner.connect(), self._fault)

    async def info(self) -> m.VerifierInfo:
        return await self._inner.info()

    async def close(self) -> None:
        await self._inner.close()


class FaultyDrafter(ToyDrafter):
    def __init__(self, fault: Fault) -> None:
        super().__init__(LETTERS)
        self._fault = fault

    def begin(self, *arguments: Any) -> None:
        self._fault.pass_by("begin")
        super().begin(*arguments)

    def step(self, *arguments: Any) -> tuple[ports.Candidate, ...]:
        self._fault.pass_by("step")
        return super().step(*arguments)


class FaultyTracer:
    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        self._fault.pass_by("trace")


@asynccontextmanager
async def no_task_left() -> AsyncIterator[None]:
    """Require that no task outlives the block."""
    before = asyncio.all_tasks()
    async with asyncio.timeout(WITHIN_S):
        yield
        while left := asyncio.all_tasks() - before:
            await asyncio.wait(left)


async def read_output(one: Agent) -> list[int] | str:
    """Return the whole output, or the reason why there is none."""
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
        ("close", 1),
        ("begin", 1),
        ("step", 1),
        ("step", 2),
        ("trace", 1),
        ("trace", 12),
        ("receive", 1),
        ("receive", 2),
        ("receive", 9),
        ("receive", 14),
    ],
)
async def test_an_exception_ends_the_generation_or_does_no_harm(
    place: str, at: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.device.session_driver._LAST_FAULT_TIMEOUT_S", 0.05)
    fault = Fault(place, at, error)
    # the drafter's thread may begin late, so the text waits for it
    in_thread = place in ("begin", "step")
    async with no_task_left():
        serve = stream_output(TOKENS, once=lambda: fault.struck or not in_thread)
        transport = FaultyTransport(connect_loopback(serve), fault)
        drafter = FaultyDrafter(fault)
        async with make_agent(transport, drafter, tracer=FaultyTracer(fault)) as one:
            result = await read_output(one)
            again = await read_output(one)
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
    assert again == TOKENS  # the fault belonged to one generation


EVENTS = (ev.Start, ev.Connected, ev.StepDone, m.Opened, m.Commit, ev.LinkDown, ev.Tick)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
async def test_a_bug_in_the_session_is_heard_of(
    event: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = DraftSession.handle

    def raise_bug(session: DraftSession, happened: ev.DraftEvent, now: float) -> Any:
        if isinstance(happened, event):
            raise ZeroDivisionError("a bug")
        return handle(session, happened, now)

    monkeypatch.setattr(DraftSession, "handle", raise_bug)
    cuts = Fault("receive", 4, ports.LinkError("cut"))
    async with no_task_left():
        # A step may end after a text that does not wait for it.
        serve = stream_output(TOKENS, once=lambda: event is not ev.StepDone)
        transport = FaultyTransport(connect_loopback(serve), cuts)
        async with make_agent(transport, ToyDrafter(LETTERS)) as one:
            assert await read_output(one) == "the device failed: ZeroDivisionError: a bug"
    driver = [r.levelno for r in caplog.records if r.name == "edgespec.device.session_driver"]
    assert driver == [logging.ERROR]


@pytest.mark.parametrize(
    "guesses",
    [
        None,
        [ports.Candidate(1, 0.0)],
        (7,),
        (ports.Candidate(-1, 0.0),),
        (ports.Candidate(1.5, 0.0),),  # type: ignore[arg-type] # what is to be refused
    ],
)
async def test_rubbish_from_a_drafter_ends_the_drafting_alone(
    guesses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = ToyDrafter(LETTERS)
    monkeypatch.setattr(drafter, "step", lambda *arguments: guesses)
    async with no_task_left(), make_agent(connect_loopback(stream_output(TOKENS)), drafter) as one:
        assert await read_output(one) == TOKENS
        assert require(one.stats).counters.steps == 0


async def test_a_failed_draft_is_told_once_in_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("head_size shall be a multiple of 16")

    drafter = ToyDrafter(LETTERS)
    monkeypatch.setattr(drafter, "step", fail)
    one = make_undrafted_agent(TOKENS, drafter)
    async with no_task_left(), one:
        for _ in range(2):
            assert await read_output(one) == TOKENS
            assert one.stats is not None
            assert "head_size" in one.stats.counters.draft_failure
            assert "drafting stopped: RuntimeError: head_size" in describe_generation(
                ReceivedTokens(), one.stats
            )
        with pytest.raises(GenerationError, match="draft model failed: RuntimeError: head_size"):
            await measure(one, PROMPT, SamplingParams(max_tokens=len(TOKENS)), ())
    assert caplog.text.count("the generation went on without drafts") == 1


async def test_a_useless_draft_is_told_once_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """Earlier generations left evidence that the draft is bad, so no step is made, and status,
    statistics and log all give the reason."""
    one = make_agent(connect_loopback(stream_output(TOKENS)), ToyDrafter(LETTERS))
    for _ in range(2000):
        one.options.learned.evidence.add(hit=False)
    one.options.learned.evidence.add(hit=True)
    said = "the draft model was right at 1 of 2,001 places (0.0%), so it is given up"
    async with no_task_left(), one:
        for _ in range(2):
            assert await read_output(one) == TOKENS
            stats = require(one.stats)
            assert (stats.counters.steps, stats.counters.rested) == (0, len(TOKENS))
            assert said in describe_generation(ReceivedTokens(), stats)
        drafting = StatusSource(one, ("here",)).snapshot().drafting
        assert (drafting.worth, said in drafting.why) == (False, True)
    assert caplog.text.count(said) == 1
    assert "\n" not in require(require(one.stats).rest_reason)


TEXT = ToyTokenizer()
WHOLE = "the great debate of the great dean"
SPOKEN = TEXT.encode(WHOLE)


@dataclass(frozen=True)
class Seen:
    """The parts of a generation that a user sees, without times and draft sources."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    finish: m.FinishReason | None
    committed: int
    last_position: int


async def observe(
    sizes: Sequence[int], stop: tuple[str, ...], finish: m.FinishReason = m.FinishReason.LENGTH
) -> Seen:
    async with (
        asyncio.timeout(WITHIN_S),
        make_agent(connect_loopback(stream_output(SPOKEN, sizes, finish))) as one,
    ):
        chunks = [chunk async for chunk in generate(one, len(SPOKEN), stop)]
        position = len(PROMPT)
        for chunk in chunks:
            assert chunk.position == position
            position += len(chunk.tokens)
        return Seen(
            tuple(token for chunk in chunks for token in chunk.tokens),
            tuple(piece.text for chunk in chunks for piece in chunk.pieces),
            chunks[-1].finish,
            require(one.stats).counters.committed,
            chunks[-1].position,
        )


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    start=st.integers(0, len(WHOLE) - 1),
    length=st.integers(1, 9),
    other=st.sampled_from(["", "never there", "dean", " "]),
    finish=st.sampled_from([m.FinishReason.LENGTH, m.FinishReason.STOP]),
)
def test_the_users_view_is_a_function_of_the_tokens_alone(
    sizes: list[int], start: int, length: int, other: str, finish: m.FinishReason
) -> None:
    stop = tuple(text for text in (WHOLE[start : start + length], other) if text)
    one_by_one = asyncio.run(observe((1,), stop, finish))
    assert asyncio.run(observe(sizes, stop, finish)) == one_by_one
    assert len(one_by_one.tokens) == one_by_one.committed
    found = [(WHOLE.find(text), len(text)) for text in stop if text in WHOLE]
    # Ids end with the token that completes a stop string; here each letter is a token.
    end = min(at + size for at, size in found)
    assert one_by_one.committed == end
    assert "".join(one_by_one.pieces) == WHOLE[: min(at for at, size in found if at + size == end)]
    assert one_by_one.finish is m.FinishReason.STOP


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        # The encoded bytes spell "once".
        ((), "ValueError", "the prompt is empty"),
        ((1.5,), "TypeError", "prompt\\[0\\] is 1.5, but must be a token id"),
        ((1, 2.0), "TypeError", "prompt\\[1\\] is 2.0"),
        (("a",), "TypeError", "prompt\\[0\\] is 'a'"),
        ((True,), "TypeError", "prompt\\[0\\] is True"),
        ((None,), "TypeError", "prompt\\[0\\] is None"),
        (b"once", "TypeError", "the prompt is bytes"),
        (7, "TypeError", "int"),
        ((3, -1), "ValueError", "prompt\\[1\\] is the token id -1, but must be in \\[0, "),
        ((1099511627776,), "ValueError", "must be in \\[0, 16777215\\]"),
    ],
)
async def test_a_prompt_that_cannot_be_is_refused_before_anything_starts(
    prompt: Sequence[int], error: str, message: str
) -> None:
    async with (
        asyncio.timeout(WITHIN_S),
        make_agent(connect_loopback(stream_output(SPOKEN))) as one,
    ):
        with pytest.raises(getattr(builtins, error), match=message):
            await anext(one.generate(prompt))
        assert one.stats is None


async def test_sampling_of_another_kind_is_refused() -> None:
    async with make_agent(connect_loopback(stream_output(SPOKEN))) as one:
        with pytest.raises(TypeError, match="sampling is dict, but must be SamplingParams"):
            await anext(one.generate([1], {"max_tokens": 3}))  # type: ignore[arg-type]


async def test_every_generation_has_a_secret_and_shows_it_with_every_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    openings: list[m.Open] = []
    send = Link.send

    def noted(link: Link, message: m.Uplink) -> None:
        if isinstance(message, m.Open):
            openings.append(message)
        send(link, message)

    async def serve(stream: ports.VerifierStream) -> None:
        opening = await stream.receive()
        assert isinstance(opening, m.Open)
        if len(openings) % 2 == 0:  # every first stream hangs up
            await play_output(stream, opening, SPOKEN)

    monkeypatch.setattr(Link, "send", noted)
    async with asyncio.timeout(WITHIN_S), make_agent(connect_loopback(serve)) as one:
        for _ in range(2):
            assert [c async for c in generate(one, len(SPOKEN))][-1].finish is m.FinishReason.LENGTH
    secrets = [opening.session_secret for opening in openings]
    assert [len(secret) for secret in secrets] == [16] * 4
    assert secrets[0] == secrets[1] != secrets[2] == secrets[3]
    assert "secret" not in repr(openings[0])


class SlowDrafter(ToyDrafter):
    """A drafter whose first step runs until it is cancelled and then until ``gate`` opens."""

    def __init__(self) -> None:
        super().__init__(LETTERS)
        self.gate = threading.Event()
        self.cancel_seen = threading.Event()
        self.did: list[str] = []

    def begin(self, *arguments: Any) -> None:
        self.did.append("begin")
        super().begin(*arguments)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: ports.Cancelled = ports.never_cancelled,
    ) -> tuple[ports.Candidate, ...]:
        if "step" in self.did:
            return super().step(keep_length, feed, width, cancelled)
        self.did.append("step")
        while not cancelled():
            self.gate.wait(0.001)
        self.cancel_seen.set()
        self.gate.wait()
        self.did.append("step ended")
        raise ports.StepCancelledError("cancelled")

    def close(self) -> None:
        self.did.append("close")


def commit_after_step(drafter: SlowDrafter) -> LoopbackTransport:
    """Return a verifier that commits once the drafter's step runs, however late its thread
    begins."""
    return connect_loopback(stream_output(SPOKEN, once=lambda: "step" in drafter.did))


async def test_the_text_is_complete_before_a_running_step_is() -> None:
    drafter = SlowDrafter()
    async with asyncio.timeout(WITHIN_S), make_agent(commit_after_step(drafter), drafter) as one:
        first = [chunk async for chunk in generate(one, len(SPOKEN))]
        assert first[-1].finish is m.FinishReason.LENGTH
        assert "step ended" not in drafter.did  # the loop above has ended all the same
        await asyncio.to_thread(drafter.cancel_seen.wait)
        second = [chunk async for chunk in generate(one, len(SPOKEN))]
        for chunks in (first, second):
            assert [token for chunk in chunks for token in chunk.tokens] == SPOKEN
        drafter.gate.set()
    assert drafter.did in (
        ["begin", "step", "step ended", "close"],
        ["begin", "step", "step ended", "begin", "close"],
    )
