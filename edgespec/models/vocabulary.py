"""The fingerprint of a vocabulary: equal for two models exactly when ids mean the same text.

Drafts travel as token ids, so a device and a verifier must agree on what an id means, and nothing
else: merges, normalisation and chat templates may differ. The hash covers every (id, token
string), added tokens included, in order of id. Two ``tokenizer.json`` files of one vocabulary
agree however they are laid out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

MAX_TOKENIZER_BYTES = 256 << 20
MAX_TOKEN_ID = (1 << 24) - 1
_FINGERPRINT_DIGITS = 32


class VocabularyError(ValueError):
    """A tokenizer file cannot be read; the message names the file and what is wrong with it."""


def vocabulary_fingerprint(path: Path) -> str:
    """32 hex digits (128 bits of SHA-256) for a ``tokenizer.json``. Raises ``VocabularyError``.

    A file is read once: that takes ten times its size of memory, and ``serve`` asks every while."""
    try:
        found = path.stat()
    except OSError:
        return _fingerprint(path, ())  # which says what is wrong
    return _fingerprint(path, (found.st_mtime_ns, found.st_size, found.st_ino))


@lru_cache(maxsize=16)
def _fingerprint(path: Path, version: tuple[int, ...]) -> str:
    tokens = read_vocabulary(path)
    digest = hashlib.sha256()
    for token_id in sorted(tokens):
        text = tokens[token_id].encode("utf-8", errors="surrogatepass")
        # Lengths are part of the input: no two vocabularies run together to the same bytes.
        digest.update(b"%d %d " % (token_id, len(text)))
        digest.update(text)
    return digest.hexdigest()[:_FINGERPRINT_DIGITS]


def read_vocabulary(path: Path) -> dict[int, str]:
    """Token strings by id, added tokens last. Raises ``VocabularyError``."""
    data = _read(path)
    model = data.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    tokens: dict[int, str]
    try:
        match vocabulary:
            case dict():  # BPE, WordPiece, WordLevel: token -> id
                tokens = {int(token_id): str(token) for token, token_id in vocabulary.items()}
            case list():  # Unigram: [token, score] at the place of its id
                tokens = {token_id: str(entry[0]) for token_id, entry in enumerate(vocabulary)}
            case _:
                raise VocabularyError(f"{path}: model.vocab is missing")
        for added in data.get("added_tokens") or ():
            tokens[int(added["id"])] = str(added["content"])
    except VocabularyError:
        raise
    except (KeyError, TypeError, IndexError, ValueError, OverflowError) as error:
        raise VocabularyError(f"{path}: unreadable vocabulary entry: {error!r}") from error
    low, high = min(tokens, default=0), max(tokens, default=0)
    if low < 0 or high > MAX_TOKEN_ID:  # whoever counts ids from 0 on would never end
        raise VocabularyError(f"{path}: token ids {low} to {high}, limit 0 to {MAX_TOKEN_ID}")
    return tokens


def _read(path: Path) -> Mapping[str, Any]:
    try:
        size = path.stat().st_size
        if size > MAX_TOKENIZER_BYTES:
            raise VocabularyError(
                f"{path}: {size} bytes, but at most {MAX_TOKENIZER_BYTES} are read"
            )
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise VocabularyError(f"{path}: no such file") from error
    except VocabularyError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise VocabularyError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(data, dict):
        raise VocabularyError(f"{path}: holds a JSON {type(data).__name__}, not an object")
    return data
