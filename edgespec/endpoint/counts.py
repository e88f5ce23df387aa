"""What an endpoint notes of its requests: counts, as Prometheus sees them, and, where
``--log-prompts`` asks for it, prompts and answers in the log.

Nothing else writes a word of a prompt or of an answer to a log. These lines have a logger of their
own, which speaks at any ``--log-level``: one ``prompt`` when a request's turn comes, one ``answer``
for each text when it is over, however it ended. Both bear the id that the client was given.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from edgespec.config.endpoint import LOGGED_CHARACTERS
from edgespec.endpoint.answer import Choice
from edgespec.telemetry.metric_table import LATENCY_S, Histogram

_PREFIX: Final = "edgespec_endpoint_"

OTHER: Final = "other"

"""Stands for the names of models that nobody serves any more, or of too many."""

MOST_NAMES: Final = 256


@dataclass(slots=True)
class TokenCounts:
    """Of the answers of one model."""

    answers: int = 0
    prompt: int = 0
    completion: int = 0
    drafted: int = 0
    accepted: int = 0


_BY_MODEL: Final[tuple[tuple[str, str, Callable[[TokenCounts], int]], ...]] = (
    ("answers_total", "Requests that were served, to the end or not", lambda one: one.answers),
    ("prompt_tokens_total", "Prompt tokens of the requests served", lambda one: one.prompt),
    ("completion_tokens_total", "Tokens of their answers", lambda one: one.completion),
    ("drafted_tokens_total", "Draft nodes sent for them", lambda one: one.drafted),
    ("accepted_tokens_total", "Of the tokens, those drafted here", lambda one: one.accepted),
)


@dataclass(slots=True)
class EndpointCounts:
    """Totals since the start."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By path and status; ``gone`` for a client that left before the end, ``cut`` for a stream
    that failed in the middle."""
    models: dict[str, TokenCounts] = field(default_factory=dict)
    """By name, of which there are at most ``MOST_NAMES`` and ``OTHER``."""
    first_token_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    duration_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))

    @property
    def completion_tokens(self) -> int:
        """Of all models."""
        return sum(one.completion for one in self.models.values())

    def of_model(self, name: str) -> TokenCounts:
        """What is counted of the model of that name from now on."""
        if name not in self.models and len(self.models) >= MOST_NAMES:
            name = OTHER
        return self.models.setdefault(name, TokenCounts())

    def add_answer(self, model: str, prompt_tokens: int, choices: Sequence[Choice]) -> None:
        """Tokens of one answer, whether or not it came to its end."""
        counts = self.of_model(model)
        counts.answers += 1
        counts.prompt += prompt_tokens
        for choice in choices:
            counts.completion += choice.tokens
            if choice.job.stats is not None:
                counts.drafted += choice.job.stats.counters.sent
                counts.accepted += choice.job.stats.counters.accepted


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is so now."""

    running: int
    waiting: int
    verifier_ready: bool
    models: tuple[str, ...]
    """The names of those that can be asked for."""


def registry_of(counts: EndpointCounts, now: Callable[[], Gauges]) -> CollectorRegistry:
    """A registry of its own, with the process's standard metrics beside ours."""
    registry = CollectorRegistry()
    registry.register(_Counted(counts, now))
    ProcessCollector(registry=registry)
    return registry


class _Counted(Collector):
    def __init__(self, counts: EndpointCounts, now: Callable[[], Gauges]) -> None:
        self._counts, self._now = counts, now

    def collect(self) -> Iterable[Metric]:
        counts, now = self._counts, self._now()
        requests = CounterMetricFamily(
            f"{_PREFIX}requests_total", "Requests by path and outcome", labels=["path", "outcome"]
        )
        for (path, outcome), count in counts.requests.items():
            requests.add_metric([path, outcome], count)
        yield requests
        for model in now.models:
            counts.of_model(model)
        for name, text, value in _BY_MODEL:
            family = CounterMetricFamily(_PREFIX + name, text, labels=["model"])
            for model, one in counts.models.items():
                family.add_metric([model], value(one))
            yield family
        for name, text, gauge in (
            ("texts_running", "Texts that are generated now", now.running),
            ("requests_waiting", "Requests that wait for their turn", now.waiting),
            ("verifier_ready", "1: a verifier is there", int(now.verifier_ready)),
        ):
            yield GaugeMetricFamily(_PREFIX + name, text, value=gauge)
        yield _histogram("time_to_first_token_seconds", "Until text comes", counts.first_token_s)
        yield _histogram("request_seconds", "From request to the end", counts.duration_s)


def _histogram(name: str, text: str, value: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(_PREFIX + name, text)
    bounds = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
    family.add_metric([], list(zip(bounds, value.cumulative, strict=True)), value.total)
    return family


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
