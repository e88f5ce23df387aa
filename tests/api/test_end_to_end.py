"""Tests of agent and verifier over real gRPC on this machine: the Python API against the real
daemon, and real models, namely the bundled pair and a checkpoint that is exported first.

Oracle: the toy model's output, computed by the scalar specification one token at a time. The stream
must be that output whatever drafts, and whatever the policy, the link or a fault do. An adapter of
the toy target is another toy model, so the oracle of a generation with an adapter is that model's
output.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import edgespec
from edgespec.config import AgentConfig, DraftSection, PolicyName, PolicySection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.ports import DeviceStream
from edgespec.core.protocol.messages import Fault, FaultCode, FinishReason, Open, Opened, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions, Chunk, GenerationError
from edgespec.device.build import build_agent, connect, load_drafter, with_port
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.tokenizer import TextTokenizer
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.verifier.build import load_target
from edgespec.wire.codec import encode_uplink
from tests.kit.live_verifier import GatedTarget, occupy_address, own_port, serve_toy, toy_text
from tests.kit.scripted_verifier import connect_loopback, stream_output
from tests.kit.tiny_checkpoints import write_checkpoint
from tests.present import require
from tests.verifier.fake_vllm import adapted_toy

PROMPT = "the quick brown fox"
IDS = ToyTokenizer().encode(PROMPT)
GREEDY = SamplingParams(max_tokens=40)

SAMPLED = SamplingParams(
    max_tokens=40, temperature=0.9, top_k=20, top_p=0.95, seed=11, frequency_penalty=0.5
)

QUICK = ReconnectPolicy(first_s=0.01, longest_s=0.05, give_up_first_s=0.5, give_up_s=20.0)


def make_config(address: str, draft: str = "toy", **policy: object) -> AgentConfig:
    return AgentConfig(
        verifier=address,
        tokenizer="toy",
        draft=DraftSection(model=draft),
        policy=PolicySection(**policy),  # type: ignore[arg-type] # the tests' own keys
        reconnect=QUICK,
    )


async def collect(agent: Agent, params: SamplingParams, prompt: str = PROMPT) -> list[Chunk]:
    return [chunk async for chunk in agent.generate(prompt, params)]


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("run_ahead", list(RunAhead))
@pytest.mark.parametrize(
    ("name", "gamma", "width"),
    [
        ("windowed", None, 2),
        ("pearl", None, 1),
        ("fixed", 4, 1),
        ("fixed", 3, 2),
    ],
)
async def test_the_text_is_the_targets_own(
    name: str, gamma: int | None, width: int, run_ahead: RunAhead, params: SamplingParams
) -> None:
    expected = toy_text(IDS, params)
    async with serve_toy() as (address, _):
        for draft in ("toy", "random", "none"):
            settings = make_config(
                address, draft, name=PolicyName(name), gamma=gamma, width=width, run_ahead=run_ahead
            )
            async with build_agent(settings) as agent:
                chunks = await collect(agent, params)
            assert tokens_of(chunks) == expected, draft
            assert chunks[-1].finish is FinishReason.LENGTH
            text = "".join(chunk.text for chunk in chunks)
            assert text == ToyTokenizer().decode(expected)


@pytest.mark.parametrize("draft", ["toy", "none"])
async def test_a_verifier_that_dies_and_is_replaced_is_not_noticed(draft: str) -> None:
    gated = GatedTarget(load_target(TOY), free_passes=5)
    received: list[Chunk] = []
    port = own_port()
    async with serve_toy(gated, port) as (address, _):
        agent = build_agent(make_config(address, draft))
        task = asyncio.create_task(collect_into(received, agent))
        await asyncio.to_thread(gated.reached.wait)
        gated.gate.set()  # the old verifier's thread may end now, whether or not its server is gone
    async with serve_toy(port=port):
        await task
        await agent.close()
    assert tokens_of(received) == toy_text(IDS, LONG)
    assert require(agent.stats).counters.reconnects > 0


async def collect_into(received: list[Chunk], agent: Agent) -> None:
    async for chunk in agent.generate(PROMPT, LONG):
        received.append(chunk)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"model": "other"}, "UNKNOWN_MODEL", "unknown model 'other'.*serves 'toy'"),
        ({"draft": None}, "VOCABULARY_MISMATCH", "must share one tokenizer"),
        ({"prompt": "long"}, "CONTEXT_TOO_LONG", "4096"),
    ],
)
async def test_a_refusal_says_why(change: dict[str, str | None], code: str, message: str) -> None:
    text = ToyTokenizer()
    async with serve_toy() as (address, _):
        info = load_target(TOY).info
        drafter = None
        if "draft" in change:
            drafter = ToyDrafter(TOY_MODEL, replace(info, vocabulary="another one"))
        options = AgentOptions(model=change.get("model") or "")
        async with Agent(connect(address), drafter, text.encode, text.stream, options) as agent:
            with pytest.raises(GenerationError, match=message) as caught:
                await collect(agent, GREEDY, "a" * 4096 if "prompt" in change else PROMPT)
            assert caught.value.code is FaultCode[code]


async def test_a_prompt_beyond_the_drafts_context_is_served_without_drafting() -> None:
    text = ToyTokenizer()
    async with serve_toy() as (address, _):
        short = replace(load_target(TOY).info, context_length=len(IDS))
        drafter = ToyDrafter(TOY_MODEL, short)
        async with Agent(connect(address), drafter, text.encode, text.stream) as agent:
            assert tokens_of(await collect(agent, GREEDY)) == toy_text(IDS, GREEDY)
            assert require(agent.stats).counters.sent == 0


TOY = VerifierConfig(model="toy", port=0)
LONG = SamplingParams(max_tokens=120)


async def test_a_half_closed_stream_that_is_refused_ends_with_the_status_of_the_fault() -> None:
    async with serve_toy() as (address, _):
        channel = grpc.aio.insecure_channel(address)
        method: Any = channel.stream_stream("/edgespec.v1.Verifier/Speculate", None, None)
        call = method()
        await call.write(encode_uplink(Open("session", "another model", "", (1, 2))))
        await call.done_writing()
        assert b"unknown model" in await call.read()
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        await channel.close(None)


async def test_no_secret_and_no_whole_session_id_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="edgespec")
    session_id = "3f2c9a7e-of-which-the-rest-is-nobody's-business"
    async with serve_toy() as (address, _):
        transport = connect(address)
        for prompt in ((1, 2), (1, 2), (3,)):
            stream = await transport.connect()
            await stream.send(Open(session_id, "", "", prompt, session_secret=b"hush" * 4))
            first = await stream.receive()
            assert isinstance(first, Opened | Fault)
            await stream.close()
        await transport.close()
    assert session_id not in caplog.text
    assert "hush" not in caplog.text


# --- the Python API as a user meets it ------------------------------------------------------------


STORY = "once upon a time"
PARAMS = edgespec.SamplingParams(max_tokens=32, temperature=0.7, seed=3)
EXPECTED = ToyTokenizer().decode(toy_text(ToyTokenizer().encode(STORY), PARAMS))


def test_every_public_name_is_there() -> None:
    for name in edgespec.__all__:
        assert getattr(edgespec, name) is not None
    assert set(edgespec.__all__) <= set(dir(edgespec))
    with pytest.raises(AttributeError, match="no attribute 'agent_'"):
        edgespec.agent_  # noqa: B018 # the access is the test


async def test_async_session(address: str) -> None:
    text = ""
    async with edgespec.connect(address, draft="toy") as agent:
        async for chunk in agent.generate(STORY, PARAMS):
            text += chunk.text
    assert text == EXPECTED


def test_sync_session(address: str) -> None:
    with edgespec.SyncAgent(
        address, draft="toy", policy=edgespec.Policy(name=PolicyName.FIXED, gamma=3)
    ) as agent:
        for _ in range(2):
            assert "".join(chunk.text for chunk in agent.generate(STORY, PARAMS)) == EXPECTED
        assert require(agent.stats).counters.committed == PARAMS.max_tokens


def test_leaving_a_sync_loop_early_frees_the_agent(address: str) -> None:
    # the values that unset variables would give
    unset: dict[str, Any] = {"tokenizer": None, "policy": None}
    with edgespec.SyncAgent(address, draft="toy", **unset) as agent:
        for chunk in agent.generate(STORY, edgespec.SamplingParams(max_tokens=3000)):
            assert chunk.text is not None
            break
        assert "".join(chunk.text for chunk in agent.generate(STORY, PARAMS)) == EXPECTED
        agent.close()
        agent.close()
        with pytest.raises(RuntimeError, match="closed"):
            next(iter(agent.generate(STORY, PARAMS)))


class Slow:
    """A transport that never connects, and is slow to let go of a cancelled attempt."""

    is_idle = False

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.inner = connect_loopback(stream_output([1]))
        self.info, self.close = self.inner.info, self.inner.close

    async def connect(self) -> DeviceStream:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(1000):
                await asyncio.sleep(0)
        raise AssertionError


def test_a_ctrl_c_while_a_sync_caller_waits_is_a_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, text, wait = Slow(), ToyTokenizer(), Future.result

    def raise_interrupt(future: Future[object], timeout: float | None = None) -> object:
        monkeypatch.setattr(Future, "result", wait)
        assert slow.asked.wait(60.0)
        raise KeyboardInterrupt

    found = Agent(slow, None, text.encode, text.stream)
    monkeypatch.setattr("edgespec.api.connect", lambda address, **_: edgespec.Agent.around(found))
    with edgespec.SyncAgent() as agent:
        monkeypatch.setattr(Future, "result", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(iter(agent.generate(STORY, PARAMS)))


def test_bad_settings_are_named() -> None:
    for kind in (edgespec.connect, edgespec.SyncAgent):
        with pytest.raises(ValueError, match=r"policy\.name is 'eagle', but must be one of"):
            kind("127.0.0.1:1", draft="toy", policy="eagle")
    with pytest.raises(ValueError, match="neither 'bundled', nor a folder"):
        edgespec.SyncAgent("127.0.0.1:1", draft="no/such/folder")


TEXT = ToyTokenizer()
SQL = replace(TOY_MODEL, order=2)
STORY_PARAMS = SamplingParams(max_tokens=32, ignore_eos=True)
STORY_IDS = TEXT.encode(STORY)
OWN, IN_SQL = (
    TEXT.decode(toy_text(STORY_IDS, STORY_PARAMS)),
    TEXT.decode(toy_text(STORY_IDS, STORY_PARAMS, SQL)),
)
WITHIN_S = 120.0


async def generate_text(agent: edgespec.Agent, model: str = "") -> str:
    return "".join([chunk.text async for chunk in agent.generate(STORY, STORY_PARAMS, model=model)])


async def test_one_agent_takes_a_model_for_each_text() -> None:
    async with serve_toy(adapted_toy({"sql": SQL})) as (address, _):
        async with edgespec.connect(address, draft="toy") as agent:
            assert [one.name for one in await agent.models()] == ["toy", "sql"]
            names = ["", "sql", "toy", "sql", ""]
            found = await asyncio.gather(*(generate_text(agent, name) for name in names))
            assert found == [IN_SQL if name == "sql" else OWN for name in names]
            with pytest.raises(edgespec.GenerationError, match="serves 'toy', 'sql'") as caught:
                await generate_text(agent, "sequel")
            assert caught.value.code is FaultCode.UNKNOWN_MODEL
            with pytest.raises(ValueError, match=r"model is 'xxxx.*at most 256 bytes"):
                await generate_text(agent, "x" * 257)
            with pytest.raises(TypeError, match="model is int, but must be text"):
                await generate_text(agent, 7)  # type: ignore[arg-type] # the test
        async with edgespec.connect(address, draft="none", model="sql") as agent:
            assert [await generate_text(agent), await generate_text(agent, "toy")] == [IN_SQL, OWN]


async def test_who_serves_what_is_told_by_those_that_answer() -> None:
    with occupy_address() as away:
        async with serve_toy(adapted_toy({"sql": SQL})) as (address, _):
            async with edgespec.connect([away, address], draft="toy") as agent:
                assert [one.name for one in await agent.models()] == ["toy", "sql"]
        for addresses in (away, [away, away.replace("127.0.0.1", "localhost")]):
            async with edgespec.connect(addresses, draft="toy") as agent:
                with pytest.raises(edgespec.GenerationError, match="no verifier answers: "):
                    await agent.models()


# --- real models behind the composition root ------------------------------------------------------


PROMPTS = (
    "Once upon a time there was a",
    "def read_lines(path):\n",
    "<|user|>A farmer has 12 hens and buys 7 more. How many hens are there?<|assistant|>",
    "The parser reads the file and",
)
PAIR_GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
PAIR_SAMPLED = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    seed=5,
    max_tokens=24,
    ignore_eos=True,
)
DRAFTS = ("none", "bundled")
# The verifier waits for drafts, so that some are accepted on any machine.
WAITING = PolicySection(run_ahead=RunAhead.NEVER)


async def test_the_text_is_the_targets_own_whatever_drafts() -> None:
    """Oracles: the target's output without a draft, and transformers' greedy output. The bundled
    draft must agree with that text at no fewer than 65 positions in 100, and the random draft only
    by chance."""
    from transformers import AutoModelForCausalLM

    folder = resolve_source("bundled", Purpose.TARGET).folder
    tokenizer = TextTokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    texts: dict[str, list[list[int]]] = {}
    config = VerifierConfig(model="bundled", port=0, server_drafts=False)
    async with serve_toy(load_target(config), config=config) as (address, _):
        for draft in DRAFTS:
            device = AgentConfig(address, draft=DraftSection(draft), policy=WAITING)
            async with build_agent(device) as agent:
                texts[draft] = [
                    [t async for chunk in agent.generate(prompt, params) for t in chunk.tokens]
                    for prompt in PROMPTS
                    for params in (PAIR_GREEDY, PAIR_SAMPLED)
                ]
                assert agent.stats is not None
                assert agent.stats.counters.draft_failure == ""
                assert (agent.stats.counters.sent > 0) == (draft != "none")
    assert all(texts[draft] == texts["none"] for draft in DRAFTS)
    for prompt, text in zip(PROMPTS, texts["none"][::2], strict=True):
        ids = model.dummy_inputs["input_ids"].new_tensor([tokenizer.encode(prompt)])
        said = model.generate(
            ids, do_sample=False, repetition_penalty=1.0, max_new_tokens=48, eos_token_id=None
        )
        assert said[0, ids.shape[1] :].tolist() == text
    for draft, least, most in (("bundled", 0.65, 1.0), ("random", 0.0, 0.02)):
        drafter = require(load_drafter(AgentConfig(draft=DraftSection(draft))))
        hits = 0
        for prompt, text in zip(PROMPTS, texts["none"][::2], strict=True):
            feed, keep = tokenizer.encode(prompt), 0
            drafter.begin(len(feed), PAIR_GREEDY)
            for token in text:
                hits += drafter.step(keep, feed, 1)[0].token == token
                keep, feed = keep + len(feed), [token]
        assert least <= hits / (48 * len(PROMPTS)) <= most
        drafter.close()


def test_cut_off_weights_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises((SetupError, OSError, ValueError), match="cut"):
        load_target(VerifierConfig(model=str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("address", "whole"),
    [
        ("host", "host:7420"),
        ("host:1", "host:1"),
        ("[::1]", "[::1]:7420"),
        ("[::1]:2", "[::1]:2"),
        ("unix:verifier.sock", "unix:verifier.sock"),
    ],
)
def test_an_address_without_a_port_gets_the_default_one(address: str, whole: str) -> None:
    assert with_port(address) == whole
