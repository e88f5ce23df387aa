"""Small tokenizers of the families that public models have, trained on a mixed text.

Each has the normalizer, pre-tokenizer, model and decoder of its family; only the vocabulary is
small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from edgespec.models.byte_vocabulary import ByteVocabulary
from edgespec.models.tokenizer import TextTokenizer
from edgespec.models.translation import Translation
from tests.sources import ROOT

CHATML: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TURNS: Final = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA_TURNS: Final = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
    "{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
_SENTENCES: Final = (
    "The quick brown fox jumps over the lazy dog, and nobody was surprised; it's 1,234.50 euros.\n",
    "def add(first, second):\n    return first + second  # the sum\n\nprint(add(1, 22))\n",
    "Привет, мир! Как дела сегодня? Ünïcödé naïve café déjà vu Straße.\n",
    "机器学习是一个领域。今天天气很好。日本語の文章です。한국어 문장입니다.\n",
    "if (x != 0) { y = x / 2; } else { throw new Error('zero'); }\n\n\n",
    "unbelievable believable believe under understand standing outstanding understanding\n",
)
_GPT2: Final = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS: Final = r"\n|▁*[^▁\n]+|▁+"
"""Parts on which SentencePiece trains: no piece holds the end of a word and a space."""
_BYTES: Final = [f"<0x{byte:02X}>" for byte in range(256)]


def _lines() -> Iterator[str]:
    yield from (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines(keepends=True)
    for count in range(40):
        yield "".join(_SENTENCES[(count * 5 + at) % len(_SENTENCES)] for at in range(4))


def _byte_level(pattern: str, size: int, special: list[str]) -> Tokenizer:
    """Return a byte-level BPE with the pre-tokenizer ``pattern``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    return tokenizer


def _sentence_piece_decoder(*, strips: bool) -> Any:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strips else [])])


def _byte_fallback(size: int, special: list[str]) -> Tokenizer:
    """Return a SentencePiece BPE with byte fallback, whose words begin with a mark."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special, *_BYTES], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    state = json.loads(tokenizer.to_str())  # Tokens of single bytes are no special ones.
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] in special]
    return Tokenizer.from_str(json.dumps(state))


def _llama2() -> Tokenizer:
    tokenizer = _byte_fallback(900, ["<unk>", "<s>", "</s>"])
    state = json.loads(tokenizer.to_str())
    state["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = _sentence_piece_decoder(strips=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def _mistral() -> Tokenizer:
    tokenizer = _byte_fallback(700, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    tokenizer.decoder = _sentence_piece_decoder(strips=True)
    return tokenizer


def _gemma() -> Tokenizer:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = _byte_fallback(1600, special)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in (1, 2, 3)])
    tokenizer.decoder = _sentence_piece_decoder(strips=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return tokenizer


def _unigram(*, byte_fallback: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    state = json.loads(tokenizer.to_str())
    if byte_fallback:
        known = {text for text, _ in state["model"]["vocab"]}
        state["model"]["vocab"] += [[one, -20.0] for one in _BYTES if one not in known]
        state["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = _sentence_piece_decoder(strips=False)
    return tokenizer


def _superwords() -> Tokenizer:
    """Return a byte-level BPE whose tokens may be several words (SuperBPE, arXiv 2503.13423)."""
    return _byte_level(r"[^\n]{1,24}|\n", 900, ["<|endoftext|>"])


def _qwen() -> Tokenizer:
    tokenizer = _byte_level(_LLAMA3, 1100, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


_MAKERS: Final[dict[str, tuple[Callable[[], Tokenizer], dict[str, str]]]] = {
    "smollm": (
        lambda: _byte_level(_GPT2, 700, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": CHATML},
    ),
    "llama3": (
        lambda: _byte_level(_LLAMA3, 1300, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]),
        {"eos_token": "<|end_of_text|>", "bos_token": "<|begin_of_text|>"},
    ),
    "qwen": (_qwen, {"eos_token": "<|im_end|>", "chat_template": CHATML}),
    "gpt-oss": (
        lambda: _byte_level(_O200K, 1500, ["<|startoftext|>", "<|return|>", "<|end|>"]),
        {"eos_token": "<|return|>"},
    ),
    "llama2": (
        _llama2,
        {"eos_token": "</s>", "bos_token": "<s>", "chat_template": LLAMA_TURNS},
    ),
    "mistral": (_mistral, {"eos_token": "</s>", "bos_token": "<s>"}),
    "gemma": (
        _gemma,
        {"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": GEMMA_TURNS},
    ),
    "unigram": (_unigram, {"eos_token": "</s>", "unk_token": "<unk>"}),
    "superwords": (_superwords, {"eos_token": "<|endoftext|>"}),
    "no bytes": (lambda: _unigram(byte_fallback=False), {"eos_token": "</s>"}),
}
FAMILIES: Final = tuple(name for name in _MAKERS if name != "no bytes")
"""Names of the families whose tokenizers can write every text."""


@cache
def make_tokenizer(family: str) -> Tokenizer:
    """Return the library's tokenizer of a family."""
    return _MAKERS[family][0]()


def write_tokenizer(family: str, folder: Path) -> Path:
    """Write the tokenizer of a family into ``folder``, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(family).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_MAKERS[family][1]))
    return folder


@cache
def load_family(family: str, folder: Path) -> ByteVocabulary:
    """Return the byte vocabulary of a family, whose files are written into ``folder``."""
    return ByteVocabulary(TextTokenizer(write_tokenizer(family, folder / family)), family)


@cache
def load_pair(target: str, draft: str, folder: Path) -> Translation:
    """Return the translation between two families, whose files are written into ``folder``."""
    return Translation(load_family(target, folder), load_family(draft, folder))
