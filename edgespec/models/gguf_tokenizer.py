"""Makes the files of a tokenizer from the metadata of a GGUF model.

Three kinds of tokenizers are known: byte-level BPE (``gpt2``), with the patterns that the file
names in ``tokenizer.ggml.pre``; and SentencePiece's BPE with byte fallback (``llama``), whose
merges follow from the scores. The result is ``tokenizer.json`` of the ``tokenizers`` library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from edgespec.models.gguf_file import GgufError, GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
_SPACE: Final = "▁"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN2: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{_CONTRACTIONS}?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS: Final[Mapping[str, str]] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "smollm3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
"""The patterns that cut a text before merging, by the name in ``tokenizer.ggml.pre``."""
_SINGLE_DIGITS: Final = ("smollm", "refact", "starcoder", "command-r", "codeshell")
"""Names for GPT-2's own pattern with each digit by itself."""
_GPT2: Final = ("gpt-2", "phi-2", "olmo", "default")
_ENDS: Final = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|end_of_role|>",
)
"""Control tokens that end an output in some family. GGUF has room for one or two only, and
llama.cpp ends at the others too."""
_HARMONY_ENDS: Final = ("<|return|>", "<|call|>")
_HARMONY_MESSAGE_END: Final = "<|end|>"
"""In a vocabulary with ``_HARMONY_ENDS`` it ends one message of an output, such as the thought."""


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """Return the tokenizer of a model. Raises ``GgufError``."""
    kind = file.needed("tokenizer.ggml.model", str)
    tokens = _read_tokens(file)
    if len(set(tokens)) != len(tokens):
        raise GgufError(f"{file.path}: tokenizer.ggml.tokens has a token twice")
    if kind == "gpt2":
        tokenizer = _make_byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _make_sentence_piece(file, tokens)
    else:
        raise GgufError(f"{file.path}: tokenizer {kind!r} is not read; gpt2 and llama are")
    _add_tokens(file, tokenizer, tokens)
    _add_begin(file, tokenizer, tokens, kind)
    return tokenizer


def tokenizer_config_of(file: GgufFile) -> dict[str, Any]:
    """Return the ``tokenizer_config.json`` of a model: its special tokens and chat templates."""
    tokens = _read_tokens(file)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos", "unknown", "padding"):
        if (token := _read_id(file, f"tokenizer.ggml.{name}_token_id", len(tokens))) is not None:
            key = {"unknown": "unk", "padding": "pad"}.get(name, name)
            config[f"{key}_token"] = tokens[token]
    if (template := file.value("tokenizer.chat_template", str)) is not None:
        config["chat_template"] = template
    return config


def end_tokens_of(file: GgufFile) -> list[int]:
    """Return the ids that end an output, the usual one first."""
    tokens, types = _read_tokens(file), _read_types(file)
    found = [
        token
        for key in ("eos", "eot", "eom")
        if (token := _read_id(file, f"tokenizer.ggml.{key}_token_id", len(tokens))) is not None
    ]
    ids = {text: token for token, text in enumerate(tokens)}
    found += [ids[end] for end in _ENDS if end in ids and types[ids[end]] == _CONTROL]
    if all(end in ids for end in _HARMONY_ENDS):
        found = [token for token in found if tokens[token] != _HARMONY_MESSAGE_END]
    return list(dict.fromkeys(found))


def _make_byte_level(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.value("tokenizer.ggml.pre", str, "default")
    merges = [
        tuple(merge.split(" ", 1)) for merge in _read_texts(file, "tokenizer.ggml.merges", [])
    ]
    if any(len(merge) != 2 for merge in merges):
        raise GgufError(f"{file.path}: tokenizer.ggml.merges has an entry that is no pair")
    model = models.BPE(
        {text: token for token, text in enumerate(tokens)},
        _check_merges(merges, set(tokens), file),
        ignore_merges=_PATTERNS.get(name) in (_LLAMA3, _TEKKEN),
    )
    tokenizer = Tokenizer(model)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if (pattern := _PATTERNS.get(name)) is not None:
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, plain])
    elif name in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    elif name in _GPT2:
        tokenizer.pre_tokenizer = gpt2
    else:
        known = ", ".join(sorted((*_PATTERNS, *_SINGLE_DIGITS, *_GPT2)))
        raise GgufError(f"{file.path}: tokenizer.ggml.pre {name!r} is not known; known are {known}")
    if pattern == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _make_sentence_piece(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = file.needed("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or not all(isinstance(score, float) for score in scores):
        raise GgufError(f"{file.path}: tokenizer.ggml.scores are not {len(tokens)} numbers")
    unknown = _read_id(file, "tokenizer.ggml.unknown_token_id", len(tokens))
    model = models.BPE(
        {text: token for token, text in enumerate(tokens)},
        list(_derive_merges(tokens, _rank_tokens(file, scores))),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    space = normalizers.Replace(" ", _SPACE)
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.value("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = space
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _rank_tokens(file: GgufFile, scores: Sequence[float]) -> list[float]:
    """Return a number for each token; the merges of the token with the highest one come first.

    The numbers are the scores in the file, with two exceptions. What users have defined, such as
    runs of spaces, comes first, because SentencePiece matches it before it merges anything (its
    score in the file is a placeholder, -1000). Gemma's tokens come in the order of their ids, since
    its tokenizer on the Hub is made in that way."""
    if file.value("general.architecture", str, "").startswith("gemma"):
        return [-float(token) for token in range(len(scores))]
    pairs = zip(scores, _read_types(file), strict=True)
    return [math.inf if kind == _USER_DEFINED else score for score, kind in pairs]


def _derive_merges(tokens: Sequence[str], ranks: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yield the merges of a vocabulary, in the order of their ranks: SentencePiece merges the pair
    whose result ranks highest."""
    ids = {text: token for token, text in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for text, rank in zip(tokens, ranks, strict=True):
        pairs = [
            (text[:cut], text[cut:])
            for cut in range(1, len(text))
            if text[:cut] in ids and text[cut:] in ids
        ]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(rank, len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return ((left, right) for *_, left, right in found)


def _check_merges(
    merges: Sequence[tuple[str, ...]], tokens: set[str], file: GgufFile
) -> list[tuple[str, str]]:
    """Return the merges, checked: the library ends the process's work on one with strangers."""
    for left, right in merges:
        if left not in tokens or right not in tokens or left + right not in tokens:
            raise GgufError(f"{file.path}: the merge {left!r} {right!r} is not of tokens")
    return [(left, right) for left, right in merges]


def _add_tokens(file: GgufFile, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Mark control tokens as special, and what users have defined as added tokens."""
    from tokenizers import AddedToken

    kinds = _read_types(file)
    special = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    # Runs of spaces need no mark in SentencePiece: their merges come first (``_ranks``).
    plain = [
        text
        for text, kind in zip(tokens, kinds, strict=True)
        if kind == _USER_DEFINED and text.strip(_SPACE)
    ]
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in special if text]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain if text])


def _add_begin(file: GgufFile, tokenizer: Tokenizer, tokens: Sequence[str], kind: str) -> None:
    """Put the begin token before each text, and the end token behind it, where the model wants
    them."""
    from tokenizers import processors

    begins = file.value("tokenizer.ggml.add_bos_token", bool, kind == "llama")
    ends = file.value("tokenizer.ggml.add_eos_token", bool, False)
    begin = _read_id(file, "tokenizer.ggml.bos_token_id", len(tokens)) if begins else None
    end = _read_id(file, "tokenizer.ggml.eos_token_id", len(tokens)) if ends else None
    added = [token for token in (begin, end) if token is not None]
    if not added:
        return
    single = ["$A:0"]
    if begin is not None:
        single.insert(0, tokens[begin])
    if end is not None:
        single.append(tokens[end])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(one.replace("$A:0", "$B:1") for one in single)],
        special_tokens=[(tokens[token], token) for token in added],
    )


def _read_tokens(file: GgufFile) -> list[str]:
    """Return the texts of all tokens. What users have defined has plain spaces in a file of
    SentencePiece, unlike everything else."""
    tokens = _read_texts(file, "tokenizer.ggml.tokens")
    if file.value("tokenizer.ggml.model", str) != "llama":
        return tokens
    return [
        text.replace(" ", _SPACE) if kind == _USER_DEFINED else text
        for text, kind in zip(tokens, _read_types(file), strict=True)
    ]


def _read_texts(file: GgufFile, key: str, default: list[str] | None = None) -> list[str]:
    found = file.needed(key, list) if default is None else file.value(key, list, default)
    if not all(isinstance(one, str) for one in found):
        raise GgufError(f"{file.path}: {key} are not texts")
    return list(found)


def _read_types(file: GgufFile) -> list[int]:
    tokens = file.needed("tokenizer.ggml.tokens", list)
    found = file.value("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(found) != len(tokens):
        raise GgufError(f"{file.path}: tokenizer.ggml.token_type are not {len(tokens)} numbers")
    return list(found)


def _read_id(file: GgufFile, key: str, count: int) -> int | None:
    found = file.value(key, int)
    if found is None:
        return None
    if not 0 <= found < count:
        raise GgufError(f"{file.path}: {key} is {found}, but there are {count} tokens")
    return int(found)
