"""What a conversation is known by: 64 bits of a hash, the same at each of its turns.

A verifier keeps the rows of texts that it has served, so the next turn of a conversation, which
begins with all that was said, is quick where the turn before was. Whoever knows its conversations
apart names them (``conversation_named``); of a bare prompt the beginning has to do
(``conversation_of``). No text can be read from the hash; but who knows a beginning can tell that it
is this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

BEGINNING_TOKENS = 64
"""Prompts that agree in so many tokens count as one conversation. Few enough that most second turns
begin like the first; more than the opening of a chat template takes."""
_BYTES = 8


def conversation_of(prompt: Sequence[int]) -> str:
    """The conversation of a prompt (token ids) that nobody has named, as 16
    hexadecimal digits."""
    return _digest(b"tokens", ",".join(map(str, prompt[:BEGINNING_TOKENS])).encode())


def conversation_named(name: str) -> str:
    """The conversation of that name (or of that first message), as 16 hexadecimal digits."""
    return _digest(b"name", name.encode("utf-8", "surrogatepass"))


def _digest(kind: bytes, data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_BYTES, person=kind).hexdigest()
