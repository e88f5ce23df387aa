"""The vocabulary fingerprint. Oracle: equal exactly when every id has the same token string."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.models.folders import (
    ModelFolderError,
    VocabularyError,
    read_config,
    read_vocabulary,
    vocabulary_fingerprint,
)
from tests.shell.tiny_checkpoints import write_tokenizer

VOCABULARY = {"a": 0, "b": 1, "ü": 2}
ADDED = [{"id": 3, "content": "<|end|>", "special": True}]


def fingerprint(folder: Path, vocabulary: object, added: object = ADDED, **more: Any) -> str:
    path = folder / "tokenizer.json"
    data = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": added}
    path.write_text(json.dumps(data | more), encoding="utf-8")
    return vocabulary_fingerprint(path)


def test_layout_does_not_count(tmp_path: Path) -> None:
    expected = fingerprint(tmp_path, VOCABULARY)
    assert len(expected) == 32
    shuffled = dict(reversed(VOCABULARY.items()))
    assert fingerprint(tmp_path, shuffled, version="2.0", normalizer=None) == expected
    assert fingerprint(tmp_path, VOCABULARY | {"<|end|>": 3}, []) == expected
    unigram = [["a", -1.0], ["b", -2.0], ["ü", -3.0]]
    assert fingerprint(tmp_path, unigram) == expected


@pytest.mark.parametrize(
    ("vocabulary", "added"),
    [
        ({"a": 1, "b": 0, "ü": 2}, ADDED),
        ({"a": 0, "b": 1, "u": 2}, ADDED),
        ({"a": 0, "b": 1}, ADDED),
        (VOCABULARY, []),
        (VOCABULARY, [{"id": 4, "content": "<|end|>"}]),
        (VOCABULARY, [{"id": 2, "content": "<|end|>"}]),
        ({"a": 0, "b1 1 ü": 1}, ADDED),
    ],
)
def test_every_difference_counts(
    tmp_path: Path, vocabulary: dict[str, int], added: list[dict[str, Any]]
) -> None:
    assert fingerprint(tmp_path, vocabulary, added) != fingerprint(tmp_path, VOCABULARY)


def test_a_real_file_agrees_with_its_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = write_tokenizer(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    assert read_vocabulary(path) == {i: t for t, i in tokenizer.get_vocab().items()}
    pretty = tmp_path / "pretty.json"
    tokenizer.save(str(pretty), pretty=False)
    assert vocabulary_fingerprint(path) == vocabulary_fingerprint(pretty)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(VocabularyError, match=r"tokenizer\.json"):
        vocabulary_fingerprint(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"tokenizer\.json: no such file"):
        vocabulary_fingerprint(tmp_path / "tokenizer.json")
    with pytest.raises(VocabularyError, match="unreadable vocabulary entry"):
        fingerprint(tmp_path, VOCABULARY, [{"content": "x"}])


@pytest.mark.parametrize(
    ("vocabulary", "added", "message"),
    [
        ({"a": 0}, [{"id": 10**9, "content": "b"}], "token ids 0 to 1000000000, limit 0 to"),
        ({"a": -1}, [], "token ids -1 to -1, limit 0 to"),
        ({"a": "b"}, [], "unreadable vocabulary entry"),
        ({"a": float("inf")}, [], "unreadable vocabulary entry"),
        ({"a": float("nan")}, [], "unreadable vocabulary entry"),
    ],
)
def test_ids_that_are_none_are_named_with_their_file(
    tmp_path: Path, vocabulary: dict[str, Any], added: list[dict[str, Any]], message: str
) -> None:
    """A device has such files from its verifier, and counts ids from 0 on."""
    with pytest.raises(VocabularyError, match=rf"tokenizer\.json: {message}"):
        fingerprint(tmp_path, vocabulary, added)


def test_files_that_nest_too_deep_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(VocabularyError, match=r"tokenizer\.json: not readable as JSON"):
        vocabulary_fingerprint(tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelFolderError, match=r"config\.json: not readable as JSON"):
        read_config(tmp_path)
