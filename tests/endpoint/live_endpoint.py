"""Endpoints for tests: a real HTTP server on a free port in this event loop, over the toy's
verifier or over an agent with a script."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from openai import AsyncOpenAI

from edgespec.cli.running import listen
from edgespec.config import AgentConfig, DraftSection, EndpointSection
from edgespec.core.device.events import TokenKind
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.token_origins import TokenOrigin
from edgespec.core.ports import TargetModel
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions, Chunk, GenerationStats, Piece
from edgespec.device.build import build_agent, connect
from edgespec.device.generation_timeline import GenerationTimeline
from edgespec.device.prober import VerifierMonitor
from edgespec.device.status import StatusSource
from edgespec.endpoint.app import build_app
from edgespec.endpoint.server import EndpointServer
from edgespec.endpoint.service import Endpoint
from edgespec.models.grammar import GrammarReader
from edgespec.models.tokenizer import ChatTokenizer
from edgespec.models.toy import ToyTokenizer
from edgespec.telemetry.agent_status import EventKind
from edgespec.verifier.daemon import Verifier
from tests.kit.letters import READER, LettersTokenizer, connect_pair
from tests.kit.live_verifier import serve_toy

QUICK = ReconnectPolicy(give_up_first_s=0.2, first_s=0.01, longest_s=0.05)


@dataclass(slots=True)
class Live:
    """A running endpoint; ``verifier`` is None if there is none."""

    endpoint: Endpoint
    server: EndpointServer
    watch: VerifierMonitor
    verifier: Verifier | None = None
    address: str = ""

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, key: str = "none", **more: Any) -> AsyncOpenAI:
        """Return OpenAI's own client, unchanged, without retries. Close it, or use ``async
        with``."""
        return AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, **more)


@contextlib.asynccontextmanager
async def start_endpoint(
    agent: Agent,
    tokenizer: ChatTokenizer,
    watch: VerifierMonitor,
    settings: EndpointSection | None = None,
    sampling: SamplingParams | None = None,
    key: str = "",
    *,
    status: StatusSource | None = None,
    max_connections: int | None = None,
) -> AsyncIterator[Live]:
    """Start an endpoint in front of the given agent, tokenizer and monitor."""
    settings = settings or EndpointSection()
    endpoint = Endpoint(agent, tokenizer, watch, settings, sampling, key=key)
    with listen("127.0.0.1", 0) as listeners:
        app = build_app(endpoint, status)
        server = EndpointServer(endpoint, app, listeners, settings, max_connections=max_connections)
        await server.start()
        try:
            yield Live(endpoint, server, watch)
        finally:
            await server.stop(0.0)
            await watch.close()


@contextlib.asynccontextmanager
async def over_toy(
    target: TargetModel | None = None, *, draft: str = "toy", **more: Any
) -> AsyncIterator[Live]:
    """Start an endpoint over the toy's verifier, and wait until the monitor knows it."""
    async with serve_toy(target) as (address, verifier):
        async with over_verifiers(address, draft=DraftSection(model=draft), **more) as found:
            found.verifier, found.address = verifier, address
            yield found


@contextlib.asynccontextmanager
async def over_verifiers(
    *addresses: str, shows_status: bool = False, key: str = "", **settings: Any
) -> AsyncIterator[Live]:
    """Start an endpoint over the toy's verifiers at these addresses, and wait until the monitor
    knows them. With one address there is no failover."""
    watch = VerifierMonitor({address: connect(address) for address in addresses})
    async with asyncio.timeout(60.0):
        while len(watch.infos) < len(addresses):
            await watch.refresh()
    given = {"draft": DraftSection(model="toy"), "tokenizer": "toy", **settings}
    async with build_agent(AgentConfig(verifier=addresses, **given)) as agent:
        status = StatusSource(agent, addresses, watch=watch) if shows_status else None
        async with start_endpoint(agent, ToyTokenizer(), watch, key=key, status=status) as found:
            yield found


# A chat template that teaches tool calls and renders the first message's content.
HERMES = "{% for t in tools or [] %}<tool_call>{% endfor %}{{ messages[0].content }}"


@contextlib.asynccontextmanager
async def over_letters(
    reads: GrammarReader | None = READER, drafts: GrammarReader | None = READER
) -> AsyncIterator[Live]:
    """Start an endpoint over a pair that can write JSON; either end may lack the grammar
    library."""
    async with connect_pair(reads, drafts) as agent:
        async with start_endpoint(agent, LettersTokenizer(HERMES), VerifierMonitor({})) as found:
            yield found


@contextlib.asynccontextmanager
async def over_nobody(address: str = "127.0.0.1:1", **more: Any) -> AsyncIterator[Live]:
    """Start an endpoint whose verifier is not there."""
    watch = VerifierMonitor({address: connect(address)}, away_every_s=0.05)
    await watch.refresh()
    config = AgentConfig(
        verifier=address,
        draft=DraftSection(model="none"),
        tokenizer="toy",
        reconnect=more.pop("reconnect", QUICK),
    )
    async with build_agent(config) as agent:
        async with start_endpoint(agent, ToyTokenizer(), watch, **more) as found:
            yield found


@dataclass(slots=True)
class ScriptedAgent:
    """An agent that generates ``pieces``, one per token with ids from 0, and then its finish
    reason. It awaits ``between`` before each piece."""

    pieces: Sequence[str] = ()
    finish: FinishReason = FinishReason.STOP
    ids: Sequence[int] = ()
    between: Callable[[int], Any] | None = None
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    samplings: list[SamplingParams] = field(default_factory=list)
    conversations: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    drafts: list[bool] = field(default_factory=list)
    origins: Sequence[TokenOrigin] = ()
    """Origins of the pieces, repeated as often as needed; empty: they are not recorded."""
    closed: int = 0
    options: AgentOptions = field(default_factory=AgentOptions)

    async def with_matcher(self, sampling: SamplingParams, client: str = "") -> SamplingParams:
        return sampling

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        logprobs: int = 0,
        conversation: str = "",
        model: str = "",
        rule: str = "",
        drafts: bool = True,
        timeline: GenerationTimeline | None = None,
        started: Callable[[GenerationStats], None] | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        self.drafts.append(drafts)
        self.prompts.append(tuple(prompt))
        self.conversations.append(conversation)
        self.models.append(model)
        self.samplings.append(sampling)
        try:
            for place, piece in enumerate(self.pieces):
                if self.between is not None:
                    await self.between(place)
                token = self.ids[place] if self.ids else place
                if timeline is not None and self.origins:
                    self._record(timeline, place)
                yield Chunk(place, (token,), (Piece(piece, TokenKind.DECODED),))
            yield Chunk(len(self.pieces), (), (), self.finish)
        finally:
            self.closed += 1

    def _record(self, timeline: GenerationTimeline, place: int) -> None:
        """Record a pass of 10 ms that brings the token ``place``, 5 ms after the last one."""
        timeline.origins.append(self.origins[place % len(self.origins)])
        at_s = timeline.began_at_s + 0.005 * (place + 1)
        timeline.add(EventKind.PASS, at_s, 2, 0.01)
        timeline.add(EventKind.COMMIT, at_s, 1)
        timeline.speed.add(at_s, 1, 0.01, 2)


@contextlib.asynccontextmanager
async def over_script(
    agent: ScriptedAgent, tokenizer: ChatTokenizer | None = None, **more: Any
) -> AsyncIterator[Live]:
    """Start an endpoint over an agent with a script."""
    inner: Any = agent
    async with start_endpoint(
        inner, tokenizer or ToyTokenizer(), VerifierMonitor({}), **more
    ) as found:
        yield found


# --- HTTP as it is on the wire --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """The bytes that came back over a connection until it was closed."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        return found


def request_bytes(
    path: str, body: bytes = b"", *, method: str = "", headers: dict[str, str] | None = None
) -> bytes:
    """Return one HTTP request that asks to close the connection after the response."""
    method = method or ("POST" if body else "GET")
    every = {"Host": "127.0.0.1", "Connection": "close", **(headers or {})}
    if body and "Transfer-Encoding" not in every:
        every.setdefault("Content-Length", str(len(body)))
    head = "".join(f"{name}: {value}\r\n" for name, value in every.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def exchange(port: int, data: bytes) -> Reply:
    """Send data, and read until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        return parse_reply(await reader.read())
    finally:
        writer.close()


async def ask(
    live: Live, path: str, data: Any = None, *, method: str = "", **headers: str
) -> Reply:
    """Send one request with this JSON. Names of ``headers`` have underscores for dashes."""
    body = b"" if data is None else json.dumps(data).encode()
    every = {name.replace("_", "-"): value for name, value in headers.items()}
    return await exchange(live.port, request_bytes(path, body, method=method, headers=every))


def parse_reply(raw: bytes) -> Reply:
    """Parse a reply, which may have been cut off."""
    connection: Any = SimpleNamespace(makefile=lambda mode: io.BytesIO(raw))
    found = http.client.HTTPResponse(connection)
    found.begin()
    try:
        body = found.read()
    except http.client.IncompleteRead as cut:
        body = cut.partial
    return Reply(found.status, {name.lower(): one for name, one in found.getheaders()}, body)


def events_of(body: bytes) -> list[Any]:
    """Return the data of a stream's events; comments and ``[DONE]`` stay as they are."""
    found: list[Any] = []
    for block in body.decode().split("\n\n"):
        if block.startswith("data: {"):
            found.append(json.loads(block.removeprefix("data: ")))
        elif block:
            found.append(block.removeprefix("data: "))
    return found


# --- every API that generates ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Api:
    """One path that generates text, and how its requests, responses and errors look."""

    path: str
    prompt: dict[str, Any]
    """The fields that hold the prompt."""
    first_bytes: bytes
    """The bytes with which a stream begins."""
    keep_alive: bytes
    """A part of what a stream holds while nothing is generated."""
    overloaded: int = 429
    """Status for a full queue."""

    def request(self, max_tokens: int = 4, *, stream: bool = False, **more: Any) -> dict[str, Any]:
        length: dict[str, Any] = {"max_tokens": max_tokens}
        if self.path == "/v1/responses":
            length = {"max_output_tokens": max_tokens}
        elif self.path.startswith("/api/"):
            length = {"options": {"num_predict": max_tokens}}
        return {"model": "edgespec", **self.prompt, **length, "stream": stream, **more}

    def text(self, reply: Reply) -> str:
        """Return the text of a response, whole or as a stream."""
        if reply.headers["content-type"] == "application/json":
            return self._text(reply.json)
        if self.path.startswith("/api/"):
            return "".join(map(self._text, map(json.loads, reply.body.splitlines())))
        events = [one.partition("\n")[2] or one for one in reply.body.decode().split("\n\n")]
        data = [one.removeprefix("data: ") for one in events if one.startswith("data: {")]
        return "".join(map(self._delta, map(json.loads, data)))

    def _text(self, data: Any) -> str:
        found: Any
        match self.path:
            case "/v1/chat/completions":
                found = data["choices"][0]["message"]["content"]
            case "/v1/completions":
                found = data["choices"][0]["text"]
            case "/v1/responses":
                found = data["output"][0]["content"][0]["text"]
            case "/v1/messages":
                found = "".join(one["text"] for one in data["content"])
            case "/api/chat":
                found = data["message"]["content"]
            case _:
                found = data["response"]
        return str(found)

    def _delta(self, event: Any) -> str:
        found: Any
        match self.path:
            case "/v1/chat/completions":
                found = event["choices"][0]["delta"].get("content", "")
            case "/v1/completions":
                found = event["choices"][0]["text"]
            case "/v1/responses":
                found = event["delta"] if event["type"] == "response.output_text.delta" else ""
            case _:
                found = event.get("delta", {}).get("text", "")
        return str(found)

    def error_message(self, data: Any) -> str:
        """Return the message of an error, and check the shape that it has in this API."""
        if self.path.startswith("/api/"):
            assert set(data) == {"error"}
            return str(data["error"])
        if self.path == "/v1/messages":
            assert set(data) == {"type", "error", "request_id"}
            assert data["type"] == "error"
            assert set(data["error"]) == {"type", "message"}
        else:
            assert set(data) == {"error"}
            assert set(data["error"]) == {"message", "type", "param", "code"}
        return str(data["error"]["message"])


_MESSAGES = {"messages": [{"role": "user", "content": "abc"}]}
APIS = (
    Api("/v1/chat/completions", _MESSAGES, b"data: ", b": keep-alive"),
    Api("/v1/completions", {"prompt": "abc"}, b"data: ", b": keep-alive"),
    Api("/v1/responses", {"input": "abc"}, b"event: response.created", b": keep-alive"),
    Api("/v1/messages", _MESSAGES, b"event: message_start", b"event: ping", 529),
    Api("/api/chat", _MESSAGES, b'{"model":"', b'"content":""},"done":false'),
    Api("/api/generate", {"prompt": "abc"}, b'{"model":"', b'"response":"","done":false'),
)
"""Every API that generates text."""
