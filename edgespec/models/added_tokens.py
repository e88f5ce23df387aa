"""Tokens that a tokenizer folder adds beside its ``tokenizer.json``.

Hugging Face's library also reads ``tokenizer_config.json``, ``special_tokens_map.json`` and
``added_tokens.json``, and adds the tokens that ``tokenizer.json`` lacks: their ids follow the
vocabulary in the order in which they are added. The rules below are those of transformers 5.23 for
a tokenizer that is loaded from a ``tokenizer.json`` (``TokenizersBackend``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS_MAP: Final = "special_tokens_map.json"
ADDED_TOKENS: Final = "added_tokens.json"
FILES: Final = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS)
"""The files beside ``tokenizer.json`` that can add a token."""

ROLES: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Names that special tokens have in every tokenizer, in the order in which they are added."""
_MAX_ADDED: Final = 1 << 16
_EXTRA: Final = "extra_special_tokens"
_OLDER_EXTRA: Final = "additional_special_tokens"
_FLAGS: Final = ("special", "single_word", "lstrip", "rstrip", "normalized")


class AddedTokensError(ValueError):
    """A file describes a token in a way that is not valid. The message names the file, the key and
    the value."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is searched in a text before the vocabulary is applied. The flags are those of
    ``tokenizers``."""

    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Tokens that are described by the files beside ``tokenizer.json``."""

    named: Mapping[str, str]
    """Special tokens by their names, such as ``bos_token``; chat templates have them as
    variables."""
    added: tuple[AddedToken, ...]
    """Tokens to add, in order. A token that the vocabulary has keeps its id and gets these
    flags."""


def assign_ids(
    tokens: Mapping[int, str], added: Mapping[int, str], vocabulary_size: int, more: Iterable[str]
) -> dict[int, str]:
    """Return the ids behind a vocabulary for the contents ``more``, as ``tokenizers`` numbers them.

    ``tokens`` are all token strings by id. ``added`` are the tokens that were added before.
    ``vocabulary_size`` is the number of entries in the model's own vocabulary."""
    known, largest = set(tokens.values()), max(added, default=-1)
    assigned: dict[int, str] = {}
    for content in more:
        if content not in known:
            largest = max(largest + 1, vocabulary_size)
            assigned[largest] = content
            known.add(content)
    return assigned


def read_added_tokens(
    files: Mapping[str, Mapping[str, Any]], own: Mapping[int, AddedToken], folder: Path
) -> AddedTokens:
    """Return the tokens that the files beside a ``tokenizer.json`` describe.

    ``files`` are the parsed ones of ``FILES`` that exist, ``own`` the added tokens of
    ``tokenizer.json`` by id. ``folder`` is used in messages. Raises ``AddedTokensError``."""
    config = dict(files.get(TOKENIZER_CONFIG, {}))
    where = folder / TOKENIZER_CONFIG
    if not config.get(_EXTRA) and _OLDER_EXTRA in config:
        config[_EXTRA] = config.pop(_OLDER_EXTRA)
    by_id: dict[int, AddedToken] = {}
    decoder = config.get("added_tokens_decoder")
    if decoder is not None:
        for key, value in _iterate_object(where, "added_tokens_decoder", decoder):
            by_id[_parse_id(where, f"added_tokens_decoder[{key}]", key)] = parse_token(
                where, value, key
            )
    else:
        _merge_map(config, files.get(SPECIAL_TOKENS_MAP, {}))
        special = {*_find_named(where, config).values(), *_find_unnamed(where, config)}
        texts = {one.content for one in special}
        path = folder / ADDED_TOKENS
        for content, number in _iterate_object(path, ADDED_TOKENS, files.get(ADDED_TOKENS, {})):
            by_id[_parse_id(path, content, number)] = AddedToken(
                content, special=content in texts, normalized=content not in texts
            )
        by_id |= own
    named, extra = _find_named(where, config), _find_unnamed(where, config)
    described = {one.content: one for one in by_id.values()}
    named = {name: described.get(one.content, one) for name, one in named.items()}
    own_tokens = set(own.values())
    added = [
        one for _, one in sorted(by_id.items(), key=lambda item: item[0]) if one not in own_tokens
    ]
    known = {one.content for one in (*own.values(), *added)}
    for one in (*named.values(), *extra):
        if one.content not in known:
            known.add(one.content)
            added.append(one)
    roles = {one.content for one in named.values()}
    added = [replace(one, special=True) if one.content in roles else one for one in added]
    if len(added) > _MAX_ADDED:
        raise AddedTokensError(f"{where}: adds {len(added)} tokens, but at most {_MAX_ADDED}")
    return AddedTokens(
        {name: one.content for name, one in named.items()},
        tuple(one for one in added if one.content),
    )


def _merge_map(config: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Merge the entries of ``special_tokens_map.json`` into ``config``, as transformers does."""
    for key, value in more.items():
        if key == _EXTRA and isinstance(value, list):
            had = config.get(_EXTRA) or []
            value = [*had, *(one for one in value if one not in had)]
        elif key == _OLDER_EXTRA:
            if _EXTRA in config:
                continue
            key = _EXTRA
        elif isinstance(value, dict) and key != _EXTRA:
            value = {**value, "special": True}
        config[key] = value


def _find_named(path: Path, config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return the special tokens that have a name: the seven common ones first, then a model's
    own."""
    named: dict[str, AddedToken] = {}
    others = [
        key
        for key, value in config.items()
        if key.endswith("_token") and key not in ROLES and isinstance(value, str | dict)
    ]
    extra = config.get(_EXTRA)
    values = {**config, **(extra if isinstance(extra, dict) else {})}
    for key in (*ROLES, *others, *(extra if isinstance(extra, dict) else ())):
        if (value := values.get(key)) is not None:
            named[key] = _parse_special(path, key, value)
    return named


def _find_unnamed(path: Path, config: Mapping[str, Any]) -> list[AddedToken]:
    """Return the special tokens without a name."""
    value = config.get(_EXTRA)
    if value is None or isinstance(value, dict):
        return []
    if not isinstance(value, list):
        raise AddedTokensError(f"{path}: {_EXTRA} is {value!r}, but must be a list of tokens")
    return [_parse_special(path, f"{_EXTRA}[{place}]", one) for place, one in enumerate(value)]


def _parse_special(path: Path, key: str, value: object) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    return parse_token(path, value, key)


def parse_token(path: Path, value: object, key: str = "added_tokens") -> AddedToken:
    """Return the token that a JSON object describes. ``path`` and ``key`` are named in the
    ``AddedTokensError`` that any other value raises."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise AddedTokensError(
            f"{path}: {key} is {value!r}, but must be a token: an object with its content"
        )
    flags = {name: value[name] for name in _FLAGS if value.get(name) is not None}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise AddedTokensError(f"{path}: {key}: {name} is {flag!r}, but must be true or false")
    if "normalized" not in flags:
        flags["normalized"] = not flags.get("special", False)
    return AddedToken(value["content"], **flags)


def _iterate_object(path: Path, key: str, value: object) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise AddedTokensError(f"{path}: {key} is {value!r}, but must be an object")
    yield from value.items()


def _parse_id(path: Path, key: str, value: object) -> int:
    """Return a token id, which JSON may have as text. Raises ``AddedTokensError``."""
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if type(number) is not int or number < 0:
        raise AddedTokensError(f"{path}: {key} has the id {value!r}, but must have a whole number")
    return number
