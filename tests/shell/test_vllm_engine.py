"""The real vLLM behind the real daemon. Skipped where vLLM is not installed: ``make unit-vllm``.

Oracle: this project's own engine on the same model, in float32. The suite's tests of the same code
on a stand-in are in ``test_vllm_target.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from edgespec.compose import build_agent, load_target
from edgespec.config import AgentConfig, DraftSection, PolicySection, VerifierConfig
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.engines.vllm.install import check_install
from edgespec.setup_error import SetupError
from tests.shell.live_verifier import ready, serving, start
from tests.shell.test_end_to_end import collect, tokens


def _missing() -> str:
    try:
        check_install()
    except SetupError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.vllm, pytest.mark.skipif(bool(_missing()), reason=_missing())]
PROMPT = "It was a cold morning in November, and the old man"
GREEDY = SamplingParams(max_tokens=100)
SAMPLED = replace(
    GREEDY,
    temperature=0.9,
    top_k=40,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.1,
    seed=9,
)
SMALL = ("--enforce-eager", "--kv-cache-memory-bytes", "200000000")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    options = ("--engine", "vllm", "--model", "bundled", "--port", "0", "--log-level", "error")
    with ready(start("verifier", *options, "--", *SMALL)) as (found, _):
        yield found


def _agent(address: str, draft: str, width: int = 1) -> AgentConfig:
    return AgentConfig(
        verifier=address,
        tokenizer="bundled",
        draft=DraftSection(model=draft),
        policy=PolicySection(width=width),
    )


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_texts_are_those_of_the_native_engine(address: str, params: SamplingParams) -> None:
    native = load_target(VerifierConfig(model="bundled", canonical=False))
    async with (
        serving(native) as (other, _),
        build_agent(_agent(other, "none")) as agent,
    ):
        expected = tokens(await collect(agent, params, PROMPT))
    for draft, width in (("none", 1), ("lookup", 1), ("random", 3)):
        async with build_agent(_agent(address, draft, width)) as agent:
            assert tokens(await collect(agent, params, PROMPT)) == expected, draft


def test_a_flag_that_vllm_does_not_know_is_an_error() -> None:
    with start("verifier", "--engine", "vllm", "--port", "0", "--", "--no-such-flag") as process:
        _, said = process.communicate()
    assert process.returncode == 1
    assert "vLLM does not take the flags --no-such-flag" in said
