"""The house style, as tests.

Oracle: each rule is a function from one file to the violations in it, and finds none here. What
ruff checks is left to it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.sources import PACKAGES, ROOT, Module, imports, modules, project_files, within

FUNCTION_LINES_MAX = 60
FILE_BYTES_MAX = 2**20
BUNDLED = "edgespec/models/bundled/"
BUNDLED_BYTES_MAX = 40 * 2**20

MAY_PRINT = ("edgespec/cli/", "tools/", "benchmarks/", "protos/")
PROSE = (".md", ".py", ".sh", ".toml", ".yaml", ".yml", ".proto", "Makefile", ".ci/run")
# Spelled in halves, or this file would be the first to break its own rules.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")
ABSOLUTE = re.compile(r"(?<![\w.$}/-])/(?:work|root|home/\w+|Users/\w+)" + r"/")

Rule = Callable[[Module], Iterator[str]]


def function_length(module: Module) -> Iterator[str]:
    """Behind the signature, which is a command's list of options."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            if lines > FUNCTION_LINES_MAX:
                where = f"{module.path}:{node.lineno}: {node.name}"
                yield f"{where} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def named_for_an_idea(module: Module) -> Iterator[str]:
    if module.path.rsplit("/", 1)[-1] in ("utils.py", "util.py", "helpers.py", "misc.py"):
        yield f"{module.path}: name the file after its one idea"


def prints_only_at_the_rim(module: Module) -> Iterator[str]:
    if module.path.startswith(MAY_PRINT):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield f"{module.path}:{node.lineno}: print() belongs to the command line; log or return"


def no_sleep_in_tests(module: Module) -> Iterator[str]:
    """``asyncio.sleep(0)`` is allowed: it yields to the loop and takes no time."""
    if not module.path.startswith("tests/"):
        return
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("sleep"):
            continue
        if not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0):
            yield f"{module.path}:{node.lineno}: a test that sleeps is slow and still flaky"


def modules_say_what_they_are(module: Module) -> Iterator[str]:
    if _is_product(module) and ast.get_docstring(module.tree) is None:
        if module.tree.body or module.path.startswith("edgespec/core/"):
            yield f"{module.path}: open with a docstring: the file's idea, then its law"


def public_classes_say_what_they_are(module: Module) -> Iterator[str]:
    """A class explains itself, or its members do (fields and methods of a seam). Enum members are
    their own words."""
    if not _is_product(module):
        return
    for node in module.tree.body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        is_enum = any(ast.unparse(base).endswith(("Enum", "Flag")) for base in node.bases)
        if not is_enum and not _explained(node):
            yield f"{module.path}:{node.lineno}: public class {node.name} has no docstring"


def _explained(node: ast.ClassDef) -> bool:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return ast.get_docstring(node) is not None or any(
        (isinstance(member, functions) and ast.get_docstring(member) is not None)
        or (isinstance(member, ast.Expr) and isinstance(member.value, ast.Constant))
        for member in node.body
    )


def _is_product(module: Module) -> bool:
    return any(within(module.name, package) for package in PACKAGES)


RULES: tuple[Rule, ...] = (
    function_length,
    named_for_an_idea,
    prints_only_at_the_rim,
    no_sleep_in_tests,
    modules_say_what_they_are,
    public_classes_say_what_they_are,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps(rule: Rule) -> None:
    _none_of(violation for module in modules() for violation in rule(module))


def test_nothing_is_marked_unfinished() -> None:
    _none_of(_matches(UNFINISHED))


def test_no_path_of_one_machine() -> None:
    # A container image has a file system of its own, so deploy/ may name absolute paths.
    _none_of(found for found in _matches(ABSOLUTE) if not found.startswith("deploy/"))


def _matches(pattern: re.Pattern[str]) -> Iterator[str]:
    for path in project_files():
        if path.endswith(PROSE):
            lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines, start=1):
                if pattern.search(line):
                    yield f"{path}:{number}: {line.strip()}"


def dead_modules(every: Iterable[Module], entry_points: Iterable[str]) -> list[str]:
    """Product modules that no other file imports and no entry point names.

    A string counts as an import when it is exactly a module's name: registries name heavy
    modules so, to load them late.
    """
    every = tuple(every)
    used = set(entry_points)
    for module in every:
        names = {found.name for found in imports(module)} | _module_strings(module)
        used |= names - {module.name}
    return [
        module.path
        for module in every
        if _is_product(module)
        and not module.is_package
        and not module.path.endswith("/__main__.py")
        and module.name not in used
    ]


def _module_strings(module: Module) -> set[str]:
    """``"package.module"`` and the first half of ``"package.module:name"``."""
    return {
        node.value.partition(":")[0]
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_no_dead_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entry_points = [target.partition(":")[0] for target in project["scripts"].values()]
    _none_of(dead_modules(modules(), entry_points))


def test_no_large_files() -> None:
    sizes = {path: (ROOT / path).stat().st_size for path in project_files()}
    bundled = sum(size for path, size in sizes.items() if path.startswith(BUNDLED))
    assert bundled <= BUNDLED_BYTES_MAX, f"{BUNDLED}: {bundled} bytes, at most {BUNDLED_BYTES_MAX}"
    _none_of(
        f"{path}: {size} bytes, at most {FILE_BYTES_MAX} outside {BUNDLED}"
        for path, size in sizes.items()
        if size > FILE_BYTES_MAX and not path.startswith(BUNDLED)
    )


def test_every_package_is_typed() -> None:
    _none_of(
        f"{folder}/py.typed is missing: its annotations are invisible to users"
        for folder in PACKAGES.values()
        if not (ROOT / folder / "py.typed").is_file()
    )


def _none_of(violations: Iterable[str]) -> None:
    found = list(violations)
    assert not found, f"{len(found)} violations:\n" + "\n".join(found)
