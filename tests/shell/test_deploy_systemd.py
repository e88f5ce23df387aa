"""The unit. Oracles: ``systemd-analyze``, our configuration reader, and the daemon's own times."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from edgespec.config import VerifierConfig, load_config
from edgespec.verifier import daemon
from tests.shell.deploy_tools import DEPLOY, UNIT, USER_UNIT, judged, tool

PROGRAM = "/opt/edgespec/bin/edgespec"
# Of ten; above five systemd calls it "exposed". What is open is named in the unit.
EXPOSURE_MAX = 2.0


def settings() -> dict[str, list[str]]:
    """Every value of every key of the unit, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    text = UNIT.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[key].append(" ".join(value.split()))
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit on a machine where the program is: here some other program."""
    something = shutil.which("true")
    assert something is not None
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace(PROGRAM, something))
    return unit


def test_systemd_understands_every_line(installed: Path) -> None:
    analyze = tool("systemd-analyze", "apt-get install systemd")
    assert _about(installed, judged(analyze, "verify", "--man=no", installed)) == []


def test_systemd_understands_a_devices_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # of a user who is logged in
    analyze = tool("systemd-analyze", "apt-get install systemd")
    something = shutil.which("true")
    assert something is not None
    unit = tmp_path / USER_UNIT.name
    unit.write_text(USER_UNIT.read_text(encoding="utf-8").replace(PROGRAM, something))
    assert _about(unit, judged(analyze, "--user", "verify", "--man=no", unit)) == []


def test_a_mistake_would_be_found(installed: Path) -> None:
    analyze = tool("systemd-analyze", "apt-get install systemd")
    installed.write_text(installed.read_text().replace("PrivateTmp=yes", "PrivatTmp=yes"))
    (found,) = _about(installed, judged(analyze, "verify", "--man=no", installed))
    assert "'PrivatTmp'" in found


def _about(unit: Path, said: str) -> list[str]:
    """The lines about this unit: those it needs may have faults of their own."""
    return [line for line in said.splitlines() if unit.name in line]


def test_the_sandbox_is_tight(installed: Path) -> None:
    analyze = tool("systemd-analyze", "apt-get install systemd")
    limit = f"--threshold={round(EXPOSURE_MAX * 10)}"
    judged(analyze, "security", "--no-pager", "--offline=true", limit, installed)


def test_it_runs_as_nobody_who_exists_and_sees_its_own_files_alone() -> None:
    unit = settings()
    for key, value in {
        "DynamicUser": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
        "DevicePolicy": "closed",
        "DeviceAllow": "char-nvidia* rw",
        "Type": "notify",
        "Restart": "on-failure",
    }.items():
        assert unit[key] == [value], key
    assert unit["SystemCallFilter"][0] == "@system-service"


def test_stopping_waits_for_the_drain_and_the_last_pass() -> None:
    unit = settings()
    (command,) = unit["ExecStart"]
    drain = re.search(r"--set drain_s=(\d+)", command)
    assert drain is not None
    needed_s = float(drain[1]) + daemon._LAST_PASS_S + daemon._LAST_WORDS_S
    assert float(unit["TimeoutStopSec"][0]) > needed_s


def test_every_secret_is_a_credential_and_a_reload_lays_all_of_them_anew() -> None:
    unit = settings()
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
    assert config.limits.max_cached_tokens >= (config.max_model_len or 0)
    (command,) = settings()["ExecStart"]
    assert command.startswith(f"{PROGRAM} verifier --config /etc/edgespec/verifier.yaml ")
