"""Pages that are drawn from the code still say what the code says, the README's pictures what their
records say, and the committed protobuf code is what the generator makes of the .proto files."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.sources import ROOT
from tools import draw_bench, draw_race
from tools.draw_states import PAGE, page
from tools.svg import text


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


# --- the README's pictures are those of their records ---------------------------------------------


SVG = "{http://www.w3.org/2000/svg}"
PICTURES = ROOT / "docs" / "pictures"
RECORDS = ROOT / "benchmarks" / "records"
EVIL = "</text><script>&\"'"


def race(prompt: str) -> dict[str, Any]:
    """A record of two texts of four tokens, the second twice as fast."""
    plain = {"at_ms": [0, 100, 200], "kinds": "ddd"}
    fast = {"at_ms": [0, 100, 100], "kinds": "dac"}
    return {
        "finished_at": "2026-11-22T15:00:35+00:00",
        "machine": {"processor": f"Xeon {EVIL}", "cpu_count": 2, "load_average": 0.5},
        "settings": {"rtt_ms": 50, "pass_ms": 25, "draft_ms": 8, "prompt_name": "python-1"},
        "prompt": prompt,
        "tokens": [" one", "\n two", " three"],
        "arms": {"plain streaming": plain, "edgespec": fast},
    }


def drawn(svg: str) -> list[str]:
    """The texts of a picture that is XML and would fetch nothing."""
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
    path.write_text(json.dumps(race(EVIL)), encoding="utf-8")
    assert EVIL + " one" in drawn(draw_race.draw(path))
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
    assert drawn(svg)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"docs/pictures/{name}.svg" in readme
