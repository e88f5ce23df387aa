"""A verifier that streams a given generation in given commits, in this event loop over the
loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.ports import Drafter, LinkError, ServeStream, Transport, VerifierStream
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions, Chunk
from edgespec.models.toy import ToyTokenizer
from edgespec.telemetry.trace import Tracer
from edgespec.testing import LoopbackTransport, play_output
from tests.kit.echo_verifier import INFO

TEXT = ToyTokenizer()
PROMPT = TEXT.encode("once")
QUICK = ReconnectPolicy(first_s=0.001, longest_s=0.002, give_up_first_s=0.2, give_up_s=0.2)


def stream_output(
    tokens: Sequence[int],
    sizes: Sequence[int] = (1,),
    finish: m.FinishReason = m.FinishReason.LENGTH,
    once: Callable[[], bool] = lambda: True,
) -> ServeStream:
    """Return a stream handler that commits all tokens, with the sizes of ``sizes`` in a cycle. The
    first commit waits until ``once`` holds, which another thread may bring about."""

    async def serve(stream: VerifierStream) -> None:
        opening = await stream.receive()
        if not isinstance(opening, m.Open):  # the device failed before it opened
            return
        while not once():  # noqa: ASYNC110 # of things that have no event
            await asyncio.sleep(0)
        await play_output(stream, opening, tokens, commit_sizes=sizes, finish=finish)

    return serve


def connect_loopback(serve: ServeStream) -> LoopbackTransport:
    return LoopbackTransport(serve, lambda: INFO)


def make_agent(
    transport: Transport,
    drafter: Drafter | None = None,
    reconnect: ReconnectPolicy = QUICK,
    tracer: Tracer | None = None,
) -> Agent:
    options = AgentOptions(reconnect=reconnect)
    return Agent(transport, drafter, TEXT.encode, TEXT.stream, options, tracer=tracer)


def make_undrafted_agent(tokens: Sequence[int], drafter: Drafter) -> Agent:
    """Return an agent whose verifier commits only after the device reported that no draft is
    coming, so that a draft step has failed."""

    async def serve(stream: VerifierStream) -> None:
        opening = await stream.receive()
        assert isinstance(opening, m.Open)
        position = len(opening.prompt)
        await stream.send(m.Opened(m.Limits(), "scripted", position))
        told_so = not opening.drafting
        while not told_so:
            message = await stream.receive()
            told_so = isinstance(message, m.Draft) and not message.tokens
        await stream.send(m.Commit(position, tuple(tokens), finish=m.FinishReason.LENGTH))
        with contextlib.suppress(LinkError):
            while True:
                await stream.receive()

    options = AgentOptions(run_ahead=m.RunAhead.NEVER, reconnect=QUICK)
    return Agent(connect_loopback(serve), drafter, TEXT.encode, TEXT.stream, options)


def generate(
    one: Agent, count: int, stop: tuple[str, ...] = (), prompt: Sequence[int] = tuple(PROMPT)
) -> AsyncGenerator[Chunk, None]:
    return one.generate(prompt, SamplingParams(max_tokens=count, stop=stop))
