"""The bytes that one token stands for by itself, for lists of log-probabilities.

A token may be a part of a character, so its text alone can be U+FFFD; its bytes always join to the
text. How a vocabulary writes bytes depends on its decoder: byte-level BPE has a letter for each
byte (GPT-2's table), byte fallback writes ``<0xE2>``, SentencePiece writes a space as U+2581.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_letters() -> dict[str, int]:
    """GPT-2's table, letter to byte: printable Latin-1 stands for itself, each other byte for
    one of the letters from U+0100 on, in order."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class TokenBytes:
    """Call with a token id; ids that there are not are no bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()
        }
        decoder = json.dumps(json.loads(tokenizer.to_str()).get("decoder"))
        self._letters = byte_letters() if '"ByteLevel"' in decoder else None

    def __call__(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            return added.encode()
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if self._letters is not None and all(letter in self._letters for letter in written):
            return bytes(self._letters[letter] for letter in written)
        if found := _BYTE_TOKEN.fullmatch(written):
            return bytes((int(found[1], 16),))
        return str(written).replace(_SPACE, " ").encode()
