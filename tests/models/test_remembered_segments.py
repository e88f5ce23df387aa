"""Conversations that are tokenized as they grow.

Oracle: the library's own ids of the whole text. Texts are made of messages, of marks and of pieces
of marks, in any order, with blanks and letters that tokenizers treat in their own ways at cuts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from edgespec.models import added_tokens, remembered_segments
from edgespec.models.remembered_segments import RememberedSegments, find_marks
from edgespec.models.remote_tokenizer import RemoteTokenizer
from edgespec.models.tokenizer import TextTokenizer

MARKS = ("<|start|>", "<|end|>")
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
WORDS = "the cat sat on a mat and ate it: ÄÖÜ ﬁne e\u0301 \u0301x ▁ İ ͅ x1 22 \t\n 日本 🙂".split(
    " "
)
BETWEEN = ("", " ", "  ", "\n", "\u00a0", "\u200d", "\u0301", "▁", "a", "<", "<|", "|>", "<|st")


def byte_level(prefix_space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return tokenizer


def prepending() -> Tokenizer:
    """Llama 2's way: the normalizer writes blanks, and no pre-tokenizer cuts."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


KINDS: dict[str, tuple[Callable[[], Tokenizer], Callable[..., Any]]] = {
    "byte level": (lambda: byte_level(False), trainers.BpeTrainer),
    "byte level with a space": (lambda: byte_level(True), trainers.BpeTrainer),
    "metaspace always": (lambda: sentence_piece("always"), trainers.BpeTrainer),
    "metaspace first": (lambda: sentence_piece("first"), trainers.BpeTrainer),
    "prepended": (prepending, trainers.BpeTrainer),
    "unigram": (unigram, trainers.UnigramTrainer),
    "word piece": (word_piece, trainers.WordPieceTrainer),
}


def added(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, **{"special": True, "normalized": False, **flags})


def make_folder(folder: Path, kind: str, *more: AddedToken) -> Path:
    """Write a small tokenizer of a kind, with the marks and further tokens, and a template."""
    make, make_trainer = KINDS[kind]
    tokenizer = make()
    options: dict[str, Any] = {"vocab_size": 300, "show_progress": False}
    if make_trainer is trainers.UnigramTrainer:
        options["unk_token"] = "<unk>"
    trainer = make_trainer(special_tokens=["<unk>"], **options)
    dice = random.Random(2)
    lines = [" ".join(dice.choices(WORDS, k=12)) for _ in range(60)]
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_tokens([*(added(mark) for mark in MARKS), *more])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def encoder(tokenizer: TextTokenizer | RemoteTokenizer) -> Callable[[str], list[int]]:
    return partial(tokenizer.encode, add_special_tokens=False)


def library_ids(folder: Path) -> Callable[[str], list[int]]:
    tokenizer = TextTokenizer(folder)
    return lambda text: tokenizer.encode_many([text])[0]


def draw_text(dice: random.Random, marks: tuple[str, ...], more: tuple[str, ...] = ()) -> str:
    """Draw a piece of a text in which marks stand at any place, in words and beside blanks."""
    parts = list[str]()
    for _ in range(dice.randrange(1, 30)):
        parts += dice.choices(WORDS, k=dice.randrange(4))
        parts.append(dice.choice(BETWEEN))
        parts.append(dice.choice((*marks, *more, "", "", dice.choice(marks)[: dice.randrange(9)])))
        parts.append(dice.choice(BETWEEN))
    return dice.choice(("", " ")).join(parts)


def check_conversations(
    encode: Callable[[str], list[int]],
    whole: Callable[[str], list[int]],
    marks: tuple[str, ...],
    more: tuple[str, ...] = (),
    *,
    rounds: int,
) -> None:
    """Let conversations grow, change in the middle, and begin like one another."""
    dice, text = random.Random(11), ""
    for _ in range(rounds):
        match dice.randrange(6):
            case 0:
                text = draw_text(dice, marks, more)
            case 1:
                cut = dice.randrange(len(text) + 1)
                text = text[:cut] + draw_text(dice, marks, more) + text[cut:]
            case 2:
                text = text[dice.randrange(len(text) + 1) :] or "a"
            case _:
                text += draw_text(dice, marks, more)
        assert encode(text) == whole(text), text


@pytest.fixture(autouse=True)
def short_texts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_segments, "LEAST_CHARACTERS", 1)
    monkeypatch.setattr(remembered_segments, "MAX_CHARACTERS", 4000)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_whole_text(kind: str, tmp_path: Path) -> None:
    odd = ("<|start", "cat<", "ate ", "|>\n")
    tokens = (
        added("<|start"),
        added("cat<", normalized=True, special=False),
        added("ate ", special=False),
        added("|>\n", rstrip=True),
    )
    folder = make_folder(tmp_path, kind, *tokens)
    tokenizer = TextTokenizer(folder)
    assert [*tokenizer.marks] == [*MARKS]
    encode = encoder(tokenizer)
    check_conversations(encode, library_ids(folder), MARKS, odd, rounds=250)


@pytest.mark.parametrize(
    ("token", "left"),
    [
        (added("x<|start|>"), ["<|end|>"]),
        (added("<|start|>user"), ["<|end|>"]),
        (added("in <|st"), ["<|end|>"]),
        (added("|>"), [*MARKS]),
        (added("<|"), [*MARKS]),
        (added("word", single_word=True), []),
    ],
    ids=lambda one: one.content if isinstance(one, AddedToken) else "",
)
def test_a_token_that_another_one_can_cover_is_no_mark(
    token: AddedToken, left: list[str], tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, "byte level", token)
    tokenizer = TextTokenizer(folder)
    assert tokenizer.marks == left
    encode = encoder(tokenizer)
    check_conversations(encode, library_ids(folder), MARKS, (token.content,), rounds=120)


@pytest.mark.parametrize(
    "flags",
    [{"normalized": True}, {"special": False}, {"lstrip": True}],
    ids=["normalized", "not special", "takes blanks before it"],
)
def test_what_makes_a_cut_unsafe_makes_no_mark(flags: dict[str, bool]) -> None:
    token = added_tokens.AddedToken("<|m|>", **{"special": True, "normalized": False, **flags})
    assert find_marks([token], ["<|m|>"]) == []
    sound = added_tokens.AddedToken("<|m|>", special=True, normalized=False, rstrip=True)
    assert find_marks([sound], ["<|m|>"]) == ["<|m|>"]
    assert find_marks([sound], ["<|n|>"]) == []


def test_a_turn_encodes_only_its_new_segments() -> None:
    asked = list[list[str]]()

    def encode(texts: list[str]) -> list[list[int]]:
        asked.append(texts)
        return [[ord(letter) for letter in text] for text in texts]

    segments = RememberedSegments(["<s>"], encode)
    text = "begin<s>one<s>two<s>one"
    assert segments.find_new(text) == ["begin", "<s>one", "<s>two", "<s>one"]
    assert segments.encode(text) == [ord(letter) for letter in text]
    text += "<s>three"
    assert segments.find_new(text) == ["<s>three"]
    assert segments.encode(text) == [ord(letter) for letter in text]
    assert asked == [["begin", "<s>one", "<s>two"], ["<s>three"]]


def test_few_characters_are_remembered() -> None:
    calls = list[int]()

    def encode(texts: list[str]) -> list[list[int]]:
        calls.append(sum(map(len, texts)))
        return [[len(text)] for text in texts]

    segments = RememberedSegments(["<s>"], encode)
    for number in range(50):
        segments.encode(f"<s>{number}" + "x" * 500)
        assert segments._characters == sum(map(len, segments._ids)) <= 4000
    assert segments.encode("<s>" + "y" * 5000) == [5003]
    assert segments.find_new("<s>49" + "x" * 500) == []
    assert segments.find_new("<s>0" + "x" * 500) != []
    assert segments.find_new("<s>" + "y" * 5000) != []


def test_special_tokens_as_text_are_not_taken_from_memory(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(make_folder(tmp_path, "byte level"))
    found = tokenizer.encode("<|start|>a", add_special_tokens=False)
    with tokenizer.special_tokens_as_text():
        assert tokenizer.encode("<|start|>a", add_special_tokens=False) != found
    assert tokenizer.encode("<|start|>a", add_special_tokens=False) == found


def test_a_tokenizer_in_another_process_is_sent_only_new_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, "metaspace first")
    tokenizer = RemoteTokenizer(folder)
    try:
        encode = encoder(tokenizer)
        check_conversations(encode, library_ids(folder), MARKS, rounds=60)
        sent, call = list[Any](), tokenizer._worker.call

        def watched(operation: str, *given: Any) -> Any:
            sent.append((operation, *given))
            return call(operation, *given)

        monkeypatch.setattr(tokenizer._worker, "call", watched)
        encode("<|start|>one<|end|>two")
        encode("<|start|>one<|end|>two<|start|>three")
        assert sent == [
            ("encode_many", ["<|start|>one", "<|end|>two"]),
            ("encode_many", ["<|start|>three"]),
        ]
    finally:
        tokenizer.close()


def test_a_cut_elsewhere_changes_ids(tmp_path: Path) -> None:
    """The oracle would find a wrong mark."""
    tokenizer = TextTokenizer(make_folder(tmp_path, "metaspace always"))
    segments = RememberedSegments(["at"], tokenizer.encode_many)
    with pytest.raises(AssertionError):
        check_conversations(segments.encode, library_ids(tmp_path), ("at",), rounds=60)
