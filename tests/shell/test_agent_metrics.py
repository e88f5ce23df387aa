"""The agent's metrics. Oracles: Prometheus' own parser, the status, and the manual."""

from __future__ import annotations

import re
from dataclasses import replace

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from edgespec.telemetry.agent_status import (
    AGENT_METRICS,
    METRICS_PREFIX,
    AgentStatus,
    AgentTotals,
    VerifierState,
)
from edgespec.telemetry.metric_table import Table, registry_of
from tests.shell.test_chat import STATUS
from tests.sources import ROOT

NAMES = {METRICS_PREFIX + one.name for one in AGENT_METRICS}


def samples(status: AgentStatus) -> dict[tuple[str, str], float]:
    """Every sample by its name and the value of its label."""
    registry = registry_of(Table(METRICS_PREFIX, AGENT_METRICS, lambda: status))
    text = generate_latest(registry).decode()
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name.startswith(METRICS_PREFIX)
    }


def test_the_values_are_those_of_the_status() -> None:
    totals = AgentTotals(generations=3, finished=1, failed=2, tokens=50, accepted=30, sent=40)
    found = samples(replace(STATUS, totals=totals))
    assert {name for name, _ in found} <= NAMES
    assert found["edgespec_agent_requests_finished_total", "failed"] == 2
    assert found["edgespec_agent_generation_tokens_total", ""] == 50
    assert found["edgespec_agent_spec_decode_num_accepted_tokens_total", ""] == 30
    assert found["edgespec_agent_rtt_seconds", "gpu-box:7420"] == 0.0514
    assert found["edgespec_agent_verifier_up", "gpu-box:7420"] == 1
    assert found["edgespec_agent_memory_budget_bytes", ""] == 600 << 20


def test_what_is_not_known_is_absent_and_a_verifier_that_is_away_is_down() -> None:
    away = replace(STATUS.verifiers[0], state=VerifierState.AWAY, rtt_s=None)
    found = samples(replace(STATUS, verifiers=(away,)))
    assert found["edgespec_agent_verifier_up", "gpu-box:7420"] == 0
    names = {name for name, _ in found}
    assert "edgespec_agent_rtt_seconds" not in names


def test_the_manual_has_each_of_them() -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(edgespec_agent_\w+)`", text)) == NAMES
