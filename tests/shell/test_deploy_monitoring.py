"""Alerts and dashboard. Oracles: ``promtool``, a PromQL parser, and what a real verifier offers at
its ``/metrics``."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import promql_parser
import pytest

from tests.shell.deploy_tools import DEPLOY, KUBERNETES, document, judged, tool
from tests.shell.live_verifier import daemon, start

ALERTS = DEPLOY / "prometheus/alerts.yml"
ALERT_TESTS = DEPLOY / "prometheus/alerts.test.yml"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/edgespec.json").read_text("utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
COLUMNS = 24
# Prometheus gives these to every series.
OF_PROMETHEUS = {"instance", "job", "namespace", "pod"}
WITHIN_S = 60


@dataclass(frozen=True, slots=True)
class Selected:
    """A metric that a query asks for, and the labels that it chooses or groups by."""

    metric: str
    labels: frozenset[str]


def rules() -> list[dict[str, Any]]:
    return [rule for group in document(ALERTS)["groups"] for rule in group["rules"]]


def queries() -> dict[str, str]:
    """Every query under ``deploy/`` by where it stands, the dashboard's variables filled in."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in rules()}
    for panel in PANELS:
        for target in panel.get("targets", []):
            where = f"panel {panel['id']} {panel['title']} {target['refId']}"
            found[where] = _filled_in(target["expr"])
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            call = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert call is not None, variable["name"]
            found[f"variable {variable['name']}"] = f"sum by ({call[2]}) ({_filled_in(call[1])})"
    (rule,) = document(KUBERNETES / "prometheus-adapter.yaml")["rules"]["custom"]
    found["adapter"] = rule["seriesQuery"]
    return found


def _filled_in(query: str) -> str:
    return (
        query.replace("$__rate_interval", "1m").replace("$model", ".*").replace("$instance", ".*")
    )


def selected(query: str) -> Iterator[Selected]:
    """Raises ``ValueError`` for what is no PromQL."""
    tree = promql_parser.parse(query)
    groupings: list[tuple[promql_parser.Expr, frozenset[str]]] = [(tree, frozenset())]

    def grouped(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            groupings.append((node.expr, frozenset(node.modifier.labels)))
        return True

    promql_parser.walk(tree, grouped)
    for below, labels in groupings:
        yield from _selectors(below, labels)


def _selectors(tree: promql_parser.Expr, grouped_by: frozenset[str]) -> list[Selected]:
    found: list[Selected] = []

    def look(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            chosen = {matcher.name for matcher in node.matchers.matchers}
            found.append(Selected(node.name or "", grouped_by | chosen))
        return True

    promql_parser.walk(tree, look)
    return found


def test_prometheus_takes_the_rules_and_the_configuration() -> None:
    promtool = tool("promtool", "apt-get install prometheus")
    judged(promtool, "check", "rules", ALERTS)
    judged(promtool, "check", "config", DEPLOY / "prometheus/prometheus.yml")


def test_each_alert_sounds_where_it_should_and_nowhere_else() -> None:
    judged(tool("promtool", "apt-get install prometheus"), "test", "rules", ALERT_TESTS)


def test_no_alert_is_left_out_of_that_test() -> None:
    names = {rule["alert"] for rule in rules()}
    cases = [
        (case["alertname"], bool(case["exp_alerts"]))
        for group in document(ALERT_TESTS)["tests"]
        for case in group["alert_rule_test"]
    ]
    assert {name for name, sounds in cases if sounds} == names
    assert {name for name, sounds in cases if not sounds} == names


def test_an_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]


@pytest.mark.parametrize("where", sorted(queries()))
def test_every_query_is_one(where: str) -> None:
    assert list(selected(queries()[where])), "it asks for nothing"


def test_what_a_query_asks_for() -> None:
    query = 'sum by (reason) (rate(a_total{x="1"}[5m])) / on () b_bucket'
    assert set(selected(query)) == {
        Selected("a_total", frozenset({"x"})),
        Selected("a_total", frozenset({"x", "reason"})),
        Selected("b_bucket", frozenset()),
    }
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        list(selected("sum(rate(a_total[5m])"))


def test_panels_lie_beside_one_another_and_say_what_they_show() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    squares = []
    for panel in PANELS:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= COLUMNS
        squares.append((at["x"], at["y"], at["x"] + at["w"], at["y"] + at["h"]))
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"].get("unit") or panel["type"] == "heatmap"
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for (l1, t1, r1, b1), (l2, t2, r2, b2) in combinations(squares, 2):
        assert r1 <= l2 or r2 <= l1 or b1 <= t2 or b2 <= t1


# --- against a real verifier ------------------------------------------------------------------


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """The samples that a verifier offers after it has served a text, with their labels."""
    with daemon("--metrics-port", "0") as (address, process):
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://\S+/metrics", line)
        assert found is not None, line
        where = ("--verifier", address, "--draft", "toy", "-n", "16")
        with start("generate", "once upon a time", *where) as device:
            _, said = device.communicate(timeout=WITHIN_S)
        assert device.returncode == 0, said
        with urllib.request.urlopen(found[0], timeout=WITHIN_S) as answer:
            return _samples(answer.read().decode())


def _samples(text: str) -> dict[str, set[str]]:
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("where", sorted(queries()))
def test_a_verifier_offers_what_the_query_asks_for(
    where: str, exposed: dict[str, set[str]]
) -> None:
    for asked in selected(queries()[where]):
        if asked.metric == "up":  # Prometheus' own
            continue
        assert asked.metric in exposed, f"no verifier has {asked.metric}"
        unknown = asked.labels - exposed[asked.metric] - OF_PROMETHEUS
        assert not unknown, f"{asked.metric} has no label {sorted(unknown)}"
