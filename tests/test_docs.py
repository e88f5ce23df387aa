"""Pages that are drawn from the code still say what the code says, and the committed protobuf code
is what the generator makes of the .proto files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tools.draw_states import PAGE, page

ROOT = Path(__file__).parents[1]


def test_session_states_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.draw_states"


def test_comments_name_files_that_there_are() -> None:
    """By whole path, or by its end: ``wire/codec.py`` is enough."""
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
    """Classes, and methods behind a dot."""
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
    """As GitHub makes them of headings."""
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
