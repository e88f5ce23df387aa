"""A vocabulary as bytes, the language that two tokenizers share.

A token is what its bytes are in the middle of a text. So ids become bytes by a table, and never by
decoding a whole text, which would lose a half character or a space. Bytes become ids by the
tokenizer's own encoder, as a piece from the middle of a plain text: names of special tokens are
letters there, and no space is put before the first word. Bytes that are no UTF-8 become the tokens
of single bytes.

Byte-level BPE, SentencePiece with byte fallback (BPE or Unigram) and everything else that has a
token for each byte of a character can be used. A tokenizer that writes ``<unk>`` for a character
that it lacks cannot.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from edgespec.models.tokenizer import ChatTemplate, TokenizerError

_CROSSES_SPACE: Final = re.compile(rb"[^\s][ ]|[0-9A-Za-z]\n")
_MAX_CROSSING_SHARE: Final = 0.01
"""Share of the tokens that may hold a word's end and a space behind it. Where more do, no place in
a text is known to be the end of a token."""
_INVALID: Final = re.compile("[\udc80-\udcff]+")
_CACHED_PIECES, _MAX_CACHED_BYTES = 8192, 96
_PROBES: Final = (" the", "the", "A b", "  two", "x = 1;", "\n", "\ue123\U000f4567")
"""Pieces that must keep their bytes. A tokenizer that drops spaces or changes cases loses them, and
one without byte tokens loses the last ones, which are no characters of any script."""
_MAX_CHARACTER_BYTES: Final = 4


class NoBytesError(TokenizerError):
    """A tokenizer cannot write every text. The message says which part it lacks."""


class PieceTokenizer(Protocol):
    """The part of a tokenizer that its byte vocabulary needs."""

    @property
    def id_count(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def special_texts(self) -> Mapping[str, str]: ...

    @property
    def added(self) -> Mapping[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def chat_template(self, *, tools: bool = False) -> ChatTemplate | None: ...


class ByteVocabulary:
    """The tokens of ``tokenizer`` as bytes. ``name`` is that of its model, for messages.

    Raises ``NoBytesError`` for a tokenizer that cannot write every text."""

    def __init__(self, tokenizer: PieceTokenizer, name: str) -> None:
        check_keeps_bytes(tokenizer, name)
        self.tokenizer, self.name = tokenizer, name
        self.size = tokenizer.id_count
        self.special_ids = tokenizer.special_ids
        self._bytes, self._ends = _read_table(tokenizer)
        self._byte_ids = self._find_byte_ids()
        self._known: dict[bytes, tuple[int, ...]] = {}
        self.has_word_ends = self._count_crossing() <= _MAX_CROSSING_SHARE * self.size
        """Whether the end of a word before a space is the end of a token, too."""
        self.prefix_ids = self._find_prefix()
        """Ids that the tokenizer writes before every text, such as the beginning of a text."""
        self.spaces_first_word, self.spaces_every_run = self._find_first_spaces()

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of an id; none for a special token, and for an id without a token."""
        if not 0 <= token < self.size or token in self.special_ids:
            return b""
        return self._bytes[self._ends[token - 1] if token else 0 : self._ends[token]]

    def text_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of several ids."""
        return b"".join(map(self.token_bytes, tokens))

    def words(self) -> Iterator[tuple[int, bytes]]:
        """Yield the ids that stand for bytes, with these."""
        for token in range(self.size):
            if word := self.token_bytes(token):
                yield token, word

    def encode(self, data: bytes) -> tuple[int, ...]:
        """Return the ids of bytes from the middle of a text. Bytes of no character become tokens of
        single bytes; one that the vocabulary lacks is left out. Raises ``TokenizerError``."""
        if not data:
            return ()
        if (known := self._known.get(data)) is not None:
            return known
        found = tuple(self._encode(data))
        if len(data) <= _MAX_CACHED_BYTES:
            if len(self._known) >= _CACHED_PIECES:
                self._known.clear()
            self._known[data] = found
        return found

    def _encode(self, data: bytes) -> list[int]:
        try:
            return self.tokenizer.encode_pieces((data.decode(),))[0]
        except UnicodeDecodeError:
            text = data.decode("utf-8", "surrogateescape")
        ids, start = list[int](), 0
        for match in _INVALID.finditer(text):
            if match.start() > start:
                ids += self.tokenizer.encode_pieces((text[start : match.start()],))[0]
            wrong = match.group().encode("utf-8", "surrogateescape")
            ids += (self._byte_ids[byte] for byte in wrong if byte in self._byte_ids)
            start = match.end()
        if start < len(text):
            ids += self.tokenizer.encode_pieces((text[start:],))[0]
        return ids

    # --- what the vocabulary has --------------------------------------------------------------

    def _find_byte_ids(self) -> dict[int, int]:
        """Return the id of each byte that is a token by itself, the lowest one."""
        found = dict[int, int]()
        for token, word in self.words():
            if len(word) == 1:
                found.setdefault(word[0], token)
        return found

    def _count_crossing(self) -> int:
        return sum(_CROSSES_SPACE.search(word) is not None for _, word in self.words())

    def _find_prefix(self) -> tuple[int, ...]:
        plain = self.tokenizer.encode("a", add_special_tokens=False)
        whole = self.tokenizer.encode("a")
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return tuple(whole[:start])
        return ()

    def _find_first_spaces(self) -> tuple[bool, bool]:
        """Return whether a space is put before the first word of a text, and whether one is put
        before the first word behind each special token."""

        def has_space(ids: Sequence[int]) -> bool:
            return self.text_bytes(ids).startswith(b" ")

        first = has_space(self.tokenizer.encode("a", add_special_tokens=False))
        if not first:
            return False, False
        for text, token in self.tokenizer.added.items():
            if token in self.special_ids:
                ids = self.tokenizer.encode(f"{text}a", add_special_tokens=False)
                return True, has_space(ids)
        return True, False


def check_keeps_bytes(tokenizer: PieceTokenizer, name: str) -> None:
    """Check that a tokenizer writes every text without a loss, by a few pieces. Raises
    ``NoBytesError`` with the name of its model."""
    special = tokenizer.special_ids
    for probe, ids in zip(_PROBES, tokenizer.encode_pieces(_PROBES), strict=True):
        written = b"".join([tokenizer.token_bytes(one) for one in ids if one not in special])
        if written != probe.encode():
            raise NoBytesError(
                f"the tokenizer of {name!r} makes {written.decode(errors='replace')!r} of"
                f" {probe!r}: it has no tokens for single bytes, or changes texts"
            )


def _read_table(tokenizer: PieceTokenizer) -> tuple[bytes, array[int]]:
    """Return the bytes of all tokens, one after another, and the end of each."""
    found, ends = bytearray(), array("I")
    for token in range(tokenizer.id_count):
        found += tokenizer.token_bytes(token)
        ends.append(len(found))
    return bytes(found), ends


# --- places in a text -----------------------------------------------------------------------------


def find_last_word_end(data: bytes, *, punctuation: bool = False) -> int:
    """Return the last place before which a word ends and at which a space or a line end begins; 0
    if there is none.

    Tokens of common tokenizers end there, whatever follows, so the text before the place and the
    text behind it can be encoded separately. A word ends with a letter or digit. With
    ``punctuation`` any other character before a space counts, too; a line end may belong to the
    punctuation before it."""
    end = len(data)
    while (place := max(data.rfind(b" ", 0, end), data.rfind(b"\n", 0, end))) > 0:
        before = _last_character(data, place)
        if before.isalnum() or (
            punctuation and data[place] == 0x20 and before and not before.isspace()
        ):
            return place
        end = place
    return 0


def is_word_end(data: bytes, place: int) -> bool:
    """Return whether ``place`` is one that ``find_last_word_end`` may return."""
    return (
        0 < place < len(data) and data[place] in b" \n" and _last_character(data, place).isalnum()
    )


def _last_character(data: bytes, end: int) -> str:
    """Return the character that ends at ``end``; empty if there is no whole one."""
    start = end - 1
    while start > 0 and end - start < _MAX_CHARACTER_BYTES and data[start] & 0xC0 == 0x80:
        start -= 1
    return data[start:end].decode(errors="ignore")[-1:]


def unfinished_length(data: bytes) -> int:
    """Return how many bytes at the end of ``data`` are the beginning of a character, 0 to 3."""
    for length in range(1, min(_MAX_CHARACTER_BYTES, len(data) + 1)):
        lead = data[-length]
        if lead & 0xC0 == 0x80:
            continue
        needed = 2 if 0xC2 <= lead < 0xE0 else 3 if lead & 0xF0 == 0xE0 else 0
        needed = 4 if 0xF0 <= lead < 0xF5 else needed
        return length if needed > length else 0
    return 0


def find_token_at(ends: Sequence[int], byte: int) -> int:
    """Return the index of the token that holds the byte at this place. ``ends`` are the ends of the
    tokens in bytes."""
    return bisect_right(ends, byte)
