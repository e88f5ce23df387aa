"""The pipe to a front process: what leaves together, and in which order. Oracle: the frames as they
were sent, read by the pipe's own other end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from edgespec.transport import front_frames as frames
from edgespec.transport.front_frames import FramePipe, numbers_in
from tests.shell.echo_verifier import PATIENCE_S

Frame = tuple[int, int, bytes]


class Wire:
    """A transport that keeps what is written, and hears it as the other end does."""

    def __init__(self) -> None:
        self.heard: list[Frame] = []
        self.writes = 0
        self._end = FramePipe(self._hear, lambda why: None, frames.READ)

    def write(self, data: bytes) -> None:
        self.writes += 1
        self._end.data_received(data)

    def _hear(self, kind: int, number: int, body: bytes) -> None:
        self.heard.append((kind, number, body))


def connected() -> tuple[FramePipe, Wire]:
    pipe, wire = FramePipe(lambda *frame: None, lambda why: None, frames.WROTE), Wire()
    transport: Any = wire
    pipe.connection_made(transport)
    return pipe, wire


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_frames_of_a_turn_leave_in_one_write_with_the_notes_behind_them() -> None:
    pipe, wire = connected()
    pipe.note(1)
    pipe.gather(frames.MESSAGE, 1, b"a draft")
    pipe.note(2)
    pipe.send(frames.HALF_CLOSED, 1)
    await until(lambda: len(wire.heard) >= 3)
    *sent, (kind, number, body) = wire.heard
    assert sent == [(frames.MESSAGE, 1, b"a draft"), (frames.HALF_CLOSED, 1, b"")]
    assert (kind, number, list(numbers_in(body))) == (frames.WROTE, 0, [1, 2])
    assert wire.writes == 1


async def test_what_can_wait_leaves_without_a_frame_that_cannot() -> None:
    pipe, wire = connected()
    pipe.note(7)
    await until(lambda: len(wire.heard) == 1)
    for count in range(20):  # behind one that has just left, and alone
        pipe.gather(frames.MESSAGE, 7, bytes([count]))
    pipe.note(8)
    await until(lambda: len(wire.heard) == 22)
    messages = [(frames.MESSAGE, 7, bytes([count])) for count in range(20)]
    assert wire.heard[1:21] == messages
    assert [list(numbers_in(body)) for kind, _, body in wire.heard if kind == frames.WROTE] == [
        [7],
        [8],
    ]


async def test_nothing_leaves_after_the_end() -> None:
    pipe, wire = connected()
    pipe.note(1)
    pipe.gather(frames.MESSAGE, 1, b"a draft")
    pipe.connection_lost(None)
    pipe.note(2)
    pipe.send(frames.HALF_CLOSED, 1)
    gone = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(4 * frames.GATHER_S, gone.set_result, None)
    await gone
    assert wire.writes == 0
