"""A target's text in the ids of a draft, kept up to date as a cache is: truncate and append.

The text is a chain of pieces. A piece is either a part of words, whose bytes the draft's tokenizer
has encoded, or a marker: special tokens, or a part of a chat prompt, that stand for ids of the
draft. A piece of words ends where a word ends and a space follows, because no token of either
vocabulary crosses that place. So only the last piece changes when the text grows. Scripts without
spaces have no such places; there a piece ends after some hundred bytes, at the cost of one token
that might have been longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgespec.models.byte_vocabulary import (
    ByteVocabulary,
    find_last_word_end,
    find_token_at,
    is_word_end,
    unfinished_length,
)
from edgespec.models.translation import Marker, Translation

_LONGEST_PIECE: Final = 384
"""Bytes of the last piece from which it is cut although no word ends in it."""
_TAIL_TOKENS, _TAIL_BYTES = 8, 48
"""Most committed tokens that are encoded again together with what is drafted behind them."""


@dataclass(slots=True)
class _Piece:
    first_token: int
    """Index of the target's token that holds the beginning of the piece."""
    start: int
    """Place of the first byte in the text."""
    first_id: int
    """Number of ids of the draft before the piece."""
    is_marker: bool
    begins_run: bool = False
    """Whether the piece stands at the beginning of the text, or behind a marker."""


class TranslatedText:
    """The text of one sequence. The first ``prompt_length`` tokens are a prompt."""

    def __init__(self, translation: Translation, prompt_length: int) -> None:
        self._pair = translation
        self._prompt_length = prompt_length
        self.tokens: list[int] = []
        """Ids of the target."""
        self.data = bytearray()
        """Bytes of ``tokens``. A special token has none."""
        self._ends: list[int] = []
        """End of each token in ``data``."""
        self._breaks: list[int] = []
        """Indices of the special tokens."""
        self._pieces: list[_Piece] = []
        self._ids: list[int] = []
        self._read_count = 0
        """Number of tokens that the pieces hold."""
        self._markers: dict[int, list[Marker]] = {}
        for marker in translation.markers:
            self._markers.setdefault(marker.target_ids[0], []).append(marker)

    @property
    def end(self) -> int:
        """Number of bytes of the text."""
        return len(self.data)

    @property
    def unfinished(self) -> int:
        """Number of bytes at the end that are the beginning of a character."""
        return unfinished_length(bytes(self.data[self._run_start() :][-4:]))

    @property
    def ends_untranslated(self) -> bool:
        """Whether the last token is a special one that the draft has no twin for."""
        token = self.tokens[-1]
        is_special = token in self._pair.target.special_ids and len(self.tokens) > 1
        return is_special and token not in self._pair.special_to_draft and not self._ends_marker()

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        if length >= len(self.tokens):
            return
        if length < self._prompt_length:
            self._pieces.clear()
            self._ids.clear()
            self._read_count = 0
        while self._pieces and self._pieces[-1].first_token >= length:
            del self._ids[self._pieces.pop().first_id :]
        self._read_count = min(self._read_count, length)
        del self.tokens[length:]
        del self.data[self._ends[length - 1] if length else 0 :]
        del self._ends[length:]
        while self._breaks and self._breaks[-1] >= length:
            self._breaks.pop()

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens. They are read by ``draft_ids``."""
        for token in tokens:
            self.tokens.append(token)
            self.data += self._pair.target.token_bytes(token)
            self._ends.append(len(self.data))
            if token in self._pair.target.special_ids:
                self._breaks.append(len(self.tokens) - 1)

    def draft_ids(self) -> list[int]:
        """Return the draft's ids of the text, but for a character that is not finished. The list
        belongs to this object."""
        tokens, special = self.tokens, self._pair.target.special_ids
        if not self._pieces:
            self._begin()
        at = self._read_count
        while at < len(tokens):
            marker = self._find_marker(at)
            if marker is not None or tokens[at] in special:
                self._encode_last(self._start_of(at))
                self._add_marker(at, self._make_marker(at) if marker is None else marker)
                at += 1 if marker is None else len(marker.target_ids)
                continue
            if self._pieces[-1].is_marker and self._ends[at] > self._start_of(at):
                start = self._start_of(at)
                self._pieces.append(_Piece(at, start, len(self._ids), False, begins_run=True))
            at += 1
        self._read_count = len(tokens)
        self._encode_last(len(self.data) - self.unfinished)
        return self._ids

    def count_draft_ids(self, length: int) -> int:
        """Return about how many of the draft's ids the first ``length`` tokens take, as of the last
        ``draft_ids``."""
        for piece in self._pieces:
            if piece.first_token >= length:
                return piece.first_id
        return len(self._ids)

    def readings(self, drafted: bytes) -> list[tuple[int, ...]]:
        """Return the target's ids that may continue the text with the bytes ``drafted``, best
        first.

        The tokens of the text stay as they are. The first reading is what the target's tokenizer
        makes of the last words and the drafted bytes together, if it begins with the tokens that
        are there; the other one is made of the drafted bytes alone. There is one reading if both
        begin alike."""
        vocabulary = self._pair.target
        alone = vocabulary.encode(drafted)
        first, tail = self._find_tail()
        if not tail or (vocabulary.has_word_ends and is_word_end(tail + drafted, len(tail))):
            return [alone]
        whole, count = vocabulary.encode(tail + drafted), len(self.tokens) - first
        if whole[:count] != tuple(self.tokens[first:]) or len(whole) == count:
            return [alone]
        together = whole[count:]
        return [together] if together[:1] == alone[:1] else [together, alone]

    def fit_first_space(self, drafted: bytes) -> bytes:
        """Return drafted bytes as they stand at the beginning of a run of words, where one of both
        tokenizers may write a space that is not in the text."""
        if self._run_start() < len(self.data) or not drafted:
            return drafted
        is_first = not self.data
        if self._spaces(self._pair.draft, is_first=is_first):
            drafted = drafted.removeprefix(b" ")
        if self._spaces(self._pair.target, is_first=is_first) and drafted[:1] not in (b" ", b"\n"):
            drafted = b" " + drafted
        return drafted

    # --- pieces -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin with the ids that the draft's tokenizer writes before every text, unless a prompt
        of the chat template follows, which has its own."""
        marker = self._find_marker(0)
        prefix = () if marker is not None and marker.begins else self._pair.draft.prefix_ids
        self._ids[:] = prefix
        self._pieces.append(_Piece(0, 0, 0, True))

    def _find_marker(self, at: int) -> Marker | None:
        """Return the part of a chat prompt that begins at token ``at``, if there is one."""
        for marker in self._markers.get(self.tokens[at], ()):
            end = at + len(marker.target_ids)
            if marker.begins != (at == 0) or end > min(self._prompt_length, len(self.tokens)):
                continue
            if tuple(self.tokens[at:end]) == marker.target_ids:
                return marker
        return None

    def _make_marker(self, at: int) -> Marker:
        """Return the marker of the special token ``at``. It is empty if the draft has no twin, and
        at the beginning of a text, for which the draft may have a prefix of its own."""
        token = self.tokens[at]
        twin = self._pair.special_to_draft.get(token)
        is_empty = twin is None or (at == 0 and self._pair.draft.prefix_ids)
        return Marker((token,), () if is_empty or twin is None else (twin,), begins=False)

    def _add_marker(self, at: int, marker: Marker) -> None:
        start = self._start_of(at)
        self._pieces.append(_Piece(at, start, len(self._ids), is_marker=True))
        self._ids.extend(marker.draft_ids)

    def _ends_marker(self) -> bool:
        """Whether the text ends with a part of a chat prompt."""
        return len(self.tokens) == self._prompt_length and any(
            tuple(self.tokens[-len(one.target_ids) :]) == one.target_ids
            for one in self._pair.markers
        )

    def _encode_last(self, end: int) -> None:
        """Encode the last piece, which reaches to the byte ``end``, anew."""
        piece = self._pieces[-1]
        if piece.is_marker:
            return
        del self._ids[piece.first_id :]
        data = bytes(self.data[piece.start : end])
        if cut := self._find_cut(data):
            self._ids += self._encode(data[:cut], piece)
            start = piece.start + cut
            token = find_token_at(self._ends, start)
            piece = _Piece(token, start, len(self._ids), is_marker=False)
            self._pieces.append(piece)
            data = data[cut:]
        self._ids += self._encode(data, piece)

    def _encode(self, data: bytes, piece: _Piece) -> tuple[int, ...]:
        if piece.begins_run and data:
            is_first = piece.start == 0
            if self._spaces(self._pair.target, is_first=is_first):
                data = data.removeprefix(b" ")
            if self._spaces(self._pair.draft, is_first=is_first):
                data = b" " + data
        return self._pair.draft.encode(data)

    @staticmethod
    def _spaces(vocabulary: ByteVocabulary, *, is_first: bool) -> bool:
        """Whether a tokenizer puts a space before the first word of a run of words."""
        return vocabulary.spaces_every_run or (vocabulary.spaces_first_word and is_first)

    def _find_cut(self, data: bytes) -> int:
        """Return the place in the last piece before which nothing changes any more; 0: none."""
        if self._pair.draft.has_word_ends and (place := find_last_word_end(data)):
            return place
        if len(data) <= _LONGEST_PIECE:
            return 0
        middle = len(data) // 2
        while middle < len(data) and data[middle] & 0xC0 == 0x80:
            middle += 1
        return middle % len(data)

    def _start_of(self, token: int) -> int:
        return self._ends[token - 1] if token else 0

    def _run_start(self) -> int:
        """Return the place behind the last special token, at which a run of words begins."""
        return self._ends[self._breaks[-1]] if self._breaks else 0

    def _find_tail(self) -> tuple[int, bytes]:
        """Return the last tokens from the end of a word on: the index of the first one, and their
        bytes."""
        run, end = self._run_start(), len(self.data)
        start = max(run, end - _TAIL_BYTES)
        place = 0
        if self._pair.target.has_word_ends:
            place = find_last_word_end(bytes(self.data[start:]))
        if start + place >= end:
            return len(self.tokens), b""
        token = find_token_at(self._ends, start + place)
        if not place and start > run and self._start_of(token) < start:
            token += 1
        token = max(token, len(self.tokens) - _TAIL_TOKENS)
        return token, bytes(self.data[self._start_of(token) :])
