"""The worker that renders chat templates for this process, and the program of its child.

If it is given a folder, the child holds the tokenizer there too, for ``RemoteTokenizer``."""

from __future__ import annotations

import atexit
import json
import sys
from array import array
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # the child can import edgespec only after ``main`` has set its path
    from edgespec.models.limited_process import Bounds
    from edgespec.models.text_worker import TextWorker
    from edgespec.models.tokenizer import TextTokenizer

_MOST_IDS: Final = 1 << 21
_KEPT_TEMPLATES: Final = 16


@cache
def template_worker() -> TextWorker:
    """Return the worker that renders the templates of this process."""
    from edgespec.models.text_worker import TextWorker

    worker = TextWorker(__file__)
    atexit.register(worker.close)
    return worker


def main(bounds: Bounds, given: str) -> None:
    """Answer questions from standard input until it ends. ``given`` is a JSON list: the module
    search path, the tokenizer's folder or an empty text, and the limits."""
    path, folder, start_cpu_s, cpu_s, bytes_per_s = json.loads(given)
    bounds.allow_cpu(start_cpu_s)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.path[:0] = path
    from edgespec.models.text_worker import read_frame, write_frame

    answers = _Answers(Path(folder) if folder else None)
    write_frame(sink, b"ready")
    while True:
        try:
            question = read_frame(source)
        except OSError:
            return
        bounds.allow_cpu(cpu_s + len(question) // bytes_per_s)
        try:
            answer = json.dumps(answers.answer(*json.loads(question))).encode()
        except MemoryError:
            answer = json.dumps(("failed", "")).encode()
        write_frame(sink, answer)


class _Answers:
    """Answers of the child: a kind, and a text or value."""

    def __init__(self, folder: Path | None) -> None:
        self._programs: dict[str, Any] = {}
        self._answers: dict[str, Callable[..., Any]] = {
            "render": self._render,
            "variables": self._find_variables,
        }
        if folder is not None:
            tokenizer = _Tokenizer(folder)
            self._answers |= {
                "facts": lambda: tokenizer.facts,
                "encode": tokenizer.encode,
                "encode_many": tokenizer.encode_many,
                "encode_plain": tokenizer.encode_plain,
                "encode_pieces": tokenizer.encode_pieces,
                "decode": tokenizer.decode,
            }

    def answer(self, operation: str, *arguments: Any) -> tuple[str, Any]:
        from edgespec.models.tokenizer import ChatTemplateError

        try:
            return "answered", self._answers[operation](*arguments)
        except ChatTemplateError as error:
            return "refused", str(error)
        except MemoryError:
            raise
        except Exception as error:
            return "failed", str(error) or type(error).__name__

    def _render(self, source: str, given: Mapping[str, Any]) -> str:
        from edgespec.models.tokenizer import (
            MAX_PROMPT_CHARACTERS,
            ChatTemplateError,
            compiled_template,
        )

        if source not in self._programs:
            if len(self._programs) >= _KEPT_TEMPLATES:
                self._programs.clear()
            self._programs[source] = compiled_template(source)
        text = str(self._programs[source].render(given))
        if (length := len(text)) > MAX_PROMPT_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template wrote {length} characters, at most {MAX_PROMPT_CHARACTERS}"
            )
        return text

    def _find_variables(self, source: str) -> list[str]:
        from edgespec.models.tokenizer import template_variables

        return sorted(template_variables(source))


class _Tokenizer:
    """The tokenizer of a folder. If the folder is unusable, the answer says why."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: TextTokenizer | None = None
        self.facts: dict[str, Any]
        try:
            self.facts = self._load(folder)
        except MemoryError:
            raise
        except Exception as error:  # errors of other libraries, too
            self.facts = {"why": str(error) or type(error).__name__}

    def _load(self, folder: Path) -> dict[str, Any]:
        """Return all that the parent keeps of the tokenizer. Raises ``ValueError``."""
        from edgespec.models.folders import vocabulary_fingerprint
        from edgespec.models.tokenizer import TextTokenizer
        from edgespec.telemetry.process_memory import trim_heap

        vocabulary = vocabulary_fingerprint(folder / "tokenizer.json")
        self._tokenizer = tokenizer = TextTokenizer(folder)
        if (size := tokenizer.id_count) > _MOST_IDS:
            raise ValueError(f"{folder}: ids reach {size}, but at most {_MOST_IDS} are taken")
        all_bytes, ends, at_start = bytearray(), array("I"), dict[int, str]()
        for token in range(size):
            piece = tokenizer.token_bytes(token)
            all_bytes += piece
            ends.append(len(all_bytes))
            if piece.startswith(b" ") and token not in tokenizer.special_ids:
                shown = tokenizer.decode([token])
                if shown.encode() != piece:
                    at_start[token] = shown
        trim_heap()
        return {
            "vocabulary": vocabulary,
            "bytes": b64encode(all_bytes).decode(),
            "ends": b64encode(ends.tobytes()).decode(),
            "alone": at_start,
            "added": dict(tokenizer.added),
            "special_ids": sorted(tokenizer.special_ids),
            "special_texts": dict(tokenizer.special_texts),
            "marks": tokenizer.marks,
            "templates": {
                name: (one.source, dict(one.tokens)) for name, one in tokenizer.templates.items()
            },
        }

    def encode(self, text: str, special: bool) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special_tokens=special)

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        assert self._tokenizer is not None
        return self._tokenizer.encode_many(texts)

    def encode_plain(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        with self._tokenizer.special_tokens_as_text():
            return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_pieces(self, texts: list[str]) -> list[list[int]]:
        assert self._tokenizer is not None
        return self._tokenizer.encode_pieces(texts)

    def decode(self, tokens: list[int], skip_special: bool) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special)
