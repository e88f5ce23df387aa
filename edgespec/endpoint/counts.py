"""What an endpoint counts, and how Prometheus sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from edgespec.endpoint.answer import Choice
from edgespec.telemetry.histogram import LATENCY_S, Histogram

_PREFIX: Final = "edgespec_endpoint_"


@dataclass(slots=True)
class EndpointCounts:
    """Totals since the start."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By path and status; ``gone`` for a client that left before the end, ``cut`` for a stream
    that failed in the middle."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    first_token_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    duration_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))

    def add_answer(self, prompt_tokens: int, choices: Sequence[Choice]) -> None:
        """Tokens of one answer, whether or not it came to its end."""
        self.prompt_tokens += prompt_tokens
        for choice in choices:
            self.completion_tokens += choice.tokens
            if choice.job.stats is not None:
                self.drafted_tokens += choice.job.stats.counters.sent
                self.accepted_tokens += choice.job.stats.counters.accepted


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is so now."""

    running: int
    waiting: int
    verifier_ready: bool


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
        for name, text, value in (
            ("prompt_tokens_total", "Prompt tokens of the requests served", counts.prompt_tokens),
            ("completion_tokens_total", "Tokens of their answers", counts.completion_tokens),
            ("drafted_tokens_total", "Draft nodes sent for them", counts.drafted_tokens),
            ("accepted_tokens_total", "Of the tokens, those drafted here", counts.accepted_tokens),
        ):
            yield CounterMetricFamily(_PREFIX + name, text, value=value)
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
