"""Bounds of peers as a user meets them: over gRPC, with the composed verifier and toy models."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio
import pytest

from edgespec.config import AgentConfig, DraftSection, LimitsSection, VerifierConfig
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.protocol.messages import Fault, FaultCode, Open, Opened
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import build_agent, connect
from edgespec.models.toy import ToyTokenizer
from edgespec.wire.codec import encode_uplink
from tests.shell.live_verifier import serving, toy_text

SHORT = SamplingParams(max_tokens=5, ignore_eos=True)
PROMPT = "many at once"
PATIENT = ReconnectPolicy(give_up_first_s=200.0, give_up_s=200.0, max_streams_without_token=1000)


async def test_a_half_closed_stream_that_is_refused_ends_with_the_status_of_the_fault() -> None:
    async with serving() as (address, _):
        channel = grpc.aio.insecure_channel(address)
        method: Any = channel.stream_stream("/edgespec.v1.Verifier/Speculate", None, None)
        call = method()
        await call.write(encode_uplink(Open("session", "another model", "", (1, 2))))
        await call.done_writing()
        assert b"unknown model" in await call.read()
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        await channel.close(None)


async def test_many_devices_of_one_address_start_at_once_and_all_are_served() -> None:
    count = 150  # more than the burst of one address
    limits = LimitsSection(max_sessions=count, peer_share=1.0)
    text = toy_text(ToyTokenizer().encode(PROMPT), SHORT)
    async with serving(config=VerifierConfig(model="toy", port=0, limits=limits)) as (address, _):
        config = AgentConfig(
            verifier=address, draft=DraftSection("none"), tokenizer="toy", reconnect=PATIENT
        )

        async def one() -> list[int]:
            found: list[int] = []
            async with build_agent(config) as agent:
                async for chunk in agent.generate(PROMPT, SHORT):
                    found += chunk.tokens
            return found

        texts = await asyncio.gather(*(one() for _ in range(count)))
    assert texts == [text] * count


async def test_an_open_beyond_the_context_is_refused_by_its_count() -> None:
    config = VerifierConfig(model="toy", port=0, max_model_len=64)
    async with serving(config=config) as (address, _):
        transport = connect(address)
        stream = await transport.connect()
        await stream.send(Open("session", "", "", (1,) * 65))
        fault = await stream.receive()
        text = "Open has 65 tokens (prompt and committed), but the context is 64"
        assert fault == Fault(FaultCode.CONTEXT_TOO_LONG, text)
        await transport.close()


async def test_no_secret_and_no_whole_session_id_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="edgespec")
    session_id = "3f2c9a7e-of-which-the-rest-is-nobody's-business"
    async with serving() as (address, _):
        transport = connect(address)
        for prompt in ((1, 2), (1, 2), (3,)):
            stream = await transport.connect()
            await stream.send(Open(session_id, "", "", prompt, session_secret=b"hush" * 4))
            first = await stream.receive()
            assert isinstance(first, Opened | Fault)
            await stream.close()
        await transport.close()
    assert session_id not in caplog.text
    assert "hush" not in caplog.text
