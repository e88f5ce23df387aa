"""An agent's status as Prometheus metrics: register an ``AgentCollector`` where the device serves
its metrics.

Suffixes are those of the verifier's metrics where both count the same thing. Nothing here grows
with what is generated: labels have values from closed sets, but for the addresses of verifiers,
which the configuration bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from edgespec.telemetry.agent_status import AgentStatus, VerifierState
from edgespec.telemetry.metric_table import Kind, Metric

PREFIX: Final = "edgespec_agent_"
_UP: Final = (VerifierState.READY, VerifierState.SERVING)


def _metric(kind: Kind, name: str, text: str, label: str = "") -> Metric:
    return Metric(PREFIX + name, kind, text, label)


_C, _G = Kind.COUNTER, Kind.GAUGE
AGENT_METRICS: Final = (
    _metric(_G, "num_requests_running", "Texts that are being generated"),
    _metric(_C, "requests_started_total", "Texts begun"),
    _metric(_C, "requests_finished_total", "Texts that ended", "reason"),
    _metric(_C, "prompt_tokens_total", "Prompt tokens of the texts begun"),
    _metric(_C, "generation_tokens_total", "Tokens that users were given"),
    _metric(_C, "corrected_tokens_total", "Of these, where a draft was sent and was wrong"),
    _metric(_G, "tokens_per_second", "Tokens a second of all texts, over the last seconds"),
    _metric(_C, "draft_steps_total", "Draft steps that ended well"),
    _metric(_C, "draft_failures_total", "Texts whose draft model failed"),
    _metric(_C, "spec_decode_num_draft_tokens_total", "Draft nodes sent"),
    _metric(_C, "spec_decode_num_accepted_tokens_total", "Draft nodes that became tokens"),
    _metric(_C, "stale_nodes_total", "Draft nodes that the verifier dropped when they came"),
    _metric(_C, "judged_positions_total", "Positions decided while the draft had a guess there"),
    _metric(_C, "first_choice_hits_total", "Of these, those that its first choice won"),
    _metric(_C, "passes_total", "The verifier's passes for these texts, as far as it told"),
    _metric(_C, "reconnects_total", "Streams that were lost and tried again"),
    _metric(_G, "drafting_worth", "1: drafts pay for their rows now; 0: they rest"),
    _metric(_G, "row_price", "The least chance that pays, by the verifier; 0: any does"),
    _metric(_G, "verifier_up", "1: the verifier serves or is ready", "verifier"),
    _metric(_G, "rtt_seconds", "Round trip to the verifier", "verifier"),
    _metric(_G, "pass_seconds", "Length of the verifier's passes", "verifier"),
    _metric(_G, "memory_resident_bytes", "Resident memory of the process"),
    _metric(_G, "memory_budget_bytes", "What the process may take; absent without a budget"),
)
AGENT_METRIC_NAMES: Final = tuple(metric.name for metric in AGENT_METRICS)

Value = float | Mapping[str, float] | None
"""Of a metric without a label, by its label, and of one that is not there now."""


class AgentCollector(Collector):
    """Makes the families anew for each fetch, from a status that is asked for then."""

    def __init__(self, status: Callable[[], AgentStatus]) -> None:
        self._status = status

    def collect(self) -> Iterable[Family]:
        return agent_families(self._status())


def agent_families(status: AgentStatus) -> list[Family]:
    """One family a metric that has a value now."""
    values = agent_values(status)
    found = ((metric, values[metric.name]) for metric in AGENT_METRICS)
    return [_family(metric, value) for metric, value in found if value is not None]


def agent_values(status: AgentStatus) -> dict[str, Value]:
    """The value of every metric, by its name."""
    totals, memory = status.totals, status.memory
    short: dict[str, Value] = {
        "num_requests_running": status.running,
        "requests_started_total": totals.generations,
        "requests_finished_total": {
            "finished": totals.finished,
            "failed": totals.failed,
            "cancelled": totals.cancelled,
        },
        "prompt_tokens_total": totals.prompt_tokens,
        "generation_tokens_total": totals.tokens,
        "corrected_tokens_total": totals.corrected,
        "tokens_per_second": status.tokens_per_s,
        "draft_steps_total": totals.steps,
        "draft_failures_total": totals.draft_failures,
        "spec_decode_num_draft_tokens_total": totals.sent,
        "spec_decode_num_accepted_tokens_total": totals.accepted,
        "stale_nodes_total": totals.stale,
        "judged_positions_total": totals.tried,
        "first_choice_hits_total": totals.hits,
        "passes_total": totals.passes,
        "reconnects_total": totals.reconnects,
        "drafting_worth": None if status.drafting.worth is None else float(status.drafting.worth),
        "row_price": status.drafting.least_chance,
        "memory_resident_bytes": memory.resident_bytes,
        "memory_budget_bytes": memory.budget_bytes,
    }
    return {PREFIX + name: value for name, value in {**short, **_verifiers(status)}.items()}


def _verifiers(status: AgentStatus) -> dict[str, Value]:
    every = status.verifiers
    return {
        "verifier_up": {one.address: float(one.state in _UP) for one in every},
        "rtt_seconds": {one.address: one.rtt_s for one in every if one.rtt_s is not None},
        "pass_seconds": {one.address: one.pass_s for one in every if one.pass_s is not None},
    }


def _family(metric: Metric, value: float | Mapping[str, float]) -> Family:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=[metric.label] if metric.label else [])
    by_label = value if isinstance(value, Mapping) else {"": value}
    for label, one in by_label.items():
        family.add_metric([label] if metric.label else [], one)
    return family
