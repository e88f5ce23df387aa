"""The README's pictures are those of their records. Oracle: what is committed, and the standard
library's XML reader."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.sources import ROOT
from tools import draw_bench, draw_race
from tools.svg import text

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
