"""From what was counted to the values of the metrics, name by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgespec.core.protocol.messages import Message
from edgespec.telemetry.engine_sample import EngineSample
from edgespec.telemetry.histogram import Histogram
from edgespec.telemetry.metric_table import PREFIX
from edgespec.telemetry.traffic_counts import DOWNLINK, UPLINK
from edgespec.telemetry.watch import Watch

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
