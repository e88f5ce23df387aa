"""A kit for tests of programs that use edgespec: no network, no model, no time.

    verifier = ScriptedVerifier([TOKENIZER.encode(" upon a time")])
    agent = verifier.agent()
    completion = await agent.complete("Once", max_tokens=64)

``LoopbackTransport`` connects an agent to any function that serves streams, in one event loop.
Messages pass through the codec, so their bytes and bounds are the same as on the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from edgespec.api import Agent
from edgespec.core.ports import DeviceStream, LinkError, ServeStream, VerifierStream
from edgespec.core.protocol.credential import ANYBODY
from edgespec.core.protocol.messages import (
    Commit,
    Downlink,
    Fault,
    FaultCode,
    FinishReason,
    Limits,
    Open,
    Opened,
    Uplink,
    VerifierInfo,
)
from edgespec.device import agent as device
from edgespec.models.toy import ToyTokenizer, toy_info
from edgespec.telemetry.logs import log_failure
from edgespec.wire import codec
from edgespec.wire.shaped import Pipe, TrafficMeter

_LOG = logging.getLogger(__name__)

TOKENIZER = ToyTokenizer()
"""The tokenizer of agents made here."""


class ScriptedVerifier:
    """A verifier that answers the n-th generation with the n-th of some outputs, and with the last
    one from then on. It keeps the requests in ``opened``.

    Args:
        outputs: The token ids of each output, or the fault that refuses the generation.
        commit_sizes: Tokens in each commit, over and over.
        finish: How each output ends.
    """

    def __init__(
        self,
        outputs: Sequence[Sequence[int] | Fault],
        *,
        commit_sizes: Sequence[int] = (1,),
        finish: FinishReason = FinishReason.STOP,
    ) -> None:
        self.outputs, self.commit_sizes, self.finish = tuple(outputs), commit_sizes, finish
        self.opened: list[Open] = []

    def agent(self) -> Agent:
        """Return an agent of this verifier, with ``TOKENIZER`` and without a draft model."""
        info = VerifierInfo(model=toy_info(), limits=Limits(), sessions=0, max_sessions=64)
        transport = LoopbackTransport(self.serve, lambda: info)
        return Agent.around(device.Agent(transport, None, TOKENIZER.encode, TOKENIZER.stream))

    async def serve(self, stream: VerifierStream) -> None:
        """Serve one stream."""
        opening = await stream.receive()
        if not isinstance(opening, Open):
            return
        output = self.outputs[min(len(self.opened), len(self.outputs) - 1)]
        self.opened.append(opening)
        if isinstance(output, Fault):
            await stream.send(output)
            return
        await play_output(
            stream, opening, output, commit_sizes=self.commit_sizes, finish=self.finish
        )


async def play_output(
    stream: VerifierStream,
    opening: Open,
    tokens: Sequence[int],
    *,
    commit_sizes: Sequence[int] = (1,),
    finish: FinishReason = FinishReason.LENGTH,
) -> None:
    """Answer ``opening`` with the part of the output ``tokens`` that the device does not hold yet,
    and wait until the device closes the stream."""
    held = len(opening.committed)
    if list(opening.committed) != list(tokens[:held]):
        raise AssertionError(f"the device resumes with {opening.committed}, which is no beginning")
    position = len(opening.prompt) + held
    await stream.send(Opened(Limits(), "scripted", position))
    for part in _cut_parts(tokens[held:], commit_sizes):
        await stream.send(Commit(position, tuple(part)))
        position += len(part)
    await stream.send(Commit(position, (), finish=finish))
    with contextlib.suppress(LinkError):
        while True:
            await stream.receive()


def _cut_parts(tokens: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    start = 0
    for size in itertools.cycle(sizes):
        if start >= len(tokens):
            return
        yield tokens[start : start + size]
        start += size


class LoopbackTransport:
    """A ``Transport`` to a verifier in this event loop.

    Args:
        serve: Serves one stream; each stream runs in a task of its own.
        info: Returns what the verifier announces.
        meter: Counts the messages that arrive.
    """

    def __init__(
        self,
        serve: ServeStream,
        info: Callable[[], VerifierInfo],
        *,
        meter: TrafficMeter | None = None,
    ) -> None:
        self._serve, self._info, self._meter = serve, info, meter
        self._links: dict[_Link, asyncio.Task[None]] = {}
        self._refusal = ""

    @property
    def stream_count(self) -> int:
        """The number of streams that are open."""
        return len(self._links)

    @property
    def is_idle(self) -> bool:
        return not self._links

    async def connect(self) -> DeviceStream:
        """Open a stream. Raises ``LinkError`` after ``close`` or ``refuse``."""
        await self.info()
        link = _Link(self._meter)
        self._links[link] = task = asyncio.create_task(self._run(link))
        task.add_done_callback(lambda _: self._links.pop(link, None))
        return _DeviceEnd(link)

    async def info(self) -> VerifierInfo:
        """Return what the verifier announces. Raises ``LinkError`` after ``refuse``."""
        if self._refusal:
            raise LinkError(self._refusal)
        return self._info()

    async def call_unary(self, name: str, request: bytes) -> bytes:
        """Raise ``LinkError``: a loopback serves streams only."""
        raise LinkError(f"a loopback has no {name}", retryable=False)

    def renew(self) -> None:
        """Lose every stream, as on a new connection."""
        self.cut("the connection was replaced")

    async def close(self) -> None:
        """End all streams, and wait until ``serve`` has returned for each."""
        self.refuse("the loopback was closed here")
        self.cut("the loopback was closed")
        tasks = tuple(self._links.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut(self, reason: str = "the loopback was cut") -> None:
        """Lose every stream with the messages under way on it. New ones can be opened."""
        for link in tuple(self._links):
            link.end(reason, drop=True)

    def refuse(self, reason: str) -> None:
        """Let ``connect`` and ``info`` fail from now on."""
        self._refusal = reason

    async def _run(self, link: _Link) -> None:
        stream = _VerifierEnd(link)
        try:
            await self._serve(stream)
        except LinkError:
            pass  # The device has closed the stream.
        except Exception as error:
            log_failure(_LOG, "a loopback stream failed", error=error, may_quote_client=True)
            why = f"the verifier failed: {type(error).__name__}"
            await stream.send_last(Fault(FaultCode.INTERNAL, why))
        finally:
            link.end("the verifier ended the stream")


class _Link:
    """The two directions of one stream."""

    def __init__(self, meter: TrafficMeter | None) -> None:
        self.up: Pipe[bytes] = Pipe(64)
        self.down: Pipe[bytes] = Pipe(64)
        self._meter = meter

    def end(self, reason: str, *, retryable: bool = True, drop: bool = False) -> None:
        self.up.end(reason, retryable=retryable, drop=drop)
        self.down.end(reason, retryable=retryable, drop=drop)

    def came(self, message: Uplink | Downlink, size: int) -> None:
        if self._meter is not None:
            self._meter.count(message, size)


class _DeviceEnd:
    verifier = "loopback"

    def __init__(self, link: _Link) -> None:
        self._link = link

    async def send(self, message: Uplink) -> None:
        await self._link.up.put(codec.encode_uplink(message))

    async def receive(self) -> Downlink:
        payload = await self._link.down.get()
        message = codec.decode_downlink(payload)
        self._link.came(message, len(payload))
        if isinstance(message, Fault):
            self._link.end(message.message, retryable=message.code.retryable)
        return message

    async def close(self) -> None:
        """Close the stream. Messages that were sent before still arrive."""
        self._link.up.end("the device closed the stream")
        self._link.down.end("the stream was closed here", retryable=False, drop=True)


class _VerifierEnd:
    peer = "loopback"
    credential = ANYBODY

    def __init__(self, link: _Link) -> None:
        self._link = link

    async def send(self, message: Downlink) -> None:
        await self._link.down.put(codec.encode_downlink(message))
        if isinstance(message, Fault):
            self._link.end(message.message, retryable=message.code.retryable)

    async def receive(self) -> Uplink:
        payload = await self._link.up.get()
        try:
            message = codec.decode_uplink(payload)
        except codec.ProtocolViolation as violation:
            await self.send_last(Fault(violation.code, str(violation)))
            raise LinkError(str(violation), retryable=False) from None
        self._link.came(message, len(payload))
        return message

    def send_now(self, message: Downlink) -> bool:
        return False

    async def feed(self, take: Callable[[Uplink], None]) -> NoReturn:
        while True:
            take(await self.receive())

    async def close(self) -> None:
        self._link.end("the verifier closed the stream")

    async def send_last(self, fault: Fault) -> None:
        """Send ``fault``, unless the device has closed the stream."""
        try:
            await self.send(fault)
        except LinkError:
            return
