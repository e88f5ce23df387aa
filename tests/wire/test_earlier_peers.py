"""A recorded device of 0.1.0 with today's verifier, and a recorded verifier of 0.1.0 with today's
device.

Oracle: the toy target's text, which the recorded peers generated as well. The streams were recorded
with both ends of commit e2c9c19c (28 November 2026), by ``recorded_peers``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import edgespec
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.wire.pb import speculation_pb2 as pb
from tests.kit.live_verifier import serve_toy, toy_text
from tests.wire.recorded_peers import (
    DEVICE,
    VERIFIER,
    RecordedStream,
    read_recording,
    serve_methods,
)

FOLDER = Path(__file__).parent / "recordings"
DRAFTING = read_recording(FOLDER / "drafting-2026-11-28.json")
PLAIN = read_recording(FOLDER / "plain-2026-11-28.json")
PROMPT = "Once upon a time"
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=40)


def read_open(stream: RecordedStream) -> Any:
    return pb.DeviceMessage.FromString(stream.of(DEVICE)[0]).open


def committed_tokens(messages: list[bytes]) -> list[int]:
    """Return the tokens of the commits in the order of their positions; fail if any is missing."""
    tokens: list[int] = []
    first: int | None = None
    for payload in messages:
        message = pb.VerifierMessage.FromString(payload)
        assert not message.HasField("fault"), message.fault
        if message.HasField("commit") and message.commit.tokens:
            first = message.commit.position if first is None else first
            assert message.commit.position == first + len(tokens)
            tokens += message.commit.tokens
    return tokens


def position_behind(payload: bytes) -> int:
    """Return the position behind a commit's tokens, or 0 for another message."""
    commit = pb.VerifierMessage.FromString(payload).commit
    return int(commit.position + len(commit.tokens)) if commit.tokens else 0


@pytest.mark.parametrize("recorded", [DRAFTING, PLAIN], ids=["drafting", "plain"])
def test_the_recorded_peers_generated_the_targets_text(recorded: RecordedStream) -> None:
    text = toy_text(list(read_open(recorded).prompt), PARAMS)
    assert committed_tokens(recorded.of(VERIFIER)) == text


def test_the_recorded_device_drafted() -> None:
    kinds = [pb.DeviceMessage.FromString(one).WhichOneof("kind") for one in DRAFTING.of(DEVICE)]
    assert kinds.count("draft") > 3
    commits = [pb.VerifierMessage.FromString(one).commit for one in DRAFTING.of(VERIFIER)]
    assert sum(commit.accepted for commit in commits) > 3


@pytest.mark.parametrize("recorded", [DRAFTING, PLAIN], ids=["drafting", "plain"])
async def test_an_earlier_device_gets_its_text_from_todays_verifier(
    recorded: RecordedStream,
) -> None:
    """Each message of the device is sent when the verifier has committed as much as it had when the
    device sent it."""
    received: list[bytes] = []
    async with serve_toy() as (address, _), grpc.aio.insecure_channel(address) as channel:
        method: Any = channel.stream_stream("/edgespec.v1.Verifier/Speculate", None, None)
        call = method()
        needed = reached = 0
        async with asyncio.timeout(60.0):
            for sender, payload in recorded.messages:
                if sender == VERIFIER:
                    needed = max(needed, position_behind(payload))
                    continue
                while reached < needed:
                    received.append(await call.read())
                    reached = max(reached, position_behind(received[-1]))
                await call.write(payload)
            await call.done_writing()
            while (payload := await call.read()) is not grpc.aio.EOF:
                received.append(payload)
            assert await call.code() is grpc.StatusCode.OK
    assert committed_tokens(received) == committed_tokens(recorded.of(VERIFIER))
    last = pb.VerifierMessage.FromString(received[-1]).commit
    assert last.finish == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("draft", ["none", "toy"])
async def test_todays_device_gets_its_text_from_an_earlier_verifier(draft: str) -> None:
    """The verifier plays its side of the stream without drafts, as if every draft came too late."""
    opens: list[Any] = []

    async def answer_info(_: bytes, __: Any) -> bytes:
        return PLAIN.info

    async def play(_: Any, context: Any) -> None:
        opens.append(pb.DeviceMessage.FromString(await context.read()).open)
        sent = PLAIN.of(VERIFIER)
        for payload in sent:
            await context.write(payload)
        end = max(position_behind(payload) for payload in sent)
        while (payload := await context.read()) is not grpc.aio.EOF:
            if pb.DeviceMessage.FromString(payload).received.position == end:
                return

    methods: dict[str, Any] = {
        "Info": grpc.unary_unary_rpc_method_handler(answer_info),
        "Speculate": grpc.stream_stream_rpc_method_handler(play),
    }
    async with serve_methods(methods) as address:
        async with edgespec.connect(address, draft=draft, tokenizer="toy") as agent:
            completion = await agent.complete(PROMPT, sampling=PARAMS)
    assert list(completion.tokens) == committed_tokens(PLAIN.of(VERIFIER))
    (opened,) = opens
    before = read_open(PLAIN)
    assert opened.prompt == before.prompt
    assert opened.sampling == before.sampling
    assert not opened.HasField("prefix")  # a verifier of 0.1.0 would refuse it
