"""Metrics over HTTP, for Prometheus to fetch: ``/metrics``, and ``/healthz`` for whoever asks
whether the process answers.

The server has a thread of its own and reads plain counts, so a fetch neither waits for the event
loop nor holds it up, and works when the loop is stuck, which is when it is wanted most. Callers are
bounded in number and in the time they may take to ask.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from edgespec.core.protocol.messages import Message
from edgespec.telemetry.metric_table import METRICS, PREFIX, Histogram, Kind, Metric
from edgespec.telemetry.watch import DOWNLINK, UPLINK, EngineSample, Watch

Value = float | Histogram | Mapping[str, float]
"""Of a metric without a label of its own, of a histogram, and by that label."""


@dataclass(frozen=True, slots=True)
class MetricValues:
    """Everything that is counted in one verifier. ``engine`` reads the engine's own counts."""

    watch: Watch
    engine: Callable[[], EngineSample]
    model: str
    version: str

    def now(self) -> dict[str, Value]:
        """The value of every metric now, by its name."""
        short = {**self._streams(), **self._engine(), **self._traffic()}
        short["read_wait_seconds_total"] = self.watch.waits.by_reason()
        short["event_loop_lag_seconds"] = self.watch.lag.lag_s
        short["build_info"] = {self.version: 1}
        return {PREFIX + name: value for name, value in short.items()}

    def _streams(self) -> dict[str, Value]:
        found = self.watch.streams
        return {
            "time_to_first_token_seconds": found.ttft_s,
            "inter_token_latency_seconds": found.itl_s,
            "rtt_seconds": found.rtt_s,
            "requests_finished_total": dict(found.finished),
            "requests_rejected_total": dict(found.rejected),
            "prompt_tokens_total": found.prompt_tokens,
            "generation_tokens_total": found.generation_tokens,
            "run_ahead_tokens_total": found.run_ahead_tokens,
            "spec_decode_num_drafts_total": found.drafts,
            "spec_decode_num_draft_tokens_total": found.draft_nodes,
            "spec_decode_num_accepted_tokens_total": found.accepted,
            "spec_decode_num_accepted_tokens_per_pos_total": {
                str(place): count for place, count in enumerate(found.accepted_at)
            },
            "stale_nodes_total": found.stale,
            "wasted_nodes_total": found.wasted,
            "pass_seconds": found.pass_s,
            "pass_rows": found.pass_rows,
            "pass_tokens": found.pass_tokens,
            "failed_passes_total": found.failed_passes,
            "late_streams_total": found.late_streams,
        }

    def _engine(self) -> dict[str, Value]:
        sample = self.engine()
        return {
            "num_requests_running": sample.running,
            "num_requests_waiting": sample.waiting,
            "num_requests_detached": sample.detached,
            "kv_cache_usage_perc": sample.cache_share,
            "evictions_total": sample.evictions,
            "preemptions_total": sample.preemptions,
            "prefix_cache_queries_total": sample.prefix_query_tokens,
            "prefix_cache_hits_total": sample.prefix_hit_tokens,
            "server_drafted_tokens_total": sample.server_drafted_tokens,
        }

    def _traffic(self) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for way, kinds in (("received", UPLINK), ("sent", DOWNLINK)):
            counts = {_word(kind): self.watch.traffic.of(kind) for kind in kinds}
            values[f"{way}_messages_total"] = {kind: n for kind, (n, _) in counts.items()}
            values[f"{way}_bytes_total"] = {kind: size for kind, (_, size) in counts.items()}
        return values


def _word(kind: type[Message]) -> str:
    return kind.__name__.lower()


_MAX_CALLERS = 16

_ASK_WITHIN_S = 5.0

# All of it, also of one that never stops for so long.
_DONE_WITHIN_S = 15.0

_MODEL = "model_name"


class CountedCollector(Collector):
    """Translates counts into the library's families, for each fetch anew."""

    def __init__(self, counted: MetricValues) -> None:
        self._counted = counted

    def collect(self) -> Iterable[Family]:
        values, model = self._counted.now(), self._counted.model
        return [_family(metric, values[metric.name], model) for metric in METRICS]


def registry_of(counted: MetricValues) -> CollectorRegistry:
    """A registry of its own, with the process's standard metrics (``process_...``) beside ours."""
    registry = CollectorRegistry()
    registry.register(CountedCollector(counted))
    ProcessCollector(registry=registry)
    return registry


class MetricsServer:
    """Takes ``host:port`` when it is made (port 0: a free one) and answers from ``start`` on.

    Raises ``OSError`` when the address cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = _Server(family, (host, port))
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port listened on."""
        return int(self._server.server_address[1])

    def start(self, counted: MetricValues) -> None:
        """Answer, from now on, with what is counted there."""
        self._server.answers = _answers(registry_of(counted))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="edgespec-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Let go of the address; a second call does nothing."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()


Answers = Callable[[str, str], tuple[int, str, bytes]]
"""From a path and an Accept header to a status, a content type and a body."""


def _answers(registry: CollectorRegistry) -> Answers:
    def answer(path: str, accept: str) -> tuple[int, str, bytes]:
        match path.partition("?")[0]:
            case "/metrics":
                encode, content_type = choose_encoder(accept)
                return 200, content_type, encode(registry)
            case "/healthz":
                return 200, "text/plain; charset=utf-8", b"ok\n"
            case _:
                return 404, "text/plain; charset=utf-8", b"here are /metrics and /healthz\n"

    return answer


class _Handler(BaseHTTPRequestHandler):
    timeout = _ASK_WITHIN_S
    server: _Server

    def do_GET(self) -> None:
        status, content_type, body = self.server.answers(self.path, self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A fetch every few seconds is no news."""


class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = _MAX_CALLERS
    answers: Answers

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        self._places = threading.BoundedSemaphore(_MAX_CALLERS)
        self._began: dict[Any, float] = {}
        """When each caller came, by its socket."""
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._began[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no thread for it
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def service_actions(self) -> None:
        """Called a few times a second: hang up on who asks a byte at a time."""
        now = time.monotonic()
        for request, began in tuple(self._began.items()):
            if now - began > _DONE_WITHIN_S:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def _leave(self, request: Any) -> None:
        del self._began[request]
        self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that left or never asked is none of ours."""


def _family(metric: Metric, value: Value, model: str) -> Family:
    labels = [_MODEL, metric.label] if metric.label else [_MODEL]
    if isinstance(value, Histogram):
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        bounds = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
        buckets = list(zip(bounds, value.cumulative, strict=True))
        histogram.add_metric([model], buckets, value.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=labels)
    by_label = {None: value} if isinstance(value, float | int) else value
    for label, one in by_label.items():
        family.add_metric([model] if label is None else [model, label], one)
    return family
