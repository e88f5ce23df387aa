"""The shaped transport: delays by a clock of the test's own, order, ends and cancellation."""

from __future__ import annotations

import asyncio
import heapq
import threading
import time

import pytest

from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec.core.ports import DeviceStream, LinkError, ModelInfo, VerifierStream
from edgespec.core.protocol import messages as m
from edgespec.wire.codec import payload_bytes
from edgespec.wire.shaped import ShapedTransport, ThreadPacer, TrafficMeter
from tests.shell.loopback import LoopbackTransport

INFO = m.VerifierInfo(ModelInfo("toy", "v1", 32000, 4096), m.Limits(), 3, 8)

UP_S, DOWN_S = 0.030, 0.070


class HandPacer(ThreadPacer):
    """Time moves when the test says so, from one waiter to the next."""

    time_s = 100.0

    def now(self) -> float:
        return self.time_s

    async def wait_until(self, when_s: float) -> None:
        if when_s > self.time_s:
            future = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiters, (when_s, next(self._numbers), future))
            await future

    def close(self) -> None:
        raise AssertionError("the transport closed a pacer it does not own")

    async def run_until(self, end_s: float) -> None:
        await settle()
        while self._waiters and self._waiters[0][0] <= end_s:
            when_s, _, future = heapq.heappop(self._waiters)
            self.time_s = max(self.time_s, when_s)
            if not future.done():
                future.set_result(None)
            await settle()
        self.time_s = end_s


async def settle() -> None:
    """Let everything run that can without time going on."""
    for _ in range(30):
        await asyncio.sleep(0)


class World:
    """A verifier that notes what arrives when, and commits the tokens of each draft."""

    def __init__(self, up: LinkModel | None = None, down: LinkModel | None = None) -> None:
        self.pacer = HandPacer()
        self.arrived: list[tuple[float, m.Uplink]] = []
        self.left_s: list[float] = []
        self.meter = TrafficMeter()
        self.inner = LoopbackTransport(self._serve, lambda: INFO)
        self.transport = ShapedTransport(
            self.inner,
            up or LinkModel(LinkSettings(one_way_s=UP_S)),
            down or LinkModel(LinkSettings(one_way_s=DOWN_S)),
            pacer=self.pacer,
            meter=self.meter,
        )

    async def _serve(self, stream: VerifierStream) -> None:
        try:
            while True:
                message = await stream.receive()
                self.arrived.append((self.now_s(), message))
                if isinstance(message, m.Draft):
                    await stream.send(m.Commit(3, message.tokens, len(message.tokens)))
                elif isinstance(message, m.Received):
                    return
        finally:
            self.left_s.append(self.now_s())

    def now_s(self) -> float:
        return round(self.pacer.now() - 100.0, 9)

    async def run_until(self, end_s: float) -> None:
        await self.pacer.run_until(100.0 + end_s)

    async def connected(self, by_s: float) -> DeviceStream:
        connecting = asyncio.ensure_future(self.transport.connect())
        await self.run_until(by_s)
        assert connecting.done()
        return await connecting


def draft(node_id: int) -> m.Draft:
    return m.Draft(node_id, (0,), (node_id,), 3, 9)


async def test_opening_costs_a_round_trip_and_each_message_its_way() -> None:
    world = World()
    connecting = asyncio.ensure_future(world.transport.connect())
    await world.run_until(0.099)
    assert not connecting.done()
    await world.run_until(0.1)
    stream = await connecting
    await stream.send(draft(1))
    receiving = asyncio.ensure_future(stream.receive())
    await world.run_until(0.199)
    assert world.arrived == [(0.13, draft(1))]
    assert not receiving.done()
    await world.run_until(0.2)
    assert await receiving == m.Commit(3, (1,), 1)
    await world.transport.close()


async def test_messages_queue_for_the_bandwidth_and_keep_their_order() -> None:
    size_bytes = payload_bytes(draft(1))
    queue = SharedQueue(size_bytes * 8 / 0.010)  # one draft takes 10 ms
    settings = LinkSettings(one_way_s=UP_S, jitter_s=0.020, seed=4)
    expected = LinkModel(settings, SharedQueue(size_bytes * 8 / 0.010))
    world = World(up=LinkModel(settings, queue), down=LinkModel())
    stream = await world.connected(2.0)
    expected.arrival(0.0, 64)
    model_s = [round(expected.arrival(2.0, size_bytes), 9) for _ in range(20)]
    for node_id in range(1, 21):
        await stream.send(draft(node_id))
    await world.run_until(4.0)
    assert world.arrived == [(model_s[n], draft(n + 1)) for n in range(20)]
    await world.transport.close()


async def test_a_cancelled_receive_loses_nothing() -> None:
    world = World()
    stream = await world.connected(0.1)
    await stream.send(draft(1))
    await stream.send(draft(2))
    for end_s in (0.15, 0.199):
        waiting = asyncio.ensure_future(stream.receive())
        await world.run_until(end_s)
        waiting.cancel()
        await settle()
    await world.run_until(0.3)
    assert [await stream.receive(), await stream.receive()] == [
        m.Commit(3, (1,), 1),
        m.Commit(3, (2,), 1),
    ]
    await world.transport.close()


async def test_the_end_of_the_stream_comes_after_the_data_before_it() -> None:
    world = World()
    stream = await world.connected(0.1)
    await stream.send(draft(1))
    await stream.send(m.Received(1, 1))  # the verifier ends the stream when it gets this
    await world.run_until(0.15)
    assert world.left_s == [0.13]
    await stream.send(draft(2))  # nobody here knows yet
    await world.run_until(0.3)
    assert await stream.receive() == m.Commit(3, (1,), 1)
    with pytest.raises(LinkError, match="the verifier ended the stream"):
        await stream.receive()
    with pytest.raises(LinkError, match="the verifier ended the stream"):
        await stream.send(draft(3))
    await world.transport.close()


async def test_closing_returns_at_once_and_what_was_sent_still_arrives() -> None:
    world = World()
    stream = await world.connected(0.1)
    await stream.send(m.Cancel())
    await stream.close()
    for attempt in (stream.send(draft(1)), stream.receive()):
        with pytest.raises(LinkError, match="was closed here"):
            await attempt
    await settle()
    assert not world.left_s
    await world.run_until(0.2)
    assert world.arrived == [(0.13, m.Cancel())]
    assert world.left_s == [0.13]
    await world.transport.close()


class HeldClock:
    """The real clock, but it stands still until ``let_go``, however long that takes."""

    def __init__(self) -> None:
        self._held_s: float | None = time.monotonic()

    def let_go(self) -> None:
        self._held_s = None

    def monotonic(self) -> float:
        return time.monotonic() if self._held_s is None else self._held_s


async def test_the_pacer_wakes_in_the_order_of_the_moments_and_never_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = HeldClock()
    monkeypatch.setattr("edgespec.wire.shaped.time", clock)
    others = set(threading.enumerate())
    pacer = ThreadPacer()
    start_s = pacer.now()
    woken: list[int] = []

    async def wait(milliseconds: int) -> None:
        await pacer.wait_until(start_s + milliseconds / 1000)
        assert pacer.now() >= start_s + milliseconds / 1000
        woken.append(milliseconds)

    waiting = asyncio.gather(*(wait(ms) for ms in (30, 10, 20, -5, 0)))
    await settle()  # a busy machine may take longer than 10 ms until all five wait
    assert woken == [-5, 0]
    clock.let_go()
    await waiting
    assert woken == [-5, 0, 10, 20, 30]
    pacer.close()
    left = set(threading.enumerate()) - others
    assert not any(thread.name == "pacer" for thread in left)
    with pytest.raises(RuntimeError, match="the pacer is closed"):
        await pacer.wait_until(pacer.now() + 1.0)
