"""Tests of the names, log probabilities and offsets of tokens in the JSON of completions and chats.

Oracle: the text of the answer. A token's offset is the length of the text before it, and a token
that is a part of a character is named by its bytes, so that no two parts share a name.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.core.device import events as ev
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import TokenScore
from edgespec.device.agent import OutputReader
from edgespec.endpoint.choices import ChatEnvelope, Choice, CompletionEnvelope, Delta
from edgespec.endpoint.requests import chat_request, completion_request
from edgespec.models.tokenizer import TextTokenizer
from tests.kit.tiny_checkpoints import write_tokenizer

TEXT = "日本🙂x"
USUAL = SamplingParams()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def answer_token_by_token(
    tokenizer: TextTokenizer, request: Any, tokens: list[int], scores: list[TokenScore], echo: str
) -> tuple[Choice, list[Delta]]:
    """Feed tokens to a choice one by one, and return it with the delta of each token."""
    choice = Choice(0, [1], request, USUAL, tokenizer.token_bytes, None, "")
    choice.echo = echo
    stops = request.sampling.stop
    reader = OutputReader(tokenizer.stream([1]), stops, 1, ev.DraftCounters())
    deltas = []
    for token, score in zip(tokens, scores, strict=True):
        kinds = (ev.TokenKind.DECODED,)
        if (chunk := reader.deliver(ev.Deliver(1, (token,), kinds, (score,)))) is not None:
            deltas.append(choice.add(chunk))
    deltas.append(choice.add(reader.finish(FinishReason.LENGTH)))
    return choice, deltas


def score_tokens(tokens: list[int], count: int) -> list[TokenScore]:
    """Score tokens: the 20 ids from 200 on, which are parts of characters, are likeliest; the token
    comes after them."""
    top = tuple((200 + place, -0.125 * (place + 1)) for place in range(count))
    return [TokenScore(-9.0, 0.0, top) for _ in tokens]


@pytest.mark.parametrize(("echo", "stop"), [("", []), ("日", []), ("", ["🙂x"])])
def test_completions_name_each_token_once_and_place_it_in_the_text(
    tokenizer: TextTokenizer, echo: str, stop: list[str]
) -> None:
    asked = {"prompt": "a", "logprobs": 20, "stop": stop}
    request = completion_request(asked, USUAL)
    tokens = tokenizer.encode(TEXT)
    assert len(tokens) > len(TEXT)
    choice, deltas = answer_token_by_token(
        tokenizer, request, tokens, score_tokens(tokens, 20), echo
    )
    envelope = CompletionEnvelope("m")
    (whole,) = envelope.whole([choice], {})["choices"]
    found, text = whole["logprobs"], whole["text"]
    assert text == echo + (TEXT.removesuffix(*stop) if stop else TEXT)
    for place, token in enumerate(tokens):
        name, written = found["tokens"][place], tokenizer.token_bytes(token)
        if name.startswith("bytes:"):
            assert name == "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)
        else:
            assert name.encode() == written
        top = found["top_logprobs"][place]
        assert top[name] == found["token_logprobs"][place] == -9.0
        assert len(top) == 21
        before = b"".join(map(tokenizer.token_bytes, tokens[:place]))
        shown_value = echo + before.decode(errors="ignore")
        assert found["text_offset"][place] == min(len(shown_value), len(text))
    streamed: list[str] = []
    for delta in deltas:
        for line in envelope.delta(choice, delta).decode().split("\n\n")[:-1]:
            (one,) = json.loads(line.removeprefix("data: "))["choices"]
            streamed += (one["logprobs"] or {"tokens": []})["tokens"]
    assert streamed == found["tokens"]


def test_a_taken_token_is_not_listed_twice(tokenizer: TextTokenizer) -> None:
    request = completion_request({"prompt": "a", "logprobs": 2}, USUAL)
    tokens = tokenizer.encode("th")[:1]
    score = TokenScore(-0.5, 1.0, ((tokens[0], -0.5), (201, -1.5)))
    choice, _ = answer_token_by_token(tokenizer, request, tokens, [score], "")
    (whole,) = CompletionEnvelope("m").whole([choice], {})["choices"]
    (top,) = whole["logprobs"]["top_logprobs"]
    assert list(top.values()) == [-0.5, -1.5]


def test_chats_give_the_bytes_of_a_part_and_the_text_of_the_rest(tokenizer: TextTokenizer) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    tokens = tokenizer.encode(TEXT)
    request = chat_request(asked, USUAL)
    choice, _ = answer_token_by_token(tokenizer, request, tokens, score_tokens(tokens, 20), "")
    (whole,) = ChatEnvelope("m").whole([choice], {})["choices"]
    content = whole["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == TEXT
    for one in content:
        assert len({top["token"] for top in one["top_logprobs"]}) == 20
        for named in (one, *one["top_logprobs"]):
            text = bytes(named["bytes"]).decode(errors="backslashreplace")
            assert named["token"] == text
