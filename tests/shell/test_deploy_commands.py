"""Every ``edgespec`` command line under ``deploy/``. Oracle: the command line itself."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import click
import pytest
import typer

from edgespec.cli.main import app
from tests.shell.deploy_tools import DEPLOY, KUBERNETES, UNIT, compose_files
from tests.shell.kustomize import pod_of, render

PROGRAM: Any = typer.main.get_command(app)


def command_lines() -> dict[str, list[str]]:
    """The words after ``edgespec``, by where they stand."""
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
    found.update(_in_the_guide())
    return found


def _in_the_guide() -> Iterator[tuple[str, list[str]]]:
    guide = (DEPLOY / "README.md").read_text(encoding="utf-8")
    for block in re.findall(r"```console\n(.*?)```", guide, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if found := re.search(r"(?:^\$ |bin/)edgespec (.*)$", line.partition("  #")[0]):
                yield f"README {line.strip()}", shlex.split(found[1])


LINES = command_lines()


@pytest.mark.parametrize("where", sorted(LINES))
def test_the_command_line_knows_every_word(where: str) -> None:
    words = [word for word in LINES[where] if word not in ("|", ">", "<")]
    unknown = _unknown(words)
    assert not unknown


def _unknown(words: list[str]) -> list[str]:
    """The command or the options of a line that there are not."""
    command, rest = PROGRAM, list(words)
    while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest[0])
        if found is None:
            return [rest[0]]
        command = found
        del rest[0]
    known = {"--help"} | {
        name for one in command.params for name in (*one.opts, *one.secondary_opts)
    }
    given = [word.partition("=")[0] for word in rest if word.startswith("-") and word != "-"]
    return [word for word in given if word not in known]


# Parts of the verifier that may be absent from a build; their options are then unknown to it.
def test_a_wrong_word_is_found() -> None:
    assert _unknown(["verifier", "--prot=7420", "--port=7420"]) == ["--prot"]
    assert _unknown(["listen"]) == ["listen"]
    assert _unknown(["doctor", "--probe", "5", "--verifier", "127.0.0.1:7420"]) == []
