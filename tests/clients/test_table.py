"""Tests of the table of clients, without any client.

Oracles: the files in ``drivers/`` and the parsers of their languages; the page that the tool
writes; examples of what drivers show, good and bad.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.clients import run
from tests.clients import scripted_model as model
from tests.clients.table import DRIVERS, WORKS, Check, Client, Kind, read_results, read_table
from tools import write_clients

CLIENTS = read_table()
RUN = {name: client for name, client in CLIENTS.items() if client.driver}


# --- the table ------------------------------------------------------------------------------------


def test_the_page_is_current() -> None:
    written = write_clients.PAGE.read_text(encoding="utf-8")
    assert written == write_clients.page(), "run: python -m tools.write_clients"


@pytest.mark.parametrize("name", CLIENTS)
def test_versions_are_exact(name: str) -> None:
    client = CLIENTS[name]
    assert all(re.fullmatch(r"[\w.-]+(\[\w+\])?==[\d.]+\w*", one) for one in client.pip)
    assert all(re.fullmatch(r"(@[\w-]+/)?[\w-]+@[\d.]+", one) for one in client.npm)
    assert re.fullmatch(r"[\d.]+\w*", client.version)


@pytest.mark.parametrize("name", CLIENTS)
def test_few_lines_configure_a_client(name: str) -> None:
    lines = [line for line in CLIENTS[name].configure.splitlines() if line.strip()]
    assert 1 <= len(lines) <= 7
    assert max(map(len, lines)) <= 100


def read_driver(name: str) -> str:
    return (DRIVERS / CLIENTS[name].driver).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RUN)
def test_a_driver_has_the_parts_of_the_table(name: str) -> None:
    source = read_driver(name)
    if CLIENTS[name].driver.endswith(".mjs"):
        (listed,) = re.findall(r"parts\.runParts\(\{([^}]*)\}\)", source)
        found = {one.strip() for one in listed.split(",") if one.strip()}
    else:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        (call,) = [one for one in calls if ast.unparse(one.func) == "parts.run_parts"]
        found = {one.arg for one in call.keywords if one.arg}
    assert found == set(CLIENTS[name].parts)


def test_every_driver_is_in_the_table() -> None:
    files = {path.name for path in DRIVERS.iterdir() if path.is_file()}
    assert files == {client.driver for client in RUN.values()} | {"parts.py", "parts.mjs"}


@pytest.mark.parametrize("path", sorted(DRIVERS.glob("*.mjs")), ids=lambda path: path.name)
def test_a_driver_in_javascript_parses(path: Path) -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("Node.js is not installed")
    done = subprocess.run([node, "--check", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", CLIENTS)
def test_results_are_of_the_versions_in_the_table(name: str) -> None:
    client, results = CLIENTS[name], read_results()
    if client.not_run:
        assert name not in results
        return
    if (found := results.get(name)) is None:
        return  # the page says that it was not run yet
    assert found.packages == client.packages, f"run: make clients CLIENTS={name}"
    assert set(found.targets["scripted"]) == set(client.parts)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        pytest.param({"driver": "a.py", "not_run": "b"}, "either", id="run and not run"),
        pytest.param({}, "either", id="neither"),
        pytest.param({"driver": "a.py"}, "parts", id="no parts"),
    ],
)
def test_an_incomplete_row_is_refused(row: Mapping[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Client(title="one", kind=Kind.LIBRARY, configure="", **row)


# --- the runner -----------------------------------------------------------------------------------


def test_lines_of_a_driver_are_found_among_others() -> None:
    written = 'noise {"part": 1}\n\n{"part": "plain", "shows": "a\\nb"}\n{"part": "half'
    assert run.parse_lines(written) == {"plain": {"part": "plain", "shows": "a\nb"}}


@pytest.mark.parametrize(
    ("check", "shown", "works"),
    [
        pytest.param(Check.ANSWER, f"> {model.ANSWER}\n", True, id="answer"),
        pytest.param(Check.ANSWER, "None", False, id="no answer"),
        pytest.param(Check.CITY, '{"city": "Paris", "country": "France"}', True, id="city"),
        pytest.param(Check.CITY, '{"city": "Paris"}', False, id="half a city"),
        pytest.param(Check.CITY, "Paris", False, id="no JSON"),
        pytest.param(Check.WEATHER, f"{model.RESULT}21 degrees in Paris", True, id="weather"),
        pytest.param(Check.WEATHER, "21 degrees in Paris", False, id="no second turn"),
        pytest.param(Check.THOUGHT, f"{model.THOUGHT}|{model.ANSWER}", True, id="thought"),
        pytest.param(
            Check.THOUGHT, f"None|{model.THOUGHT}{model.ANSWER}", False, id="thought in the answer"
        ),
        pytest.param(Check.TASK, f"one\ntwo\n|{model.RESULT}one\ntwo", True, id="task"),
        pytest.param(Check.TASK, f"one\n|{model.RESULT}one\ntwo", False, id="half a task"),
        pytest.param(Check.TASK, "one\ntwo\n|Well, two.", False, id="a task without its end"),
        pytest.param(Check.EDITS, "one\ntwo\n|Applied edit", True, id="edits"),
        pytest.param(Check.EDITS, "one\nten\n|Applied edit", False, id="two edits"),
        pytest.param(Check.NUMBER, "0.5", True, id="number"),
        pytest.param(Check.NUMBER, "nan", False, id="no number"),
    ],
)
def test_a_part_is_judged_by_what_it_shows(check: Check, shown: str, works: bool) -> None:
    assert (run.judge(check, shown, is_scripted=True) == WORKS) is works


def test_a_real_model_is_judged_by_form() -> None:
    assert run.judge(Check.ANSWER, "Lyon", is_scripted=False) == WORKS
    city = '{"city": "Lyon", "country": ""}'
    assert run.judge(Check.CITY, city, is_scripted=False) == WORKS
