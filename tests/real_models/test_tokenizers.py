"""The tokenizers in two GGUF files.

Oracle: transformers' own reader of GGUF files, on random texts of many scripts. It leaves out one
part of SmolLM2's tokenizer, which the file names ``smollm``: digits are cut off before everything
else, as in the tokenizer on the Hub and in llama.cpp. The test adds it.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.tokenizer import TextTokenizer
from tests.kit.real_models import convert, report

pytestmark = pytest.mark.slow

TEXTS = 3000
PIECES = (
    *("Hello", "world", " a", " I", "A", "don't", "I'LL", "we've", "naïve", "Straße", "ﬁ", "İ"),
    *(" ", "  ", "   ", "    ", "\n", "\n\n", "\t", "\t\t", " \n ", "\r\n", "\x0b", "\x85"),
    *("日本語", "漢字", "かな", "한국어", "العربية", "עברית", "हिन्दी", "ไทย", "Ελληνικά", "привет"),
    *("😀", "👩‍👩‍👧", "🇩🇪", "e\u0301", "\u200b", "\u200d", "\u00a0", "\u3000", "\ufeff", "\u2028"),
    *("\x00", "\x01", "\x7f", "\x1b[0m", "\ue000", "\U0010ffff", "\U0001d54f", "\ufffd"),
    *(
        "12345",
        "3.14",
        "\uff11\uff12",
        "½",
        "²",
        "!!!",
        "...",
        "—",
        "“q”",
        "#",
        "$",
        "%",
        "*",
        "//",
    ),
    *("_snake_case", "camelCase", "def f(x):\n    return x", '{"a": [1, 2]}', "<div>", "&amp;"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<bos>", "<eos>", "<unk>", "<pad>"),
    *(
        "<mask>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<unused1>",
        "[INST]",
        "</s>",
        "<h1>",
        "[toxicity=0]",
    ),
    *("▁", "▁▁", "Ġ", "Ċ", "<0x0A>", "http://x.y/z?q=1#f"),
)


def texts() -> list[str]:
    chance = random.Random(5)
    longer = ["".join(chance.choices(PIECES, k=chance.randint(1, 12))) for _ in range(TEXTS)]
    return [*PIECES, *longer]


def check(path: Path, made: Path, reference: Any, folder: Path) -> None:
    """Compare the tokenizer of a GGUF file, and that of the folder made of it, with transformers'
    ``reference``, which is saved in ``folder``."""
    from_file = resolve_source(str(path), Purpose.TEXTS)
    from_folder = resolve_source(str(convert(path, made)), Purpose.TEXTS)
    reference.save_pretrained(folder)
    saved = resolve_source(str(folder), Purpose.TEXTS)
    assert from_file.vocabulary == from_folder.vocabulary == saved.vocabulary
    ours = from_file.load_tokenizer()
    assert isinstance(ours, TextTokenizer)
    different = []
    for text in texts():
        ids = reference.encode(text)
        if ours.encode(text) != ids:
            different.append(text)
        stream = ours.stream()
        shown = stream.push(ids) + stream.flush()
        assert shown == reference.decode(ids, skip_special_tokens=True), text
    report(f"\n{path.name}: {len(texts())} texts, {len(different)} with other ids")
    assert different == []


def test_ids_of_smollm2_are_those_of_transformers(
    smollm2_path: Path, made: Path, tmp_path: Path
) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    backend = reference.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    check(smollm2_path, made, reference, tmp_path)


def test_ids_of_gemma3_are_those_of_transformers(
    gemma3_path: Path, made: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(gemma3_path.parent, gguf_file=gemma3_path.name)
    check(gemma3_path, made, reference, tmp_path)


@pytest.mark.parametrize(
    ("fixture", "marks"),
    [
        ("smollm2_path", ("<|im_start|>", "<|im_end|>")),
        ("gemma3_path", ("<start_of_turn>", "<end_of_turn>")),
    ],
    ids=["smollm2", "gemma3"],
)
def test_a_conversation_that_grows_has_the_ids_of_the_whole(
    fixture: str,
    marks: tuple[str, ...],
    made: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Oracle: the library's ids of the whole text."""
    folder = convert(request.getfixturevalue(fixture), made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(" ".join(marks), encoding="utf-8")
    tokenizer = TextTokenizer(tmp_path)
    assert set(marks) <= set(tokenizer.marks)
    dice, text = random.Random(6), ""
    for _ in range(300):
        pieces = dice.choices((*PIECES, *marks), k=dice.randint(1, 60))
        message = "".join(pieces)
        cut = len(text) if dice.random() < 0.8 else dice.randrange(len(text) + 1)
        text = text[:cut] + dice.choice((*marks, "")) + message + text[cut:]
        text = text if len(text) < 40_000 else message
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == tokenizer.encode_many([text])[0], text
