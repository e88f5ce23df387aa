"""The parameter ``prediction`` over HTTP. Oracles: the output without it, which is the same, and
the number of its tokens that a prediction of the whole output has right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from edgespec.config import PolicySection
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.predicted_text import MAX_PREDICTION_TOKENS
from edgespec.device.agent import MAX_PREDICTION_CHARS
from edgespec.models.toy import ToyTokenizer
from tests.endpoint.live_endpoint import (
    Live,
    ScriptedAgent,
    ask,
    events_of,
    over_script,
    over_toy,
)

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LENGTH = 60
# So that drafts are there to be accepted: the toy's passes take no time.
WAITS = PolicySection(run_ahead=RunAhead.NEVER)


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "abc"}]
    fixed = {"max_tokens": LENGTH, "seed": 1, "ignore_eos": True}
    return {"messages": messages, **fixed, **more}


def content(text: str | Sequence[str]) -> dict[str, Any]:
    parts = text if isinstance(text, str) else [{"type": "text", "text": one} for one in text]
    return {"type": "content", "content": parts}


async def answer(live: Live, data: dict[str, Any], path: str = CHAT) -> tuple[str, dict[str, Any]]:
    """Return the output of a request and its usage."""
    reply = await ask(live, path, data)
    assert reply.status == 200, reply.body
    found = reply.json
    choice = found["choices"][0]
    return choice["message"]["content"] if path == CHAT else choice["text"], found["usage"]


def counted(usage: dict[str, Any]) -> tuple[int, int]:
    """Return the accepted and the rejected tokens of predictions."""
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize("draft", ["none", "toy"])
async def test_a_prediction_brings_the_same_output_sooner(draft: str) -> None:
    async with over_toy(draft=draft, policy=WAITS) as live:
        text, plain = await answer(live, chat(drafts=False))
        assert counted(plain) == (0, 0)
        for prediction in (content(text), content([text[:20], text[20:]])):
            same, usage = await answer(live, chat(prediction=prediction))
            accepted, rejected = counted(usage)
            assert same == text
            assert accepted > LENGTH // 2
            # Nodes behind wrong ones of the model count as wrong.
            assert rejected == 0 or draft == "toy"
            assert usage["edgespec"]["verifier_passes"] < LENGTH // 2
            assert usage["edgespec"]["accepted_tokens"] >= accepted
            assert usage["completion_tokens"] == LENGTH, "no token is billed twice"
        events = await ask(live, CHAT, chat(prediction=content(text), stream=True, n=2))
        assert events.status == 200
        shown = [one for one in events_of(events.body) if isinstance(one, dict)]
        deltas = [one for event in shown for one in event["choices"] if one["index"] == 0]
        assert "".join(one["delta"].get("content", "") for one in deltas) == text


async def test_completions_take_it_too() -> None:
    data = {"prompt": "abc", "max_tokens": LENGTH, "seed": 1, "ignore_eos": True}
    async with over_toy(draft="none", policy=WAITS) as live:
        text, _ = await answer(live, data, COMPLETIONS)
        same, usage = await answer(live, data | {"prediction": content(text)}, COMPLETIONS)
    assert same == text
    assert counted(usage)[0] > LENGTH // 2


async def test_a_wrong_prediction_changes_nothing_and_is_counted() -> None:
    async with over_toy(draft="none", policy=WAITS) as live:
        text, _ = await answer(live, chat(drafts=False))
        other = "".join(chr(ord("a") + (ord(one) * 7 + at) % 26) for at, one in enumerate(text))
        same, usage = await answer(live, chat(prediction=content(other * 9)))
    assert same == text
    assert counted(usage)[1] > 0


async def test_sources_and_metrics_name_the_prediction() -> None:
    async with over_toy(draft="none", policy=WAITS, shows_status=True) as live:
        text, _ = await answer(live, chat(drafts=False))
        _, usage = await answer(live, chat(prediction=content(text), token_sources=True))
        metrics = (await ask(live, "/metrics", method="GET")).body.decode()
    accepted, _ = counted(usage)
    assert usage["edgespec"]["tokens_by_source"]["prediction"] == accepted
    for name in ("edgespec_endpoint", "edgespec_agent"):
        (line,) = [
            one
            for one in metrics.splitlines()
            if one.startswith(f"{name}_accepted_prediction_tokens_total")
        ]
        assert float(line.split()[-1]) == accepted


BAD: dict[str, tuple[Any, str, str]] = {
    "text": ("x", "prediction", "prediction is 'x', but must be an object"),
    "no type": ({"content": "x"}, "prediction.type", 'is None, but must be "content"'),
    "another type": (
        {"type": "file", "content": "x"},
        "prediction.type",
        "prediction.type is 'file', but must be \"content\"",
    ),
    "no content": ({"type": "content"}, "prediction.content", "is None, but must be text, or"),
    "a number": ({"type": "content", "content": 3}, "prediction.content", "is 3, but must be text"),
    "a part of another type": (
        {"type": "content", "content": [{"type": "image_url", "image_url": {}}]},
        "prediction.content[0].type",
        "is 'image_url', but must be \"text\"",
    ),
    "no part": ({"type": "content", "content": ["x"]}, "prediction.content[0]", "must be an objec"),
    "too many characters": (
        content("a" * (MAX_PREDICTION_CHARS + 1)),
        "prediction.content",
        f"has {MAX_PREDICTION_CHARS + 1:,} characters, but at most {MAX_PREDICTION_CHARS:,}",
    ),
    "too many tokens": (
        content("a" * (MAX_PREDICTION_TOKENS + 1)),
        "prediction.content",
        f"has {MAX_PREDICTION_TOKENS + 1:,} tokens, but may have at most {MAX_PREDICTION_TOKENS:,}",
    ),
    "half a character": (content("\ud800"), "prediction.content", "half of a surrogate pair"),
}


@pytest.mark.parametrize(("prediction", "param", "message"), BAD.values(), ids=BAD)
async def test_what_is_no_prediction_is_refused_by_name(
    prediction: Any, param: str, message: str
) -> None:
    async with over_script(ScriptedAgent(("a",)), ToyTokenizer()) as live:
        reply = await ask(live, CHAT, chat(prediction=prediction))
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize("prediction", [None, content(""), content([])])
async def test_an_empty_prediction_is_none(prediction: Any) -> None:
    async with over_toy(policy=WAITS) as live:
        _, usage = await answer(live, chat(prediction=prediction))
    assert counted(usage) == (0, 0)


async def test_responses_do_not_have_it() -> None:
    """OpenAI's Responses API has no prediction, and its usage no counts of one."""
    async with over_toy() as live:
        reply = await ask(live, RESPONSES, {"input": "abc", "max_output_tokens": 5})
    assert reply.status == 200
    assert reply.json["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
