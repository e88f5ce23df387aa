"""A verifier's metrics over HTTP: ``/metrics``, and ``/healthz`` for whoever asks whether the
process answers.

The server has a thread of its own and reads plain counts, so a fetch neither waits for the event
loop nor holds it up, and works when the loop is stuck, which is when it is wanted most. Callers are
bounded in number and in the time they may take to ask.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final

from prometheus_client.exposition import choose_encoder

from edgespec.core.verifier.engine import VerifyEngine
from edgespec.telemetry.metric_table import Table, metrics, registry_of
from edgespec.telemetry.verifier_counts import EngineSample, Watch

PREFIX: Final = "edgespec_"
METRICS: Final = metrics("""
histogram time_to_first_token_seconds streams.ttft_s From Open to the first tokens of a new stream
histogram inter_token_latency_seconds streams.itl_s Time a token took after the one before
histogram rtt_seconds streams.rtt_s From handing over a commit to its acknowledgement
gauge num_requests_running running Sessions with a device, in the cache
gauge num_requests_waiting waiting Sessions with a device that wait to enter the cache
gauge num_requests_detached detached Sessions without a device, kept for the lease
counter requests_finished_total{reason} streams.finished Streams that ended after they were opened
counter requests_rejected_total{reason} streams.rejected Streams refused before they were opened
counter prompt_tokens_total streams.prompt_tokens Prompt tokens of the sessions opened
counter generation_tokens_total streams.generation_tokens Tokens committed by passes and sent
counter run_ahead_tokens_total streams.run_ahead_tokens Of these, by passes without a draft
counter server_drafted_tokens_total drafts.served_tokens Of these, guessed by the verifier
counter source_nodes_total{source} source_nodes Draft nodes that passes looked at, by who drafted
counter source_accepted_total{source} source_accepted Of these, nodes that became tokens
counter server_draft_steps_total drafts.steps Steps of the verifier's own draft model
counter server_draft_seconds_total drafts.seconds What these took
counter server_draft_failures_total drafts.failures Failures of that model: it drafts no more
counter spec_decode_num_drafts_total streams.drafts Sessions' parts of passes with draft nodes
counter spec_decode_num_draft_tokens_total streams.draft_nodes Draft nodes that passes looked at
counter spec_decode_num_accepted_tokens_total streams.accepted Draft nodes that became tokens
counter spec_decode_num_accepted_tokens_per_pos_total{position} accepted_at By their place in drafts
counter stale_nodes_total streams.stale Draft nodes dropped when they came: late or impossible
counter wasted_nodes_total streams.wasted Draft nodes that a pass looked at in vain
histogram pass_seconds streams.pass_s Length of a pass
histogram pass_rows streams.pass_rows Rows of a pass: fed tokens and draft nodes
histogram pass_tokens streams.pass_tokens Tokens that a pass committed, of all its sessions
counter failed_passes_total streams.failed_passes Passes that failed and began anew
gauge kv_cache_usage_perc cache_share Share of the key-value blocks that is held, 0 to 1
counter evictions_total keeper.evictions How often a session gave up its blocks
counter preemptions_total keeper.preemptions Of these, how often one that had work
counter prefix_cache_queries_total keeper.prefix_query_tokens Tokens looked up in the prefix cache
counter prefix_cache_hits_total keeper.prefix_hit_tokens Of these, tokens found there
counter received_bytes_total{kind} traffic.received_bytes Payload bytes of messages from devices
counter received_messages_total{kind} traffic.received_messages Messages from devices
counter sent_bytes_total{kind} traffic.sent_bytes Payload bytes of messages to devices
counter sent_messages_total{kind} traffic.sent_messages Messages to devices
counter read_wait_seconds_total{reason} waits Streams were left unread, in seconds
counter late_streams_total streams.late_streams Streams left out of a pass: the last had not left
histogram event_loop_lag_seconds lag How late the event loop was, asked ten times a second
gauge build_info{version} build 1; the label says which version runs
""")

_MAX_CALLERS: Final = 16
_ASK_WITHIN_S: Final = 5.0
# All of it, also of one that never stops for so long.
_DONE_WITHIN_S = 15.0


class MetricsServer:
    """Takes ``host:port`` when it is made (port 0: a free one) and answers from ``start`` on.
    Raises ``OSError`` when the address cannot be had."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = _Server(family, (host, port))
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self, watch: Watch, engine: VerifyEngine, model: str, version: str) -> None:
        """Answer, from now on, with what is counted there."""

        def sample() -> EngineSample:
            return EngineSample(watch, engine, version)

        registry = registry_of(Table(PREFIX, METRICS, sample, model_name=model))

        def answer(path: str, accept: str) -> tuple[int, str, bytes]:
            match path.partition("?")[0]:
                case "/metrics":
                    encode, content_type = choose_encoder(accept)
                    return 200, content_type, encode(registry)
                case "/healthz":
                    return 200, "text/plain; charset=utf-8", b"ok\n"
            return 404, "text/plain; charset=utf-8", b"here are /metrics and /healthz\n"

        self._server.answers = answer
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="edgespec-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()


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
    answers: Callable[[str, str], tuple[int, str, bytes]]
    """From a path and an Accept header to a status, a content type and a body."""

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
