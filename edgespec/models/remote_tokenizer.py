"""Tokenizer of another party, held by a child process (``text_process.py``).

Texts are tokenized in the child, within limits. The bytes of all tokens are kept in this process,
so texts are decoded token by token without the child.
"""

from __future__ import annotations

from array import array
from base64 import b64decode
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from edgespec.models import text_process
from edgespec.models.remembered_segments import RememberedSegments
from edgespec.models.text_worker import TextWorker, TextWorkerError
from edgespec.models.tokenizer import (
    DEFAULT,
    TOOL_USE,
    ChatTemplate,
    TextStream,
    TokenizerError,
    continue_stream,
)

TOKENIZER_BYTES: Final = 768 << 20
"""Limit on the data of the child. A file of 35 MB takes ten times its size while it is read."""


class RemoteTokenizer:
    """A tokenizer with the methods of ``TextTokenizer`` that agents and endpoints use. Its process
    ends with ``close``.

    Every method that uses the child raises ``TokenizerError`` if that takes too long or too much
    memory. The constructor does so too, and names the fault of an unusable folder."""

    def __init__(self, folder: Path, most_bytes: int = TOKENIZER_BYTES) -> None:
        self._worker = TextWorker(text_process.__file__, most_bytes, str(folder))
        try:
            self._facts: dict[str, Any] = self._call_child("facts")
            if "why" in self._facts:
                raise TokenizerError(self._facts["why"])
        except TokenizerError:
            self.close()
            raise
        self.vocabulary: str = self._facts["vocabulary"]
        """Fingerprint of the vocabulary."""
        self.special_ids = frozenset[int](self._facts["special_ids"])
        self.special_texts: Mapping[str, str] = self._facts["special_texts"]
        self.added: Mapping[str, int] = self._facts["added"]
        self._bytes = b64decode(self._facts.pop("bytes"))
        self._ends = array("I", b64decode(self._facts.pop("ends")))
        self._texts_at_start = {
            int(token): text for token, text in self._facts.pop("alone").items()
        }
        """Texts of tokens that are decoded in another way at the beginning of a text."""
        self._segments = RememberedSegments(
            self._facts["marks"], lambda texts: list(self._call_child("encode_many", texts))
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``. A conversation's earlier messages are remembered here, so
        that only new ones cross to the child (``remembered_segments.py``)."""
        if not add_special_tokens:
            return self._segments.encode(text)
        return list(self._call_child("encode", text, add_special_tokens))

    def find_new(self, text: str) -> list[str]:
        """Return the parts of ``text`` whose ids are not remembered from earlier texts."""
        return self._segments.find_new(text)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of ``text`` as plain text, even where it has the name of a special
        token."""
        return list(self._call_child("encode_plain", text))

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text as a piece from the middle of a plain text
        (``TextTokenizer.encode_pieces``)."""
        return [list(ids) for ids in self._call_child("encode_pieces", list(texts))]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(tokens) == 1 and tokens[0] in self._texts_at_start:
            return str(self._texts_at_start[tokens[0]])
        return str(self._call_child("decode", list(tokens), skip_special_tokens))

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        return continue_stream(self, prompt)

    def chat_template(self, *, tools: bool = False) -> ChatTemplate | None:
        return (self._templates.get(TOOL_USE) if tools else None) or self._templates.get(DEFAULT)

    def special_id(self, text: str) -> int | None:
        token_id = self.added.get(text)
        return token_id if token_id in self.special_ids else None

    @property
    def id_count(self) -> int:
        """The largest id that has a token, plus one."""
        return len(self._ends)

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < len(self._ends):
            return b""
        return self._bytes[self._ends[token - 1] if token else 0 : self._ends[token]]

    def first_token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token at the beginning of a text, without using the child."""
        alone = self._texts_at_start.get(token)
        return self.token_bytes(token) if alone is None else alone.encode()

    def close(self) -> None:
        """End the child. Nothing can be encoded after this."""
        self._worker.close()

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        return {
            name: ChatTemplate(source, tokens, self._worker)
            for name, (source, tokens) in self._facts["templates"].items()
        }

    def _call_child(self, operation: str, *given: Any) -> Any:
        try:
            return self._worker.call(operation, *given)
        except TextWorkerError as error:
            raise TokenizerError(f"the tokenizer failed: {error}") from None
        except RuntimeError as error:  # raised by the library, for instance for an invalid id
            raise TokenizerError(str(error)) from None
