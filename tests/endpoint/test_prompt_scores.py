"""Tests of the scores of a prompt: ``echo`` with ``logprobs``, and ``max_tokens: 0``.

Oracle: the toy's logits at each position of the prompt, by the scalar specification; and the scores
that a generation has for the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.config import VerifierConfig
from edgespec.core.ports import PassRequest, PassResult
from edgespec.core.protocol.constraint import (
    MAX_FORCED_TOKENS,
    ConstrainedText,
    Constraint,
    ConstraintError,
    ConstraintKind,
    pack_mask,
    tokens_constraint,
    with_tokens_matcher,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import score_token
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.verifier.build import load_target
from tests.endpoint.live_endpoint import Live, ask, events_of, over_toy
from tests.present import require

COMPLETIONS = "/v1/completions"
TEXT = "the quick brown fox"


def prompt_logprobs(tokens: list[int]) -> list[float | None]:
    scores = [
        score_token(TOY_MODEL.logits(tokens[:place]), tokens[place], 1).logprob
        for place in range(1, len(tokens))
    ]
    return [None, *scores]


async def score(live: Live, **more: Any) -> dict[str, Any]:
    reply = await ask(live, COMPLETIONS, {"echo": True, "logprobs": 2, "max_tokens": 0, **more})
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json
    return found


@pytest.mark.parametrize("draft", ["toy", "none"])
async def test_each_token_of_a_prompt_has_its_score(draft: str) -> None:
    tokens = ToyTokenizer().encode(TEXT)
    async with over_toy(draft=draft) as live:
        of_text = await score(live, prompt=TEXT)
        of_ids = await score(live, prompt=tokens)
        longer = await score(live, prompt=TEXT, max_tokens=3, temperature=0)
        rest = await ask(
            live, COMPLETIONS, {"prompt": TEXT, "logprobs": 2, "max_tokens": 3, "temperature": 0}
        )
    for whole in (of_text, of_ids, longer):
        choice = whole["choices"][0]
        found = choice["logprobs"]
        count = len(tokens)
        assert found["token_logprobs"][:count] == pytest.approx(
            prompt_logprobs(tokens), abs=1e-4, nan_ok=False
        )
        assert found["top_logprobs"][0] is None
        assert all(len(one) >= 2 for one in found["top_logprobs"][1:count])
        assert "".join(found["tokens"][:count]) == TEXT
        assert [TEXT[at] for at in found["text_offset"][:count]] == [*TEXT]
    assert of_text["choices"][0]["text"] == TEXT
    assert of_text["choices"][0]["finish_reason"] == "length"
    assert of_text["usage"]["prompt_tokens"] == len(tokens)
    assert of_text["usage"]["completion_tokens"] == 0
    generated = rest.json["choices"][0]
    assert longer["choices"][0]["text"] == TEXT + generated["text"]
    assert (
        longer["choices"][0]["logprobs"]["token_logprobs"][len(tokens) :]
        == generated["logprobs"]["token_logprobs"]
    )


async def test_a_stream_has_the_same_scores() -> None:
    async with over_toy() as live:
        whole = (await score(live, prompt=TEXT, max_tokens=2, temperature=0))["choices"][0]
        data = {"prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 2, "temperature": 0}
        reply = await ask(live, COMPLETIONS, {**data, "stream": True})
    choices = [one["choices"][0] for one in events_of(reply.body) if isinstance(one, dict)]
    assert "".join(one["text"] for one in choices) == whole["text"]
    parts = [one["logprobs"] for one in choices if one["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for part in parts for value in part[name]] == whole["logprobs"][name]


async def test_end_tokens_in_a_prompt_end_nothing() -> None:
    """The toy's end token stands in the middle of the prompt."""
    end = require(TOY_MODEL.eos_token)
    tokens = [5, end, 7, end, 9]
    async with over_toy() as live:
        found = (await score(live, prompt=tokens))["choices"][0]["logprobs"]
    assert found["token_logprobs"] == pytest.approx(prompt_logprobs(tokens), abs=1e-4)


async def test_one_token_and_several_prompts() -> None:
    async with over_toy() as live:
        found = (await score(live, prompt=["a", "ab", "abc"]))["choices"]
        empty = await ask(live, COMPLETIONS, {"prompt": "ab", "max_tokens": 0})
        chat = await ask(live, "/v1/chat/completions", {"messages": [], "max_tokens": 0})
    assert [len(one["logprobs"]["tokens"]) for one in found] == [1, 2, 3]
    assert empty.json["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "length",
    }
    assert (chat.status, chat.error["param"]) == (400, "max_tokens")


async def test_a_long_prompt_takes_few_passes() -> None:
    """The verifier drafts what the constraint forces, 64 tokens a pass."""
    passes, target = 0, load_target(VerifierConfig(model="toy"))
    forward = target.forward

    def counted(batch: Sequence[PassRequest]) -> Sequence[PassResult]:
        nonlocal passes
        passes += 1
        return forward(batch)

    tokens = [place % 60 for place in range(600)]
    with patch.object(target, "forward", counted):
        async with over_toy(target, draft="none") as live:
            found = await score(live, prompt=tokens)
    assert len(found["choices"][0]["logprobs"]["tokens"]) == 600
    assert passes <= 20


# --- the constraint -------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.data())
def test_a_list_of_tokens_allows_itself_alone(tokens: list[int], data: st.DataObject) -> None:
    constraint = tokens_constraint(tokens)
    text = ConstrainedText(constraint, [3])
    for length in data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)):
        assert text.follow(tokens[:length]) == length
        rest = tokens[length : length + 1]
        assert require(text.mask()) == pack_mask(rest)
        assert text.forced(tokens[:length], 4) == tokens[length : length + 4]
    wrong = [*tokens[:-1], tokens[-1] + 1]
    assert text.follow(wrong) == len(tokens) - 1


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ([], r"number of forced tokens is 0, but must be in \[1, 8192\]"),
        ([1] * (MAX_FORCED_TOKENS + 1), "number of forced tokens is 8193"),
        ([1 << 24], "forced token is 16777216"),
    ],
)
def test_a_list_of_tokens_is_bounded(tokens: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tokens_constraint(tokens)
    assert SamplingParams(constraint=tokens_constraint([1] * MAX_FORCED_TOKENS), ignore_eos=True)


@pytest.mark.parametrize(("text", "match"), [("?", "no base64"), ("YWI=", "has 2 bytes")])
def test_a_broken_list_is_refused(text: str, match: str) -> None:
    with pytest.raises(ConstraintError, match=match):
        with_tokens_matcher(Constraint(ConstraintKind.TOKENS, text))


async def test_a_text_under_a_grammar_still_needs_its_end() -> None:
    with pytest.raises(ValueError, match="ignore_eos is true"):
        SamplingParams(constraint=Constraint(ConstraintKind.REGEX, "a"), ignore_eos=True)
