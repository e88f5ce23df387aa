"""Tests of vocabularies as bytes, and of texts in the ids of a draft with another tokenizer.

Oracles: the bytes of the text; the tokenizers themselves, on the whole text; for chat prompts, the
draft's own template.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.models.byte_vocabulary import (
    ByteVocabulary,
    NoBytesError,
    find_last_word_end,
    unfinished_length,
)
from edgespec.models.remote_tokenizer import RemoteTokenizer
from edgespec.models.tokenizer import TextTokenizer
from edgespec.models.translated_text import TranslatedText
from edgespec.models.translation import Translation, describe_translation
from tests.kit.tokenizer_families import FAMILIES, load_family, load_pair, write_tokenizer
from tests.kit.translation_worlds import check_cuts, random_text

CASES = 15
TALK = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "A fox, I believe."},
    {"role": "user", "content": "Why?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("target", FAMILIES)
def test_no_byte_is_lost_and_committed_ids_stay(target: str, folder: Path) -> None:
    cuts = 0
    for draft in FAMILIES:
        for number in range(CASES):
            dice = random.Random(f"{target} {draft} {number}")
            cuts += check_cuts(load_pair(target, draft, folder), dice)
    assert cuts > 2 * CASES * len(FAMILIES)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "superwords"])
def test_a_text_can_be_cut_where_a_word_ends(family: str, folder: Path) -> None:
    vocabulary, dice, cut = load_family(family, folder), random.Random(family), 0
    assert vocabulary.has_word_ends
    for _ in range(300):
        data = random_text(dice).encode()
        if place := find_last_word_end(data):
            parts = vocabulary.encode(data[:place]) + vocabulary.encode(data[place:])
            assert parts == vocabulary.encode(data)
            cut += 1
    assert cut > 200


def test_tokens_of_several_words_leave_no_place_to_cut(folder: Path) -> None:
    assert not load_family("superwords", folder).has_word_ends


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"one two", 3),
        (b"one two ", 7),
        (b"one, two", 0),
        (b"one", 0),
        (b" one", 0),
        (b"a\nb", 1),
        (b"a.\nb", 0),
        ("é x".encode(), 2),
        ("。 x".encode(), 0),
        (b"\xff x", 0),
        (b"a  b", 1),
    ],
)
def test_where_a_word_ends(data: bytes, place: int) -> None:
    assert find_last_word_end(data) == place


@pytest.mark.parametrize("letter", ["a", "é", "中", "🙂"])
def test_a_beginning_of_a_character_is_unfinished(letter: str) -> None:
    data = b"x" + letter.encode()
    assert unfinished_length(data) == 0
    for length in range(1, len(letter.encode())):
        assert unfinished_length(data[: 1 + length]) == length
    assert unfinished_length(b"\x80") == unfinished_length(b"\xff") == 0


def test_bytes_of_no_character_become_single_bytes(folder: Path) -> None:
    for family in FAMILIES:
        vocabulary = load_family(family, folder)
        data = b"ab\xff\xfe\x80 cd\xe4\xb8"
        assert vocabulary.text_bytes(vocabulary.encode(data)) == data


def test_a_tokenizer_without_bytes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(NoBytesError, match=r"'no bytes' makes .* no tokens for single bytes"):
        load_family("no bytes", tmp_path)


def test_names_of_special_tokens_are_letters_in_a_piece(folder: Path) -> None:
    vocabulary = load_family("smollm", folder)
    name = "<|im_end|>"
    special = vocabulary.tokenizer.added[name]
    ids = vocabulary.encode(f"a {name}{name} b".encode())
    assert special not in ids
    assert vocabulary.text_bytes(ids) == f"a {name}{name} b".encode()
    assert special in vocabulary.tokenizer.encode(name)


def test_a_lent_tokenizer_is_translated_in_its_process(folder: Path) -> None:
    own = load_family("llama2", folder)
    lent = RemoteTokenizer(folder / "llama2")
    try:
        other = ByteVocabulary(lent, "lent")
        text = random_text(random.Random(3)).encode()
        assert other.encode(text) == own.encode(text)
        assert [*other.words()] == [*own.words()]
        for name in ("prefix_ids", "spaces_first_word", "spaces_every_run", "has_word_ends"):
            assert vars(other)[name] == vars(own)[name], name
    finally:
        lent.close()


# --- special tokens and chat prompts --------------------------------------------------------------


def special(vocabulary: ByteVocabulary, *names: str) -> list[int]:
    return [vocabulary.tokenizer.added[name] for name in names]


def test_ends_have_twins_by_their_role(folder: Path) -> None:
    pair = load_pair("gemma", "smollm", folder)
    text, turn = special(pair.target, "<eos>", "<end_of_turn>")
    own_text, own_turn = special(pair.draft, "<|endoftext|>", "<|im_end|>")
    assert pair.special_to_draft == {text: own_text, turn: own_turn}
    assert pair.special_to_target == {own_text: text, own_turn: turn}
    same = load_pair("qwen", "smollm", folder)
    ids = special(same.target, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    twins = special(same.draft, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert same.special_to_draft == dict(zip(ids, twins, strict=True))


@pytest.mark.parametrize(
    ("target", "draft"),
    [("gemma", "smollm"), ("smollm", "gemma"), ("qwen", "smollm"), ("smollm", "qwen")],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_chat_prompt_is_the_one_of_the_drafts_own_template(
    target: str, draft: str, count: int, folder: Path
) -> None:
    pair = load_pair(target, draft, folder)

    def prompt(vocabulary: ByteVocabulary) -> list[int]:
        tokenizer: Any = vocabulary.tokenizer
        text = tokenizer.chat_template().render(TALK[:count])
        return list(tokenizer.encode(text, add_special_tokens=False))

    ids = prompt(pair.target)
    text = TranslatedText(pair, len(ids))
    text.append(ids)
    assert text.draft_ids() == prompt(pair.draft)
    text.append(pair.target.encode(b"It runs away."))
    assert text.draft_ids() == [*prompt(pair.draft), *pair.draft.encode(b"It runs away.")]
    text.truncate(len(ids) + 1)
    text.append(special(pair.target, *(["<end_of_turn>"] if target == "gemma" else ["<|im_end|>"])))
    assert pair.draft.token_bytes(text.draft_ids()[-1]) == b""


def test_a_text_begins_as_texts_of_the_draft_do(folder: Path) -> None:
    pair = load_pair("llama3", "gemma", folder)
    bos, *others = special(pair.target, "<|begin_of_text|>", "<|end_of_text|>")
    words = pair.target.encode(b"The fox")
    text = TranslatedText(pair, 1)
    for ids in (words, (bos, *words)):
        text = TranslatedText(pair, len(ids))
        text.append(ids)
        assert text.draft_ids() == pair.draft.tokenizer.encode("The fox")
        assert not text.ends_untranslated
    text.append(others)
    assert not text.ends_untranslated  # an end of a text
    unknown = load_pair("mistral", "gemma", folder)
    text = TranslatedText(unknown, 1)
    text.append([*unknown.target.encode(b"a"), *special(unknown.target, "[INST]")])
    assert text.ends_untranslated


# --- what both vocabularies share -----------------------------------------------------------------


def test_a_word_of_both_gets_the_noise_of_the_targets_id(folder: Path) -> None:
    pair = load_pair("gemma", "smollm", folder)
    noise = pair.noise_ids(pair.draft.size + 5)
    theirs = {word: token for token, word in reversed([*pair.target.words()])}
    shared = 0
    for token, word in pair.draft.words():
        if word in theirs:
            assert noise[token] == theirs[word]
            shared += 1
        elif noise[token] != np.uint32(0xFFFFFFFF):
            assert word.startswith(pair.target.token_bytes(int(noise[token])))
    assert shared > 200
    assert (noise[pair.draft.size :] == np.uint32(0xFFFFFFFF)).all()
    twin = special(pair.target, "<end_of_turn>")[0]
    assert noise[special(pair.draft, "<|im_end|>")[0]] == twin
    own = {word for _, word in pair.draft.words()}
    words = [word for _, word in pair.target.words()]
    assert pair.shared_count == sum(word in own for word in words)
    share = f"{pair.shared_count / len(words):.0%} of the {len(words):,} words of gemma"
    assert share in describe_translation(pair)


def test_a_refused_template_leaves_the_words(tmp_path: Path) -> None:
    folder = write_tokenizer("smollm", tmp_path / "bad")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    bad = ByteVocabulary(TextTokenizer(folder), "bad")
    assert Translation(bad, bad).markers == ()
