"""The house style, and files that are drawn or generated from other files, as tests.

Oracle: each rule is a function from one file to the violations in it, and finds none here (ruff
checks the rest). Pages that are drawn from the code still match it, the README's pictures match
their records, and the committed protobuf code equals the generator's output.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.sources import (
    PACKAGES,
    ROOT,
    Module,
    is_within,
    list_imports,
    parse_modules,
    project_files,
)
from tools import draw_bench, draw_policy, draw_race, write_settings, write_validity
from tools.draw_states import PAGE, page
from tools.svg import text

FILE_BYTES_MAX = 2**20
BUNDLED = "edgespec/models/bundled/"
BUNDLED_BYTES_MAX = 40 * 2**20

MAY_PRINT = ("edgespec/cli/", "tools/", "benchmarks/", "protos/")
PROSE = (".md", ".py", ".sh", ".toml", ".yaml", ".yml", ".proto", "Makefile", ".ci/run")
# The patterns are spelled in halves, or this file would break its own rules.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")
ABSOLUTE = re.compile(r"(?<![\w.$}/-])/(?:work|root|home/\w+|Users/\w+)" + r"/")

Rule = Callable[[Module], Iterator[str]]


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
    """Find sleeps. ``asyncio.sleep(0)`` is allowed: it yields to the loop and takes no time."""
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
    """Find public classes that neither explain themselves nor have explained members (fields and
    methods of a protocol). The names of Enum members are enough."""
    if not _is_product(module):
        return
    for node in module.tree.body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        is_enum = any(ast.unparse(base).endswith(("Enum", "Flag")) for base in node.bases)
        if not is_enum and not _is_explained(node):
            yield f"{module.path}:{node.lineno}: public class {node.name} has no docstring"


def _is_explained(node: ast.ClassDef) -> bool:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return ast.get_docstring(node) is not None or any(
        (isinstance(member, functions) and ast.get_docstring(member) is not None)
        or (isinstance(member, ast.Expr) and isinstance(member.value, ast.Constant))
        for member in node.body
    )


def _is_product(module: Module) -> bool:
    return any(is_within(module.name, package) for package in PACKAGES)


RULES: tuple[Rule, ...] = (
    named_for_an_idea,
    prints_only_at_the_rim,
    no_sleep_in_tests,
    modules_say_what_they_are,
    public_classes_say_what_they_are,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps(rule: Rule) -> None:
    _none_of(violation for module in parse_modules() for violation in rule(module))


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
    """Return product modules that no other file imports and no entry point names.

    A string counts as an import if it is exactly a module's name: registries name heavy modules so,
    to load them late.
    """
    every = tuple(every)
    used = set(entry_points)
    for module in every:
        names = {found.name for found in list_imports(module)} | _module_strings(module)
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
    """Return ``"package.module"`` strings, and the first half of ``"package.module:name"``
    strings."""
    return {
        node.value.partition(":")[0]
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_no_dead_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entry_points = [target.partition(":")[0] for target in project["scripts"].values()]
    _none_of(dead_modules(parse_modules(), entry_points))


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


# --- what is drawn or generated from other files --------------------------------------------------


def test_session_states_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.draw_states"


def test_settings_page_is_current() -> None:
    written = write_settings.PAGE.read_text(encoding="utf-8")
    assert written == write_settings.page(), "run: python -m tools.write_settings"


def test_page_of_validity_shows_its_records() -> None:
    written = write_validity.PAGE.read_text(encoding="utf-8")
    assert written == write_validity.fill(written), "run: python -m tools.write_validity"
    names = re.findall(r"<!-- table: ([\w-]+) -->", written)
    assert sorted(names) == sorted(write_validity.TABLES)


def test_comments_name_files_that_there_are() -> None:
    """A comment names a file by its whole path or by the end of it: ``wire/codec.py`` is enough."""
    folders = ("edgespec", "sim", "tests", "tools", "benchmarks", "protos")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    known = [f"/{path.relative_to(ROOT).as_posix()}" for path in paths]
    gone = {
        (path.name, name)
        for path in paths
        for name in re.findall(r"``([\w/]+\.py)``", path.read_text(encoding="utf-8"))
        if not any(one.endswith(f"/{name}") for one in known)
    }
    assert not gone


def test_the_life_of_a_token_names_what_there_is() -> None:
    """The names are classes, and methods after a dot."""
    text = (ROOT / "docs/life-of-a-token.md").read_text(encoding="utf-8")
    code = [*ROOT.glob("edgespec/**/*.py"), *ROOT.glob("protos/*.proto")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in code)
    named = set(re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", text))
    words = {word for pair in named for word in pair if word}
    assert len(words) > 10
    unknown = {word for word in words if not re.search(rf"(class|def|message) {word}\b", source)}
    assert not unknown
    rows = re.findall(r"^\| `(edgespec/[\w/]+\.py)` \| (.+) \|$", text, re.MULTILINE)
    assert len(rows) > 10
    for path, names in rows:
        source = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^class {name}\b", source, re.MULTILINE), (path, name)


PAGES = (
    *ROOT.glob("*.md"),
    *(p for d in ("docs", "deploy", "benchmarks") for p in (ROOT / d).rglob("*.md")),
)


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


def test_links_lead_to_pages_and_headings_that_there_are() -> None:
    broken = []
    for source in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", source.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = source.parent / path if path else source
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                broken.append(f"{source.relative_to(ROOT)}: {link}")
    assert not broken


GENERATED = ROOT / "edgespec" / "wire" / "pb"


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("protos_generate", ROOT / "protos/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_code_is_what_the_generator_writes(tmp_path: Path) -> None:
    generator = _generator()
    if reason := generator.unavailable():
        pytest.skip(reason)
    fresh = {path.name: path.read_text() for path in generator.generate(tmp_path)}
    committed = {path.name: path.read_text() for path in GENERATED.glob("*_pb2.py*")}
    assert fresh.keys() == committed.keys(), "run: python protos/generate.py"
    drifted = [name for name in fresh if fresh[name] != committed[name]]
    assert not drifted, "run: python protos/generate.py"


def test_every_field_number_of_a_hot_message_costs_one_byte() -> None:
    from edgespec.wire.pb import speculation_pb2 as pb

    for message in (pb.DeviceMessage, pb.VerifierMessage, pb.Draft, pb.Commit, pb.Received):
        assert all(field.number <= 15 for field in message.DESCRIPTOR.fields)


def test_every_enum_has_an_unspecified_zero() -> None:
    from edgespec.wire.pb import speculation_pb2 as pb

    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


# --- the README's pictures match their records ----------------------------------------------------


SVG = "{http://www.w3.org/2000/svg}"
PICTURES = ROOT / "docs" / "pictures"
RECORDS = ROOT / "benchmarks" / "records"
EVIL = "</text><script>&\"'"


def record_race(prompt: str) -> dict[str, Any]:
    """Return a record of two generations of four tokens, the second twice as fast."""
    plain = {"at_ms": [0, 100, 200], "kinds": "ddd"}
    fast = {"at_ms": [0, 100, 100], "kinds": "dac"}
    return {
        "finished_at": "2026-11-22T15:00:35+00:00",
        "settings": {
            **{"rtt_ms": 50, "pass_ms": 25, "draft_ms": 8, "server_draft_ms": 2.5},
            **{"prompt_name": "python-1", "pair": f"Target and draft {EVIL}"},
        },
        "prompt": prompt,
        "tokens": [" one", "\n two", " three"],
        "arms": {"plain streaming": plain, "edgespec": fast},
    }


def texts_in_picture(svg: str) -> list[str]:
    """Return the texts of a picture; check that it is XML and would fetch nothing."""
    root = ElementTree.fromstring(svg)
    assert "http" not in svg.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"url\((?!#)|@import|href", svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        *("svg", "title", "desc", "style", "rect", "path", "text", "tspan", "animate", "clipPath")
    }
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def test_whatever_a_model_wrote_is_only_text(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record_race(EVIL)), encoding="utf-8")
    assert EVIL + " one" in texts_in_picture(draw_race.draw(path))
    assert text("\x00\x1b\x07") == "\N{REPLACEMENT CHARACTER}" * 3


@pytest.mark.parametrize(
    ("draw", "name", "limit"),
    [(draw_race.draw, "race", 100_000), (draw_bench.draw, "bench", 60_000)],
)
def test_the_readme_shows_what_the_records_say(
    draw: Callable[[Path], str], name: str, limit: int
) -> None:
    record, picture = RECORDS / f"{name}.json", PICTURES / f"{name}.svg"
    svg = draw(record)
    assert picture.read_text(encoding="utf-8") == svg, f"run: python -m tools.draw_{name}"
    assert len(svg.encode()) < limit
    assert texts_in_picture(svg)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"docs/pictures/{name}.svg" in readme


def test_the_heat_map_shows_what_its_record_says() -> None:
    svg = draw_policy.draw(write_validity.RECORDS / "policy.json")
    drawn = write_validity.PICTURE.read_text(encoding="utf-8")
    assert drawn == svg, "run: python -m tools.write_validity"
    assert len(svg.encode()) < 400_000
    assert texts_in_picture(svg)
    page = write_validity.PAGE.read_text(encoding="utf-8")
    assert f"pictures/{write_validity.PICTURE.name}" in page
