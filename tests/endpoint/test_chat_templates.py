"""Chat templates. Oracle: ``transformers`` renders the same template with the same messages.

The templates are ours; each uses what those of a family use (Llama 3, Qwen, Mistral, Gemma, Phi).
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from edgespec.models.tokenizer import (
    ChatTemplate,
    ChatTemplateError,
    TextTokenizer,
    TokenBytes,
    TokenizerError,
    read_chat_templates,
)
from tests.shell.tiny_checkpoints import write_tokenizer
from tests.tables import tabled

NOW = datetime(2026, 3, 14, 15, 9)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
FOLDER = Path(__file__).parent / "templates"
FAMILIES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
USER = {"role": "user", "content": "  <b>é</b> & \"ça\" 'x'\n"}
ASSISTANT = {"role": "assistant", "content": "<think>hm</think>\nyes"}
SYSTEM = {"role": "system", "content": "be brief"}
CALL = {"name": "weather", "arguments": {"city": "Köln <3", "days": [1, 2.5, None]}}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": CALL}],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"rain": true}'}
WEATHER = {
    "name": "weather",
    "description": "Says 'rain' or \"sun\" <or> both",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": WEATHER}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER],
    [USER, CALLS, RESULT],
    [USER, CALLS, RESULT, ASSISTANT, USER],
    [USER, USER],
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_what_transformers_renders(family: str, tools: Any) -> None:
    """Where a template refuses, both refuse."""
    oracle: Any = render_jinja_template
    template, rendered = ChatTemplate(FAMILIES[family], TOKENS), 0
    for messages in CONVERSATIONS:
        for prompted in (True, False):
            for variables in ({}, {"enable_thinking": False, "date_string": "today"}):
                try:
                    given = {"chat_template": FAMILIES[family], **TOKENS, **variables}
                    (expected,), *_ = oracle(
                        [messages], tools=tools, add_generation_prompt=prompted, **given
                    )
                except Exception:
                    with pytest.raises(ChatTemplateError):
                        template.render(messages, tools=tools, variables=variables)
                    continue
                found = template.render(
                    messages, tools=tools, add_generation_prompt=prompted, variables=variables
                )
                assert found == expected
                rendered += 1
    assert rendered >= 8


def test_the_time_is_the_callers() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: NOW)
    assert template.render([USER]) == "14 Mar 2026"
    today = ChatTemplate("{{ strftime_now('%Y') }}").render([USER])
    assert today == datetime.now().strftime("%Y")


def test_whether_a_template_knows_tools() -> None:
    assert len(FAMILIES) == 5
    known = {name: ChatTemplate(source).knows_tools for name, source in FAMILIES.items()}
    assert known == {"llama": True, "qwen": True, "mistral": True, "gemma": False, "phi": False}


@tabled
def test_a_hostile_template_fails_and_does_nothing(source: str) -> None:
    """What the sandbox keeps to itself is undefined, which shows as nothing, or an error."""
    messages = [dict(USER)]
    try:
        shown = ChatTemplate(source).render(messages)
    except ChatTemplateError:
        shown = ""
    assert shown == ""
    assert messages == [USER]


def test_half_a_surrogate_pair_is_no_prompt(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = {"chat_template": "{{ tools[0].a }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = TextTokenizer(tmp_path).chat_template()
    assert found is not None
    with pytest.raises(TokenizerError, match="half of a surrogate pair"):
        found.render([USER], tools=[{"a": "\ud800"}])
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(ChatTemplateError, match="half of a surrogate pair"):
        template.render([{"role": "user", "content": "\ud800"}])


def test_where_templates_are_found(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "a"},
        {"name": "tool_use", "template": "b{{ tools }}"},
        {"name": "broken"},
    ]
    config = {"chat_template": named, "bos_token": {"content": "<s>"}, "pad_token": None}
    found = read_chat_templates(tmp_path, config)
    assert {name: one.source for name, one in found.items()} == {
        "default": "a",
        "tool_use": "b{{ tools }}",
    }
    assert found["default"].tokens == {"bos_token": "<s>"}
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    found = read_chat_templates(tmp_path, config)
    assert (found["default"].source, found["rag"].source) == ("file", "rag")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: not readable"):
        read_chat_templates(tmp_path, config)


def test_the_bytes_of_tokens_join_to_the_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    text = "naïve 漢字 👩‍🚀 Ω"
    tokens = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(one) for one in tokens).decode() == text
    assert tokenizer.token_bytes(1 << 20) == b""


def test_the_bytes_of_byte_fallback_and_sentencepiece() -> None:
    from tokenizers import decoders, models

    words = {"<unk>": 0, "\N{LOWER ONE EIGHTH BLOCK}a": 1, "<0xE2>": 2}
    inner = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    found = TokenBytes(inner)
    assert [found(one) for one in (0, 1, 2, 3)] == [b"<unk>", b" a", b"\xe2", b""]
