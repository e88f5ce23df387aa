"""What the tests of ``deploy/`` share: where it lies, and the tools of others that judge it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sources import ROOT

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd/edgespec-verifier.service"
USER_UNIT = DEPLOY / "systemd/edgespec-serve.service"
COMPOSE = DEPLOY / "compose.yaml"
KUBERNETES = DEPLOY / "kubernetes"


def tool(name: str, package: str) -> str:
    """The path of a command: of this environment, or of the machine. Skips the test without it."""
    own = Path(sys.executable).parent / name
    found = str(own) if own.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; it comes with {package}")
    return found


def judged(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a command says; the test fails with its words where it exits with an error."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def document(path: Path) -> Any:
    """The one YAML document of a file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def compose_files() -> dict[str, Any]:
    return {path.name: document(path) for path in sorted(DEPLOY.glob("compose*.yaml"))}
