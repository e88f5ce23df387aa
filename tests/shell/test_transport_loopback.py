"""The link in memory: what gRPC does, without gRPC; and the meter on it."""

from __future__ import annotations

import asyncio

import pytest

from edgespec.core.ports import LinkError
from edgespec.wire.shaped import Pipe


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
