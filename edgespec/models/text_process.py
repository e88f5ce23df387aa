"""The process that renders chat templates for this one: a worker, and what its child runs."""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # the child finds our modules once it was told where they are
    from edgespec.models.limited_process import Bounds
    from edgespec.models.text_worker import TextWorker

_CPU_S: Final = 5
"""Processor time for one question: ``text_worker.CPU_S``."""
_START_CPU_S: Final = 10
_KEPT_TEMPLATES: Final = 16


@cache
def template_worker() -> TextWorker:
    """Return the worker that renders the templates of this process."""
    from edgespec.models.text_worker import TextWorker

    worker = TextWorker(__file__)
    atexit.register(worker.close)
    return worker


def main(bounds: Bounds, path: str) -> None:
    """Answer questions from standard input until it ends. ``path``, a JSON list, says where
    modules are found."""
    bounds.allow(_START_CPU_S)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.path[:0] = json.loads(path)
    from edgespec.models.text_worker import read_frame, write_frame

    answers = _Answers()
    write_frame(sink, b"ready")
    while True:
        try:
            question = read_frame(source)
        except OSError:
            return
        bounds.allow(_CPU_S)
        try:
            answer = json.dumps(answers.answer(*json.loads(question))).encode()
        except MemoryError:
            answer = json.dumps(("failed", "")).encode()
        write_frame(sink, answer)


class _Answers:
    """What the child answers: a kind, and a text or value."""

    def __init__(self) -> None:
        self._programs: dict[str, Any] = {}
        self._answers: Mapping[str, Callable[..., Any]] = {
            "render": self._rendered,
            "variables": self._variables,
        }

    def answer(self, what: str, *given: Any) -> tuple[str, Any]:
        from edgespec.models.tokenizer import ChatTemplateError

        try:
            return "answered", self._answers[what](*given)
        except ChatTemplateError as error:
            return "refused", str(error)
        except MemoryError:
            raise
        except Exception as error:
            return "failed", str(error) or type(error).__name__

    def _rendered(self, source: str, given: Mapping[str, Any]) -> str:
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

    def _variables(self, source: str) -> list[str]:
        from edgespec.models.tokenizer import template_variables

        return sorted(template_variables(source))
