"""What is asked and answered, in the log: for who wants to see it there (``--log-prompts``).

Nothing else writes a word of a prompt or of an answer to a log. These lines have a logger of their
own, which speaks at any ``--log-level``: one ``prompt`` when a request's turn comes, one ``answer``
for each text when it is over, however it ended. Both bear the id that the client was given.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from typing import Any, Final

from edgespec.config.endpoint import LOGGED_CHARACTERS
from edgespec.endpoint.answer import Choice

HIDDEN: Final = "[key]"
_UNFINISHED: Final = "cut"
_log = logging.getLogger(__name__)


class PromptLog:
    """``keys``: words that are hidden wherever they stand, for a text may quote them."""

    def __init__(self, keys: Collection[str] = ()) -> None:
        self._keys = sorted((key for key in keys if key), key=len, reverse=True)

    def begin(self) -> None:
        """From now on the lines are written, which the log itself is the first to say."""
        _log.setLevel(logging.INFO)
        _log.warning(
            "log_prompts is on: prompts and answers are written to this log, at most %d characters"
            " of each",
            LOGGED_CHARACTERS,
        )

    def asked(self, request: str, choices: Collection[Choice]) -> None:
        """The prompts of ``request``, each once, as the model reads them."""
        prompts = {id(choice.job.prompt): choice for choice in choices}
        for choice in prompts.values():
            self._write(request, "prompt", _prompt(choice), len(choice.job.prompt), {})

    def answered(self, request: str, choices: Collection[Choice]) -> None:
        """The texts that came, as far as they did; never what no target has verified."""
        for choice in choices:
            calls = [{"name": one.name, "arguments": one.arguments} for one in choice.calls]
            text = choice.text + (json.dumps(calls, ensure_ascii=False) if calls else "")
            more = {"index": choice.index, "finish": choice.finish or _UNFINISHED}
            self._write(request, "answer", text, choice.tokens, more)

    def _write(
        self, request: str, event: str, text: str, tokens: int, more: dict[str, Any]
    ) -> None:
        for key in self._keys:
            text = text.replace(key, HIDDEN)
        shown = _shortened(text)
        fields = {"event": event, "tokens": tokens, "characters": len(text), "text": shown, **more}
        extra = {"request_id": request, "fields": fields, "quoted": shown}
        _log.info("%s of %d tokens", event, tokens, extra=extra)


def _prompt(choice: Choice) -> str:
    try:
        written = b"".join(map(choice.token_bytes, choice.job.prompt))
    except Exception:  # ids that do not exist: whoever sent them is told elsewhere
        return f"token ids {list(choice.job.prompt)}"
    return written.decode("utf-8", errors="replace")


def _shortened(text: str) -> str:
    """The first and the last half of what is logged of it."""
    if len(text) <= LOGGED_CHARACTERS:
        return text
    half = LOGGED_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
