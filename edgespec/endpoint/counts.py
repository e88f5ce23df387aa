"""What an endpoint notes of its requests: counts, as Prometheus sees them, and, where
``endpoint.log_prompts`` asks for it, prompts and answers in the log.

Nothing else writes a word of a prompt or of an answer to a log. These lines have a logger of their
own, which speaks at any ``log_level``: one ``prompt`` when a request's turn comes, one ``answer``
for each text when it is over, however it ended. Both bear the id that the client was given.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final

from edgespec.config.device import LOGGED_CHARACTERS
from edgespec.endpoint.answer import Choice
from edgespec.telemetry.metric_table import LATENCY_S, Histogram, counter, gauge, histogram

METRICS_PREFIX: Final = "edgespec_endpoint_"
OTHER: Final = "other"
"""Stands for the names of models that nobody serves any more, or of too many."""
MOST_NAMES: Final = 256
_BY_MODEL: Final = (
    ("answers", "Requests that were served, to the end or not"),
    ("prompt_tokens", "Prompt tokens of the requests served"),
    ("completion_tokens", "Tokens of their answers"),
    ("drafted_tokens", "Draft nodes sent for them"),
    ("accepted_tokens", "Of the tokens, those drafted here"),
)
METRICS: Final = (
    counter("requests_total", "counts.requests", "Requests by path and outcome", "path,outcome"),
    *(counter(f"{name}_total", f"counts.{name}", text, "model") for name, text in _BY_MODEL),
    gauge("texts_running", "admission.running", "Texts that are generated now"),
    gauge("requests_waiting", "admission.waiting", "Requests that wait for their turn"),
    gauge("verifier_ready", "verifiers.ready", "1: a verifier is there"),
    histogram("time_to_first_token_seconds", "counts.first_token_s", "Until text comes"),
    histogram("request_seconds", "counts.duration_s", "From request to the end"),
)
"""Read from an ``Endpoint``."""


class EndpointCounts:
    """Totals since the start; those of models by name, of which there are at most ``MOST_NAMES``
    and ``OTHER``."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """By path and status; ``gone`` for a client that left before the end, ``cut`` for a stream
        that failed in the middle."""
        self.answers, self.prompt_tokens = Counter[str](), Counter[str]()
        self.completion_tokens, self.drafted_tokens = Counter[str](), Counter[str]()
        self.accepted_tokens = Counter[str]()
        self.first_token_s, self.duration_s = Histogram(LATENCY_S), Histogram(LATENCY_S)

    def add_answer(
        self, model: str, prompt_tokens: int = 0, choices: Sequence[Choice] = (), answers: int = 1
    ) -> None:
        """Tokens of one answer, whether or not it came to its end."""
        if model not in self.answers and len(self.answers) >= MOST_NAMES:
            model = OTHER
        stats = [one.job.stats.counters for one in choices if one.job.stats is not None]
        self.answers[model] += answers
        self.prompt_tokens[model] += prompt_tokens
        self.completion_tokens[model] += sum(one.tokens for one in choices)
        self.drafted_tokens[model] += sum(one.sent for one in stats)
        self.accepted_tokens[model] += sum(one.accepted for one in stats)


HIDDEN: Final = "[key]"
_UNFINISHED: Final = "cut"
_log = logging.getLogger("edgespec.endpoint.prompt_log")


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
