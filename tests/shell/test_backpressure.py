"""A stream on which nothing leaves stops its own text soon, and nobody else's."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from edgespec.core.ports import DeviceStream, VerifierStream
from edgespec.core.protocol.messages import Commit, Downlink, Limits, Open, Received, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.verifier.daemon import Backlog, Verifier
from edgespec.verifier.targets.toy import ToyTarget
from tests.shell.live_verifier import toy_text
from tests.shell.loopback import LoopbackTransport

MODEL = ToyModel(vocabulary_size=16, order=2)

PROMPT = (1, 2, 3)

SAMPLING = SamplingParams(max_tokens=40)

TEXT = toy_text(PROMPT, SAMPLING, MODEL)


class Held:
    """A stream on which nothing leaves before ``gate`` is set."""

    def __init__(self, inner: VerifierStream, gate: asyncio.Event) -> None:
        self._inner, self._gate = inner, gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def send(self, message: Downlink) -> None:
        await self._gate.wait()
        await self._inner.send(message)


async def _open(transport: LoopbackTransport, key: str) -> DeviceStream:
    stream = await transport.connect()
    request = Open(key, "", "", PROMPT, sampling=SAMPLING, run_ahead=RunAhead.ALWAYS)
    await stream.send(request)
    return stream


async def _read(stream: DeviceStream) -> list[int]:
    tokens: list[int] = []
    while True:
        message = await stream.receive()
        if isinstance(message, Commit):
            tokens += message.tokens
            if message.finish is not None:
                await stream.send(Received(len(PROMPT) + len(tokens), 0))
                return tokens


async def test_a_text_waits_for_what_cannot_leave_and_no_other_text_does() -> None:
    verifier = Verifier(ToyTarget(MODEL), Limits(context_length=256), EngineLimits())
    gate, streams = asyncio.Event(), 0

    async def serve(stream: VerifierStream) -> None:
        nonlocal streams
        streams += 1
        await verifier.serve(cast(VerifierStream, Held(stream, gate)) if streams == 1 else stream)

    transport = LoopbackTransport(serve, lambda: verifier.info)
    held = await _open(transport, "held")
    reading = asyncio.ensure_future(_read(held))
    assert await _read(await _open(transport, "free")) == TEXT
    # Its greeting did not leave, so the end of its first pass found it behind.
    assert verifier.engine.sessions["held"].prefix.length == len(PROMPT) + 1
    gate.set()
    assert await reading == TEXT
    await verifier.stop()


def _commit(number: int) -> Commit:
    return Commit(number, (1,))


async def test_it_takes_no_more_than_its_limit_and_nothing_after_its_end() -> None:
    backlog = Backlog(2)
    assert [backlog.put(_commit(number)) for number in range(3)] == [True, True, False]
    assert await backlog.get() == _commit(0)
    assert backlog.put(_commit(3))
    backlog.end()
    assert not backlog.put(_commit(4))
    assert [await backlog.get() for _ in range(3)] == [_commit(1), _commit(3), None]


async def test_a_cancelled_reader_loses_nothing() -> None:
    backlog = Backlog(2)
    reading = asyncio.ensure_future(backlog.get())
    await asyncio.sleep(0)
    backlog.put(_commit(1))
    reading.cancel()
    await asyncio.wait((reading,))
    assert reading.cancelled()
    assert await backlog.get() == _commit(1)
