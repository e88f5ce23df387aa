"""The manifests. Oracles: Kubernetes' own schemas, strict; Kustomize where it is installed; the
restricted pod security standard."""

from __future__ import annotations

import re
import shutil
from typing import Any

import kubernetes_validate
import pytest
import yaml

from edgespec.verifier import daemon
from tests.shell.deploy_tools import DEPLOY, KUBERNETES, document, judged
from tests.shell.kustomize import Resource, identity, pod_of, render

KUSTOMIZATIONS = ("base", "overlays/public", "overlays/mesh")
# The oldest and the newest that the manifests are meant for.
VERSIONS = ("1.32", "1.37")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.fixture(params=KUSTOMIZATIONS)
def rendered(request: pytest.FixtureRequest) -> list[Resource]:
    return render(KUBERNETES / request.param)


def one(rendered: list[Resource], kind: str, name: str = "edgespec-verifier") -> Resource:
    (found,) = (r for r in rendered if identity(r)[:2] == (kind, name))
    return found


def verifier(rendered: list[Resource]) -> dict[str, Any]:
    (container,) = pod_of(one(rendered, "StatefulSet"))["containers"]
    assert isinstance(container, dict)
    return container


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_them(rendered: list[Resource], version: str) -> None:
    for resource in rendered:
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_mistake_would_be_found() -> None:
    wrong = one(render(KUBERNETES / "base"), "StatefulSet")
    pod_of(wrong)["terminationGracePeriod"] = 5
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_kustomize_makes_the_same_of_them(name: str) -> None:
    if command := shutil.which("kustomize"):
        built = judged(command, "build", KUBERNETES / name)
    elif command := shutil.which("kubectl"):
        built = judged(command, "kustomize", KUBERNETES / name)
    else:
        pytest.skip("neither kustomize nor kubectl is installed")
    theirs = [resource for resource in yaml.safe_load_all(built) if resource]
    assert sorted(theirs, key=identity) == sorted(render(KUBERNETES / name), key=identity)


def test_everything_is_there(rendered: list[Resource]) -> None:
    kinds = {resource["kind"] for resource in rendered}
    assert kinds == {
        "HorizontalPodAutoscaler",
        "Namespace",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
        "StatefulSet",
    }
    assert len({identity(resource) for resource in rendered}) == len(rendered)


def test_a_pod_keeps_the_restricted_standard(rendered: list[Resource]) -> None:
    namespace = one(rendered, "Namespace", "edgespec")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    pod = pod_of(one(rendered, "StatefulSet"))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert one(rendered, "ServiceAccount")["automountServiceAccountToken"] is False
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
    workload = one(rendered, "StatefulSet")
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"] == labels
    assert one(rendered, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    policy = one(rendered, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    ports = {port["name"]: port["containerPort"] for port in verifier(rendered)["ports"]}
    for service in (resource for resource in rendered if resource["kind"] == "Service"):
        assert service["spec"]["selector"] == labels
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    assert {p["port"] for rule in policy["ingress"] for p in rule["ports"]} == set(ports)
    assert one(rendered, "Service")["spec"]["clusterIP"] == "None"
    assert workload["spec"]["serviceName"] == identity(one(rendered, "Service"))[1]
    scaled = one(rendered, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
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
    container, pod = verifier(rendered), pod_of(one(rendered, "StatefulSet"))
    claims = one(rendered, "StatefulSet")["spec"]["volumeClaimTemplates"]
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


def test_a_pod_is_given_the_time_to_drain(rendered: list[Resource]) -> None:
    pod, container = pod_of(one(rendered, "StatefulSet")), verifier(rendered)
    (drain_s,) = (
        float(argument.rpartition("=")[2])
        for argument in container["args"]
        if argument.startswith("--set=drain_s=")
    )
    pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed_s = pause_s + drain_s + daemon._LAST_PASS_S + daemon._LAST_WORDS_S
    assert pod["terminationGracePeriodSeconds"] > needed_s


def test_the_autoscaler_and_the_adapter_mean_one_metric(rendered: list[Resource]) -> None:
    (metric,) = one(rendered, "HorizontalPodAutoscaler")["spec"]["metrics"]
    (rule,) = document(KUBERNETES / "prometheus-adapter.yaml")["rules"]["custom"]
    name = metric["pods"]["metric"]["name"]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].startswith(name + "{")
