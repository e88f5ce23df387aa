"""Tests of the Python API: whole outputs, streams, chats, timeouts, errors, and the test kit.

Oracle: the outputs that ``ScriptedVerifier`` was given, the definition of a finished answer in
OpenAI's API, and the tree of exceptions that ``core/protocol/errors.py`` draws.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import pytest

import edgespec
from edgespec.core.device import events as ev
from edgespec.core.ports import LinkError, VerifierStream
from edgespec.core.protocol import errors
from edgespec.core.protocol import messages as m
from edgespec.device.agent import Agent as DeviceAgent
from edgespec.device.agent import AgentOptions, generation_error
from edgespec.device.connections import Connections
from edgespec.testing import TOKENIZER, LoopbackTransport, ScriptedVerifier
from tests.kit.letters import LettersTokenizer
from tests.kit.scripted_verifier import QUICK, connect_loopback

TALE = " upon a time there was a fox"
IDS = tuple(TOKENIZER.encode(TALE))


def script_verifier(*texts: str, **options: Any) -> ScriptedVerifier:
    return ScriptedVerifier([TOKENIZER.encode(text) for text in texts], **options)


async def test_a_completion_is_the_whole_output() -> None:
    async with script_verifier(TALE, commit_sizes=(3, 1)).agent() as agent:
        completion = await agent.complete("once", max_tokens=64)
    assert (completion.text, completion.tokens) == (TALE, IDS)
    assert completion.finish is edgespec.FinishReason.STOP
    prompt_tokens = len(TOKENIZER.encode("once"))
    assert completion.usage == edgespec.Usage(prompt_tokens, len(IDS))
    assert completion.usage.total_tokens == prompt_tokens + len(IDS)
    assert completion.stats.counters.committed == len(IDS)
    assert (completion.logprobs, completion.tool_calls) == ((), ())


async def test_keywords_win_over_the_sampling_parameters() -> None:
    verifier = script_verifier(TALE)
    async with verifier.agent() as agent:
        usual = edgespec.SamplingParams(temperature=0.5, max_tokens=99)
        await agent.complete("once", sampling=usual, max_tokens=64, seed=7)
        with pytest.raises(ValueError, match="temperature is -1"):
            await agent.complete("once", temperature=-1.0)
        with pytest.raises(TypeError, match="tempurature"):
            await agent.complete("once", tempurature=1.0)  # type: ignore[call-arg] # the test
    (opened,) = verifier.opened
    assert opened.sampling == edgespec.SamplingParams(temperature=0.5, max_tokens=64, seed=7)


def test_every_field_of_the_sampling_parameters_is_a_keyword() -> None:
    keywords = get_type_hints(edgespec.SamplingFields)
    theirs = get_type_hints(edgespec.SamplingParams)
    assert keywords == {field.name: theirs[field.name] for field in fields(edgespec.SamplingParams)}


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of ``function`` with their types, its unpacked keywords among them."""
    found = {name: hint for name, hint in get_type_hints(function).items() if name != "return"}
    for name, hint in list(found.items()):
        if get_origin(hint) is Unpack:
            del found[name]
            (keywords,) = get_args(hint)
            found |= get_type_hints(keywords)
    return found


def test_the_synchronous_agent_has_the_same_calls() -> None:
    for name, function in inspect.getmembers(edgespec.Agent, inspect.isfunction):
        if name.startswith("_") or name in ("load", "chat_prompt"):
            continue
        theirs = parameters_of(function)
        theirs.pop("started", None)
        assert parameters_of(getattr(edgespec.SyncAgent, name)) == theirs, name
    assert parameters_of(edgespec.SyncAgent.__init__) == parameters_of(edgespec.connect)


@pytest.mark.parametrize("name", ["complete", "chat"])
def test_every_option_of_a_stream_is_one_of_a_whole_output(name: str) -> None:
    theirs, own = (parameters_of(getattr(edgespec.Agent, one)) for one in ("stream", name))
    del theirs["prompt"]
    assert own.items() >= theirs.items()


async def test_a_stream_has_its_own_statistics() -> None:
    async with script_verifier(TALE, " a fox").agent() as agent:
        first, second = agent.stream("once"), agent.stream("once")
        with pytest.raises(RuntimeError, match="ask for a chunk first"):
            _ = first.stats
        async with first, second:
            texts = [[chunk.text async for chunk in one] for one in (first, second)]
        assert ["".join(text) for text in texts] == [TALE, " a fox"]
        counts = [one.stats.counters.committed for one in (first, second)]
        assert counts == [len(IDS), len(TOKENIZER.encode(" a fox"))]
        with pytest.raises(RuntimeError, match="read to its end before"):
            await first.read()


async def test_a_stream_reads_on_from_where_its_reader_stands() -> None:
    async with script_verifier(TALE).agent() as agent, agent.stream("once") as stream:
        first = await anext(stream)
        rest = await stream.read()
    assert first.text + rest.text == TALE
    assert rest.finish is edgespec.FinishReason.STOP


class Waiting:
    """A verifier that opens a generation and then sends nothing."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def serve(self, stream: VerifierStream) -> None:
        opening = await stream.receive()
        assert isinstance(opening, m.Open)
        await stream.send(m.Opened(m.Limits(), "waiting", len(opening.prompt)))
        try:
            while True:
                await stream.receive()
        except LinkError:
            self.ended.set()
            raise


async def test_a_call_ends_after_its_timeout_and_leaves_nothing_behind() -> None:
    verifier = Waiting()
    device = DeviceAgent(connect_loopback(verifier.serve), None, TOKENIZER.encode, TOKENIZER.stream)
    async with edgespec.Agent.around(device) as agent:
        with pytest.raises(edgespec.GenerationTimeout, match=r"timeout_s, 0\.01 s") as caught:
            await agent.complete("once", timeout_s=0.01)
        assert isinstance(caught.value, TimeoutError)
        await verifier.ended.wait()


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        pytest.param(ev.Fail("gone", is_disconnected=True), edgespec.ConnectError, id="lost link"),
        pytest.param(ev.Fail("a bug"), edgespec.GenerationError, id="the device failed"),
        pytest.param(
            ev.Fail("full", m.FaultCode.OVERLOADED, 3.5), edgespec.Overloaded, id="overloaded"
        ),
        pytest.param(
            ev.Fail("stop", m.FaultCode.SHUTTING_DOWN), edgespec.Overloaded, id="shutting down"
        ),
        pytest.param(
            ev.Fail("long", m.FaultCode.CONTEXT_TOO_LONG), edgespec.InvalidRequest, id="too long"
        ),
        pytest.param(
            ev.Fail("key", m.FaultCode.UNAUTHENTICATED), edgespec.Unauthenticated, id="no key"
        ),
        pytest.param(ev.Fail("bug", m.FaultCode.INTERNAL), edgespec.Refused, id="internal"),
    ],
)
def test_each_failure_has_its_exception(
    failure: ev.Fail, kind: type[edgespec.GenerationError]
) -> None:
    error = generation_error(failure)
    assert type(error) is kind
    assert (str(error), error.code) == (failure.why, failure.code)
    assert getattr(error, "retry_after_s", 0.0) == failure.retry_after_s


def test_the_drawn_tree_of_exceptions_is_the_real_one() -> None:
    lines = re.findall(r"^([ │├└─]*)(\w+)\b.*$", errors.__doc__ or "", re.MULTILINE)
    drawn: dict[str, str] = {}
    path: list[str] = []
    for indent, name in lines:
        if not hasattr(edgespec, name) and name != "ConstraintBusyError":
            continue
        depth = (len(indent) - 4) // 4
        path[depth:] = [name]
        drawn[name] = path[depth - 1] if depth else "Exception"
    classes: list[type[Exception]] = [
        edgespec.EdgespecError,
        *list_subclasses_of(edgespec.EdgespecError),
    ]
    real = {one.__name__: one.__bases__[0].__name__ for one in classes}
    assert drawn == {name: base for name, base in real.items() if name in drawn}
    assert len(drawn) == 12 - 1
    assert {name for name in real if hasattr(edgespec, name)} <= drawn.keys()


def list_subclasses_of(kind: type[Exception]) -> list[type[Exception]]:
    return [
        one for direct in kind.__subclasses__() for one in (direct, *list_subclasses_of(direct))
    ]


async def test_a_refusal_names_when_to_come_back() -> None:
    fault = m.Fault(m.FaultCode.OVERLOADED, "2 streams are open, the limit is 2", 7.5)
    transport, options = (
        connect_loopback(ScriptedVerifier([fault]).serve),
        AgentOptions(reconnect=QUICK),
    )
    device = DeviceAgent(transport, None, TOKENIZER.encode, TOKENIZER.stream, options)
    async with edgespec.Agent.around(device) as agent:
        with pytest.raises(edgespec.Overloaded, match="the limit is 2") as caught:
            await agent.complete("once")
    assert caught.value.retry_after_s == 7.5


async def test_no_verifier_is_a_connect_error() -> None:
    device = DeviceAgent(
        connect_loopback(Waiting().serve), None, TOKENIZER.encode, TOKENIZER.stream
    )
    assert isinstance(device.transport, LoopbackTransport)
    device.transport.refuse("nobody listens")
    async with edgespec.Agent.around(device) as agent:
        with pytest.raises(edgespec.ConnectError, match="nobody listens"):
            await agent.models()


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "fox"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


async def test_a_chat_is_rendered_and_its_calls_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = LettersTokenizer(TEMPLATE)
    verifier = ScriptedVerifier([texts.encode(f"Let me see. {CALL}"), texts.encode("A fox.")])
    device = DeviceAgent(connect_loopback(verifier.serve), None, texts.encode, texts.stream)
    monkeypatch.setattr("edgespec.api.load_tokenizer", lambda reference: texts)
    messages = [{"role": "user", "content": "what is a fox?"}]
    async with edgespec.Agent.around(device) as agent:
        called = await agent.chat(messages, tools=TOOLS)
        answered = await agent.chat(messages)
    assert called.text == "Let me see."
    assert [(call.name, call.arguments) for call in called.tool_calls] == [
        ("look_up", '{"word": "fox"}')
    ]
    assert (answered.text, answered.tool_calls) == ("A fox.", ())
    with_tools, without = (texts.decode(one.prompt) for one in verifier.opened)
    assert "look_up" in with_tools
    assert without == "user: what is a fox?\nassistant:"


async def test_a_verifier_can_be_started_from_python() -> None:
    async with edgespec.run_verifier("toy") as server:
        assert server.model.name == "toy"
        async with edgespec.connect(server.address, draft="toy") as agent:
            found = await agent.complete("once upon", max_tokens=16)
            assert len(found.tokens) == 16
            loop = threading.get_ident()
    with pytest.raises(ValueError, match="no/such/model"):
        async with edgespec.run_verifier("no/such/model"):
            raise AssertionError(loop)


async def test_loading_does_not_hold_up_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def load(config: edgespec.AgentConfig, connections: Connections) -> DeviceAgent:
        begun.set()
        assert go_on.wait(60.0)
        return DeviceAgent(
            connect_loopback(Waiting().serve), None, TOKENIZER.encode, TOKENIZER.stream
        )

    monkeypatch.setattr("edgespec.api._build", load)
    agent = edgespec.connect("127.0.0.1:1", draft="toy")
    loading = [asyncio.create_task(agent.load()) for _ in range(2)]
    await asyncio.to_thread(begun.wait, 60.0)  # the loop runs while the model is loaded
    go_on.set()
    await asyncio.gather(*loading)
    await agent.close()
    await agent.close()
    with pytest.raises(RuntimeError, match="the agent is closed"):
        await agent.complete("once")
