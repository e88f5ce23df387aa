"""The Python API as a user meets it, against the real daemon. Of models by name, the oracle: an
adapter is another toy model, so its text is that one's, by the scalar specification."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest

import edgespec
from edgespec.core.ports import DeviceStream
from edgespec.core.protocol.messages import FaultCode
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from tests.present import present
from tests.shell.fake_vllm import adapted_toy
from tests.shell.live_verifier import nobody, serving, toy_text
from tests.shell.scripted_verifier import loopback, streaming

PROMPT = "once upon a time"
PARAMS = edgespec.SamplingParams(max_tokens=32, temperature=0.7, seed=3)
EXPECTED = ToyTokenizer().decode(toy_text(ToyTokenizer().encode(PROMPT), PARAMS))


def test_every_public_name_is_there() -> None:
    for name in edgespec.__all__:
        assert getattr(edgespec, name) is not None
    assert set(edgespec.__all__) <= set(dir(edgespec))
    with pytest.raises(AttributeError, match="no attribute 'agent_'"):
        edgespec.agent_  # noqa: B018 # the access is the test


async def test_async_session(address: str) -> None:
    text = ""
    async with edgespec.connect(address, draft="toy") as agent:
        async for chunk in agent.generate(PROMPT, PARAMS):
            text += chunk.text
    assert text == EXPECTED


def test_sync_session(address: str) -> None:
    with edgespec.SyncAgent(address, draft="toy", policy="fixed", gamma=3) as agent:
        for _ in range(2):
            assert "".join(chunk.text for chunk in agent.generate(PROMPT, PARAMS)) == EXPECTED
        assert present(agent.stats).counters.committed == PARAMS.max_tokens


def test_leaving_a_sync_loop_early_frees_the_agent(address: str) -> None:
    with edgespec.SyncAgent(address, draft="toy") as agent:
        for chunk in agent.generate(PROMPT, edgespec.SamplingParams(max_tokens=3000)):
            assert chunk.text is not None
            break
        assert "".join(chunk.text for chunk in agent.generate(PROMPT, PARAMS)) == EXPECTED
        agent.close()
        agent.close()
        with pytest.raises(RuntimeError, match="closed"):
            next(iter(agent.generate(PROMPT, PARAMS)))


class Slow:
    """A transport that never connects, and takes its time to let go."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.inner = loopback(streaming([1]))
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

    def interrupted(future: Future[object], timeout: float | None = None) -> object:
        monkeypatch.setattr(Future, "result", wait)
        assert slow.asked.wait(60.0)
        raise KeyboardInterrupt

    with edgespec.SyncAgent.of(Agent(slow, None, text.encode, text.stream)) as agent:
        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(agent.generate(PROMPT, PARAMS)))


def test_bad_settings_are_named() -> None:
    for kind in (edgespec.connect, edgespec.SyncAgent):
        with pytest.raises(ValueError, match=r"policy\.name is 'eagle', but must be one of"):
            kind("127.0.0.1:1", draft="toy", policy="eagle")
        with pytest.raises(ValueError, match="neither 'bundled', nor a folder"):
            kind("127.0.0.1:1", draft="no/such/folder")


TEXT = ToyTokenizer()
SQL = replace(TOY_MODEL, order=2)
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
IDS = TEXT.encode(PROMPT)
OWN, IN_SQL = TEXT.decode(toy_text(IDS, GREEDY)), TEXT.decode(toy_text(IDS, GREEDY, SQL))
WITHIN_S = 120.0


async def text(agent: Agent, model: str = "") -> str:
    return "".join([chunk.text async for chunk in agent.generate(PROMPT, GREEDY, model=model)])


async def test_one_agent_takes_a_model_for_each_text() -> None:
    async with serving(adapted_toy({"sql": SQL})) as (address, _):
        async with edgespec.connect(address, draft="toy") as agent:
            assert [one.name for one in await agent.models()] == ["toy", "sql"]
            names = ["", "sql", "toy", "sql", ""]
            found = await asyncio.gather(*(text(agent, name) for name in names))
            assert found == [IN_SQL if name == "sql" else OWN for name in names]
            with pytest.raises(edgespec.GenerationError, match="serves 'toy', 'sql'") as caught:
                await text(agent, "sequel")
            assert caught.value.code is FaultCode.UNKNOWN_MODEL
            with pytest.raises(ValueError, match=r"model is 'xxxx.*at most 256 bytes"):
                await text(agent, "x" * 257)
            with pytest.raises(TypeError, match="model is int, but must be text"):
                await text(agent, 7)  # type: ignore[arg-type] # the test
        async with edgespec.connect(address, draft="none", model="sql") as agent:
            assert [await text(agent), await text(agent, "toy")] == [IN_SQL, OWN]


async def test_who_serves_what_is_told_by_those_that_answer() -> None:
    with nobody() as away:
        async with serving(adapted_toy({"sql": SQL})) as (address, _):
            async with edgespec.connect([away, address], draft="toy") as agent:
                assert [one.name for one in await agent.models()] == ["toy", "sql"]
        for addresses in (away, [away, away.replace("127.0.0.1", "localhost")]):
            async with edgespec.connect(addresses, draft="toy") as agent:
                with pytest.raises(edgespec.GenerationError, match="no verifier answers: "):
                    await agent.models()
