"""What the user gets from one stream of tokens. Oracle: token by token, by hand.

However commits cut the stream up (which is what drafts decide), ids, pieces, text, usage and finish
are the same.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.ports import (
    Cancelled,
    Candidate,
    ModelInfo,
    StepCancelledError,
    VerifierStream,
    never_cancelled,
)
from edgespec.core.protocol.messages import FinishReason, Open, Uplink
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.agent import MAX_TOKEN_ID, Chunk
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.device.session_driver import Link
from edgespec.models.toy import TOY_ALPHABET, ToyTokenizer
from tests.shell.loopback import LoopbackTransport
from tests.shell.scripted_verifier import PROMPT, agent, generate, loopback, play, streaming

TEXT = ToyTokenizer()
WITHIN_S = 30.0
WHOLE = "the great debate of the great dean"
TOKENS = TEXT.encode(WHOLE)


@dataclass(frozen=True)
class Seen:
    """What a user can tell of a generation, but for when it came and who guessed it."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    finish: FinishReason | None
    committed: int
    last_position: int


async def seen(
    sizes: Sequence[int], stop: tuple[str, ...], finish: FinishReason = FinishReason.LENGTH
) -> Seen:
    async with asyncio.timeout(WITHIN_S), agent(loopback(streaming(TOKENS, sizes, finish))) as one:
        chunks = [chunk async for chunk in generate(one, len(TOKENS), stop)]
        assert one.stats is not None
        position = len(PROMPT)
        for chunk in chunks:
            assert chunk.position == position
            position += len(chunk.tokens)
        return Seen(
            tuple(token for chunk in chunks for token in chunk.tokens),
            tuple(piece.text for chunk in chunks for piece in chunk.pieces),
            chunks[-1].finish,
            one.stats.counters.committed,
            chunks[-1].position,
        )


@pytest.mark.parametrize("sizes", [(1,), (3,), (40,)])
async def test_ids_end_with_the_token_that_completes_the_stop_string(
    sizes: tuple[int, ...],
) -> None:
    found = await seen(sizes, ("great de",))
    length = len(TEXT.encode("the great de"))
    assert found.tokens == tuple(TOKENS[:length])
    assert "".join(found.pieces) == "the "
    assert (found.finish, found.committed) == (FinishReason.STOP, length)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    start=st.integers(0, len(WHOLE) - 1),
    length=st.integers(1, 9),
    other=st.sampled_from(["", "never there", "dean", " "]),
    finish=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)
def test_the_users_view_is_a_function_of_the_tokens_alone(
    sizes: list[int], start: int, length: int, other: str, finish: FinishReason
) -> None:
    stop = tuple(text for text in (WHOLE[start : start + length], other) if text)
    one_by_one = asyncio.run(seen((1,), stop, finish))
    assert asyncio.run(seen(sizes, stop, finish)) == one_by_one
    assert len(one_by_one.tokens) == one_by_one.committed
    cut = min(at for at in (WHOLE.find(text) for text in stop) if at >= 0)
    assert "".join(one_by_one.pieces) == WHOLE[:cut]


# --- prompts and what goes with them ----------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "the prompt is empty"),
        ([1.5], TypeError, r"prompt\[0\] is 1.5, but must be a token id"),
        ([1, 2.0], TypeError, r"prompt\[1\] is 2.0"),
        (["a"], TypeError, r"prompt\[0\] is 'a'"),
        ([True], TypeError, r"prompt\[0\] is True"),
        ([None], TypeError, r"prompt\[0\] is None"),
        (b"once", TypeError, "the prompt is bytes"),
        (7, TypeError, "int"),
        (
            [3, -1],
            ValueError,
            rf"prompt\[1\] is the token id -1, but must be in \[0, {MAX_TOKEN_ID}",
        ),
        ([1 << 40], ValueError, rf"must be in \[0, {MAX_TOKEN_ID}\]"),
    ],
)
async def test_a_prompt_that_cannot_be_is_refused_before_anything_starts(
    prompt: Sequence[int], error: type[Exception], message: str
) -> None:
    async with asyncio.timeout(WITHIN_S), agent(loopback(streaming(TOKENS))) as one:
        with pytest.raises(error, match=message):
            await anext(one.generate(prompt))
        assert one.stats is None


async def test_sampling_of_another_kind_is_refused() -> None:
    async with agent(loopback(streaming(TOKENS))) as one:
        with pytest.raises(TypeError, match="sampling is dict, but must be SamplingParams"):
            await anext(one.generate([1], {"max_tokens": 3}))  # type: ignore[arg-type]


async def test_every_generation_has_a_secret_and_shows_it_with_every_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    openings: list[Open] = []
    send = Link.send

    def noted(link: Link, message: Uplink) -> None:
        if isinstance(message, Open):
            openings.append(message)
        send(link, message)

    async def serve(stream: VerifierStream) -> None:
        opening = await stream.receive()
        assert isinstance(opening, Open)
        if len(openings) % 2 == 0:  # every first stream hangs up
            await play(stream, opening, TOKENS)

    monkeypatch.setattr(Link, "send", noted)
    async with asyncio.timeout(WITHIN_S), agent(loopback(serve)) as one:
        for _ in range(2):
            assert [c async for c in generate(one, len(TOKENS))][-1].finish is FinishReason.LENGTH
    secrets = [opening.session_secret for opening in openings]
    assert [len(secret) for secret in secrets] == [16] * 4
    assert secrets[0] == secrets[1] != secrets[2] == secrets[3]
    assert "secret" not in repr(openings[0])


# --- a draft step that is still running -------------------------------------------------------


class SlowDrafter:
    """A drafter whose first step goes on until it is cancelled and then until ``gate`` opens."""

    def __init__(self) -> None:
        self._inner = ToyDrafter(ToyModel(len(TOY_ALPHABET), order=2))
        self.info: ModelInfo = self._inner.info
        self.gate = threading.Event()
        self.heard_of_it = threading.Event()
        self.did: list[str] = []

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self.did.append("begin")
        self._inner.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        if "step" in self.did:
            return self._inner.step(keep_length, feed, width, cancelled)
        self.did.append("step")
        while not cancelled():
            self.gate.wait(0.001)
        self.heard_of_it.set()
        self.gate.wait()
        self.did.append("step ended")
        raise StepCancelledError("nobody wants it")

    def close(self) -> None:
        self.did.append("close")


def text_after(drafter: SlowDrafter) -> LoopbackTransport:
    """A verifier that commits once the drafter's step runs, however late its thread begins."""
    return loopback(streaming(TOKENS, once=lambda: "step" in drafter.did))


async def test_the_text_is_complete_before_a_running_step_is() -> None:
    drafter = SlowDrafter()
    async with asyncio.timeout(WITHIN_S), agent(text_after(drafter), drafter) as one:
        first = [chunk async for chunk in generate(one, len(TOKENS))]
        assert first[-1].finish is FinishReason.LENGTH
        assert "step ended" not in drafter.did  # and the loop above has ended all the same
        await asyncio.to_thread(drafter.heard_of_it.wait)
        second = [chunk async for chunk in generate(one, len(TOKENS))]
        assert tokens_of(first) == tokens_of(second) == TOKENS
        drafter.gate.set()
    assert drafter.did in (
        ["begin", "step", "step ended", "close"],
        ["begin", "step", "step ended", "begin", "close"],
    )


def tokens_of(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]
