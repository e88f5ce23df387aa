"""What an endpoint shows beside OpenAI's API: the page, metrics, a systemd unit.
Oracle: what the scripted agent said; the numbers of the requests that were made."""

from __future__ import annotations

import pytest

from tests.endpoint.live_endpoint import ScriptedAgent, ask, events_of, over_script, over_toy


async def test_the_page_its_numbers_and_the_agents_metrics() -> None:
    async with over_toy(shows_status=True, key="sesame") as live:
        page = await ask(live, "/")
        assert page.status == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert (await ask(live, "/status.json")).status == 401
        key = {"Authorization": "Bearer sesame"}
        assert (
            await ask(live, "/v1/completions", {"prompt": "abc", "max_tokens": 5}, **key)
        ).status == 200
        numbers = (await ask(live, "/status.json", **key)).json
        assert numbers["totals"]["tokens"] == 5
        assert numbers["verifiers"][0]["state"] == "ready"
        lines = (await ask(live, "/metrics", **key)).body.decode().splitlines()
    assert "edgespec_agent_generation_tokens_total 5.0" in lines
    assert 'edgespec_endpoint_completion_tokens_total{model="toy"} 5.0' in lines


@pytest.mark.parametrize("stream", [True, False])
async def test_what_was_ignored_stands_in_a_header(stream: bool) -> None:
    async with over_script(ScriptedAgent(["b"])) as live:
        more = {"num_ctx": 1, "a\r\nb": 2, "echo": True, "stream": stream}
        reply = await ask(live, "/v1/completions", {"prompt": "a", **more})
    assert reply.headers["x-edgespec-ignored"] == "num_ctx, a??b"
    bodies = events_of(reply.body)[:-1] if stream else [reply.json]
    assert "".join(one["choices"][0]["text"] for one in bodies) == "ab"


async def test_texts_are_tokenized_and_back() -> None:
    async with over_toy() as live:
        found = (await ask(live, "/tokenize", {"prompt": "abc"})).json
        assert (found["count"], found["max_model_len"]) == (3, 4096)
        assert (await ask(live, "/tokenize", {"content": "abc"})).json == found
        back = (await ask(live, "/detokenize", {"tokens": found["tokens"]})).json
        assert back["prompt"] == back["content"] == "abc"
        messages = [{"role": "user", "content": "abc"}]
        assert (await ask(live, "/tokenize", {"messages": messages})).json["count"] > 3
        for path, data in (
            ("/detokenize", {"tokens": [1 << 30]}),
            ("/detokenize", {"tokens": "abc"}),
            ("/tokenize", {"prompt": 3}),
            ("/tokenize", {"prompt": "a" * 1_000_000}),
            ("/tokenize", [3]),
        ):
            assert (await ask(live, path, data)).status == 400, (path, data)
        long = await ask(live, "/tokenize", {"prompt": "a" * (5 << 20)})
        assert long.status == 413
