"""No modules import each other in a circle, and the heavy libraries are loaded late, or never.

Oracle: imports in the syntax trees as a graph; a fresh interpreter's list of what is loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter

import pytest

from edgespec.cli import main
from edgespec_sim.commands import main as simulator
from tests.sources import PACKAGES, ROOT, Module, imports, modules, parse, within
from tests.test_floors import HEAVY


def dependencies(module: Module, known: Collection[str]) -> set[str]:
    """The modules in ``known`` that a module imports. ``from a import b`` is an import of ``a.b``
    where that is a module, and of ``a`` where ``b`` is something in it."""
    found = list(imports(module))
    modules_found = set()
    for one in found:
        # ``from a import b`` is reported as ``a`` and as ``a.b``; the longer name tells which.
        if any(other.line == one.line and other.name.startswith(one.name + ".") for other in found):
            continue
        name = one.name
        while name and name not in known:
            name = name.rpartition(".")[0]
        modules_found.add(name)
    return modules_found - {"", module.name}


def import_circle(some: Collection[Module]) -> list[str]:
    """One circle of imports among these modules, its first module again at the end; else empty."""
    known = {module.name for module in some}
    try:
        TopologicalSorter({m.name: sorted(dependencies(m, known)) for m in some}).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    product = [m for m in modules() if any(within(m.name, package) for package in PACKAGES)]
    assert len(product) > 100
    assert import_circle(product) == [], "move what both need into a file of its own"


@pytest.mark.parametrize(
    "line",
    [
        "from edgespec.b import B",
        "from edgespec import b",
        "import edgespec.b",
        "if TYPE_CHECKING:\n    from edgespec.b import B",
        "def f():\n    from edgespec import b",
    ],
)
def test_a_planted_circle_is_found(line: str) -> None:
    top = parse("edgespec/__init__.py", "from edgespec.a import A\n")
    a = parse("edgespec/a.py", f"{line}\n")
    b = parse("edgespec/b.py", "from edgespec.a import A\n")
    assert import_circle([top, a, b]) == ["edgespec.a", "edgespec.b", "edgespec.a"]
    assert import_circle([top, b]) == []


def test_the_heavy_libraries_are_loaded_late() -> None:
    """By every command, for they are imported when they are called."""
    commands = {**main.COMMANDS, **simulator.COMMANDS}.values()
    names = {where.partition(":")[0] for where in commands}
    assert _loaded_by("edgespec.api", *sorted(names)) & HEAVY == set()


def test_the_version_is_said_without_the_commands() -> None:
    tell = "*sorted(name for name in sys.modules if name.startswith('edgespec'))"
    said = _printed(
        "import sys\nfrom edgespec.cli.main import app\n"
        f"try: app(['--version'])\nexcept SystemExit: print({tell})"
    )
    loaded = "edgespec edgespec.cli edgespec.cli.entry edgespec.cli.main"
    assert said[1:] == [loaded]


@pytest.mark.parametrize("package", ["edgespec.core", "edgespec_sim"])
def test_the_heavy_libraries_are_never_loaded(package: str) -> None:
    """Transitively, for every module of the package: the table above only sees one step."""
    outside = "edgespec_sim.commands"  # it runs worlds in processes
    names = [m.name for m in modules() if within(m.name, package) and not within(m.name, outside)]
    assert names, f"{package} holds no module"
    assert _loaded_by(*names) & (HEAVY | {"asyncio"}) == set()


def test_only_training_loads_torch() -> None:
    every = [module.name for module in modules() if within(module.name, "edgespec_uara")]
    names = [name for name in every if not within(name, "edgespec_uara.masac")]
    assert names != every
    assert _loaded_by(*names) & HEAVY == set()


def test_an_early_load_would_be_seen() -> None:
    assert {"asyncio", "colorsys"} <= _loaded_by("asyncio", "colorsys")


def _loaded_by(*names: str) -> set[str]:
    """Top-level names in ``sys.modules`` of a fresh interpreter that imported ``names``."""
    names_of_modules = "[name for name in sys.modules if '.' not in name]"
    said = _printed(f"import json, sys, {', '.join(names)}\nprint(json.dumps({names_of_modules}))")
    return set(json.loads(said[-1]))


def _printed(code: str) -> list[str]:
    """The lines that a fresh interpreter prints."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "sim")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
