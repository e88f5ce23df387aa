"""The table of clients: their versions, how they are configured, and what they showed.

``clients.yaml`` is written by hand and says what a client must show. ``results.yaml`` is written by
``make clients`` and says what it showed. ``docs/clients.md`` is made of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from edgespec.config.loading import ConfigError, load_config

FOLDER: Final = Path(__file__).parent
DRIVERS: Final = FOLDER / "drivers"
TABLE: Final = FOLDER / "clients.yaml"
RESULTS: Final = FOLDER / "results.yaml"

ASK: Final[Mapping[str, str]] = {
    "plain": "What is the capital of France?",
    "tools": 'What is the weather in Paris? Call get_weather with {"city": "Paris"}.',
    "structured": "Name the capital of France and its country, as JSON.",
    "thoughts": "Think first. What is the capital of France?",
    "task": (
        "Run these commands: `echo one > notes.txt`, `echo two >> notes.txt`, `cat notes.txt`. Then"
        " say what the last one printed."
    ),
}
"""The message of the user in each part (``scripted_model.py`` reads the instructions)."""


class Check(Enum):
    """A kind of result that a part must show. ``tests/clients/run.py`` has the judge of each."""

    ANSWER = "answer"
    """The answer to a question; the scripted target's own one."""
    WEATHER = "weather"
    """The result of a tool that the client ran, in the answer of a second turn."""
    CITY = "city"
    """JSON of a city and its country."""
    CITY_AFTER_CALL = "city_after_call"
    """The same JSON behind a call of a tool."""
    THOUGHT = "thought"
    """A thought apart from its answer."""
    TASK = "task"
    """The file that the first two of three calls wrote, and the result of the third in the
    answer."""
    EDITS = "edits"
    """The file after three edits."""
    ARGUMENTS = "arguments"
    """The arguments of a call, read by the client's own parser."""
    SECTIONS = "sections"
    """The answer in a format of the client's own, which small models miss."""
    CALLED = "called"
    """Any text behind a call."""
    NUMBER = "number"
    """A number that the client computed."""
    TEXT = "text"
    """Any text."""

    @property
    def needs_script(self) -> bool:
        """Whether only the scripted target is sure to lead to it."""
        return self not in (Check.ANSWER, Check.CITY, Check.NUMBER, Check.TEXT)


class Kind(Enum):
    """Group of clients, in the order of the page."""

    LIBRARY = "library"
    FRAMEWORK = "framework"
    AGENT = "agent"
    """A program that works on files. Its prompts have 20,000 tokens and more, or edits."""
    PROGRAM = "program"
    PAGE = "page"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One row of the table.

    Raises ``ValueError`` that names what is missing."""

    title: str
    kind: Kind
    pip: tuple[str, ...] = ()
    """Packages of the Python index with exact versions. The first is the client."""
    npm: tuple[str, ...] = ()
    """Packages of npm with exact versions."""
    uses_torch: bool = False
    """Whether the client imports torch. It then takes the one of this checkout's environment."""
    driver: str = ""
    """Script in ``drivers/``. Empty for a client that is not run."""
    parts: Mapping[str, Check] = field(default_factory=dict)
    """Parts of the driver, and what each must show."""
    limit_s: float = 120.0
    """Time limit of all parts together."""
    language: str = "python"
    """Language of ``configure``."""
    configure: str
    """The lines that point the client at the endpoint."""
    remark: str = ""
    """A remark for users, on the page."""
    not_run: str = ""
    """Reason why the client is not run, with what was seen by hand."""

    def __post_init__(self) -> None:
        if bool(self.driver) == bool(self.not_run):
            raise ValueError(f"{self.title}: give either a driver or not_run")
        if self.driver and not (self.parts and (self.pip or self.npm)):
            raise ValueError(f"{self.title}: a client that is run has parts and packages")

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages with their exact versions, of either index."""
        return self.pip + self.npm

    @property
    def version(self) -> str:
        """Version of the client itself."""
        name, _, version = self.packages[0].rpartition("==" if self.pip else "@")
        assert name, "test_table.py checks that versions are exact"
        return version


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    clients: Mapping[str, Client]


@cache
def read_table() -> Mapping[str, Client]:
    """Return all clients by name. Raises ``ConfigError``."""
    return load_config(_Table, TABLE).clients


WORKS: Final = "works"
"""Result of a part that showed what it must."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one client."""

    packages: tuple[str, ...]
    """The packages that were run, as in the table."""
    targets: Mapping[str, Mapping[str, str]]
    """Results by target and part: ``WORKS``, or what went wrong."""


def read_results() -> dict[str, Results]:
    """Return what was seen of each client. Raises ``ConfigError``."""
    if not RESULTS.is_file():
        return {}
    data: Any = yaml.safe_load(RESULTS.read_text(encoding="utf-8")) or {}
    try:
        return {name: Results(tuple(one["packages"]), one["targets"]) for name, one in data.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{RESULTS}: {error!r}; write it anew with make clients") from error


_RESULTS_HEAD: Final = """\
# What `make clients` saw, by client, target and part. It is written by
# `make clients CLIENTS_ARGS=--record`, and docs/clients.md is made of it.
"""


def write_results(results: Mapping[str, Results]) -> None:
    """Write what was seen of each client, in the order of the table."""
    data = {
        name: {
            "packages": list(results[name].packages),
            "targets": {target: dict(found) for target, found in results[name].targets.items()},
        }
        for name in read_table()
        if name in results
    }
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
    RESULTS.write_text(_RESULTS_HEAD + text, encoding="utf-8")
