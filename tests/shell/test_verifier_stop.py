"""Ends of a verifier and of its streams that nobody else sees. Oracle: what is said of them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edgespec.core.ports import DeviceStream
from edgespec.core.protocol.messages import (
    Commit,
    Downlink,
    Fault,
    FaultCode,
    Limits,
    Open,
    RunAhead,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.credential import ANYBODY
from edgespec.telemetry.verifier_counts import StreamMeter, StreamRecord
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.toy import ToyTarget
from tests.shell.loopback import LoopbackTransport

MODEL = ToyModel(vocabulary_size=16, order=2)
PROMPT = (1, 2, 3)


async def opened(transport: LoopbackTransport, key: str, tokens: int) -> DeviceStream:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    stream = await transport.connect()
    await stream.send(
        Open(key, "", "", PROMPT, sampling=sampling, run_ahead=RunAhead.ALWAYS, drafting=False)
    )
    return stream


async def until_fault_or_end(stream: DeviceStream) -> Fault | None:
    while True:
        message: Downlink = await stream.receive()
        if isinstance(message, Fault):
            return message
        if isinstance(message, Commit) and message.finish is not None:
            return None


class Stuck(ToyTarget):
    """Once it is told, it does not come back from the end of a sequence before it may."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def close(self, key: str) -> None:
        super().close(key)
        self.reached.set()
        assert self.go_on.wait(60.0)


async def test_a_target_that_is_stuck_between_passes_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edgespec.verifier.daemon._LAST_PASS_S", 0.05)
    target = Stuck()
    verifier = Verifier(target, Limits(context_length=256))
    transport = LoopbackTransport(verifier.serve, lambda: verifier.info)
    assert await until_fault_or_end(await opened(transport, "a", 3)) is None
    await asyncio.to_thread(target.reached.wait)
    stopping = asyncio.create_task(verifier.stop())
    try:
        await asyncio.wait_for(asyncio.shield(stopping), 30.0)
    finally:
        target.go_on.set()
        await stopping
    # So the process does not wait for that thread at its end, either (``cli/verifier._leave``).
    assert verifier.why_broken == "the target is still at work after 0.05 s"
    await transport.close()


async def test_a_stream_whose_key_was_revoked_is_not_counted_as_cancelled() -> None:
    records: list[StreamRecord] = []
    meter = StreamMeter(records.append)
    verifier = Verifier(ToyTarget(MODEL), Limits(context_length=256), telemetry=meter)
    transport = LoopbackTransport(verifier.serve, lambda: verifier.info)
    stream = await opened(transport, "a", 200)
    await stream.receive()
    nobody = ""  # the name of who showed no key
    assert verifier.revoke([nobody]) == 1
    assert not verifier.engine.sessions
    fault = await until_fault_or_end(stream)
    assert fault is not None
    assert fault.code is FaultCode.UNAUTHENTICATED
    await transport.close()
    await verifier.stop()
    assert [record.reason for record in records] == ["unauthenticated"]
    assert {reason: n for reason, n in meter.finished.items() if n} == {"unauthenticated": 1}


class Held:
    """A stream whose one message comes when the test says."""

    peer, credential = "peer", ANYBODY

    def __init__(self, first: asyncio.Future[Open]) -> None:
        never: asyncio.Future[Open] = asyncio.get_running_loop().create_future()
        self._coming = [first, never]
        self.asked = asyncio.Event()

    async def receive(self) -> Open:
        self.asked.set()
        return await self._coming.pop(0)

    async def send(self, message: Downlink) -> None:
        """It is lost."""

    async def close(self) -> None:
        """It holds nothing."""


async def test_an_open_that_comes_as_its_stream_ends_leaves_no_session_attached() -> None:
    verifier = Verifier(ToyTarget(MODEL), Limits(context_length=256))
    first: asyncio.Future[Open] = asyncio.get_running_loop().create_future()
    stream = Held(first)
    serving = asyncio.create_task(verifier.serve(stream))
    await stream.asked.wait()
    first.set_result(Open("s", "", "", PROMPT, sampling=SamplingParams(max_tokens=4)))
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(session.attached for session in verifier.engine.sessions.values())
    await verifier.stop()
