"""Spans of a verifier's streams. Oracle: what the device got, read from the library's own exporter
in memory; the environment's words for what is asked."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from edgespec.cli.serving import Watching
from edgespec.config import VerifierConfig
from edgespec.core.protocol.messages import Fault, FaultCode, Limits, Open, Opened
from edgespec.core.verifier.engine_events import SendTo, StreamOpened
from edgespec.device.build import build_agent
from edgespec.telemetry.logs import current_trace_parent
from edgespec.telemetry.spans import StreamSpans, stream_spans
from edgespec.telemetry.watch import StreamMeter
from edgespec.verifier.build import build_verifier
from edgespec.wire.grpc_calls import trace_parent_in
from tests.shell.test_end_to_end import IDS, SAMPLED, collect, config, tokens

pytest.importorskip("opentelemetry.sdk.trace", reason="edgespec[otel] is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exported() -> Iterator[tuple[StreamSpans, InMemorySpanExporter, TracerProvider]]:
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    yield StreamSpans(provider), memory, provider
    provider.shutdown()


async def _generate(spans: StreamSpans) -> tuple[list[int], Any]:
    watch = Watching(None, spans)
    verifier, server = build_verifier(VerifierConfig(model="toy", port=0), watch=watch.watch)
    await server.start()
    async with build_agent(config(f"127.0.0.1:{server.port}")) as agent:
        found = tokens(await collect(agent, SAMPLED))
        stats = agent.stats
    await verifier.stop()
    await server.stop(0.0)
    return found, stats


async def test_a_generation_is_a_span_with_what_the_device_got(
    exported: tuple[StreamSpans, InMemorySpanExporter, TracerProvider],
) -> None:
    spans, memory, _ = exported
    found, stats = await _generate(spans)
    (span,) = memory.get_finished_spans()
    attributes = dict(span.attributes or {})
    assert span.name == "text_completion toy"
    assert span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    assert attributes["gen_ai.usage.output_tokens"] == len(found)
    assert attributes["gen_ai.usage.input_tokens"] == len(IDS)
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.request.temperature"] == SAMPLED.temperature
    assert attributes["gen_ai.response.model"] == "toy"
    assert attributes["edgespec.accepted_tokens"] == stats.counters.accepted
    assert attributes["client.address"] == "127.0.0.1"
    _check_times(span)


def _check_times(span: ReadableSpan) -> None:
    (first,) = span.events
    assert first.name == "first_token"
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time < first.timestamp < span.end_time


async def test_the_span_hangs_on_the_callers(
    exported: tuple[StreamSpans, InMemorySpanExporter, TracerProvider],
) -> None:
    spans, memory, provider = exported
    assert current_trace_parent() == ""
    with provider.get_tracer("app").start_as_current_span("my question") as caller:
        assert f"{caller.get_span_context().span_id:016x}" in current_trace_parent()
        await _generate(spans)
    inner, outer = memory.get_finished_spans()
    assert inner.parent is not None
    theirs, ours = outer.get_span_context(), inner.get_span_context()
    assert theirs is not None
    assert ours is not None
    assert inner.parent.span_id == theirs.span_id
    assert ours.trace_id == theirs.trace_id


def test_a_stream_that_a_fault_ended_is_an_error(
    exported: tuple[StreamSpans, InMemorySpanExporter, TracerProvider],
) -> None:
    spans, memory, _ = exported
    meter = StreamMeter(spans)
    greeting = SendTo(1, Opened(Limits(), "toy", 1))
    meter.observe(StreamOpened(1, Open("s", "", "", (1,))), (greeting,), 1.0)
    meter.told(1, Fault(FaultCode.INTERNAL, "no"))
    meter.gone(1, 3.5)
    (span,) = memory.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "internal"
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == 2_500_000_000


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("traceparent", ""),),
        (("traceparent", PARENT + "0"),),
        (("traceparent", PARENT.encode()),),
        (("traceparent", "00-" + "z" * 32 + PARENT[35:]),),
        (("other", PARENT),),
    ],
)
def test_a_header_of_another_form_is_none(headers: tuple[tuple[str, Any], ...]) -> None:
    assert trace_parent_in(headers) == ""
    assert trace_parent_in((*headers, ("traceparent", PARENT))) == PARENT


# --- asking for it --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    ],
)
def test_without_a_request_there_are_no_spans(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert stream_spans(environ) is None
    assert caplog.records == []


def test_the_console_is_an_exporter(capsys: pytest.CaptureFixture[str]) -> None:
    spans = stream_spans({"OTEL_TRACES_EXPORTER": "console"})
    assert spans is not None
    meter = StreamMeter(spans)
    meter.observe(StreamOpened(1, Open("s", "", "", (1,))), (), 1.0)
    meter.gone(1, 3.5)
    spans.close()
    out = capsys.readouterr().err
    assert '"name": "text_completion"' in out
    assert "edgespec-verifier" in out


def test_an_unknown_exporter_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert stream_spans({"OTEL_TRACES_EXPORTER": "zipkin"}) is None
    assert "OTEL_TRACES_EXPORTER is 'zipkin', but must be otlp, console or none" in caplog.text


def test_a_missing_library_is_told_with_what_to_install(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    caplog.set_level(logging.WARNING)
    assert stream_spans({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"}) is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT asks for traces, but opentelemetry.sdk" in caplog.text
    assert "pip install 'edgespec[otel]'" in caplog.text
