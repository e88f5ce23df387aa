"""What goes wrong between a verifier and its front processes, without any such process.

Oracle: the law of each part: no call or task is left behind, and the next process is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.core.verifier.call_budget import INFO_LIMITS
from edgespec.transport import front_child, front_frames, front_group
from edgespec.transport.front_child import FrontChild
from edgespec.transport.front_group import FrontProcesses
from edgespec.transport.front_orders import Orders
from edgespec.transport.front_process import _Call
from edgespec.transport.grpc_listener import ANSWERED, STREAMED, Methods
from edgespec.transport.grpc_options import Keepalive
from tests.shell.echo_verifier import PATIENCE_S

OPENED = json.dumps([STREAMED, "ipv4:127.0.0.1:1", []]).encode()


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def serve_nothing(_requests: Any, call: Any) -> None:
    await call.read()


METHODS: Methods = dict.fromkeys((STREAMED, *ANSWERED), serve_nothing)


def frame(kind: int, number: int, body: bytes = b"") -> bytes:
    return front_frames._HEADER.pack(len(body), kind, number) + body


@contextlib.asynccontextmanager
async def child(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FrontChild]:
    """The verifier's hold on a process that is not there."""
    process = SimpleNamespace(pid=1, poll=lambda: 0, wait=lambda timeout=None: 0)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    read, life = os.pipe()
    os.close(read)
    monkeypatch.setattr(front_child, "_started", lambda: (ours, life, process))
    orders = Orders("127.0.0.1:0", 1 << 20, Keepalive(), INFO_LIMITS, 30, None)
    front = FrontChild(orders, METHODS)
    try:
        await front.talk()
        yield front
    finally:
        await front.close()
        theirs.close()


async def test_a_call_that_ends_before_it_was_looked_at_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that opens and hangs up at once, and a busy loop that reads both together."""
    async with child(monkeypatch) as front:
        opened = frame(front_frames.OPEN, 7, OPENED)
        front._pipe.data_received(opened + frame(front_frames.GONE, 7, b"the device is gone"))
        assert front.call_count == 1
        await until(lambda: front.call_count == 0)
        front._pipe.data_received(opened)  # its number is free again
        assert front.call_count == 1


class Context:
    """A call of a device that says nothing."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def read(self) -> None:
        await asyncio.Event().wait()


class Pipe:
    """What a front process has sent."""

    def __init__(self) -> None:
        self.kinds: list[int] = []

    def send(self, kind: int, number: int = 0, body: bytes = b"") -> None:
        self.kinds.append(kind)

    def gather(self, kind: int, number: int, body: bytes) -> None:
        self.kinds.append(kind)

    def note(self, number: int) -> None:
        self.kinds.append(front_frames.WROTE)


async def test_a_call_whose_device_left_leaves_no_task_in_the_front_process() -> None:
    pipe: Any = Pipe()
    call = _Call(1, Context(), pipe, STREAMED, None)
    running = asyncio.create_task(call.run())
    await until(lambda: len(call._tasks) == 2)
    for _ in range(3):  # both have begun to wait
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: all(task.done() for task in call._tasks))
    assert pipe.kinds == [front_frames.OPEN, front_frames.GONE]


class Front:
    """A process that listens at once, unless ``gate`` holds it up, and ends when told."""

    made: list[Front]
    gate: asyncio.Event
    numbers = itertools.count(1)
    call_count = 0

    def __init__(self, orders: Orders, _methods: Methods) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.identity = orders.identity
        self.process = SimpleNamespace(pid=next(self.numbers))
        self.drained = self.stopped = False
        self.fails = ""
        self.made.append(self)

    @property
    def listening(self) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._listen())

    async def _listen(self) -> None:
        await self.gate.wait()

    async def talk(self) -> None:
        return

    def drain(self) -> None:
        self.drained = True

    async def last_words(self) -> str:
        return self.ended.result()

    async def close(self) -> None:
        if self.fails:
            raise RuntimeError(self.fails)

    async def stop(self, grace_s: float) -> None:
        self.stopped = True
        await self.close()


@contextlib.asynccontextmanager
async def fronts(
    monkeypatch: pytest.MonkeyPatch, count: int = 1
) -> AsyncIterator[tuple[FrontProcesses, list[Front]]]:
    monkeypatch.setattr(front_group, "FrontChild", Front)
    monkeypatch.setattr(front_group, "_FIRST_WAIT_S", 0.0)
    Front.made, Front.gate = [], asyncio.Event()
    Front.gate.set()
    group = FrontProcesses(count, "127.0.0.1", 0)
    line: Any = None
    await group.start(METHODS, line)
    try:
        yield group, Front.made
    finally:
        await group.stop(0.0)


async def test_a_process_that_starts_while_a_drain_begins_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fronts(monkeypatch) as (group, made):
        Front.gate.clear()
        made[0].ended.set_result("killed")
        await until(lambda: len(made) == 2)
        await group.drain()
        Front.gate.set()
        await until(lambda: bool(group.processes))
        assert made[1].drained


async def test_a_process_whose_end_cannot_be_waited_for_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with fronts(monkeypatch) as (group, made):
        made[0].fails = "can't start new thread"
        made[0].ended.set_result("killed")
        await until(lambda: group.processes == (made[-1].process.pid,) and len(made) == 2)
    assert "can't start new thread" in caplog.text


async def test_one_that_cannot_be_ended_does_not_keep_the_port_or_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with fronts(monkeypatch, 2) as (group, made):
        made[0].fails, held = "can't start new thread", group._held
        assert held is not None
        await group.stop(0.0)
        assert [front.stopped for front in made] == [True, True]
        assert held.fileno() == -1
    assert "could not be ended: can't start new thread" in caplog.text
