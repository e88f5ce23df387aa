"""The link in memory: what gRPC does, without gRPC; and the meter on it."""

from __future__ import annotations

import asyncio

import pytest

from edgespec.core.ports import DeviceStream, LinkError, ModelInfo, VerifierStream
from edgespec.core.protocol.messages import (
    Commit,
    Draft,
    Fault,
    FaultCode,
    Limits,
    Open,
    Opened,
    Received,
    VerifierInfo,
)
from edgespec.wire.codec import payload_bytes
from edgespec.wire.shaped import FRAMING_BYTES, Pipe, TrafficMeter
from edgespec.wire.wire_limits import WireLimits
from tests.shell.loopback import LoopbackTransport

INFO = VerifierInfo(ModelInfo("toy", "v1", 32000, 4096), Limits(), 3, 8)
OPEN = Open("session", "", "", (1, 2, 3))
OPENED = Opened(Limits(), "toy", 3)


async def echo(stream: VerifierStream) -> None:
    while True:
        match await stream.receive():
            case Open():
                await stream.send(OPENED)
            case Draft(tokens=tokens):
                await stream.send(Commit(3, tokens, len(tokens)))
            case Received():
                raise ZeroDivisionError("a bug in the verifier")
            case _:
                return


async def opened(transport: LoopbackTransport) -> DeviceStream:
    stream = await transport.connect()
    await stream.send(OPEN)
    assert await stream.receive() == OPENED
    return stream


async def test_messages_pass_and_are_counted() -> None:
    meter = TrafficMeter()
    transport = LoopbackTransport(echo, lambda: INFO, meter=meter)
    assert await transport.info() == INFO
    stream = await opened(transport)
    draft, commit = Draft(1, (0, 1), (7, 8), 3, 9), Commit(3, (7, 8), 2)
    await stream.send(draft)
    assert await stream.receive() == commit
    await transport.close()
    report = meter.totals
    assert report["draft_payload_bytes"] == payload_bytes(draft)
    assert report["drafted_nodes"] == report["committed_tokens"] == 2
    up_bytes = payload_bytes(OPEN) + payload_bytes(draft)
    assert report["up_payload_bytes"] == up_bytes
    assert report["up_framed_bytes"] == up_bytes + 2 * FRAMING_BYTES
    assert report["down_messages"] == report["open_messages"] + report["draft_messages"] == 2


async def test_a_cut_loses_what_is_under_way_and_a_new_stream_opens() -> None:
    transport = LoopbackTransport(echo, lambda: INFO)
    stream = await opened(transport)
    await stream.send(Draft(1, (0,), (7,), 3, 9))
    transport.cut("the cable was pulled")
    for attempt in (stream.receive(), stream.send(Received(1, 1))):
        with pytest.raises(LinkError, match="the cable was pulled") as caught:
            await attempt
        assert caught.value.retryable
    await opened(transport)
    await transport.close()
    assert transport.stream_count == 0


async def test_it_refuses_until_told_otherwise() -> None:
    transport = LoopbackTransport(echo, lambda: INFO)
    transport.refuse("maintenance")
    with pytest.raises(LinkError, match="maintenance"):
        await transport.connect()
    with pytest.raises(LinkError, match="maintenance"):
        await transport.info()
    transport.accept()
    await opened(transport)
    await transport.close()
    with pytest.raises(LinkError, match="was closed here") as caught:
        await transport.connect()
    assert not caught.value.retryable


async def test_a_message_over_a_bound_ends_the_stream_with_a_fault() -> None:
    transport = LoopbackTransport(echo, lambda: INFO, limits=WireLimits(vocabulary_size=10))
    stream = await opened(transport)
    lax = LoopbackTransport(echo, lambda: INFO)
    await lax.close()
    stream._codec = lax._codec()  # type: ignore[attr-defined] # a device without our bounds
    await stream.send(Draft(1, (0,), (10,), 3, 9))
    fault = await stream.receive()
    assert isinstance(fault, Fault)
    assert fault.code is FaultCode.INVALID
    assert "Draft.tokens[0] is 10" in fault.message
    with pytest.raises(LinkError, match=r"Draft.tokens") as caught:
        await stream.receive()
    assert not caught.value.retryable
    await transport.close()


async def test_a_bug_in_the_verifier_ends_its_own_stream_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = LoopbackTransport(echo, lambda: INFO)
    good, bad = await opened(transport), await opened(transport)
    await bad.send(Received(1, 1))
    assert await bad.receive() == Fault(
        FaultCode.INTERNAL, "the verifier failed: ZeroDivisionError"
    )
    await good.send(Draft(1, (0,), (7,), 3, 9))
    assert await good.receive() == Commit(3, (7,), 1)
    await transport.close()
    assert "a bug in the verifier" in caplog.text


async def test_a_device_that_leaves_ends_the_verifiers_stream() -> None:
    transport = LoopbackTransport(echo, lambda: INFO)
    stream = await opened(transport)
    await stream.close()
    await asyncio.gather(*transport._links.values())
    assert transport.stream_count == 0
    await transport.close()


async def test_a_sender_waits_while_nobody_reads() -> None:
    pipe: Pipe[int] = Pipe(2)
    senders = [asyncio.ensure_future(pipe.put(n)) for n in range(4)]
    done, waiting = await asyncio.wait(senders, timeout=0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert [sender.done() for sender in senders] == [True, True, False, False]
    senders[2].cancel()
    assert [await pipe.get(), await pipe.get(), await pipe.get()] == [0, 1, 3]
    pipe.end("over")
    with pytest.raises(LinkError, match="over"):
        await pipe.put(5)
    assert len(done | waiting) == 4


async def test_a_pipe_ends_after_the_data_that_came_before() -> None:
    pipe: Pipe[int] = Pipe(4)
    await pipe.put(1)
    pipe.end("first reason", retryable=False)
    pipe.end("second reason")
    assert await pipe.get() == 1
    with pytest.raises(LinkError, match="first reason") as caught:
        await pipe.get()
    assert not caught.value.retryable
