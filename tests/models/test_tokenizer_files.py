"""Tests that a tokenizer folder is read as transformers reads it, and that a token's bytes are its
decoder's text.

Oracle: ``AutoTokenizer`` on the same folder: the ids of a text, the text of ids, the set of special
ids, the whole vocabulary, and the special tokens by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer

from edgespec.models.folders import read_vocabulary
from edgespec.models.tokenizer import TextTokenizer, TokenizerError
from tests.kit.tiny_checkpoints import SENTENCES, write_tokenizer

PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}
TOOL = {
    "content": "<|tool|>",
    "special": False,
    "normalized": False,
    "lstrip": False,
    "rstrip": True,
    "single_word": False,
}
OBJECT = {"__type": "AddedToken", **TOOL}
FOLDERS: dict[str, dict[str, Any]] = {
    "nothing beside": {},
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"320": TOOL}}},
    "added_tokens_decoder makes one special": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"5": {**TOOL, "content": "<|user|>", "special": False}},
            "eos_token": "<|user|>",
        }
    },
    "added_tokens_decoder wins over added_tokens.json": {
        "tokenizer_config.json": {"added_tokens_decoder": {}},
        "added_tokens.json": {"<|tool|>": 320},
    },
    "added_tokens.json": {"added_tokens.json": {"<|tool|>": 321, "<think>": 320}},
    "added_tokens.json of a special one": {
        "tokenizer_config.json": {"pad_token": "<|tool|>"},
        "added_tokens.json": {"<|tool|>": 320},
    },
    "additional_special_tokens": {
        "tokenizer_config.json": {"additional_special_tokens": ["<|tool|>", "<think>", "th"]}
    },
    "extra_special_tokens": {"tokenizer_config.json": {"extra_special_tokens": ["<|tool|>"]}},
    "extra_special_tokens by name": {
        "tokenizer_config.json": {"extra_special_tokens": {"image_token": "<|tool|>"}}
    },
    "a name of its own": {"tokenizer_config.json": {"image_token": "<|tool|>"}},
    "special tokens by name": {
        "tokenizer_config.json": {
            "bos_token": OBJECT,
            "eos_token": "<|end|>",
            "pad_token": "<pad>",
            "unk_token": None,
        }
    },
    "special_tokens_map.json": {
        "special_tokens_map.json": {
            "eos_token": {key: TOOL[key] for key in TOOL if key != "special"},
            "pad_token": "<pad>",
            "additional_special_tokens": ["<think>"],
        }
    },
    "special_tokens_map.json wins over the config": {
        "tokenizer_config.json": {"eos_token": "<|user|>", "extra_special_tokens": ["<think>"]},
        "special_tokens_map.json": {"eos_token": "<|tool|>", "additional_special_tokens": ["x"]},
    },
    "all three": {
        "tokenizer_config.json": {"bos_token": "<s>", "additional_special_tokens": ["<think>"]},
        "special_tokens_map.json": {"eos_token": "</s>"},
        "added_tokens.json": {"<|tool|>": 330, "</s>": 331},
    },
}
TEXT = "the <|tool|>  fox<think> </s><|user|><pad><s> jumps<|end|>"


def folder_of(folder: Path, files: dict[str, Any]) -> Path:
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    for name, content in {"tokenizer_config.json": {}, **files}.items():
        more = PLAIN if name == "tokenizer_config.json" else {}
        (folder / name).write_text(json.dumps(content | more))
    return folder


@pytest.mark.parametrize("kind", FOLDERS)
def test_all_files_are_read_that_the_library_reads(tmp_path: Path, kind: str) -> None:
    folder = folder_of(tmp_path, FOLDERS[kind])
    library: Any = AutoTokenizer.from_pretrained(folder)
    ours = TextTokenizer(folder)
    ids = library(TEXT)["input_ids"]
    assert ours.encode(TEXT) == ids
    assert ours.decode(ids) == library.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == library.decode(ids)
    found = library.added_tokens_decoder
    assert ours.special_ids == {number for number, token in found.items() if token.special}
    vocabulary = {number: text for text, number in library.get_vocab().items()}
    assert read_vocabulary(folder / "tokenizer.json") == vocabulary
    stream = ours.stream()
    assert stream.push(ids) + stream.flush() == ours.decode(ids)
    assert ours.special_texts == library.special_tokens_map


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", {"eos_token": 7}, "eos_token is 7, but must be a token"),
        ("tokenizer_config.json", {"eos_token": {"text": "x"}}, "eos_token is .*its content"),
        ("tokenizer_config.json", {"additional_special_tokens": "x"}, "must be a list of tokens"),
        ("tokenizer_config.json", {"extra_special_tokens": [None]}, r"special_tokens\[0\] is None"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, r"is \[1\], but must be an obj"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": TOOL}}, r"has the id 'x'"),
        ("tokenizer_config.json", {"pad_token": {**TOOL, "lstrip": 1}}, "lstrip is 1, but must be"),
        ("added_tokens.json", {"<x>": -1}, "<x> has the id -1"),
        ("added_tokens.json", {"<x>": 1.5}, "<x> has the id 1.5"),
        ("special_tokens_map.json", {"eos_token": {}}, "must be a token"),
    ],
)
def test_what_is_no_token_is_named(
    tmp_path: Path, name: str, content: dict[str, Any], message: str
) -> None:
    folder = folder_of(tmp_path, {name: content})
    with pytest.raises(TokenizerError, match=message):
        TextTokenizer(folder)
    with pytest.raises(ValueError, match=message):
        read_vocabulary(folder / "tokenizer.json")


# --- one token's bytes ----------------------------------------------------------------------------

ADDED = ["▁▁▁▁", "    ", "\n\n", "naïve", "▁the", "<tool_call>", "<0x0a>"]


def byte_level(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(write_tokenizer(folder) / "tokenizer.json"))


def words(*steps: decoders.Decoder) -> Callable[[Path], Tokenizer]:
    def make(folder: Path) -> Tokenizer:
        pieces = ["▁the", "▁", "fox", "a", "日", "▁▁", "é", "s</w>", "##s"]
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
        vocabulary |= {piece: 256 + place for place, piece in enumerate(pieces)}
        made = Tokenizer(models.BPE(vocabulary, [], unk_token="a", byte_fallback=True))
        made.normalizer = normalizers.Replace(" ", "▁")
        if steps:
            made.decoder = steps[0] if len(steps) == 1 else decoders.Sequence(list(steps))
        return made

    return make


SPACES, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
VOCABULARIES: dict[str, Callable[[Path], Tokenizer]] = {
    "byte level": byte_level,
    "spaces and byte fallback": words(SPACES, FALLBACK, FUSE),
    "the first space stripped": words(SPACES, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)),
    "metaspace": words(decoders.Metaspace()),
    "metaspace and byte fallback": words(FALLBACK, decoders.Metaspace()),
    "word ends": words(decoders.BPEDecoder()),
    "no decoder": words(),
}


@pytest.fixture(params=VOCABULARIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made = VOCABULARIES[request.param](tmp_path)
    made.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    made.add_special_tokens([AddedToken("<s>", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(PLAIN))
    return tmp_path


def test_each_token_is_what_the_decoder_shows_in_the_middle_of_a_text(folder: Path) -> None:
    library: Any = AutoTokenizer.from_pretrained(folder)
    ours = TextTokenizer(folder)
    (a,) = ours.encode("a", add_special_tokens=False)
    before, tail = library.decode([a]), library.decode([a, a])[1:]
    for token in library.get_vocab().values():
        shown = library.decode([a, token, a]).removeprefix(before).removesuffix(tail)
        assert ours.token_bytes(token).decode("utf-8", errors="replace") == shown, token
    assert ours.token_bytes(len(library) + 7) == b""


def test_a_stream_is_what_the_decoder_shows_of_the_whole(folder: Path) -> None:
    """This must hold even if the text's characters are cut into bytes."""
    library: Any = AutoTokenizer.from_pretrained(folder)
    ours = TextTokenizer(folder)
    size, ends_words = len(library), "BPEDecoder" in (folder / "tokenizer.json").read_text()
    for text in (*SENTENCES, "a    a▁▁▁▁a", "日本 é\n\n🙂 naïve", "<tool_call> the<s> fox"):
        ids = ours.encode(text)
        for tokens in (ids, ids[::-1], [token for one in ids for token in (one, size - 3)]):
            whole = ours.decode(tokens)
            if "\ufffd" in whole:
                # the library decides how many replacement characters stand for broken bytes
                continue
            stream = ours.stream()
            got = "".join(stream.push([token]) for token in tokens) + stream.flush()
            # the library drops the space after the last word, but a stream may go on
            if ends_words:
                got = got.removesuffix(" ")
            assert got == whole
            shown = [token for token in tokens if token not in ours.special_ids]
            joined = b"".join(map(ours.token_bytes, shown)).decode()
            assert joined.strip(" ") == whole.strip(" ")
