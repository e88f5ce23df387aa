"""OpenAI's JavaScript client, unchanged, against a real server. Oracle: as for the Python one.

Needs Node, and the client where Node finds it: ``npm install openai`` in any folder, and
``NODE_PATH`` its ``node_modules``. Skipped without.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from edgespec.endpoint.requests import seed_of
from tests.endpoint.live_endpoint import over_toy
from tests.endpoint.test_openai_client import PROMPT, SAMPLED, chatted, said

SCRIPT = Path(__file__).with_name("openai_client.mjs")
WITHIN_S = 120.0


@pytest.fixture
def node() -> str:
    found = shutil.which("node")
    if found is None:
        pytest.skip("Node is not installed")
    tried = subprocess.run([found, "-e", 'require("openai")'], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("NODE_PATH leads to no openai")
    return found


async def test_the_javascript_client_gets_what_it_expects(node: str) -> None:
    async with over_toy() as live:
        client = await asyncio.create_subprocess_exec(
            *(node, str(SCRIPT), live.url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(WITHIN_S):
                out, err = await client.communicate()
                await live.endpoint.idle()  # the aborted one is cancelled here, too
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
    assert client.returncode == 0, err.decode()
    found = json.loads(out)
    text = chatted(**SAMPLED)
    assert found["whole"]["choices"][0]["message"]["content"] == text
    assert found["streamed"]["text"] == found["helper"] == text
    assert found["streamed"]["finish"] == found["whole"]["choices"][0]["finish_reason"] == "length"
    assert found["streamed"]["usage"]["completion_tokens"] == 24
    assert found["whole"]["usage"]["edgespec"]["drafted_tokens"] > 0
    plain = said(PROMPT, max_tokens=24)
    assert found["completion"]["choices"][0]["text"] == plain
    stopped, stop = found["stopped"]["choices"][0], found["stop"]
    assert (stopped["text"], stopped["finish_reason"]) == (plain[: plain.index(stop)], "stop")
    laws = [{**SAMPLED, "seed": seed_of(5, k)} for k in range(3)]
    assert [one["text"] for one in found["several"]["choices"]] == [said(PROMPT, **o) for o in laws]
    scores = found["scored"]["choices"][0]["logprobs"]["content"]
    assert len(scores) == 24
    assert all(len(one["top_logprobs"]) == 2 for one in scores)
    assert found["models"] == ["toy"]
    kinds = {name: (one["kind"], one["status"]) for name, one in found["errors"].items()}
    bad = ("BadRequestError", 400)
    assert kinds == {"model": ("NotFoundError", 404), "value": bad, "name": bad}
    assert found["errors"]["value"]["param"] == "max_tokens"
    assert found["chunks_before_abort"] >= 3
