"""The one-machine trial. Oracles: the compose specification's own schema, our configuration reader,
and a stand-in for ``edgespec`` that writes down what the device's loop asks of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from edgespec.config import AgentConfig, load_config
from tests.shell.deploy_tools import COMPOSE, DEPLOY, compose_files, document, judged, tool

SERVICES: dict[str, Any] = document(COMPOSE)["services"]
WITHIN_S = 60


def test_the_files_follow_the_specification() -> None:
    checker = tool("check-jsonschema", "pip install check-jsonschema")
    paths = [DEPLOY / name for name in compose_files()]
    judged(checker, "--builtin-schema", "vendor.compose-spec", *paths)


def test_the_trial_is_whole() -> None:
    assert set(SERVICES) == {"verifier", "device", "prometheus", "grafana"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_kept_small(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), service["image"]
    assert not service.get("privileged")
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), f"{name}: {port} is open to the network"


def test_everything_mounted_is_there_and_everything_there_is_mounted() -> None:
    whole = document(COMPOSE)
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


def test_the_devices_reach_the_verifier_over_a_shaped_link_alone() -> None:
    config = load_config(AgentConfig, DEPLOY / "compose/device.yaml")
    assert config.verifiers == ("verifier:7420",)
    assert config.link.shaped
    assert SERVICES["device"]["networks"] == ["link"]
    assert "link" in SERVICES["verifier"]["networks"]


def test_stopping_waits_for_the_drain() -> None:
    (drain_s,) = (
        float(argument.rpartition("=")[2])
        for argument in SERVICES["verifier"]["command"]
        if argument.startswith("--set=drain_s=")
    )
    grace = re.fullmatch(r"(\d+)s", SERVICES["verifier"]["stop_grace_period"])
    assert grace is not None
    assert float(grace[1]) >= drain_s + 35  # the last pass and the last words


def test_prometheus_and_grafana_find_what_they_are_given() -> None:
    targets = {
        name: {one["source"]: one["target"] for one in SERVICES[name]["configs"]}
        for name in ("prometheus", "grafana")
    }
    settings = document(DEPLOY / "prometheus/prometheus.yml")
    folder = Path(targets["prometheus"]["prometheus"]).parent
    assert [str(folder / name) for name in settings["rule_files"]] == [
        targets["prometheus"]["alerts"]
    ]
    (scrape,) = settings["scrape_configs"]
    (names,) = scrape["dns_sd_configs"]
    assert names["names"] == ["verifier"]
    assert f"--metrics-port={names['port']}" in SERVICES["verifier"]["command"]
    (provider,) = document(DEPLOY / "grafana/provisioning/dashboards/edgespec.yml")["providers"]
    dashboard = targets["grafana"]["dashboard"]
    assert str(Path(dashboard).parent) == provider["options"]["path"]
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
    assert environment["PROMETHEUS_URL"].startswith("http://prometheus:")


def _stand_in(folder: Path, log: Path) -> dict[str, str]:
    """An environment in which ``edgespec`` writes its arguments to ``log``, and fails."""
    command = folder / "edgespec"
    program = (
        "import json, sys; "
        f"print(json.dumps(sys.argv[1:]), file=open({str(log)!r}, 'a'), flush=True); sys.exit(1)"
    )
    command.write_text(f'#!/bin/sh\nexec python3 -c "{program}" "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PAUSE_S": "0"}


def test_the_loop_asks_on_whatever_fails_and_ends_when_told(tmp_path: Path) -> None:
    log = tmp_path / "asked.jsonl"
    log.touch()
    with subprocess.Popen(
        ["/bin/sh", DEPLOY / "compose/device.sh", "device.yaml"],
        env=_stand_in(tmp_path, log),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as loop:
        assert loop.stderr is not None
        for _ in range(4):
            assert loop.stderr.readline() == "the generation failed; trying again\n"
        loop.send_signal(signal.SIGTERM)
        loop.communicate(timeout=WITHIN_S)
        assert loop.returncode == 143
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert {arguments[0] for arguments in asked} == {"generate"}
    assert [arguments[arguments.index("--seed") + 1] for arguments in asked[:4]] == list("1234")
    assert len({arguments[1] for arguments in asked[:4]}) == 3
    assert all(arguments[2:4] == ["--config", "device.yaml"] for arguments in asked)
