"""Text from tokens in pieces. Oracle: decoding the whole sequence at once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from edgespec.models.tokenizer import MAX_HELD_TOKENS, REPLACEMENT, TextTokenizer, TokenizerError
from tests.shell.tiny_checkpoints import SENTENCES, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("text", [*SENTENCES, "naïve 漢字 👩‍🚀 Ω", ""])
def test_text_survives(tokenizer: TextTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in tokens]
    assert "".join(pieces) + stream.flush() == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(data=st.data())
def test_any_text_in_any_grouping_is_the_same_text(
    tokenizer: TextTokenizer, data: st.DataObject
) -> None:
    text = data.draw(st.text(max_size=30))
    tokens = tokenizer.encode(text)
    stream, got, rest = tokenizer.stream(), "", tokens
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        got += stream.push(rest[:count])
        rest = rest[count:]
        assert text.startswith(got)
    assert got + stream.flush() == text


@given(data=st.data())
def test_any_tokens_give_what_decoding_them_at_once_gives(
    tokenizer: TextTokenizer, data: st.DataObject
) -> None:
    """Random ids are mostly broken UTF-8; what was pushed is never taken back."""
    size = tokenizer.vocabulary_size
    tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=MAX_HELD_TOKENS))
    stream = tokenizer.stream()
    got = "".join(stream.push([token]) for token in tokens) + stream.flush()
    assert got == tokenizer.decode(tokens)


def test_half_a_character_is_held_back(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.encode("漢")
    assert len(tokens) == 3
    stream = tokenizer.stream()
    assert [stream.push([token]) for token in tokens] == ["", "", "漢"]
    assert stream.push(tokens[:2]) == ""
    assert stream.flush() == REPLACEMENT
    assert stream.flush() == ""


def test_bytes_that_never_become_text_are_not_held_for_ever(tokenizer: TextTokenizer) -> None:
    broken = tokenizer.encode("漢")[1]  # a continuation byte without its start
    stream = tokenizer.stream()
    pieces = [stream.push([broken]) for _ in range(1000)]
    longest = max(len(p) for p in pieces)
    assert 0 < longest <= MAX_HELD_TOKENS + 1
    assert len("".join(pieces) + stream.flush()) == 1000
    assert stream.push(tokenizer.encode("ok")) == "ok"


@given(data=st.data())
def test_no_character_is_lost_however_much_is_broken(
    tokenizer: TextTokenizer, data: st.DataObject
) -> None:
    """What is no replacement character arrives, whole and in order, in long broken texts too."""
    size = tokenizer.vocabulary_size
    tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=80))
    tokens += [tokenizer.encode("漢")[1]] * data.draw(st.integers(0, 40))
    tokens += tokenizer.encode(data.draw(st.text(max_size=3)))
    stream = tokenizer.stream()
    got = "".join(stream.push([token]) for token in tokens) + stream.flush()
    assert got.replace(REPLACEMENT, "") == tokenizer.decode(tokens).replace(REPLACEMENT, "")


def test_special_tokens_have_no_text(tokenizer: TextTokenizer) -> None:
    end = tokenizer.encode("<|end|>")
    assert set(end) <= tokenizer.special_ids
    stream = tokenizer.stream()
    tokens = [*tokenizer.encode("ab"), *end, *tokenizer.encode("cd")]
    assert "".join(stream.push([t]) for t in tokens) + stream.flush() == "abcd"


def test_spaces_of_a_metaspace_vocabulary_stay(tmp_path: Path) -> None:
    """Its decoder drops the first token's leading space, which only the text's first may lose."""
    inner = Tokenizer(models.WordLevel({"▁the": 0, "▁fox": 1, "es": 2, "?": 3}, unk_token="?"))
    inner.decoder = decoders.Metaspace()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    stream = tokenizer.stream()
    assert [stream.push([t]) for t in (0, 1, 2, 0)] == ["the", " fox", "es", " the"]
    stream = tokenizer.stream([0])
    assert [stream.push([t]) for t in (1, 2, 0)] == [" fox", "es", " the"]


@given(data=st.data())
def test_a_continuation_is_what_the_whole_has_behind_the_prompt(
    tokenizer: TextTokenizer, fallback: TextTokenizer, data: st.DataObject
) -> None:
    """Oracle: the library's decoding of both together."""
    for one, words in ((tokenizer, SENTENCES), (fallback, [" a", " aé a", "€ a"])):
        prompt, text = data.draw(st.sampled_from(words)), data.draw(st.sampled_from(words))
        if one is fallback:
            tokens = [256 if byte == ord("a") else byte for byte in (prompt + text).encode()]
        else:
            tokens = one.encode(prompt + text)
        cut = data.draw(st.integers(0, len(tokens)))
        before = one.decode(tokens[:cut])
        stream = one.stream(tokens[:cut])
        got = stream.push(tokens[cut:]) + stream.flush()
        # A character that the prompt leaves unfinished belongs to the continuation.
        assert before.rstrip(REPLACEMENT) + got == one.decode(tokens)


def byte_fallback(folder: Path, *more: decoders.Decoder) -> TextTokenizer:
    """A vocabulary in which token i is byte i, and 256 a word."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "?": 257}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="?", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    )
    inner.save(str(folder / "tokenizer.json"))
    return TextTokenizer(folder)


def _spelled(tokens: list[int], strips: bool) -> str:
    """Oracle: Python's own decoder of each run of bytes. As Llama's, one decoder takes the first
    space off a text."""
    text = "".join(
        " a" * len(list(run)) if word else bytes(run).decode("utf-8", errors="replace")
        for word, run in itertools.groupby(tokens, lambda token: token == 256)
    )
    return text.removeprefix(" ") if strips else text


_CHARACTERS = st.sampled_from([*map(tuple, ("€".encode(), "é".encode(), b"A")), (256,)])
_BROKEN = st.sampled_from([(0xFF,), (0xE2, 0x82), (0xC3,)])


@pytest.mark.parametrize("strips", [False, True])
@given(parts=st.lists(_CHARACTERS | _BROKEN, max_size=20))
def test_bytes_and_words_in_any_order_are_what_they_say(
    fallback: TextTokenizer, stripping: TextTokenizer, strips: bool, parts: list[tuple[int, ...]]
) -> None:
    stream = (stripping if strips else fallback).stream()
    tokens = [token for part in parts for token in part]
    got = "".join(stream.push([token]) for token in tokens) + stream.flush()
    assert got == _spelled(tokens, strips)


@pytest.mark.parametrize("strips", [False, True])
@given(
    before=st.lists(_CHARACTERS, max_size=6),
    cut=st.integers(0, 2),
    behind=st.lists(_CHARACTERS, max_size=6),
)
def test_a_character_that_the_prompt_begins_is_all_that_is_told_of_it(
    fallback: TextTokenizer,
    stripping: TextTokenizer,
    strips: bool,
    before: list[tuple[int, ...]],
    cut: int,
    behind: list[tuple[int, ...]],
) -> None:
    told, rest = ([token for part in parts for token in part] for parts in (before, behind))
    character = list("€".encode())
    stream = (stripping if strips else fallback).stream(told + character[:cut])
    got = stream.push([*character[cut:], *rest]) + stream.flush()
    assert _spelled(told, strips) + got == _spelled([*told, *character, *rest], strips)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return byte_fallback(tmp_path_factory.mktemp("fallback"))


@pytest.fixture(scope="module")
def stripping(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return byte_fallback(tmp_path_factory.mktemp("stripping"), decoders.Strip(" ", 1, 0))


def test_saved_padding_and_truncation_do_not_touch_a_prompt(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    inner = Tokenizer.from_file(str(path))
    inner.enable_truncation(4)
    inner.enable_padding(length=50)
    inner.save(str(path))
    tokens = TextTokenizer(tmp_path).encode(SENTENCES[0])
    assert 4 < len(tokens) < 50


# --- chat -----------------------------------------------------------------------------------


def test_a_chat_is_rendered_by_the_models_template(tokenizer: TextTokenizer) -> None:
    messages = [{"role": "user", "content": "hi <b>"}, {"role": "assistant", "content": "yo"}]
    assert tokenizer.has_chat_template
    text = tokenizer.render_chat(messages)
    assert text == "<|end|><|user|>hi <b>\n<|assistant|>yo\n<|assistant|>"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokenizer.special_ids & set(tokens)) == 3


def with_template(folder: Path, template: object) -> TextTokenizer:
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return TextTokenizer(folder)


MESSAGES = [{"role": "user", "content": "é"}]


def test_other_places_of_a_template(tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    assert with_template(tmp_path, named).render_chat(MESSAGES) == "yes"
    assert with_template(tmp_path, "{{ messages|tojson }}").render_chat(MESSAGES) == json.dumps(
        MESSAGES, ensure_ascii=False
    )
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert TextTokenizer(tmp_path).render_chat(MESSAGES) == "é!"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "there is no chat_template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template failed"),
        ("{{ messages.__class__.__mro__ }}", "chat template failed"),
        ("{{ messages.append(1) }}", "chat template failed"),
        ("{{ range(999999999) | length }}", "chat template failed"),
    ],
)
def test_a_template_that_is_missing_broken_or_hostile(
    tmp_path: Path, template: object, message: str
) -> None:
    tokenizer = with_template(tmp_path, template)
    with pytest.raises(TokenizerError, match=message):
        tokenizer.render_chat(MESSAGES)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a readable tokenizer"):
        TextTokenizer(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: holds a JSON list"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match="number of messages is 0"):
        TextTokenizer(tmp_path).render_chat([])
