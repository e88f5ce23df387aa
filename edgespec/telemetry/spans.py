"""A verifier's streams as OpenTelemetry spans, one each, with the attributes that the semantic
conventions give to generative models (``gen_ai.*``).

The library is an extra. It is used when the standard environment asks for traces:
``OTEL_TRACES_EXPORTER``, or an endpoint in ``OTEL_EXPORTER_OTLP_ENDPOINT`` or
``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``, and not ``OTEL_SDK_DISABLED=true``. A span is made when its
stream has ended, from the record that the meter kept, and is sent by a thread of the library's; its
parent is the span of the device that opened the stream, if it told one (``traceparent``).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from edgespec.core.protocol.messages import FinishReason
from edgespec.telemetry.watch import LOST, StreamRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_LOG = logging.getLogger(__name__)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTER, _DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SERVICE = "edgespec-verifier"
OPERATION: Final = "text_completion"
_FINE = (*(reason.value for reason in FinishReason), LOST)


class StreamSpans:
    """Makes a span of each record; see ``StreamMeter``."""

    def __init__(
        self, provider: TracerProvider, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._provider, self._clock_ns = provider, clock_ns
        self._tracer = provider.get_tracer("edgespec")

    def __call__(self, record: StreamRecord) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": record.trace_parent})
        end_ns = self._clock_ns()

        def moment_ns(at: float) -> int:
            return end_ns - round((record.ended_at - at) * 1e9)

        span = self._tracer.start_span(
            f"{OPERATION} {record.model}".strip(),
            parent,
            SpanKind.SERVER,
            _attributes(record),
            start_time=moment_ns(record.opened_at),
        )
        if record.first_at is not None:
            span.add_event("first_token", timestamp=moment_ns(record.first_at))
        if record.reason not in _FINE:
            span.set_attribute("error.type", record.reason)
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def stream_spans(environ: Mapping[str, str]) -> StreamSpans | None:
    """What sends spans as the environment asks; None when it does not, or, with a warning, when
    the library is not there."""
    asked = _who_asks(environ)
    if asked is None:
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(environ)
    except ModuleNotFoundError as error:
        install = "pip install 'edgespec[otel]'"
        _LOG.warning("%s asks for traces, but %s is missing: %s", asked, error.name, install)
        return None
    if exporter is None:
        return None
    named = "OTEL_SERVICE_NAME" in environ or "service.name" in environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create(None if named else {"service.name": _SERVICE})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return StreamSpans(provider)


def _who_asks(environ: Mapping[str, str]) -> str | None:
    """The variable that asks for traces, if one does."""
    if environ.get(_DISABLED, "").strip().lower() == "true":
        return None
    if exporter := environ.get(_EXPORTER, "").strip():
        return None if exporter == "none" else _EXPORTER
    return next((name for name in _ENDPOINTS if environ.get(name)), None)


def _exporter(environ: Mapping[str, str]) -> SpanExporter | None:
    wanted = environ.get(_EXPORTER, "").strip() or "otlp"
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "grpc")
    match wanted, protocol:
        case "console", _:
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter

            return ConsoleSpanExporter(out=sys.stderr)
        case "otlp", "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

            grpc_exporter: SpanExporter = over_grpc.OTLPSpanExporter()
            return grpc_exporter
        case "otlp", "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

            http_exporter: SpanExporter = over_http.OTLPSpanExporter()
            return http_exporter
        case "otlp", other:
            _LOG.warning("no traces: the protocol is %r, but must be grpc or http/protobuf", other)
        case other, _:
            _LOG.warning("no traces: %s is %r, but must be otlp, console or none", _EXPORTER, other)
    return None


def _attributes(record: StreamRecord) -> dict[str, str | int | float | list[str]]:
    sampling = record.request.sampling
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.operation.name": OPERATION,
        "gen_ai.provider.name": "edgespec",
        "gen_ai.request.model": record.request.model or record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": [record.reason],
        "gen_ai.usage.input_tokens": len(record.request.prompt),
        "gen_ai.usage.output_tokens": record.tokens,
        "edgespec.accepted_tokens": record.accepted,
        "edgespec.draft_nodes": record.nodes,
        "client.address": record.peer,
    }
    if record.credential:
        attributes["edgespec.key"] = record.credential
    if record.ttft_s is not None:
        attributes["edgespec.time_to_first_token_s"] = record.ttft_s
    return attributes
