"""The architecture as a test over the syntax tree: which part may import which, no circles, and
heavy libraries loaded late or never.

Oracle: every import in the product is looked up in ``floors.yaml``, imports inside functions and
under ``TYPE_CHECKING`` too (a name is a dependency, whenever it is loaded). For loaded modules, the
oracle is a fresh interpreter's own list.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import pytest
import yaml

from edgespec.cli import main
from edgespec_sim.commands import main as simulator
from tests.kit.live_verifier import run_python
from tests.present import require
from tests.sources import PACKAGES, ROOT, Module, is_within, list_imports, parse, parse_modules

TABLE = yaml.safe_load((ROOT / "tests/floors.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Floor:
    """The rules of one package: its allowed modules of ours, and its forbidden libraries."""

    package: str
    ours: tuple[str, ...]
    never: frozenset[str] = frozenset()
    stdlib_only: bool = False

    def violations(self, module: Module) -> Iterator[str]:
        said: set[tuple[str, int]] = set()
        for found in list_imports(module):
            top = found.name.partition(".")[0]
            reason = self._refuses(found.name)
            if reason and (top, found.line) not in said:
                said.add((top, found.line))
                yield (
                    f"{module.path}:{found.line}: {self.package} may not import {found.name}: "
                    + (reason)
                )

    def _refuses(self, name: str) -> str | None:
        top = name.partition(".")[0]
        if top in PACKAGES:
            # No package may depend on all of `edgespec`, its own top module included.
            own = () if self.package == "edgespec" else (self.package,)
            allowed = (*own, *self.ours)
            # `from edgespec.core import tree` also yields `edgespec.core`, and the bare `edgespec`
            # of `from edgespec import ports` means nothing by itself.
            fine = name == "edgespec" or any(is_within(name, ours) for ours in allowed)
            return None if fine else "it lies on another floor"
        if top in self.never:
            return "the library belongs to another floor"
        if self.stdlib_only and top not in sys.stdlib_module_names:
            return "standard library only"
        return None


def _words(text: str) -> list[str]:
    groups = TABLE["groups"]
    return [
        one for word in text.split() for one in (_words(groups[word]) if word in groups else [word])
    ]


def _named(text: str) -> tuple[str, ...]:
    return tuple(one if one.startswith("edgespec") else f"edgespec.{one}" for one in _words(text))


def _floor(
    floor: str, ours: str = "", never: str = "", but: str = "", stdlib_only: bool = False
) -> Floor:
    (package,) = _named(floor)
    return Floor(package, _named(ours), frozenset(_words(never)) - set(but.split()), stdlib_only)


HEAVY = frozenset(_words("heavy"))
FLOORS = [_floor(**row) for row in TABLE["floors"]]


def floor_of(module: Module) -> Floor | None:
    return next((floor for floor in FLOORS if is_within(module.name, floor.package)), None)


def violations(module: Module) -> list[str]:
    floor = floor_of(module)
    return list(floor.violations(module)) if floor else []


def test_every_import_stays_on_its_floor() -> None:
    found = [violation for module in parse_modules() for violation in violations(module)]
    assert not found, f"{len(found)} violations:\n" + "\n".join(found)


def test_every_product_module_has_a_floor_and_every_floor_a_module() -> None:
    floors = {require(floor).package for module in parse_modules() if (floor := floor_of(module))}
    assert floors == {floor.package for floor in FLOORS}
    for module in parse_modules():
        if any(is_within(module.name, package) for package in PACKAGES):
            floor = require(floor_of(module))
            assert floor.package != "edgespec" or module.name == "edgespec", module.path


def dependencies(module: Module, known: Collection[str]) -> set[str]:
    """Return the modules in ``known`` that a module imports. ``from a import b`` is an import of
    ``a.b`` if that is a module, else of ``a``."""
    found = list(list_imports(module))
    modules_found = set()
    for one in found:
        # ``from a import b`` is reported as ``a`` and as ``a.b``; the longer name is exact.
        if any(other.line == one.line and other.name.startswith(one.name + ".") for other in found):
            continue
        name = one.name
        while name and name not in known:
            name = name.rpartition(".")[0]
        modules_found.add(name)
    return modules_found - {"", module.name}


def import_circle(some: Collection[Module]) -> list[str]:
    """Return one circle of imports among these modules, with its first module again at the end, or
    an empty list."""
    known = {module.name for module in some}
    try:
        TopologicalSorter({m.name: sorted(dependencies(m, known)) for m in some}).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    product = [
        m for m in parse_modules() if any(is_within(m.name, package) for package in PACKAGES)
    ]
    assert len(product) > 100
    assert import_circle(product) == [], "move what both need into a file of its own"


def test_the_heavy_libraries_are_loaded_late() -> None:
    """Commands load them when they are called, so this holds for every command."""
    commands = {**main.COMMANDS, **simulator.COMMANDS}.values()
    names = {where.partition(":")[0] for where in commands}
    assert _loaded_by("edgespec.api", *sorted(names)) & HEAVY == set()


def test_the_version_is_said_without_the_commands() -> None:
    tell = "*sorted(name for name in sys.modules if name.startswith('edgespec'))"
    said = _printed(
        "import sys\nfrom edgespec.cli.main import app\n"
        f"try: app(['--version'])\nexcept SystemExit: print({tell})"
    )
    loaded = "edgespec edgespec.cli edgespec.cli.installation edgespec.cli.main"
    assert said[1:] == [f"{loaded} edgespec.operating_system"]


@pytest.mark.parametrize("package", ["edgespec.core", "edgespec_sim"])
def test_the_heavy_libraries_are_never_loaded(package: str) -> None:
    """The check is transitive, for every module of the package: the table above only covers one
    step."""
    outside = "edgespec_sim.commands"  # it runs worlds in processes
    names = [
        m.name
        for m in parse_modules()
        if is_within(m.name, package) and not is_within(m.name, outside)
    ]
    assert names, f"{package} holds no module"
    assert _loaded_by(*names) & (HEAVY | {"asyncio"}) == set()


def test_only_training_loads_torch() -> None:
    every = [module.name for module in parse_modules() if is_within(module.name, "edgespec_uara")]
    names = [name for name in every if not is_within(name, "edgespec_uara.masac")]
    assert names != every
    assert _loaded_by(*names) & HEAVY == set()


SYSTEMS = "edgespec/operating_system.py"
"""The one file that may use what Unix alone has."""
POSIX_ONLY = frozenset(
    "curses fcntl grp pty pwd readline resource syslog termios tty uvloop".split()
)
POSIX_ATTRIBUTES = {
    "mmap": "MADV_DONTNEED MADV_NOHUGEPAGE MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ",
    "os": "O_CLOEXEC O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK chown fchmod fchown fork getegid"
    " geteuid getgid getloadavg getuid killpg mkfifo nice posix_fadvise pread pwrite rename"
    " sched_getaffinity sched_setaffinity set_blocking setpgid setsid statvfs sysconf uname",
    "select": "epoll kqueue poll",
    "signal": "SIGALRM SIGCHLD SIGHUP SIGKILL SIGQUIT SIGUSR1 SIGUSR2 alarm pause pthread_sigmask"
    " setitimer sigwait",
    "socket": "AF_UNIX SO_REUSEADDR SO_REUSEPORT",
}
"""Attributes of modules that Windows lacks or that mean something else there (``os.rename`` refuses
a file that exists, ``SO_REUSEADDR`` lets a second server take a port)."""
LINUX_ONLY = ("edgespec/verifier/",)
"""Folders of the verifier, which runs on Linux."""
SERVER_SIDE = (
    "edgespec.verifier",
    "edgespec.training",
    "edgespec.sampling.tensors",
    "edgespec_uara.masac",
)
"""Modules that load torch, which on Linux needs what is taken away."""


def posix_imports(module: Module) -> Iterator[str]:
    """Find imports of modules that Unix alone has, outside the one file for them. Imports inside
    functions count, since the function would fail."""
    for found in list_imports(module):
        if found.name.partition(".")[0] in POSIX_ONLY:
            yield f"{module.path}:{found.line}: {found.name} is not on every system"


def posix_attributes(module: Module) -> Iterator[str]:
    """Find uses of attributes that Unix alone has, outside the one file for them."""
    names = {(one, name) for one, names in POSIX_ATTRIBUTES.items() for name in names.split()}
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in names:
                yield f"{module.path}:{node.lineno}: {owner}.{name} is not the same everywhere"
            case ast.ImportFrom(module=str(owner), names=aliases):
                for alias in aliases:
                    if (owner, alias.name) in names:
                        yield f"{module.path}:{node.lineno}: {owner}.{alias.name}"


def unnamed_encodings(module: Module) -> Iterator[str]:
    """Find text files that are read or written in the encoding of the system, which is cp1252 on
    many a Windows."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg for keyword in node.keywords}
        match node.func:
            case ast.Attribute(attr="read_text") if not node.args and "encoding" not in given:
                pass
            case ast.Attribute(attr="write_text") if len(node.args) < 2 and "encoding" not in given:
                pass
            case ast.Name(id="open") if "encoding" not in given and not _is_binary(node.args[1:]):
                pass
            case _:
                continue
        yield f"{module.path}:{node.lineno}: name the encoding"


def _is_binary(arguments: Sequence[ast.expr]) -> bool:
    return any(isinstance(one, ast.Constant) and "b" in str(one.value) for one in arguments)


@pytest.mark.parametrize("find", [posix_imports, posix_attributes, unnamed_encodings])
def test_only_one_file_knows_what_systems_lack(find: Callable[[Module], Iterator[str]]) -> None:
    """The folders of the verifier run on Linux alone."""
    found = [
        violation
        for module in parse_modules()
        if any(is_within(module.name, package) for package in PACKAGES)
        and module.path != SYSTEMS
        and not module.path.startswith(LINUX_ONLY)
        for violation in find(module)
    ]
    assert not found, "use edgespec/operating_system.py:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "find", "count"),
    [
        pytest.param("def f():\n    import resource", posix_imports, 1, id="an import"),
        pytest.param("from termios import ECHO", posix_imports, 2, id="a name of it"),
        pytest.param("import signal\nsignal.SIGHUP", posix_attributes, 1, id="a signal"),
        pytest.param("from os import fork", posix_attributes, 1, id="a function"),
        pytest.param("import os\nos.O_RDONLY", posix_attributes, 0, id="on every system"),
        pytest.param("path.read_text()", unnamed_encodings, 1, id="no encoding"),
        pytest.param("open('x', 'rb')", unnamed_encodings, 0, id="bytes"),
        pytest.param("open('x', encoding='utf-8')", unnamed_encodings, 0, id="named"),
    ],
)
def test_the_rules_on_systems_find_what_they_name(
    text: str, find: Callable[[Module], Iterator[str]], count: int
) -> None:
    assert len(list(find(parse("edgespec/x.py", text)))) == count


@pytest.mark.parametrize("name", ["edgespec/__init__.py", "edgespec/__main__.py"])
def test_an_old_python_can_read_how_the_command_begins(name: str) -> None:
    """It has to come as far as the line that names the Python that is needed."""
    ast.parse((ROOT / name).read_text(encoding="utf-8"), feature_version=(3, 8))


def test_a_device_and_the_simulator_can_be_imported_where_posix_is_not() -> None:
    """Windows lacks modules and names of the standard library. Oracle: a fresh interpreter that
    lacks them too."""
    names = [
        module.name
        for module in parse_modules()
        if any(is_within(module.name, package) for package in PACKAGES)
        and not any(is_within(module.name, one) for one in (*SERVER_SIDE, "edgespec.__main__"))
    ]
    assert len(names) > 250
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    path = (ROOT / "tests/kit/without_unix", ROOT, ROOT / "sim")
    _printed(code, {"PYTHONPATH": os.pathsep.join(map(str, path))})


def _loaded_by(*names: str) -> set[str]:
    """Return the top-level names in ``sys.modules`` of a fresh interpreter that imported
    ``names``."""
    names_of_modules = "[name for name in sys.modules if '.' not in name]"
    said = _printed(f"import json, sys, {', '.join(names)}\nprint(json.dumps({names_of_modules}))")
    return set(json.loads(said[-1]))


def _printed(code: str, env: Mapping[str, str] | None = None) -> list[str]:
    """Return the lines that a fresh interpreter prints. ``env`` is added to its environment."""
    done = run_python("-c", code, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
