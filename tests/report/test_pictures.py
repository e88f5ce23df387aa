"""The README's pictures: what a record says is in them, what it must not do is not. Oracle: the
standard library's XML reader, and records written here by hand or by the bench's own code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from edgespec.bench.arms import Arm
from edgespec.bench.prompts import Workload
from edgespec.bench.report import Subject, document
from edgespec.bench.runner import BenchSettings
from tests.sources import ROOT
from tools import draw_bench, draw_race
from tools.svg import text

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = ROOT / "docs" / "pictures"
EVIL = "</text><script>&\"'"


def race(prompt: str = "def f", kind: str = "accepted") -> dict[str, Any]:
    """A record of two texts of four tokens, the second twice as fast."""
    plain = {"at_ms": [0, 100, 200], "kinds": "ddd"}
    fast = {"at_ms": [0, 100, 100], "kinds": f"d{kind[0]}c"}
    return {
        "finished_at": "2026-11-22T15:00:35+00:00",
        "machine": {"processor": f"Xeon {EVIL}", "cpu_count": 2, "load_average": 0.5},
        "settings": {"rtt_ms": 50, "pass_ms": 25, "draft_ms": 8, "prompt_name": "python-1"},
        "prompt": prompt,
        "tokens": [" one", "\n two", " three"],
        "arms": {"plain streaming": plain, "edgespec": fast},
    }


def bench(milliseconds: dict[Arm, list[float]], rtts_ms: tuple[float, ...]) -> dict[str, Any]:
    """What a bench of two repeats of two texts leaves, the second text 2 ms slower."""
    rows: list[dict[str, object]] = [
        {
            **{"arm": arm.value, "rtt_ms": rtt_ms, "repeat": repeat, "requests": 1},
            **{"tpots_ms": [value + 2.0 * text for text in (0, 1)], "tokens": 48, "mismatches": 0},
        }
        for arm, values in milliseconds.items()
        for rtt_ms, value in zip(rtts_ms, values, strict=True)
        for repeat in range(2)
    ]
    settings = replace(BenchSettings(), rtts_ms=rtts_ms, repeats=2)
    subject = Subject("bundled", "bundled", "bundled", f"big {EVIL}", "small", "built-in", False)
    workload = Workload(("story",), ((1, 2),), frozenset())
    argv = ("edgespec", "bench", "--json", f"{EVIL}.json")
    return document(argv, settings, subject, workload, rows, {20.0: 4}, {}, interrupted=False)


def two_arms() -> dict[str, Any]:
    return bench({Arm.TARGET_ONLY: [25.0, 27.0], Arm.EDGESPEC: [11.0, 13.0]}, (20.0, 100.0))


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


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


# --- a race ---------------------------------------------------------------------------------


def test_a_race_shows_each_token_when_it_came(tmp_path: Path) -> None:
    path = write(tmp_path / "race.json", race())
    svg = draw_race.draw(path)
    texts = drawn(svg)
    assert svg == draw_race.draw(path), "the same record, the same bytes"
    assert texts[:4] == ["plain streaming", "100.0 ms a token, 0.2 s", "def f one", " two three"]
    assert "50.0 ms a token, 0.1 s" in texts
    assert "2.00 times as fast." in " ".join(texts)
    root = ElementTree.fromstring(svg)
    words = [(word.text, word.get("class", "")) for word in root.iter(f"{SVG}tspan")]
    pane = [("def f", "p"), (" one", "")]
    assert words == [*pane, (" two three", ""), *pane, (" two", "a"), (" three", "c")]
    # A round takes 3.2 s; 11 characters of 6.65 pixels, and six more 0.1 s later.
    rows = [row.attrib for row in root.findall(f"{SVG}clipPath/{SVG}rect/{SVG}animate")]
    assert [row["values"] for row in rows] == ["0;27;66", "0;66"]
    assert [row["keyTimes"] for row in rows] == ["0;.031;.062", "0;.031"]


def test_arms_between_the_first_and_the_last_are_a_bar_each(tmp_path: Path) -> None:
    found = race()
    slow, fast = found["arms"].values()
    found["settings"]["server_draft_ms"] = 2.5
    found["arms"] = {"plain": slow, "device": fast, "server": slow, "both": fast}
    svg = draw_race.draw(write(tmp_path / "r.json", found))
    texts = drawn(svg)
    assert texts.count("50.0 ms a token, 0.1 s") == texts.count("100.0 ms a token, 0.2 s") == 2
    assert {"plain", "device", "server", "both"} <= set(texts)
    assert "on the server 2.5 ms" in " ".join(texts)
    about = ElementTree.fromstring(svg).findtext(f"{SVG}desc") or ""
    assert "plain takes 100.0 ms a token, device 50.0, server 100.0, both 50.0" in about


def test_whatever_a_model_wrote_is_only_text(tmp_path: Path) -> None:
    assert EVIL + " one" in drawn(draw_race.draw(write(tmp_path / "r.json", race(EVIL))))
    assert text("\x00\x1b\x07") == "\N{REPLACEMENT CHARACTER}" * 3


# --- a bench --------------------------------------------------------------------------------


def test_a_bench_is_drawn_from_its_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "bench.json", two_arms())
    svg = draw_bench.draw(path)
    assert svg == draw_bench.draw(path)
    texts = drawn(svg)
    for expected in ("ms a token", "round-trip time, ms", "20", "100", "target-only streaming"):
        assert expected in texts
    # 26 / 12 and 28 / 14: the means of two texts.
    assert [one for one in texts if one.endswith("×")] == ["2.17×", "2.00×"]
    about = ElementTree.fromstring(svg).findtext(f"{SVG}desc") or ""
    assert "edgespec, device alone: 12.0 at 20, 14.0 at 100" in about
    caption = " ".join(texts)
    assert "1 prompt of 96 tokens and 2 repeats" in caption
    assert "differ from the target's own: 0 of 384" in caption
    assert "Draft length of stop-and-wait: 4 at 20 ms" in caption
    assert "edgespec bench --json" in caption


def test_where_both_ends_draft_that_curve_has_the_speeds(tmp_path: Path) -> None:
    arms = {Arm.TARGET_ONLY: [25.0], Arm.EDGESPEC: [11.0], Arm.SERVER_DRAFT: [8.0]}
    svg = draw_bench.draw(write(tmp_path / "b.json", bench({**arms, Arm.BOTH: [7.0]}, (20.0,))))
    texts = drawn(svg)
    assert {"the server alone", "edgespec, both"} <= set(texts)
    assert [one for one in texts if one.endswith("×")] == ["3.25×"]  # 26 / 8


# --- the command, and what is committed -----------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "name", "limit"),
    [(draw_race.draw, "race", 100_000), (draw_bench.draw, "bench", 60_000)],
)
def test_the_readme_shows_what_the_records_say(
    draw: Callable[[Path], str], name: str, limit: int
) -> None:
    record, picture = PICTURES / f"{name}.json", PICTURES / f"{name}.svg"
    svg = draw(record)
    assert picture.read_text(encoding="utf-8") == svg, f"run: python -m tools.draw_{name}"
    assert len(svg.encode()) < limit
    assert drawn(svg)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"docs/pictures/{name}.svg" in readme
